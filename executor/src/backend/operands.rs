//! How large each operand of a kernel is and how its numbers are stored, and the check of a call against it.
//! The layouts are [`Kernel`]'s to document; this file only multiplies.

mod elements;

use foretell_models::{Kernel, Storage};
use foretell_units::{Bytes, DataType};

use super::{BackendError, KernelCall};
use elements::{Elements, elements};

/// The sizes of a kernel's operands in a precision, in the order in which an instruction lists them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperandBytes {
    /// What it reads.
    pub reads: Vec<Bytes>,
    /// What it writes. The third of [`Kernel::BatchNorm`] and of [`Kernel::Dispatch`] is optional and listed here.
    pub writes: Vec<Bytes>,
}

/// The most operands of a side.
pub(super) const MOST_OPERANDS: usize = 8;

/// The sizes of `kernel`'s operands in a run of `precision`.
pub fn operand_bytes(kernel: &Kernel, precision: DataType) -> OperandBytes {
    let [reads, writes] = sides(kernel, precision);
    let bytes = |side: Side| {
        let sizes = side.elements.iter().zip(side.storages);
        sizes.take(side.count).map(|(&elements, storage)| storage.data_type(precision).size() * elements as u64).collect()
    };
    OperandBytes { reads: bytes(reads), writes: bytes(writes) }
}

/// The number formats of a kernel's operands, in the order in which an instruction lists them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperandTypes {
    /// Of what it reads.
    pub reads: Vec<DataType>,
    /// Of what it writes, as [`OperandBytes::writes`].
    pub writes: Vec<DataType>,
}

/// The number formats of `kernel`'s operands in a run of `precision`.
pub fn operand_types(kernel: &Kernel, precision: DataType) -> OperandTypes {
    let [reads, writes] = sides(kernel, precision)
        .map(|side| side.storages.iter().take(side.count).map(|storage| storage.data_type(precision)).collect());
    OperandTypes { reads, writes }
}

/// What a call lists on one side.
pub(super) struct Side {
    /// How many operands, at most.
    pub(super) count: usize,
    /// Elements of each.
    pub(super) elements: [usize; MOST_OPERANDS],
    /// How those of each are stored.
    pub(super) storages: &'static [Storage],
}

/// A kernel's reads and writes. In mixed precision an optimizer has one write more: the master copy.
pub(super) fn sides(kernel: &Kernel, precision: DataType) -> [Side; 2] {
    let Elements { reads, writes } = elements(kernel);
    let (read_storages, write_storages) = storages(kernel);
    let side = |(elements, count): ([usize; MOST_OPERANDS], usize), storages| {
        let mut all = [0; MOST_OPERANDS];
        all[..count].copy_from_slice(&elements[..count]);
        Side { count, elements: all, storages }
    };
    let [reads, mut writes] = [side(reads, read_storages), side(writes, write_storages)];
    if let Kernel::Sgd { elements, .. } | Kernel::AdamW { elements, .. } = *kernel
        && is_mixed(precision)
    {
        writes.elements[writes.count] = elements;
        writes.count += 1;
    }
    [reads, writes]
}

/// Whether parameters in this precision have a copy in single precision beside them, which the optimizer updates.
pub(super) fn is_mixed(precision: DataType) -> bool {
    precision.size() < DataType::Fp32.size()
}

