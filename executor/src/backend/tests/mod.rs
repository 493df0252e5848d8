//! Every kernel against a naive reference, every gradient against differences of its forward kernel, and every refusal.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

mod dropout;
mod gradients;
mod lstm;
mod mixture;
mod parts;
mod precision;
mod reference;
mod ring;
mod speeds;

use foretell_models::{Attention, Epsilon, Kernel, RelativePositions, Rope, WeightLayout, Window};
use foretell_units::DataType;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::{Backend as _, BackendError, CpuBackend, Hyperparameters, KernelCall, Operand, operand_bytes, operand_types};
use crate::half::Half;

/// Numbers in double precision: what the reference works on, and what an arena's operand is made from.
type Tensor = Vec<f64>;

const PARAMETERS: Hyperparameters = Hyperparameters {
    learning_rate: 0.05,
    momentum: 0.9,
    weight_decay: 0.01,
    beta1: 0.9,
    beta2: 0.99,
    epsilon: 1e-6,
    gradient_scale: 0.5,
    clip_norm: 1.0,
    growth_interval: 3,
    step: 3,
    seed: 11,
};

fn window(extents: [usize; 8]) -> Window {
    let [batch, height, width, in_channels, out_channels, size, stride, padding] = extents;
    Window { batch, height, width, in_channels, out_channels, size, stride, padding }
}

/// Attention of as many keys as queries, without grouping.
fn attention([batch, sequence, heads, head_dimension]: [usize; 4], causal: bool, packed: bool) -> Attention {
    Attention {
        batch,
        queries: sequence,
        keys: sequence,
        key_heads: heads,
        group: 1,
        head_dimension,
        causal,
        scaled: true,
        relative: None,
        packed,
        query_parts: 1,
        query_offset: 0,
        ring: None,
    }
}

/// Attention of every kind: packed and not, grouped, crossed, of a part of the queries, with relative positions.
fn attentions() -> Vec<Attention> {
    let mut all = Vec::new();
    for causal in [false, true] {
        for extents in [[1, 1, 1, 1], [2, 65, 3, 5], [1, 200, 2, 16], [1, 7, 1, 64]] {
            all.extend([true, false].map(|packed| attention(extents, causal, packed)));
        }
        let plain = attention([2, 66, 2, 8], causal, false);
        let relative = |bidirectional| Some(RelativePositions { buckets: 8, max_distance: 20, bidirectional });
        all.extend([
            Attention { group: 3, ..plain },
            Attention { keys: 91, query_offset: 25, scaled: false, ..plain },
            Attention { queries: 22, query_parts: 3, group: 2, ..plain },
            Attention { queries: 33, keys: 99, query_parts: 3, head_dimension: 17, ..plain },
            Attention { relative: relative(true), ..plain },
            Attention { relative: relative(false), scaled: false, packed: true, ..plain },
            Attention { relative: relative(!causal), queries: 22, query_parts: 3, group: 2, batch: 1, ..plain },
        ]);
    }
    all
}

/// Rotary positions of a whole sequence, and of the last part of one.
fn ropes() -> [Rope; 3] {
    let sizes =
        Rope { batch: 1, positions: 1, heads: 1, head_dimension: 2, theta: 10_000, position_parts: 1, position_offset: 0 };
    let whole = Rope { batch: 3, positions: 37, heads: 2, head_dimension: 18, ..sizes };
    [sizes, whole, Rope { theta: 500, position_parts: 3, position_offset: 1000, ..whole }]
}

