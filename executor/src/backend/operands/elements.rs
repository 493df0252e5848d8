//! How many numbers each operand of a kernel has.

use super::MOST_OPERANDS;
use foretell_models::{Control, Kernel, Window};

/// Elements of the operands of each side, without an allocation.
pub(super) struct Elements {
    pub(super) reads: ([usize; MOST_OPERANDS], usize),
    pub(super) writes: ([usize; MOST_OPERANDS], usize),
}

/// Those of `kernel`, as its documentation has them.
pub(super) fn elements(kernel: &Kernel) -> Elements {
    match *kernel {
        Kernel::Matmul { rows, columns, contracted, bias, activation, .. } => {
            let (reads, y) = ([rows * contracted, columns * contracted, columns], rows * columns);
            operands(&reads[..2 + usize::from(bias)], &[y, y][..1 + usize::from(activation.keeps_argument())])
        }
        Kernel::MatmulInputGradient { rows, columns, contracted, gelu, .. } => {
            let dx = rows * contracted;
            operands(&[rows * columns, columns * contracted, dx][..2 + usize::from(gelu)], &[dx])
        }
        Kernel::MatmulWeightGradient { rows, columns, contracted, bias, .. } => {
            operands(&[rows * columns, rows * contracted], &[columns * contracted, columns][..1 + usize::from(bias)])
        }
        Kernel::Quantise { rows, columns, straight, transposed, .. } => {
            let written = [1, rows * columns, rows * columns];
            operands(&[rows * columns], &written[..1 + usize::from(straight) + usize::from(transposed)])
        }
        Kernel::EightBitMatmul { rows, columns, contracted, bias, activation } => {
            let (reads, y) = ([rows * contracted, columns * contracted, 1, 1, columns], rows * columns);
            operands(&reads[..4 + usize::from(bias)], &[y, y][..1 + usize::from(activation.keeps_argument())])
        }
        Kernel::EightBitMatmulInputGradient { rows, columns, contracted, gelu } => {
            let dx = rows * contracted;
            operands(&[rows * columns, columns * contracted, 1, 1, dx][..4 + usize::from(gelu)], &[dx])
        }
        Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, .. } => {
            operands(&[rows * columns, rows * contracted, 1, 1], &[columns * contracted])
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
            operands(&[rows * classes, rows, rows, Control::LENGTH], &[rows * classes])
        }
        Kernel::Sgd { elements, momentum, controlled, .. } => {
            let reads: &[usize] = if controlled { &[elements, Control::LENGTH] } else { &[elements] };
            let writes: &[usize] = if momentum { &[elements, elements] } else { &[elements] };
            operands(reads, writes)
        }
        Kernel::AdamW { elements, controlled: false } => operands(&[elements], &[elements, elements, elements]),
        Kernel::AdamW { elements, controlled: true } => operands(&[elements, Control::LENGTH], &[elements, elements, elements]),
        Kernel::UpdateControl { .. } => operands(&[1], &[Control::LENGTH]),
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

/// As [`Window::output_elements`], and zero for a window that the check of a call refuses: a size must not overflow before it is refused.
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