/// How the numbers of each operand are stored: the reads, then the writes. Those of kernels that only move numbers are stored as the
/// call's operands are, in the run's precision or in single precision; they are listed as the former.
///
/// The compiler gives every tensor's storage ([`foretell_models::Tensor::storage`]); this is the same from the kernels' side.
#[rustfmt::skip]
fn storages(kernel: &Kernel) -> (&'static [Storage], &'static [Storage]) {
    use Storage::{Eight as E, Integer as I, Precision as P, Single as S};
    match kernel {
        Kernel::Matmul { .. } => (&[P, P, P], &[P, P]),
        Kernel::MatmulInputGradient { .. } => (&[P, P, P], &[P]),
        Kernel::MatmulWeightGradient { .. } => (&[P, P], &[S, S]),
        Kernel::Quantise { .. } => (&[P], &[S, E, E]),
        Kernel::EightBitMatmul { .. } => (&[E, E, S, S, P], &[P, P]),
        Kernel::EightBitMatmulInputGradient { .. } => (&[E, E, S, S, P], &[P]),
        Kernel::EightBitMatmulWeightGradient { .. } => (&[E, E, S, S], &[S]),
        Kernel::BiasAdd { .. } => (&[P, P], &[P]),
        Kernel::BiasGradient { .. } => (&[P], &[S]),
        Kernel::Relu { .. } | Kernel::Gelu { .. } => (&[P], &[P]),
        Kernel::ReluGradient { .. } | Kernel::GeluGradient { .. } | Kernel::Add { .. } => (&[P, P], &[P]),
        Kernel::Convolution(_) | Kernel::ConvolutionInputGradient(_) => (&[P, P], &[P]),
        Kernel::ConvolutionWeightGradient(_) => (&[P, P], &[S]),
        Kernel::BatchNorm { .. } => (&[P, P, P], &[P, S, S]),
        Kernel::BatchNormInputGradient { .. } => (&[P, P, P, S], &[P, S]),
        Kernel::BatchNormWeightGradient { .. } => (&[S], &[S, S]),
        Kernel::BatchNormInference { .. } => (&[P, P, P, S], &[P]),
        Kernel::RunningStatistics { .. } => (&[S], &[S]),
        Kernel::MaxPool(_) => (&[P], &[P, I]),
        Kernel::MaxPoolGradient(_) => (&[P, I], &[P]),
        Kernel::GlobalAveragePool { .. } | Kernel::GlobalAveragePoolGradient { .. } => (&[P], &[P]),
        Kernel::LayerNorm { .. } => (&[P, P, P], &[P, S]),
        Kernel::LayerNormInputGradient { .. } => (&[P, P, P, S], &[P]),
        Kernel::LayerNormWeightGradient { .. } => (&[P, P, S], &[S, S]),
        Kernel::Embedding { .. } => (&[I, P], &[P]),
        Kernel::EmbeddingWeightGradient { .. } => (&[P, I], &[S]),
        Kernel::Multiply { .. } => (&[P, P], &[P]),
        Kernel::Scale { .. } => (&[P], &[P]),
        Kernel::Route { .. } => (&[P], &[P, I]),
        Kernel::RouteGradient { .. } => (&[P, P, I], &[P]),
        Kernel::Dispatch(_) => (&[P, I], &[P, I, S]),
        Kernel::DispatchGradient(_) => (&[P, I, I], &[P]),
        Kernel::Combine(_) | Kernel::CombineInputGradient(_) | Kernel::CombineGateGradient(_) => (&[P, P, I, I], &[P]),
        Kernel::ExpertMatmul { .. } | Kernel::ExpertMatmulInputGradient { .. } => (&[P, P], &[P]),
        Kernel::ExpertMatmulWeightGradient { .. } => (&[P, P], &[S]),
        Kernel::Lstm(_) => (&[P, P, P], &[P, P, P, P]),
        Kernel::LstmGradient { .. } => (&[P; MOST_OPERANDS], &[P, P]),
        Kernel::LstmWeightGradient(_) => (&[P, P, P], &[S]),
        Kernel::GeluExact { .. } => (&[P], &[P]),
        Kernel::GeluExactGradient { .. } | Kernel::SiluMultiply { .. } => (&[P, P], &[P]),
        Kernel::SiluMultiplyGradient { .. } => (&[P, P, P], &[P, P]),
        Kernel::RmsNorm { .. } => (&[P, P], &[P, S]),
        Kernel::RmsNormInputGradient { .. } => (&[P, P, P, S], &[P]),
        Kernel::RmsNormWeightGradient { .. } => (&[P, P, S], &[S]),
        Kernel::Rope(_) | Kernel::RopeGradient(_) => (&[P], &[P]),
        Kernel::Dropout(_) => (&[P], &[P]),
        Kernel::Prepend { .. } => (&[P, P], &[P]),
        Kernel::PrependInputGradient { .. } => (&[P], &[P]),
        Kernel::PrependWeightGradient { .. } => (&[P], &[S]),
        Kernel::First { .. } | Kernel::FirstGradient { .. } => (&[P], &[P]),
        // With relative positions a table follows, a parameter, and its gradient.
        Kernel::Attention(sizes) if sizes.ring.is_some() => (&[P, P, P], &[S, S]),
        Kernel::AttentionGradient(sizes) if sizes.ring.is_some() => (&[P, P, P, P, P, S], &[S, S, S]),
        Kernel::Attention(_) => (&[P, P, P, P], &[P, S]),
        Kernel::AttentionGradient(sizes) if sizes.packed => (&[P, P, P, S, P], &[P, S]),
        Kernel::AttentionGradient(_) => (&[P, P, P, P, P, S, P], &[P, P, P, S]),
        Kernel::Split { .. } => (&[P], &[P; MOST_OPERANDS]),
        Kernel::Join { .. } => (&[P; MOST_OPERANDS], &[P]),
        Kernel::CrossEntropy { .. } => (&[P, I], &[S, S, S]),
        Kernel::LogitStatistics { .. } => (&[P, I], &[S]),
        Kernel::CrossEntropyOfStatistics { .. } => (&[S, I], &[S, S, S]),
        Kernel::CrossEntropyGradient { .. } => (&[P, I, S, S], &[P]),
        // The last is the master copy, in mixed precision.
        Kernel::Sgd { momentum: false, .. } => (&[S, S], &[P, S]),
        Kernel::Sgd { momentum: true, .. } => (&[S, S], &[P, S, S]),
        Kernel::AdamW { .. } => (&[S, S], &[P, S, S, S]),
        Kernel::UpdateControl { .. } | Kernel::Sum { .. } | Kernel::Accumulate { .. } => (&[S], &[S]),
        Kernel::Narrow { .. } => (&[S], &[P]),
        Kernel::Zero { .. } => (&[], &[S]),
        Kernel::SumOfSquares { .. } => (&[S], &[S]),
        Kernel::Slice { .. }
        | Kernel::Interleave { .. }
        | Kernel::Deinterleave { .. }
        | Kernel::TakeColumns { .. }
        | Kernel::PutColumns { .. } => (&[P], &[P]),
    }
}