/// Kernels of every kind at sizes that no block, tile or vector divides.
fn cases() -> Vec<Kernel> {
    let mut cases = Vec::new();
    for weight in [WeightLayout::OutIn, WeightLayout::InOut] {
        for [rows, columns, contracted] in
            [[1, 1, 1], [37, 29, 53], [300, 1100, 7], [5, 64, 128], [1030, 300, 260], [3, 40, 1030]]
        {
            for (bias, relu) in [(false, false), (true, false), (false, true), (true, true)] {
                cases.push(Kernel::Matmul { rows, columns, contracted, weight, bias, relu });
            }
            cases.push(Kernel::MatmulInputGradient { rows, columns, contracted, weight });
            cases.push(Kernel::MatmulWeightGradient { rows, columns, contracted, weight });
        }
    }
    for [rows, columns] in [[1, 1], [131, 37], [67, 200], [3, 64]] {
        cases.extend([Kernel::BiasAdd { rows, columns }, Kernel::BiasGradient { rows, columns }]);
        cases.extend([
            Kernel::LayerNorm { rows, features: columns, epsilon: Epsilon::new(5) },
            Kernel::LayerNorm { rows, features: columns, epsilon: Epsilon::new(1) },
            Kernel::RmsNorm { rows, features: columns, epsilon: Epsilon::new(2) },
            Kernel::RmsNormInputGradient { rows, features: columns },
            Kernel::RmsNormWeightGradient { rows, features: columns },
            Kernel::LayerNormInputGradient { rows, features: columns },
            Kernel::LayerNormWeightGradient { rows, features: columns },
            Kernel::CrossEntropy { rows, classes: columns },
            Kernel::CrossEntropyGradient { rows, classes: columns, normalizer: 7, parts: 1, scaled: false },
        ]);
    }
    for elements in [1, 15, 64, 1037, 40_003] {
        cases.extend([
            Kernel::Relu { elements },
            Kernel::ReluGradient { elements },
            Kernel::Gelu { elements },
            Kernel::GeluGradient { elements },
            Kernel::GeluExact { elements },
            Kernel::GeluExactGradient { elements },
            Kernel::SiluMultiply { elements },
            Kernel::SiluMultiplyGradient { elements },
            Kernel::Add { elements },
            Kernel::Scale { elements, square: 512 },
            Kernel::Multiply { elements },
            Kernel::SumOfSquares { elements },
            Kernel::Sum { elements },
            Kernel::Accumulate { elements },
            Kernel::Zero { elements },
            Kernel::AdamW { elements, controlled: false },
        ]);
        for (momentum, nesterov) in [(false, false), (true, false), (true, true)] {
            cases.push(Kernel::Sgd { elements, momentum, nesterov, controlled: false });
        }
    }
    for extents in [
        [1, 1, 1, 1, 1, 1, 1, 0],
        [2, 5, 6, 3, 4, 3, 1, 1],
        [2, 8, 8, 16, 32, 3, 1, 1],
        [3, 9, 7, 5, 33, 3, 2, 1],
        [2, 7, 7, 6, 70, 1, 1, 0],
        [2, 7, 8, 6, 9, 1, 2, 0],
        [1, 17, 19, 3, 40, 7, 2, 3],
        [2, 12, 11, 1, 8, 5, 1, 0],
        [1, 4, 4, 64, 48, 3, 1, 1],
        [2, 4, 4, 2, 3, 2, 3, 2],
        [1, 33, 35, 20, 16, 3, 1, 2],
        [1, 6, 5, 4, 5, 4, 1, 1],
        [3, 30, 30, 40, 36, 3, 1, 1],
        [1, 5, 5, 2, 3, 2, 1, 3],
        [2, 10, 10, 7, 5, 1, 1, 1],
        [2, 13, 15, 5, 64, 3, 1, 1],
        [1, 31, 40, 3, 32, 7, 2, 3],
        [2, 16, 16, 20, 64, 1, 1, 0],
        [130, 9, 8, 20, 6, 3, 2, 1],
        [2, 8, 7, 16, 40, 1, 2, 0],
        [2, 9, 9, 24, 7, 4, 3, 2],
        [2, 2, 4, 16, 5, 3, 3, 1],
        [5, 1, 1, 20, 33, 3, 1, 1],
        [30, 1, 1, 260, 300, 3, 2, 1],
    ] {
        let window = window(extents);
        cases.extend([
            Kernel::Convolution(window),
            Kernel::ConvolutionInputGradient(window),
            Kernel::ConvolutionWeightGradient(window),
        ]);
        let pooling = Window { out_channels: window.in_channels, ..window };
        if pooling.padding < pooling.size {
            cases.extend([Kernel::MaxPool(pooling), Kernel::MaxPoolGradient(pooling)]);
        }
    }
    for [groups, positions, channels] in [[1, 5, 1], [1, 700, 17], [3, 50, 64], [2, 9000, 3]] {
        cases.extend([
            Kernel::BatchNorm { groups, positions, channels },
            Kernel::BatchNormInputGradient { groups, positions, channels },
            Kernel::BatchNormWeightGradient { groups, channels },
            Kernel::BatchNormInference { positions, channels },
            Kernel::RunningStatistics { channels, contributions: groups },
            Kernel::GlobalAveragePool { batch: groups, positions, channels },
            Kernel::GlobalAveragePoolGradient { batch: groups, positions, channels },
        ]);
    }
    for [tokens, vocabulary, hidden] in [[1, 1, 1], [50, 7, 33]] {
        cases.extend([
            Kernel::Embedding { tokens, vocabulary, hidden, parts: 1 },
            Kernel::EmbeddingWeightGradient { tokens, vocabulary, hidden, parts: 1 },
        ]);
    }
    for sizes in attentions() {
        cases.extend([Kernel::Attention(sizes), Kernel::AttentionGradient(sizes)]);
    }
    cases.extend([1, 77, 3000].map(|elements| Kernel::Narrow { elements }));
    for sizes in ropes() {
        cases.extend([Kernel::Rope(sizes), Kernel::RopeGradient(sizes)]);
    }
    for [batch, positions, features] in [[1, 1, 1], [3, 7, 20], [2, 1, 5]] {
        cases.extend([
            Kernel::Prepend { batch, positions, features },
            Kernel::PrependInputGradient { batch, positions, features },
            Kernel::PrependWeightGradient { batch, positions, features },
            Kernel::First { batch, positions, features },
            Kernel::FirstGradient { batch, positions, features },
        ]);
    }
    for [rows, parts, columns] in [[1, 1, 1], [7, 3, 10], [2, 8, 3]] {
        cases.extend([Kernel::Split { rows, parts, columns }, Kernel::Join { rows, parts, columns }]);
    }
    cases.extend(dropout::cases());
    cases.extend(mixture::cases());
    cases.extend(lstm::cases());
    for [outer, parts, inner] in [[1, 1, 1], [3, 4, 5], [1, 2, 33]] {
        cases.extend([
            Kernel::Slice { outer, parts, inner },
            Kernel::Interleave { outer, parts, inner },
            Kernel::Deinterleave { outer, parts, inner },
        ]);
    }
    for [rows, columns, start, part] in [[1, 3, 1, 2], [4, 10, 0, 3], [3, 70, 30, 40]] {
        cases.extend([Kernel::TakeColumns { rows, columns, start, part }, Kernel::PutColumns { rows, columns, start, part }]);
    }
    cases
}

