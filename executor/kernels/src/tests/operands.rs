//! Random operands that a kernel can meet, and what may be said of them.

use super::{PARAMETERS, Tensor, eight_bits, mixture, reference};
use crate::half::SixteenBits;
use crate::{operand_bytes, operand_types};
use foretell_models::{Epsilon, Kernel};
use foretell_units::DataType;
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;

/// An operand of integers, and what they are below.
pub(super) fn integers(kernel: &Kernel, index: usize) -> Option<usize> {
    match (*kernel, index) {
        (Kernel::Embedding { vocabulary, .. }, 0) | (Kernel::EmbeddingWeightGradient { vocabulary, .. }, 1) => Some(vocabulary),
        (Kernel::CrossEntropy { classes, .. } | Kernel::CrossEntropyGradient { classes, .. }, 1) => Some(classes),
        (Kernel::LabelRanks { classes, .. } | Kernel::ClassScores { classes, .. }, 1) => Some(classes),
        (Kernel::TopLabels { .. }, 0 | 1) => Some(9),
        (Kernel::WeightedCrossEntropy { classes, .. } | Kernel::WeightedCrossEntropyGradient { classes, .. }, 1) => Some(classes),
        (Kernel::MaxPoolGradient(window), 1) => Some(window.input_elements()),
        _ => mixture::integers(kernel, index),
    }
}

/// Elements of operands of so many bytes.
pub(super) fn counts(kernel: &Kernel) -> (Vec<usize>, Vec<usize>) {
    let sizes = operand_bytes(kernel, DataType::Fp32);
    let types = operand_types(kernel, DataType::Fp32);
    let count = |sizes: Vec<foretell_units::Bytes>, types: Vec<DataType>| {
        sizes.iter().zip(types).map(|(bytes, size)| (bytes.count() / size.size().count()) as usize).collect()
    };
    (count(sizes.reads, types.reads), count(sizes.writes, types.writes))
}

/// Random operands that the kernel can meet: variances are positive, log-sums and saved statistics
/// belong to their tensors.
pub(super) fn operands(kernel: &Kernel, random: &mut ChaCha8Rng) -> (Vec<Tensor>, Vec<Tensor>) {
    operands_in(kernel, DataType::Fp32, random)
}

