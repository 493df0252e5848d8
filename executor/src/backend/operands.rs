//! How large each operand of a kernel is and how its numbers are stored, and the check of a call against it.
//! The layouts are [`Kernel`]'s to document; this file only multiplies.

use foretell_models::{Kernel, Storage, Window};
use foretell_units::{Bytes, DataType};

use super::{BackendError, KernelCall};

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

/// Numbers of an update's control.
pub(super) const CONTROL: usize = 8;

/// Elements of the operands of each side, without an allocation.
struct Elements {
    reads: ([usize; MOST_OPERANDS], usize),
    writes: ([usize; MOST_OPERANDS], usize),
}

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
    use Storage::{Integer as I, Precision as P, Single as S};
    match kernel {
        Kernel::Matmul { .. } => (&[P, P, P], &[P]),
        Kernel::MatmulInputGradient { .. } => (&[P, P], &[P]),
        Kernel::MatmulWeightGradient { .. } => (&[P, P], &[S]),
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

fn elements(kernel: &Kernel) -> Elements {
    match *kernel {
        Kernel::Matmul { rows, columns, contracted, bias, .. } => {
            let (x, w) = (rows * contracted, columns * contracted);
            if bias { operands(&[x, w, columns], &[rows * columns]) } else { operands(&[x, w], &[rows * columns]) }
        }
        Kernel::MatmulInputGradient { rows, columns, contracted, .. } => {
            operands(&[rows * columns, columns * contracted], &[rows * contracted])
        }
        Kernel::MatmulWeightGradient { rows, columns, contracted, .. } => {
            operands(&[rows * columns, rows * contracted], &[columns * contracted])
        }
        Kernel::BiasAdd { rows, columns } => operands(&[rows * columns, columns], &[rows * columns]),
        Kernel::BiasGradient { rows, columns } => operands(&[rows * columns], &[columns]),
        Kernel::Multiply { elements } => operands(&[elements, elements], &[elements]),
        Kernel::Scale { elements, .. } => operands(&[elements], &[elements]),
        Kernel::Relu { elements } | Kernel::Gelu { elements } | Kernel::GeluExact { elements } => {
            operands(&[elements], &[elements])
        }
        Kernel::ReluGradient { elements }
        | Kernel::GeluGradient { elements }
        | Kernel::GeluExactGradient { elements }
        | Kernel::SiluMultiply { elements }
        | Kernel::Add { elements } => operands(&[elements, elements], &[elements]),
        Kernel::SiluMultiplyGradient { elements } => operands(&[elements; 3], &[elements; 2]),
        Kernel::Convolution(window) => {
            operands(&[window.input_elements(), window.weight_elements()], &[output_elements(&window)])
        }
        Kernel::ConvolutionInputGradient(window) => {
            operands(&[output_elements(&window), window.weight_elements()], &[window.input_elements()])
        }
        Kernel::ConvolutionWeightGradient(window) => {
            operands(&[output_elements(&window), window.input_elements()], &[window.weight_elements()])
        }
        Kernel::BatchNorm { groups, positions, channels } => {
            let x = groups * positions * channels;
            operands(&[x, channels, channels], &[x, 2 * groups * channels, 2 * channels])
        }
        Kernel::BatchNormInputGradient { groups, positions, channels } => {
            let x = groups * positions * channels;
            operands(&[x, x, channels, 2 * groups * channels], &[x, 2 * groups * channels])
        }
        Kernel::BatchNormWeightGradient { groups, channels } => operands(&[2 * groups * channels], &[channels, channels]),
        Kernel::BatchNormInference { positions, channels } => {
            let x = positions * channels;
            operands(&[x, channels, channels, 2 * channels], &[x])
        }
        Kernel::RunningStatistics { channels, .. } => operands(&[2 * channels], &[2 * channels]),
        Kernel::MaxPool(window) => {
            let y = output_elements(&window);
            operands(&[window.input_elements()], &[y, y])
        }
        Kernel::MaxPoolGradient(window) => {
            let y = output_elements(&window);
            operands(&[y, y], &[window.input_elements()])
        }
        Kernel::GlobalAveragePool { batch, positions, channels } => {
            operands(&[batch * positions * channels], &[batch * channels])
        }
        Kernel::GlobalAveragePoolGradient { batch, positions, channels } => {
            operands(&[batch * channels], &[batch * positions * channels])
        }
        Kernel::LayerNorm { rows, features, .. } => {
            operands(&[rows * features, features, features], &[rows * features, 2 * rows])
        }
        Kernel::LayerNormInputGradient { rows, features } => {
            operands(&[rows * features, rows * features, features, 2 * rows], &[rows * features])
        }
        Kernel::LayerNormWeightGradient { rows, features } => {
            operands(&[rows * features, rows * features, 2 * rows], &[features, features])
        }
        Kernel::RmsNorm { rows, features, .. } => operands(&[rows * features, features], &[rows * features, rows]),
        Kernel::RmsNormInputGradient { rows, features } => {
            operands(&[rows * features, rows * features, features, rows], &[rows * features])
        }
        Kernel::RmsNormWeightGradient { rows, features } => operands(&[rows * features, rows * features, rows], &[features]),
        Kernel::Rope(sizes) | Kernel::RopeGradient(sizes) => operands(&[sizes.elements()], &[sizes.elements()]),
        Kernel::Dropout(sizes) => operands(&[sizes.elements()], &[sizes.elements()]),
        Kernel::Prepend { batch, positions, features } => {
            operands(&[batch * positions * features, features], &[batch * (positions + 1) * features])
        }
        Kernel::PrependInputGradient { batch, positions, features } => {
            operands(&[batch * (positions + 1) * features], &[batch * positions * features])
        }
        Kernel::PrependWeightGradient { batch, positions, features } => {
            operands(&[batch * (positions + 1) * features], &[features])
        }
        Kernel::First { batch, positions, features } => operands(&[batch * positions * features], &[batch * features]),
        Kernel::FirstGradient { batch, positions, features } => operands(&[batch * features], &[batch * positions * features]),
        Kernel::Embedding { tokens, vocabulary, hidden, .. } => operands(&[tokens, vocabulary * hidden], &[tokens * hidden]),
        Kernel::EmbeddingWeightGradient { tokens, vocabulary, hidden, .. } => {
            operands(&[tokens * hidden, tokens], &[vocabulary * hidden])
        }
        Kernel::Attention(sizes) => {
            let [q, k, table] = [sizes.query_elements(), sizes.key_elements(), sizes.table_elements()];
            let reads = if sizes.packed { [3 * q, table, 0, 0] } else { [q, k, k, table] };
            let count = if sizes.packed { 1 } else { 3 } + usize::from(sizes.relative.is_some());
            operands(&reads[..count], &[q, sizes.rows()])
        }
        Kernel::AttentionGradient(sizes) => {
            let [q, k, table] = [sizes.query_elements(), sizes.key_elements(), sizes.table_elements()];
            let tables = usize::from(sizes.relative.is_some());
            if sizes.packed {
                operands(&[q, 3 * q, q, sizes.rows(), table][..4 + tables], &[3 * q, table][..1 + tables])
            } else {
                operands(&[q, q, k, k, q, sizes.rows(), table][..6 + tables], &[q, k, k, table][..3 + tables])
            }
        }
        Kernel::Split { rows, parts, columns } => operands(&[rows * parts * columns], &[rows * columns; MOST_OPERANDS][..parts]),
        Kernel::Join { rows, parts, columns } => operands(&[rows * columns; MOST_OPERANDS][..parts], &[rows * parts * columns]),
        Kernel::CrossEntropy { rows, classes } => operands(&[rows * classes, rows], &[1, 1, rows]),
        Kernel::Route { tokens, experts, top } => operands(&[tokens * experts], &[tokens * top, tokens * top]),
        Kernel::RouteGradient { tokens, experts, top } => operands(&[tokens * top; 3], &[tokens * experts]),
        Kernel::Dispatch(mixture) => {
            let choices = mixture.choices();
            operands(&[mixture.token_elements(), choices], &[mixture.slot_elements(), choices, 1])
        }
        Kernel::DispatchGradient(mixture) => {
            let choices = mixture.choices();
            operands(&[mixture.slot_elements(), choices, choices], &[mixture.token_elements()])
        }
        Kernel::Combine(mixture) => {
            let choices = mixture.choices();
            operands(&[mixture.slot_elements(), choices, choices, choices], &[mixture.token_elements()])
        }
        Kernel::CombineInputGradient(mixture) => {
            let choices = mixture.choices();
            operands(&[mixture.token_elements(), choices, choices, choices], &[mixture.slot_elements()])
        }
        Kernel::CombineGateGradient(mixture) => {
            let choices = mixture.choices();
            operands(&[mixture.token_elements(), mixture.slot_elements(), choices, choices], &[choices])
        }
        Kernel::Lstm(sizes) => {
            let y = sizes.output_elements();
            let reads = [4 * y, sizes.weight_elements(), sizes.state_elements()];
            operands(&reads[..2 + usize::from(sizes.initial)], &[y, 4 * y, y, sizes.state_elements()])
        }
        Kernel::LstmGradient { sizes, outputs, last } => {
            let (y, state) = (sizes.output_elements(), sizes.state_elements());
            // What may be missing stands first and last.
            let reads = [y, state, sizes.weight_elements(), 4 * y, y, state];
            let mut present = [0; 6];
            let mut count = 0;
            for (size, is_present) in reads.into_iter().zip([outputs, last, true, true, true, sizes.initial]) {
                if is_present {
                    present[count] = size;
                    count += 1;
                }
            }
            operands(&present[..count], &[4 * y, state][..1 + usize::from(sizes.initial)])
        }
        Kernel::LstmWeightGradient(sizes) => {
            let reads = [4 * sizes.output_elements(), sizes.output_elements(), sizes.state_elements()];
            operands(&reads[..2 + usize::from(sizes.initial)], &[sizes.weight_elements()])
        }
        Kernel::ExpertMatmul { experts, rows, columns, contracted } => {
            operands(&[experts * rows * contracted, experts * columns * contracted], &[experts * rows * columns])
        }
        Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted } => {
            operands(&[experts * rows * columns, experts * columns * contracted], &[experts * rows * contracted])
        }
        Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted } => {
            operands(&[experts * rows * columns, experts * rows * contracted], &[experts * columns * contracted])
        }
        Kernel::LogitStatistics { rows, classes, .. } => operands(&[rows * classes, rows], &[4 * rows]),
        Kernel::CrossEntropyOfStatistics { rows, parts } => operands(&[4 * parts * rows, rows], &[1, 1, rows]),
        Kernel::CrossEntropyGradient { rows, classes, scaled: false, .. } => {
            operands(&[rows * classes, rows, rows], &[rows * classes])
        }
        Kernel::CrossEntropyGradient { rows, classes, scaled: true, .. } => {
            operands(&[rows * classes, rows, rows, CONTROL], &[rows * classes])
        }
        Kernel::Sgd { elements, momentum, controlled, .. } => {
            let reads: &[usize] = if controlled { &[elements, CONTROL] } else { &[elements] };
            let writes: &[usize] = if momentum { &[elements, elements] } else { &[elements] };
            operands(reads, writes)
        }
        Kernel::AdamW { elements, controlled: false } => operands(&[elements], &[elements, elements, elements]),
        Kernel::AdamW { elements, controlled: true } => operands(&[elements, CONTROL], &[elements, elements, elements]),
        Kernel::UpdateControl { .. } => operands(&[1], &[CONTROL]),
        Kernel::Sum { elements } => operands(&[elements], &[1]),
        Kernel::Accumulate { elements } | Kernel::Narrow { elements } => operands(&[elements], &[elements]),
        Kernel::Zero { elements } => operands(&[], &[elements]),
        Kernel::SumOfSquares { elements } => operands(&[elements], &[1]),
        Kernel::Slice { outer, parts, inner } => operands(&[outer * parts * inner], &[outer * inner]),
        Kernel::Interleave { outer, parts, inner } | Kernel::Deinterleave { outer, parts, inner } => {
            operands(&[outer * parts * inner], &[outer * parts * inner])
        }
        Kernel::TakeColumns { rows, columns, part, .. } => operands(&[rows * columns], &[rows * part]),
        Kernel::PutColumns { rows, columns, part, .. } => operands(&[rows * part], &[rows * columns]),
    }
}

/// As [`Window::output_elements`], and zero for a window that [`check_sizes`] refuses: a size must not overflow before it is refused.
fn output_elements(window: &Window) -> usize {
    let fits = |extent: usize| extent + 2 * window.padding >= window.size && window.stride > 0;
    if fits(window.height) && fits(window.width) { window.output_elements() } else { 0 }
}

fn operands(reads: &[usize], writes: &[usize]) -> Elements {
    let fill = |sizes: &[usize]| {
        let mut filled = [0; MOST_OPERANDS];
        filled.iter_mut().zip(sizes).for_each(|(slot, &size)| *slot = size);
        (filled, sizes.len())
    };
    Elements { reads: fill(reads), writes: fill(writes) }
}