/// Whether the write may be the first read, and whether writes may accumulate, as `Kernel` documents.
fn in_place(kernel: &Kernel) -> bool {
    matches!(
        kernel,
        Kernel::BiasAdd { .. }
            | Kernel::Relu { .. }
            | Kernel::ReluGradient { .. }
            | Kernel::GeluGradient { .. }
            | Kernel::GeluExactGradient { .. }
            | Kernel::SiluMultiplyGradient { .. }
            | Kernel::Rope(_)
            | Kernel::RopeGradient(_)
            | Kernel::Dropout(_)
            | Kernel::Add { .. }
            | Kernel::Scale { .. }
            | Kernel::Multiply { .. }
            | Kernel::CrossEntropyGradient { .. }
    )
}

/// An operand of integers, and what they are below.
fn integers(kernel: &Kernel, index: usize) -> Option<usize> {
    match (*kernel, index) {
        (Kernel::Embedding { vocabulary, .. }, 0) | (Kernel::EmbeddingWeightGradient { vocabulary, .. }, 1) => Some(vocabulary),
        (Kernel::CrossEntropy { classes, .. } | Kernel::CrossEntropyGradient { classes, .. }, 1) => Some(classes),
        (Kernel::MaxPoolGradient(window), 1) => Some(window.input_elements()),
        _ => mixture::integers(kernel, index),
    }
}

