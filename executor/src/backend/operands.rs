//! How large each operand of a kernel is, and the check of a call against it.
//! The layouts are [`Kernel`]'s to document; this file only multiplies.

use foretell_models::{Kernel, Window};
use foretell_units::Bytes;

use super::{BackendError, KernelCall};

/// The sizes of a kernel's operands in single precision, in the order in which an instruction lists them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperandBytes {
    /// What it reads.
    pub reads: Vec<Bytes>,
    /// What it writes. The third of [`Kernel::BatchNorm`] is optional and listed here.
    pub writes: Vec<Bytes>,
}

/// Numbers of an update's control.
pub(super) const CONTROL: usize = 8;

/// Elements of up to four operands a side, without an allocation.
struct Elements {
    reads: ([usize; 4], usize),
    writes: ([usize; 4], usize),
}

/// The sizes of `kernel`'s operands in single precision.
pub fn operand_bytes(kernel: &Kernel) -> OperandBytes {
    let elements = elements(kernel);
    let bytes = |(sizes, count): ([usize; 4], usize)| sizes.iter().take(count).map(|&size| Bytes::new(4 * size as u64)).collect();
    OperandBytes { reads: bytes(elements.reads), writes: bytes(elements.writes) }
}

/// Refuses a call whose operands are not the kernel's in number, size and alignment.
pub(super) fn check(call: &KernelCall<'_>) -> Result<(), BackendError> {
    let kernel = call.kernel.name();
    check_sizes(call.kernel)?;
    let elements = elements(call.kernel);
    let optional = usize::from(matches!(call.kernel, Kernel::BatchNorm { .. }));
    for (side, operands, (sizes, count), optional) in
        [("reads", call.reads, elements.reads, 0), ("writes", call.writes, elements.writes, optional)]
    {
        if operands.len() > count || operands.len() + optional < count {
            return Err(BackendError::OperandCount { kernel, side, wanted: count, given: operands.len() });
        }
        for (index, (operand, size)) in operands.iter().zip(sizes).enumerate() {
            let wanted = 4 * size;
            if operand.bytes != wanted {
                return Err(BackendError::OperandSize { kernel, side, index, wanted, given: operand.bytes });
            }
            if !operand.pointer.addr().is_multiple_of(4) || operand.pointer.is_null() {
                return Err(BackendError::OperandAlignment { kernel, side, index });
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
        Kernel::RunningStatistics { contributions: 0, .. } => impossible("no statistics contribute"),
        Kernel::CrossEntropyGradient { normalizer: 0, .. } => impossible("the normalizer is zero"),
        Kernel::CrossEntropy { classes: 0, .. } => impossible("there are no classes"),
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
        Kernel::Relu { elements } | Kernel::Gelu { elements } => operands(&[elements], &[elements]),
        Kernel::ReluGradient { elements } | Kernel::GeluGradient { elements } | Kernel::Add { elements } => {
            operands(&[elements, elements], &[elements])
        }
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
        Kernel::LayerNorm { rows, features } => operands(&[rows * features, features, features], &[rows * features, 2 * rows]),
        Kernel::LayerNormInputGradient { rows, features } => {
            operands(&[rows * features, rows * features, features, 2 * rows], &[rows * features])
        }
        Kernel::LayerNormWeightGradient { rows, features } => {
            operands(&[rows * features, rows * features, 2 * rows], &[features, features])
        }
        Kernel::Embedding { tokens, vocabulary, hidden, .. } => operands(&[tokens, vocabulary * hidden], &[tokens * hidden]),
        Kernel::EmbeddingWeightGradient { tokens, vocabulary, hidden, .. } => {
            operands(&[tokens * hidden, tokens], &[vocabulary * hidden])
        }
        Kernel::Attention { batch, sequence, heads, head_dimension, .. } => {
            let out = batch * sequence * heads * head_dimension;
            operands(&[3 * out], &[out, batch * heads * sequence])
        }
        Kernel::AttentionGradient { batch, sequence, heads, head_dimension, .. } => {
            let out = batch * sequence * heads * head_dimension;
            operands(&[out, 3 * out, out, batch * heads * sequence], &[3 * out])
        }
        Kernel::CrossEntropy { rows, classes } => operands(&[rows * classes, rows], &[1, 1, rows]),
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
        Kernel::Accumulate { elements } => operands(&[elements], &[elements]),
        Kernel::Zero { elements } => operands(&[], &[elements]),
        Kernel::SumOfSquares { elements } => operands(&[elements], &[1]),
        Kernel::Slice { outer, parts, inner } => operands(&[outer * parts * inner], &[outer * inner]),
        Kernel::Interleave { outer, parts, inner } | Kernel::Deinterleave { outer, parts, inner } => {
            operands(&[outer * parts * inner], &[outer * parts * inner])
        }
    }
}

/// As [`Window::output_elements`], and zero for a window that [`check_sizes`] refuses: a size must not overflow before it is refused.
fn output_elements(window: &Window) -> usize {
    let fits = |extent: usize| extent + 2 * window.padding >= window.size && window.stride > 0;
    if fits(window.height) && fits(window.width) { window.output_elements() } else { 0 }
}

fn operands(reads: &[usize], writes: &[usize]) -> Elements {
    let fill = |sizes: &[usize]| {
        let mut filled = [0; 4];
        filled.iter_mut().zip(sizes).for_each(|(slot, &size)| *slot = size);
        (filled, sizes.len())
    };
    Elements { reads: fill(reads), writes: fill(writes) }
}