/// Whether a kernel only moves numbers, of whichever width.
pub(super) fn only_moves(kernel: &Kernel) -> bool {
    matches!(
        kernel,
        Kernel::Slice { .. }
            | Kernel::Interleave { .. }
            | Kernel::Deinterleave { .. }
            | Kernel::TakeColumns { .. }
            | Kernel::PutColumns { .. }
    )
}

/// The bytes of an element of a call that only moves numbers: as many as its read has, in the run's precision or in single precision.
pub(super) fn moved_width(call: &KernelCall<'_>) -> Option<usize> {
    let moves = only_moves(call.kernel);
    let single = || call.reads.first().is_some_and(|read| read.bytes == 4 * elements(call.kernel).reads.0[0]);
    moves.then(|| if single() { 4 } else { call.precision.size().count() as usize })
}

/// Refuses a call whose operands are not the kernel's in number, size and alignment.
pub(super) fn check(call: &KernelCall<'_>) -> Result<(), BackendError> {
    let kernel = call.kernel.name();
    if !matches!(call.precision, DataType::Fp32 | DataType::Bf16 | DataType::Fp16) {
        return Err(BackendError::UnknownPrecision { kernel, precision: call.precision });
    }
    check_sizes(call.kernel)?;
    let [reads, writes] = sides(call.kernel, call.precision);
    let moved_width = moved_width(call);
    let optional = usize::from(matches!(call.kernel, Kernel::BatchNorm { .. } | Kernel::Dispatch(_)));
    for (name, operands, side, optional) in [("reads", call.reads, reads, 0), ("writes", call.writes, writes, optional)] {
        if operands.len() > side.count || operands.len() + optional < side.count {
            return Err(BackendError::OperandCount { kernel, side: name, wanted: side.count, given: operands.len() });
        }
        for (index, (operand, (elements, storage))) in operands.iter().zip(side.elements.iter().zip(side.storages)).enumerate() {
            let width = moved_width.unwrap_or(storage.data_type(call.precision).size().count() as usize);
            let wanted = width * elements;
            if operand.bytes != wanted {
                return Err(BackendError::OperandSize { kernel, side: name, index, wanted, given: operand.bytes });
            }
            // A run of sixteen-bit numbers that is only moved may begin at any of them.
            let alignment = moved_width.unwrap_or(4);
            if !operand.pointer.addr().is_multiple_of(alignment) || operand.pointer.is_null() {
                return Err(BackendError::OperandAlignment { kernel, side: name, index });
            }
        }
    }
    let parts = call.kernel.parts();
    if parts > 1 && call.group_index >= parts {
        let value = i32::try_from(call.group_index).unwrap_or(i32::MAX);
        return Err(BackendError::IndexOutOfRange { kernel, position: 0, value, limit: parts });
    }
    Ok(())
}