/// As [`operands`], of numbers that the operands' formats in a precision have.
pub(super) fn operands_in(kernel: &Kernel, precision: DataType, random: &mut ChaCha8Rng) -> (Vec<Tensor>, Vec<Tensor>) {
    let types = operand_types(kernel, precision);
    let (reads, writes) = counts(kernel);
    let mut number = || f64::from(random.random_range(-1.0_f32..1.0));
    let mut reads: Vec<Tensor> = reads
        .into_iter()
        .enumerate()
        .map(|(index, count)| match integers(kernel, index) {
            Some(limit) => (0..count).map(|_| ((number() + 1.0) / 2.0 * limit as f64).floor().min(limit as f64 - 1.0)).collect(),
            None => (0..count).map(|_| number()).collect(),
        })
        .collect();
    let mut writes: Vec<Tensor> = writes.into_iter().map(|count| (0..count).map(|_| number()).collect()).collect();
    round_to(&types.reads, &mut reads);
    round_to(&types.writes, &mut writes);
    let forward = |forward: Kernel, reads: &[Tensor]| {
        let before: Vec<Tensor> = counts(&forward).1.into_iter().map(|count| vec![0.0; count]).collect();
        rounded(reference::run(&forward, reads, &before, false, &PARAMETERS, last_member(&forward)))
    };
    match *kernel {
        Kernel::BatchNormInference { channels, .. } => reads[3][channels..].iter_mut().for_each(|variance| *variance += 1.5),
        // Of each window one of its own pixels is the largest.
        Kernel::MaxPoolGradient(window) => {
            reads[1] = forward(Kernel::MaxPool(window), &[vec![0.0; window.input_elements()]]).remove(1)
        }
        Kernel::LambStep { .. } => reads[1].iter_mut().for_each(|norm| *norm = norm.abs()),
        Kernel::WeightedCrossEntropy { .. } => {
            reads[2].iter_mut().for_each(|weight| *weight = weight.abs());
            if reads[1].len() > 2 {
                reads[1][1] = -1.0;
            }
        }
        Kernel::WeightedCrossEntropyGradient { rows, classes, smoothing, .. } => {
            reads[3].iter_mut().for_each(|weight| *weight = weight.abs());
            let inputs = [reads[0].clone(), reads[1].clone(), reads[3].clone()];
            reads[2] = forward(Kernel::WeightedCrossEntropy { rows, classes, smoothing }, &inputs).remove(2);
            reads[1][rows / 2] = -1.0;
        }
        Kernel::AdamW { .. } | Kernel::LambDirection { .. } => writes[2].iter_mut().for_each(|moment| *moment = moment.abs()),
        Kernel::CrossEntropy { .. } | Kernel::LabelRanks { .. } | Kernel::TopLabels { .. } if reads[1].len() > 2 => {
            reads[1][1] = -1.0;
        }
        Kernel::ClassScores { rows, classes } => {
            reads[2] = forward(Kernel::CrossEntropy { rows, classes }, &reads[..2]).remove(2);
        }
        Kernel::CrossEntropyGradient { rows, classes, .. } => {
            reads[2] = forward(Kernel::CrossEntropy { rows, classes }, &reads[..2]).remove(2);
            reads[1][rows / 2] = -1.0;
        }
        Kernel::BatchNormInputGradient { groups, positions, channels } => {
            let inputs = [reads[1].clone(), reads[2].clone(), reads[2].clone()];
            reads[3] = forward(Kernel::BatchNorm { groups, positions, channels }, &inputs).remove(1);
        }
        Kernel::LayerNormInputGradient { rows, features } => {
            let inputs = [reads[1].clone(), reads[2].clone(), reads[2].clone()];
            reads[3] = forward(Kernel::LayerNorm { rows, features, epsilon: Epsilon::new(5) }, &inputs).remove(1);
        }
        Kernel::LayerNormWeightGradient { rows, features } => {
            let ones = vec![1.0; features];
            let norm = Kernel::LayerNorm { rows, features, epsilon: Epsilon::new(5) };
            reads[2] = forward(norm, &[reads[1].clone(), ones.clone(), ones]).remove(1);
        }
        Kernel::RmsNormInputGradient { rows, features } => {
            let norm = Kernel::RmsNorm { rows, features, epsilon: Epsilon::new(5) };
            reads[3] = forward(norm, &[reads[1].clone(), reads[2].clone()]).remove(1);
        }
        Kernel::RmsNormWeightGradient { rows, features } => {
            let norm = Kernel::RmsNorm { rows, features, epsilon: Epsilon::new(5) };
            reads[2] = forward(norm, &[reads[1].clone(), vec![1.0; features]]).remove(1);
        }
        Kernel::AttentionGradient(sizes) => {
            let inputs = if sizes.packed { 1 } else { 3 };
            let mut forward_reads = reads[1..1 + inputs].to_vec();
            forward_reads.extend(sizes.relative.map(|_| reads[reads.len() - 1].clone()));
            let mut written = forward(Kernel::Attention(sizes), &forward_reads);
            (reads[2 + inputs], reads[1 + inputs]) = (written.remove(1), written.remove(0));
        }
        Kernel::Quantise { rows, .. } => eight_bits::make_wide(rows, &mut reads[0]),
        Kernel::EightBitMatmul { .. }
        | Kernel::EightBitMatmulInputGradient { .. }
        | Kernel::EightBitMatmulWeightGradient { .. } => eight_bits::make_codes(kernel, &mut reads),
        _ => mixture::make_consistent(kernel, &mut reads),
    }
    round_to(&types.reads, &mut reads);
    (reads, writes)
}

/// Rounds the tensors that are stored in sixteen bits.
pub(super) fn round_to(types: &[DataType], tensors: &mut [Tensor]) {
    for (tensor, &data_type) in tensors.iter_mut().zip(types) {
        if let Some(half) = SixteenBits::of(data_type) {
            tensor.iter_mut().for_each(|value| *value = f64::from(half.to_single(half.nearest(*value as f32))));
        }
    }
}

/// The index of the last of the ranks among whom what the kernel works on is cut into parts.
pub(super) fn last_member(kernel: &Kernel) -> usize {
    kernel.parts() - 1
}

/// As numbers of single precision, which is what a kernel is given.
pub(super) fn rounded(mut tensors: Vec<Tensor>) -> Vec<Tensor> {
    tensors.iter_mut().flatten().for_each(|value| *value = f64::from(*value as f32));
    tensors
}