/// Elements of operands of so many bytes.
fn counts(kernel: &Kernel) -> (Vec<usize>, Vec<usize>) {
    let sizes = operand_bytes(kernel, DataType::Fp32);
    let count = |sizes: Vec<foretell_units::Bytes>| sizes.iter().map(|bytes| (bytes.count() / 4) as usize).collect();
    (count(sizes.reads), count(sizes.writes))
}

/// Random operands that the kernel can meet: variances are positive, log-sums and saved statistics belong to their tensors.
fn operands(kernel: &Kernel, random: &mut ChaCha8Rng) -> (Vec<Tensor>, Vec<Tensor>) {
    operands_in(kernel, DataType::Fp32, random)
}

/// As [`operands`], of numbers that the operands' formats in a precision have.
fn operands_in(kernel: &Kernel, precision: DataType, random: &mut ChaCha8Rng) -> (Vec<Tensor>, Vec<Tensor>) {
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
        Kernel::AdamW { .. } => writes[2].iter_mut().for_each(|moment| *moment = moment.abs()),
        Kernel::CrossEntropy { .. } if reads[1].len() > 2 => reads[1][1] = -1.0,
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
        _ => mixture::make_consistent(kernel, &mut reads),
    }
    round_to(&types.reads, &mut reads);
    (reads, writes)
}

/// Rounds the tensors that are stored in sixteen bits.
fn round_to(types: &[DataType], tensors: &mut [Tensor]) {
    for (tensor, &data_type) in tensors.iter_mut().zip(types) {
        if let Some(half) = Half::of(data_type) {
            tensor.iter_mut().for_each(|value| *value = f64::from(half.to_single(half.nearest(*value as f32))));
        }
    }
}

/// The index of the last of the ranks among whom what the kernel works on is cut into parts.
fn last_member(kernel: &Kernel) -> usize {
    kernel.parts() - 1
}

/// As numbers of single precision, which is what a kernel is given.
fn rounded(mut tensors: Vec<Tensor>) -> Vec<Tensor> {
    tensors.iter_mut().flatten().for_each(|value| *value = f64::from(*value as f32));
    tensors
}

/// Runs the kernel on this machine's backend. With `share_first` the first write is the first read's memory.
fn run(
    kernel: &Kernel,
    reads: &[Tensor],
    before: &[Tensor],
    accumulate: bool,
    share_first: bool,
    group_index: usize,
) -> Vec<Tensor> {
    run_on(&mut CpuBackend::new(), kernel, reads, before, accumulate, share_first, group_index)
}

fn run_on(
    backend: &mut CpuBackend,
    kernel: &Kernel,
    reads: &[Tensor],
    before: &[Tensor],
    accumulate: bool,
    share_first: bool,
    group_index: usize,
) -> Vec<Tensor> {
    run_in(backend, DataType::Fp32, kernel, reads, before, accumulate, share_first, group_index)
}

