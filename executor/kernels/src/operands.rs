//! Sizes and number formats of a kernel's operands, and the check of a call against them.
//! [`Kernel`] documents the layouts; this file only computes sizes.

use foretell_models::{Kernel, KernelOperand, MOST_OPERANDS};
use foretell_units::{Bytes, DataType};

use super::{BackendError, KernelCall, Operand};

/// The eight-bit copies of a matrix that a quantisation writes.
#[derive(Clone, Copy)]
pub(crate) struct EightBitCopies {
    /// A copy in the matrix's own order.
    pub(crate) straight: bool,
    /// A transposed copy.
    pub(crate) transposed: bool,
}

/// The sizes of a kernel's operands in a precision, in the order in which an instruction lists
/// them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperandBytes {
    /// The operands that it reads.
    pub reads: Vec<Bytes>,
    /// The operands that it writes, optional ones included.
    pub writes: Vec<Bytes>,
}

/// The sizes of `kernel`'s operands in a run of `precision`.
pub fn operand_bytes(kernel: &Kernel, precision: DataType) -> OperandBytes {
    let spec = kernel.spec();
    let bytes = |operand: &KernelOperand| operand.bytes(precision);
    OperandBytes { reads: spec.reads().map(bytes).collect(), writes: spec.writes(precision).map(bytes).collect() }
}

/// The number formats of a kernel's operands, in the order in which an instruction lists them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperandTypes {
    /// The operands that it reads.
    pub reads: Vec<DataType>,
    /// The operands that it writes, optional ones included.
    pub writes: Vec<DataType>,
}

/// The number formats of `kernel`'s operands in a run of `precision`.
pub fn operand_types(kernel: &Kernel, precision: DataType) -> OperandTypes {
    let spec = kernel.spec();
    let data_type = |operand: &KernelOperand| operand.data_type(precision);
    OperandTypes { reads: spec.reads().map(data_type).collect(), writes: spec.writes(precision).map(data_type).collect() }
}

/// Bytes per element of a call that only moves numbers, which are in the run's precision or in
/// single precision; inferred from the length of the first read. `None` for other calls.
pub(super) fn moved_width(call: &KernelCall<'_>) -> Option<usize> {
    let spec = call.kernel.spec();
    let elements = spec.reads().next().map_or(0, |operand| operand.elements);
    let is_single = || call.reads.first().is_some_and(|read| read.bytes == 4 * elements);
    spec.moves_any_width.then(|| if is_single() { 4 } else { call.precision.size().count() as usize })
}

/// Refuses a call in an unsupported precision, with impossible sizes, or with operands that differ
/// from the kernel's in number, size or alignment.
pub(super) fn check(call: &KernelCall<'_>) -> Result<(), BackendError> {
    let kernel = call.kernel.name();
    if !matches!(call.precision, DataType::Fp32 | DataType::Bf16 | DataType::Fp16) {
        return Err(BackendError::UnknownPrecision { kernel, precision: call.precision });
    }
    check_sizes(call.kernel)?;
    let spec = call.kernel.spec();
    let moved_width = moved_width(call);
    check_side(call, "reads", call.reads, spec.reads(), moved_width)?;
    check_side(call, "writes", call.writes, spec.writes(call.precision), moved_width)?;
    let parts = call.kernel.parts();
    if parts > 1 && call.group_index >= parts {
        let value = i32::try_from(call.group_index).unwrap_or(i32::MAX);
        return Err(BackendError::IndexOutOfRange { kernel, position: 0, value, limit: parts });
    }
    Ok(())
}

/// Refuses operands of one side (`name`) that differ from `described` in number, size or alignment.
fn check_side<'a>(
    call: &KernelCall<'_>,
    name: &'static str,
    given: &[Operand],
    described: impl Iterator<Item = &'a KernelOperand> + Clone,
    moved_width: Option<usize>,
) -> Result<(), BackendError> {
    let kernel = call.kernel.name();
    let wanted = described.clone().count();
    let optional = described.clone().filter(|operand| operand.is_optional()).count();
    if given.len() > wanted || given.len() + optional < wanted {
        return Err(BackendError::OperandCount { kernel, side: name, wanted, given: given.len() });
    }
    for (index, (operand, described)) in given.iter().zip(described).enumerate() {
        let width = moved_width.unwrap_or(described.data_type(call.precision).size().count() as usize);
        let wanted = width * described.elements;
        if operand.bytes != wanted {
            return Err(BackendError::OperandSize { kernel, side: name, index, wanted, given: operand.bytes });
        }
        // Kernels that only move 16-bit numbers accept operands aligned to two bytes.
        let alignment = moved_width.unwrap_or(4);
        if !operand.pointer.addr().is_multiple_of(alignment) || operand.pointer.is_null() {
            return Err(BackendError::OperandAlignment { kernel, side: name, index });
        }
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
        Kernel::CrossEntropyGradient { normalizer: 0, .. } | Kernel::WeightedCrossEntropyGradient { normalizer: 0, .. } => {
            impossible("the normalizer is zero")
        }
        Kernel::Attention(sizes) | Kernel::AttentionGradient(sizes) => {
            if sizes.packed && (sizes.queries != sizes.keys || sizes.group != 1) {
                return impossible("packed attention has as many keys as queries, and of as many heads");
            }
            if sizes.value_features() != sizes.head_dimension {
                return impossible("attention whose values have other features than its keys is planned, and not executed");
            }
            if sizes.window.is_some() {
                return impossible("attention over a window of keys is planned, and not executed");
            }
            if sizes.ring.is_some() && (sizes.packed || sizes.relative.is_some()) {
                return impossible("a step of a ring has keys and values apart from queries, and no relative positions");
            }
            if sizes.relative.is_some_and(|relative| relative.buckets < 4 || relative.max_distance <= relative.buckets) {
                return impossible("relative positions need four buckets, and a distance beyond them");
            }
            Ok(())
        }
        Kernel::Rope(sizes) | Kernel::RopeGradient(sizes) => {
            let rotated = sizes.rotated_features();
            if !rotated.is_multiple_of(2) || rotated > sizes.head_dimension || sizes.theta == 0 {
                return impossible("rotary positions turn pairs of a head's features by a base above zero");
            }
            Ok(())
        }
        Kernel::Planned(_) | Kernel::Scan(_) | Kernel::ScanGradient(_) => {
            impossible("it is planned and simulated, and not executed")
        }
        Kernel::First { positions: 0, .. } => impossible("there is no first position"),
        Kernel::Split { parts, .. } | Kernel::Join { parts, .. } if !(1..=MOST_OPERANDS).contains(parts) => {
            impossible("a tensor is split into one to eight")
        }
        Kernel::Scale { square: 0, .. } => impossible("a divisor is zero"),
        Kernel::CrossEntropy { classes: 0, .. } | Kernel::WeightedCrossEntropy { classes: 0, .. } => {
            impossible("there are no classes")
        }
        Kernel::Route { experts, top, .. } if *top == 0 || top > experts => {
            impossible("a token is sent to no expert, or to more than there are")
        }
        Kernel::Dispatch(mixture) if mixture.capacity > i32::MAX as usize => {
            impossible("an expert has more slots than an index of 32 bits can name")
        }
        _ => Ok(()),
    }
}