fn check_sizes(kernel: &Kernel) -> Result<(), BackendError> {
    let impossible = |reason| Err(BackendError::ImpossibleSizes { kernel: kernel.name(), reason });
    match kernel {
        Kernel::Convolution(window)
        | Kernel::ConvolutionInputGradient(window)
        | Kernel::ConvolutionWeightGradient(window)
        | Kernel::MaxPool(window)
        | Kernel::MaxPoolGradient(window) => {
            if window.stride == 0 || window.size == 0 {
                return impossible("the window's size or stride is zero");
            }
            if window.size > window.height + 2 * window.padding || window.size > window.width + 2 * window.padding {
                return impossible("the window is larger than the padded image");
            }
            let pooling = matches!(kernel, Kernel::MaxPool(_) | Kernel::MaxPoolGradient(_));
            if pooling && window.in_channels != window.out_channels {
                return impossible("a pooling keeps its number of channels");
            }
            if pooling && window.padding >= window.size {
                return impossible("a pooling's padding must be smaller than its window");
            }
            if pooling && window.input_elements() > i32::MAX as usize {
                return impossible("a pooling's input has more elements than an index of 32 bits can name");
            }
            Ok(())
        }
        Kernel::TakeColumns { columns, start, part, .. } | Kernel::PutColumns { columns, start, part, .. }
            if start.checked_add(*part).is_none_or(|end| end > *columns) =>
        {
            impossible("the columns lie beyond the matrix")
        }
        Kernel::RunningStatistics { contributions: 0, .. } => impossible("no statistics contribute"),
        Kernel::CrossEntropyGradient { normalizer: 0, .. } => impossible("the normalizer is zero"),
        Kernel::Attention(sizes) | Kernel::AttentionGradient(sizes) => {
            if sizes.packed && (sizes.queries != sizes.keys || sizes.group != 1) {
                return impossible("packed attention has as many keys as queries, and of as many heads");
            }
            if sizes.ring.is_some() && (sizes.packed || sizes.relative.is_some()) {
                return impossible("a step of a ring has keys and values apart from queries, and no relative positions");
            }
            if sizes.relative.is_some_and(|relative| relative.buckets < 4 || relative.max_distance <= relative.buckets) {
                return impossible("relative positions need four buckets, and a distance beyond them");
            }
            Ok(())
        }
        Kernel::Rope(sizes) | Kernel::RopeGradient(sizes) if !sizes.head_dimension.is_multiple_of(2) || sizes.theta == 0 => {
            impossible("rotary positions turn pairs of features by a base above zero")
        }
        Kernel::First { positions: 0, .. } => impossible("there is no first position"),
        Kernel::Split { parts, .. } | Kernel::Join { parts, .. } if !(1..=MOST_OPERANDS).contains(parts) => {
            impossible("a tensor is split into one to eight")
        }
        Kernel::Scale { square: 0, .. } => impossible("a divisor is zero"),
        Kernel::CrossEntropy { classes: 0, .. } => impossible("there are no classes"),
        Kernel::Route { experts, top, .. } if *top == 0 || top > experts => {
            impossible("a token is sent to no expert, or to more than there are")
        }
        Kernel::Dispatch(mixture) if mixture.capacity > i32::MAX as usize => {
            impossible("an expert has more slots than an index of 32 bits can name")
        }
        _ => Ok(()),
    }
}