/// Runs the kernel in a precision; the operands are stored as it says.
#[allow(clippy::too_many_arguments)]
fn run_in(
    backend: &mut CpuBackend,
    precision: DataType,
    kernel: &Kernel,
    reads: &[Tensor],
    before: &[Tensor],
    accumulate: bool,
    share_first: bool,
    group_index: usize,
) -> Vec<Tensor> {
    let types = operand_types(kernel, precision);
    let types: Vec<DataType> = types.reads[..reads.len()].iter().chain(&types.writes).copied().collect();
    let to_bytes = |data_type: DataType, x: f64| match (Half::of(data_type), data_type) {
        (Some(half), _) => half.nearest(x as f32).to_le_bytes().to_vec(),
        (None, DataType::Int32) => (x as i32).to_le_bytes().to_vec(),
        _ => (x as f32).to_le_bytes().to_vec(),
    };
    // In words, so that they are aligned.
    let mut memory: Vec<(Vec<u32>, usize)> = Vec::new();
    for (tensor, &data_type) in reads.iter().chain(before).zip(&types) {
        let bytes: Vec<u8> = tensor.iter().flat_map(|&x| to_bytes(data_type, x)).collect();
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte));
        memory.push((bytes.chunks(4).map(word).collect(), bytes.len()));
    }
    let mut all: Vec<Operand> =
        memory.iter_mut().map(|(memory, bytes)| Operand { pointer: memory.as_mut_ptr().cast(), bytes: *bytes }).collect();
    if share_first {
        all[reads.len()] = all[0];
    }
    let (read, written) = all.split_at(reads.len());
    let call = KernelCall {
        kernel,
        reads: read,
        writes: written,
        accumulate,
        hyperparameters: &PARAMETERS,
        group_index,
        samples_before: 0,
        precision,
    };
    // SAFETY: the operands are vectors that live until the end; at most the first write is the first read.
    unsafe { backend.run(&call) }.unwrap();
    if share_first {
        memory[reads.len()] = memory[0].clone();
    }
    memory[reads.len()..]
        .iter()
        .zip(&types[reads.len()..])
        .map(|((memory, length), &data_type)| {
            let bytes: Vec<u8> = memory.iter().flat_map(|word| word.to_le_bytes()).take(*length).collect();
            match (Half::of(data_type), data_type) {
                (Some(half), _) => {
                    bytes.as_chunks::<2>().0.iter().map(|&bits| f64::from(half.to_single(u16::from_le_bytes(bits)))).collect()
                }
                (None, DataType::Int32) => {
                    bytes.as_chunks::<4>().0.iter().map(|&bits| f64::from(i32::from_le_bytes(bits))).collect()
                }
                _ => bytes.as_chunks::<4>().0.iter().map(|&bits| f64::from(f32::from_le_bytes(bits))).collect(),
            }
        })
        .collect()
}

fn assert_close(kernel: &Kernel, what: &str, computed: &[Tensor], expected: &[Tensor]) {
    for (index, (computed, expected)) in computed.iter().zip(expected).enumerate() {
        assert_eq!(computed.len(), expected.len());
        // Errors grow with what was summed: they are measured against the tensor's largest value, not the element's.
        let scale = expected.iter().fold(1e-3_f64, |largest, value| largest.max(value.abs()));
        for (position, (&computed, &expected)) in computed.iter().zip(expected).enumerate() {
            let close = (computed - expected).abs() <= 4e-6 * scale;
            assert!(close, "{kernel:?} {what}: write {index} at {position}: {computed} for {expected}");
        }
    }
}

#[test]
fn every_kernel_computes_what_the_reference_does() {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    // Kept over all kernels: what one leaves in the scratch memory must not show in another.
    let mut backends = CpuBackend::variants();
    for kernel in cases() {
        let (reads, before) = operands(&kernel, &mut random);
        let group_index = last_member(&kernel);
        for accumulate in [false, true] {
            let expected = reference::run(&kernel, &reads, &before, accumulate, &PARAMETERS, group_index);
            let mode = if accumulate { "accumulating" } else { "overwriting" };
            for backend in &mut backends {
                let computed = run_on(backend, &kernel, &reads, &before, accumulate, false, group_index);
                assert_close(&kernel, mode, &computed, &expected);
            }
            let computed = run(&kernel, &reads, &before, accumulate, false, group_index);
            let again = run(&kernel, &reads, &before, accumulate, false, group_index);
            assert_eq!(computed, again, "{kernel:?} is not deterministic");
            if in_place(&kernel) {
                let computed = run(&kernel, &reads, &before, accumulate, true, group_index);
                assert_close(&kernel, "in place", &computed, &expected);
            }
        }
    }
}

