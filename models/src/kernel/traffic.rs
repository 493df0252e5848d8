//! The memory that kernels must read and write at least: of each operand once, whatever caches there are.

use super::Kernel;
use crate::attention::Attention;
use foretell_units::{Bytes, DataType};

/// Elements read and written, by the kind of number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Elements in the precision of the run, read.
    pub read: usize,
    /// Elements in the precision of the run, written.
    pub written: usize,
    /// Elements of eight bits, read or written.
    pub eight: usize,
    /// Elements of four bytes in every precision (statistics, ids, gradients of parameters, optimizer state), read or written.
    pub single: usize,
}

impl Kernel {
    /// The elements that must cross the memory's border at least once.
    pub fn traffic(&self) -> Traffic {
        let traffic = |read, written, single| Traffic { read, written, eight: 0, single };
        match *self {
            Kernel::Matmul { rows, columns, contracted, bias, activation, .. } => {
                let read = rows * contracted + columns * contracted + if bias { columns } else { 0 };
                traffic(read, (1 + usize::from(activation.keeps_argument())) * rows * columns, 0)
            }
            Kernel::MatmulInputGradient { rows, columns, contracted, gelu, .. } => {
                let argument = if gelu { rows * contracted } else { 0 };
                traffic(rows * columns + columns * contracted + argument, rows * contracted, 0)
            }
            Kernel::MatmulWeightGradient { rows, columns, contracted, bias, .. } => {
                traffic(rows * columns + rows * contracted, 0, columns * contracted + if bias { columns } else { 0 })
            }
            // Once for the largest element and once to round all.
            Kernel::Quantise { rows, columns, straight, transposed, .. } => {
                let written = (usize::from(straight) + usize::from(transposed)) * rows * columns;
                Traffic { read: 2 * rows * columns, written: 0, eight: written, single: 1 }
            }
            Kernel::EightBitMatmul { rows, columns, contracted, bias, activation } => Traffic {
                read: if bias { columns } else { 0 },
                written: (1 + usize::from(activation.keeps_argument())) * rows * columns,
                eight: (rows + columns) * contracted,
                single: 2,
            },
            Kernel::EightBitMatmulInputGradient { rows, columns, contracted, gelu } => Traffic {
                read: if gelu { rows * contracted } else { 0 },
                written: rows * contracted,
                eight: (rows + contracted) * columns,
                single: 2,
            },
            Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, .. } => {
                Traffic { read: 0, written: 0, eight: rows * (columns + contracted), single: columns * contracted + 2 }
            }
            Kernel::BiasAdd { rows, columns } => traffic(rows * columns + columns, rows * columns, 0),
            Kernel::BiasGradient { rows, columns } => traffic(rows * columns, 0, columns),
            Kernel::Multiply { elements } => traffic(2 * elements, elements, 0),
            Kernel::Scale { elements, .. } => traffic(elements, elements, 0),
            Kernel::Relu { elements } | Kernel::Gelu { elements } | Kernel::GeluExact { elements } => {
                traffic(elements, elements, 0)
            }
            Kernel::ReluGradient { elements }
            | Kernel::GeluGradient { elements }
            | Kernel::GeluExactGradient { elements }
            | Kernel::SiluMultiply { elements }
            | Kernel::Add { elements } => traffic(2 * elements, elements, 0),
            Kernel::SiluMultiplyGradient { elements } => traffic(3 * elements, 2 * elements, 0),
            Kernel::Convolution(window) => {
                traffic(window.input_elements() + window.weight_elements(), window.output_elements(), 0)
            }
            Kernel::ConvolutionInputGradient(window) => {
                traffic(window.output_elements() + window.weight_elements(), window.input_elements(), 0)
            }
            Kernel::ConvolutionWeightGradient(window) => {
                traffic(window.output_elements() + window.input_elements(), 0, window.weight_elements())
            }
            // Once for the statistics and once to normalise.
            Kernel::BatchNorm { groups, positions, channels } => {
                let elements = groups * positions * channels;
                traffic(2 * elements, elements, 2 * groups * channels)
            }
            Kernel::BatchNormInputGradient { groups, positions, channels } => {
                let elements = groups * positions * channels;
                traffic(4 * elements, elements, 4 * groups * channels)
            }
            Kernel::BatchNormWeightGradient { groups, channels } => traffic(0, 0, 2 * (groups + 1) * channels),
            Kernel::BatchNormInference { positions, channels } => {
                traffic(positions * channels, positions * channels, 2 * channels)
            }
            Kernel::RunningStatistics { channels, .. } => traffic(0, 0, 6 * channels),
            Kernel::MaxPool(window) => traffic(window.input_elements(), window.output_elements(), window.output_elements()),
            Kernel::MaxPoolGradient(window) => {
                traffic(window.output_elements(), window.input_elements(), window.output_elements())
            }
            Kernel::GlobalAveragePool { batch, positions, channels } => {
                traffic(batch * positions * channels, batch * channels, 0)
            }
            Kernel::GlobalAveragePoolGradient { batch, positions, channels } => {
                traffic(batch * channels, batch * positions * channels, 0)
            }
            Kernel::LayerNorm { rows, features, .. } => traffic(rows * features, rows * features, 2 * rows),
            Kernel::RmsNorm { rows, features, .. } => traffic(rows * features, rows * features, rows),
            Kernel::RmsNormInputGradient { rows, features } => traffic(2 * rows * features, rows * features, rows),
            Kernel::RmsNormWeightGradient { rows, features } => traffic(2 * rows * features, 0, rows + features),
            Kernel::Rope(sizes) | Kernel::RopeGradient(sizes) => traffic(sizes.elements(), sizes.elements(), 0),
            Kernel::Dropout(sizes) => traffic(sizes.elements(), sizes.elements(), 0),
            Kernel::Prepend { batch, positions, features } => {
                traffic((batch * positions + 1) * features, batch * (positions + 1) * features, 0)
            }
            Kernel::PrependInputGradient { batch, positions, features } => {
                let elements = batch * positions * features;
                traffic(elements, elements, 0)
            }
            Kernel::PrependWeightGradient { batch, features, .. } => traffic(batch * features, 0, features),
            Kernel::First { batch, features, .. } => traffic(batch * features, batch * features, 0),
            Kernel::FirstGradient { batch, positions, features } => traffic(batch * features, batch * positions * features, 0),
            Kernel::LayerNormInputGradient { rows, features } => traffic(2 * rows * features, rows * features, 2 * rows),
            Kernel::LayerNormWeightGradient { rows, features } => traffic(2 * rows * features, 0, 2 * rows + 2 * features),
            Kernel::Embedding { tokens, hidden, .. } => traffic(tokens * hidden, tokens * hidden, tokens),
            Kernel::EmbeddingWeightGradient { tokens, vocabulary, hidden, .. } => {
                traffic(tokens * hidden, 0, vocabulary * hidden + 2 * tokens * hidden)
            }
            Kernel::Attention(Attention { ring: Some(ring), .. }) if ring.unseen => traffic(0, 0, 0),
            Kernel::AttentionGradient(sizes @ Attention { ring: Some(ring), .. }) if ring.unseen => {
                traffic(0, 0, 2 * sizes.key_elements())
            }
            // What is merged is read, too.
            Kernel::Attention(sizes @ Attention { ring: Some(ring), .. }) => {
                let [q, k, passes] = [sizes.query_elements(), sizes.key_elements(), 1 + usize::from(ring.merges())];
                traffic(q + 2 * k, 0, passes * (q + sizes.rows()))
            }
            Kernel::AttentionGradient(sizes @ Attention { ring: Some(ring), .. }) => {
                let [q, k, passes] = [sizes.query_elements(), sizes.key_elements(), 1 + usize::from(ring.merges())];
                traffic(3 * q + 2 * k, 0, passes * q + 2 * k + sizes.rows())
            }
            Kernel::Attention(sizes) => {
                let [q, k] = [sizes.query_elements(), sizes.key_elements()];
                traffic(q + 2 * k + sizes.table_elements(), q, sizes.rows())
            }
            Kernel::AttentionGradient(sizes) => {
                let [q, k, table] = [sizes.query_elements(), sizes.key_elements(), sizes.table_elements()];
                traffic(3 * q + 2 * k + table, q + 2 * k, sizes.rows() + table)
            }
            Kernel::Split { rows, parts, columns } | Kernel::Join { rows, parts, columns } => {
                traffic(rows * parts * columns, rows * parts * columns, 0)
            }
            Kernel::CrossEntropy { rows, classes } => traffic(rows * classes, 0, 2 * rows),
            Kernel::LogitStatistics { rows, classes, .. } => traffic(rows * classes, 0, 5 * rows),
            Kernel::CrossEntropyOfStatistics { rows, parts } => traffic(0, 0, (4 * parts + 2) * rows),
            Kernel::CrossEntropyGradient { rows, classes, .. } => traffic(rows * classes, rows * classes, 2 * rows),
            Kernel::Route { tokens, experts, top } => traffic(tokens * experts, tokens * top, tokens * top),
            Kernel::RouteGradient { tokens, experts, top } => traffic(2 * tokens * top, tokens * experts, tokens * top),
            Kernel::Dispatch(mixture) => traffic(mixture.token_elements(), mixture.slot_elements(), 2 * mixture.choices() + 1),
            Kernel::DispatchGradient(mixture) => {
                traffic(mixture.choices() * mixture.hidden, mixture.token_elements(), 2 * mixture.choices())
            }
            Kernel::Combine(mixture) => {
                traffic(mixture.choices() * (mixture.hidden + 1), mixture.token_elements(), 2 * mixture.choices())
            }
            Kernel::CombineInputGradient(mixture) => {
                traffic(mixture.token_elements() + mixture.choices(), mixture.slot_elements(), 2 * mixture.choices())
            }
            Kernel::CombineGateGradient(mixture) => {
                let read = mixture.token_elements() + mixture.choices() * mixture.hidden;
                traffic(read, mixture.choices(), 2 * mixture.choices())
            }
            Kernel::ExpertMatmul { experts, rows, columns, contracted } => {
                traffic(experts * (rows + columns) * contracted, experts * rows * columns, 0)
            }
            Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted } => {
                traffic(experts * (rows + contracted) * columns, experts * rows * contracted, 0)
            }
            Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted } => {
                traffic(experts * rows * (columns + contracted), 0, experts * columns * contracted)
            }
            Kernel::Lstm(sizes) => {
                let y = sizes.output_elements();
                traffic(4 * y + sizes.weight_elements() + sizes.initial_elements(), 6 * y + sizes.state_elements(), 0)
            }
            Kernel::LstmGradient { sizes, outputs, last } => {
                let y = sizes.output_elements();
                let upstream = usize::from(outputs) * y + usize::from(last) * sizes.state_elements();
                let kept = 5 * y + sizes.weight_elements() + sizes.initial_elements();
                traffic(upstream + kept, 4 * y + sizes.initial_elements(), 0)
            }
            Kernel::LstmWeightGradient(sizes) => {
                traffic(5 * sizes.output_elements() + sizes.initial_elements() / 2, 0, sizes.weight_elements())
            }
            Kernel::Sgd { elements, momentum, .. } => traffic(0, 0, if momentum { 5 } else { 3 } * elements),
            Kernel::AdamW { elements, .. } => traffic(0, 0, 7 * elements),
            Kernel::SumOfSquares { elements } | Kernel::Sum { elements } | Kernel::Zero { elements } => traffic(0, 0, elements),
            Kernel::Accumulate { elements } => traffic(0, 0, 3 * elements),
            Kernel::Narrow { elements } => traffic(0, elements, elements),
            Kernel::UpdateControl { .. } => traffic(0, 0, 17),
            Kernel::Slice { outer, inner, .. } => traffic(outer * inner, outer * inner, 0),
            Kernel::Interleave { outer, parts, inner } | Kernel::Deinterleave { outer, parts, inner } => {
                traffic(outer * parts * inner, outer * parts * inner, 0)
            }
            Kernel::TakeColumns { rows, part, .. } | Kernel::PutColumns { rows, part, .. } => {
                traffic(rows * part, rows * part, 0)
            }
        }
    }

    /// The bytes that must cross the memory's border at least once, when the run's precision is `precision`.
    pub fn bytes(&self, precision: DataType) -> Bytes {
        let traffic = self.traffic();
        // In mixed precision an optimizer updates the master copy and writes the parameter beside it.
        let narrowed = match *self {
            Kernel::Sgd { elements, .. } | Kernel::AdamW { elements, .. } if precision.size() < Bytes::new(4) => elements,
            _ => 0,
        };
        let others = Bytes::new(4 * traffic.single as u64 + traffic.eight as u64);
        precision.size() * (traffic.read + traffic.written + narrowed) as u64 + others
    }
}