#[test]
fn batch_norm_needs_no_statistics_and_keeps_its_digits_far_from_zero() {
    let kernel = Kernel::BatchNorm { groups: 2, positions: 3000, channels: 5 };
    let (mut reads, before) = operands(&kernel, &mut ChaCha8Rng::seed_from_u64(2));
    reads[0].iter_mut().for_each(|x| *x = f64::from((*x + 300.0) as f32));
    let mut expected = reference::run(&kernel, &reads, &before, false, &PARAMETERS, 0);
    expected.truncate(2);
    let computed = run(&kernel, &reads, &before[..2], false, false, 0);
    // The input itself has 3e-5 between neighbours here, against a deviation of 0.58.
    for (computed, expected) in computed.iter().flatten().zip(expected.iter().flatten()) {
        assert!((computed - expected).abs() <= 1e-4 * expected.abs().max(1.0), "{computed} for {expected}");
    }
}

#[test]
fn softmaxes_survive_large_logits() {
    let kernel = Kernel::CrossEntropy { rows: 2, classes: 3 };
    let reads = vec![vec![1000.0, 0.0, -1000.0, -500.0, -500.0, -500.0], vec![1.0, 0.0]];
    let written = run(&kernel, &reads, &[vec![0.0], vec![0.0], vec![0.0; 2]], false, false, 0);
    assert_close(
        &kernel,
        "large logits",
        &written,
        &[vec![1000.0 + 3.0_f64.ln()], vec![1.0], vec![1000.0, 3.0_f64.ln() - 500.0]],
    );
}

/// The error of one call with operands of these sizes, in bytes.
fn refusal(kernel: &Kernel, reads: &[usize], writes: &[usize], integer: i32) -> BackendError {
    let mut memory = vec![integer; 4096];
    let operand = |bytes: &usize, memory: &mut Vec<i32>| Operand { pointer: memory.as_mut_ptr().cast(), bytes: *bytes };
    let reads: Vec<Operand> = reads.iter().map(|bytes| operand(bytes, &mut memory)).collect();
    let writes: Vec<Operand> = writes.iter().map(|bytes| operand(bytes, &mut memory)).collect();
    let parameters = Hyperparameters::default();
    let (hyperparameters, precision) = (&parameters, DataType::Fp32);
    let call = KernelCall {
        kernel,
        reads: &reads,
        writes: &writes,
        accumulate: false,
        hyperparameters,
        group_index: 2,
        samples_before: 0,
        precision,
    };
    // SAFETY: the call is refused before its overlapping operands are written.
    unsafe { CpuBackend::new().run(&call) }.unwrap_err()
}

#[test]
fn a_call_that_does_not_fit_is_refused() {
    let add = Kernel::Add { elements: 3 };
    assert!(matches!(refusal(&add, &[12], &[12], 0), BackendError::OperandCount { side: "reads", wanted: 2, given: 1, .. }));
    assert!(matches!(refusal(&add, &[12, 12], &[12, 12], 0), BackendError::OperandCount { side: "writes", .. }));
    assert!(matches!(refusal(&add, &[12, 8], &[12], 0), BackendError::OperandSize { index: 1, wanted: 12, given: 8, .. }));
    let slice = Kernel::Slice { outer: 1, parts: 2, inner: 1 };
    assert!(matches!(refusal(&slice, &[8], &[4], 0), BackendError::IndexOutOfRange { value: 2, limit: 2, .. }));
    let embedding = Kernel::Embedding { tokens: 2, vocabulary: 5, hidden: 1, parts: 1 };
    assert!(matches!(refusal(&embedding, &[8, 20], &[8], 5), BackendError::IndexOutOfRange { position: 0, value: 5, .. }));
    assert!(matches!(refusal(&embedding, &[8, 20], &[8], -1), BackendError::IndexOutOfRange { value: -1, .. }));
    let loss = Kernel::CrossEntropy { rows: 1, classes: 2 };
    assert!(matches!(refusal(&loss, &[8, 4], &[4, 4, 4], -2), BackendError::IndexOutOfRange { value: -2, limit: 2, .. }));
    let too_large = Kernel::Convolution(window([1, 2, 2, 1, 1, 5, 1, 1]));
    assert!(matches!(refusal(&too_large, &[16, 100], &[0], 0), BackendError::ImpossibleSizes { .. }));
}
