#![allow(warnings)]
use foretell_models::*;
use foretell_units::*;
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct OldTraffic {
    read: usize,
    written: usize,
    eight: usize,
    single: usize,
}
trait Old {
    fn old_name(&self) -> &'static str;
    fn old_may_work_in_place(&self) -> bool;
    fn old_traffic(&self) -> OldTraffic;
    fn old_bytes(&self, precision: DataType) -> Bytes;
    fn old_is_matrix_product(&self) -> bool;
    fn old_format(&self, precision: DataType) -> DataType;
    fn old_flops(&self) -> Flops;
    fn old_fused_flops(&self) -> Flops;
    fn old_model_flops(&self) -> Flops;
}
impl Old for Kernel {
    fn old_name(&self) -> &'static str {
        match self {
            Kernel::Matmul { .. } => "matmul",
            Kernel::MatmulInputGradient { .. } => "matmul_input_gradient",
            Kernel::MatmulWeightGradient { .. } => "matmul_weight_gradient",
            Kernel::Quantise { .. } => "quantise",
            Kernel::EightBitMatmul { .. } => "eight_bit_matmul",
            Kernel::EightBitMatmulInputGradient { .. } => "eight_bit_matmul_input_gradient",
            Kernel::EightBitMatmulWeightGradient { .. } => "eight_bit_matmul_weight_gradient",
            Kernel::BiasAdd { .. } => "bias_add",
            Kernel::BiasGradient { .. } => "bias_gradient",
            Kernel::Relu { .. } => "relu",
            Kernel::ReluGradient { .. } => "relu_gradient",
            Kernel::Gelu { .. } => "gelu",
            Kernel::GeluGradient { .. } => "gelu_gradient",
            Kernel::GeluExact { .. } => "gelu_exact",
            Kernel::GeluExactGradient { .. } => "gelu_exact_gradient",
            Kernel::SiluMultiply { .. } => "silu_multiply",
            Kernel::SiluMultiplyGradient { .. } => "silu_multiply_gradient",
            Kernel::Add { .. } => "add",
            Kernel::Convolution(_) => "convolution",
            Kernel::ConvolutionInputGradient(_) => "convolution_input_gradient",
            Kernel::ConvolutionWeightGradient(_) => "convolution_weight_gradient",
            Kernel::BatchNorm { .. } => "batch_norm",
            Kernel::BatchNormInputGradient { .. } => "batch_norm_input_gradient",
            Kernel::BatchNormWeightGradient { .. } => "batch_norm_weight_gradient",
            Kernel::BatchNormInference { .. } => "batch_norm_inference",
            Kernel::RunningStatistics { .. } => "running_statistics",
            Kernel::MaxPool(_) => "max_pool",
            Kernel::MaxPoolGradient(_) => "max_pool_gradient",
            Kernel::GlobalAveragePool { .. } => "global_average_pool",
            Kernel::GlobalAveragePoolGradient { .. } => "global_average_pool_gradient",
            Kernel::LayerNorm { .. } => "layer_norm",
            Kernel::LayerNormInputGradient { .. } => "layer_norm_input_gradient",
            Kernel::LayerNormWeightGradient { .. } => "layer_norm_weight_gradient",
            Kernel::RmsNorm { .. } => "rms_norm",
            Kernel::RmsNormInputGradient { .. } => "rms_norm_input_gradient",
            Kernel::RmsNormWeightGradient { .. } => "rms_norm_weight_gradient",
            Kernel::Rope(_) => "rope",
            Kernel::RopeGradient(_) => "rope_gradient",
            Kernel::Dropout(_) => "dropout",
            Kernel::Prepend { .. } => "prepend",
            Kernel::PrependInputGradient { .. } => "prepend_input_gradient",
            Kernel::PrependWeightGradient { .. } => "prepend_weight_gradient",
            Kernel::First { .. } => "first",
            Kernel::FirstGradient { .. } => "first_gradient",
            Kernel::Embedding { .. } => "embedding",
            Kernel::EmbeddingWeightGradient { .. } => "embedding_weight_gradient",
            Kernel::Attention(_) => "attention",
            Kernel::AttentionGradient(_) => "attention_gradient",
            Kernel::Split { .. } => "split",
            Kernel::Join { .. } => "join",
            Kernel::CrossEntropy { .. } => "cross_entropy",
            Kernel::LogitStatistics { .. } => "logit_statistics",
            Kernel::CrossEntropyOfStatistics { .. } => "cross_entropy_of_statistics",
            Kernel::CrossEntropyGradient { .. } => "cross_entropy_gradient",
            Kernel::Route { .. } => "route",
            Kernel::RouteGradient { .. } => "route_gradient",
            Kernel::Dispatch(_) => "dispatch",
            Kernel::DispatchGradient(_) => "dispatch_gradient",
            Kernel::Combine(_) => "combine",
            Kernel::CombineInputGradient(_) => "combine_input_gradient",
            Kernel::CombineGateGradient(_) => "combine_gate_gradient",
            Kernel::ExpertMatmul { .. } => "expert_matmul",
            Kernel::ExpertMatmulInputGradient { .. } => "expert_matmul_input_gradient",
            Kernel::ExpertMatmulWeightGradient { .. } => "expert_matmul_weight_gradient",
            Kernel::Lstm(_) => "lstm",
            Kernel::LstmGradient { .. } => "lstm_gradient",
            Kernel::LstmWeightGradient(_) => "lstm_weight_gradient",
            Kernel::Scale { .. } => "scale",
            Kernel::Multiply { .. } => "multiply",
            Kernel::Sgd { .. } => "sgd",
            Kernel::AdamW { .. } => "adamw",
            Kernel::UpdateControl { .. } => "update_control",
            Kernel::Sum { .. } => "sum",
            Kernel::Accumulate { .. } => "accumulate",
            Kernel::Narrow { .. } => "narrow",
            Kernel::Zero { .. } => "zero",
            Kernel::SumOfSquares { .. } => "sum_of_squares",
            Kernel::Slice { .. } => "slice",
            Kernel::Interleave { .. } => "interleave",
            Kernel::Deinterleave { .. } => "deinterleave",
            Kernel::TakeColumns { .. } => "take_columns",
            Kernel::PutColumns { .. } => "put_columns",
        }
    }

    fn old_may_work_in_place(&self) -> bool {
        matches!(
            self,
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
    fn old_traffic(&self) -> OldTraffic {
        let traffic = |read, written, single| OldTraffic { read, written, eight: 0, single };
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
                OldTraffic { read: 2 * rows * columns, written: 0, eight: written, single: 1 }
            }
            Kernel::EightBitMatmul { rows, columns, contracted, bias, activation } => OldTraffic {
                read: if bias { columns } else { 0 },
                written: (1 + usize::from(activation.keeps_argument())) * rows * columns,
                eight: (rows + columns) * contracted,
                single: 2,
            },
            Kernel::EightBitMatmulInputGradient { rows, columns, contracted, gelu } => OldTraffic {
                read: if gelu { rows * contracted } else { 0 },
                written: rows * contracted,
                eight: (rows + contracted) * columns,
                single: 2,
            },
            Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, .. } => {
                OldTraffic { read: 0, written: 0, eight: rows * (columns + contracted), single: columns * contracted + 2 }
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
    fn old_bytes(&self, precision: DataType) -> Bytes {
        let traffic = self.old_traffic();
        // In mixed precision an optimizer updates the master copy and writes the parameter beside it.
        let narrowed = match *self {
            Kernel::Sgd { elements, .. } | Kernel::AdamW { elements, .. } if precision.size() < Bytes::new(4) => elements,
            _ => 0,
        };
        let others = Bytes::new(4 * traffic.single as u64 + traffic.eight as u64);
        precision.size() * (traffic.read + traffic.written + narrowed) as u64 + others
    }
    /// Whether the time goes into matrix products, which run at a device's peak, rather than into moving memory.
    fn old_is_matrix_product(&self) -> bool {
        matches!(
            self,
            Kernel::Matmul { .. }
                | Kernel::MatmulInputGradient { .. }
                | Kernel::MatmulWeightGradient { .. }
                | Kernel::EightBitMatmul { .. }
                | Kernel::EightBitMatmulInputGradient { .. }
                | Kernel::EightBitMatmulWeightGradient { .. }
                | Kernel::Lstm(_)
                | Kernel::LstmGradient { .. }
                | Kernel::LstmWeightGradient(_)
                | Kernel::ExpertMatmul { .. }
                | Kernel::ExpertMatmulInputGradient { .. }
                | Kernel::ExpertMatmulWeightGradient { .. }
                | Kernel::Convolution(_)
                | Kernel::ConvolutionInputGradient(_)
                | Kernel::ConvolutionWeightGradient(_)
                | Kernel::Attention(_)
                | Kernel::AttentionGradient(_)
        )
    }

    /// The number format in which a kernel of a run in `precision` multiplies: that, but for operands of eight bits.
    fn old_format(&self, precision: DataType) -> DataType {
        match self {
            Kernel::EightBitMatmul { .. }
            | Kernel::EightBitMatmulInputGradient { .. }
            | Kernel::EightBitMatmulWeightGradient { .. } => DataType::Fp8,
            _ => precision,
        }
    }

    /// The arithmetic that it does: a multiply-add is two operations; causal attention does half of the scores.
    fn old_flops(&self) -> Flops {
        Flops::new(match *self {
            Kernel::Matmul { rows, columns, contracted, .. }
            | Kernel::MatmulInputGradient { rows, columns, contracted, .. }
            | Kernel::MatmulWeightGradient { rows, columns, contracted, .. }
            | Kernel::EightBitMatmul { rows, columns, contracted, .. }
            | Kernel::EightBitMatmulInputGradient { rows, columns, contracted, .. }
            | Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, .. } => {
                2.0 * product(&[rows, columns, contracted])
            }
            Kernel::ExpertMatmul { experts, rows, columns, contracted }
            | Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted }
            | Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted } => {
                2.0 * product(&[experts, rows, columns, contracted])
            }
            Kernel::Lstm(sizes) | Kernel::LstmGradient { sizes, .. } | Kernel::LstmWeightGradient(sizes) => {
                2.0 * product(&[sizes.batch, sizes.sequence, sizes.weight_elements()])
            }
            Kernel::Combine(mixture) | Kernel::CombineGateGradient(mixture) => {
                2.0 * product(&[mixture.tokens, mixture.top, mixture.hidden])
            }
            Kernel::Convolution(window)
            | Kernel::ConvolutionInputGradient(window)
            | Kernel::ConvolutionWeightGradient(window) => {
                2.0 * window.output_elements() as f64 * product(&[window.size, window.size, window.in_channels])
            }
            Kernel::Attention(sizes) => 4.0 * product(&[sizes.batch, sizes.heads(), sizes.head_dimension]) * sizes.scores(),
            Kernel::AttentionGradient(sizes) => {
                // One product to recompute the scores and four for the gradients.
                10.0 * product(&[sizes.batch, sizes.heads(), sizes.head_dimension]) * sizes.scores()
            }
            Kernel::AdamW { elements, .. } => 12.0 * elements as f64,
            Kernel::Gelu { elements } | Kernel::GeluGradient { elements } => 12.0 * elements as f64,
            Kernel::GeluExact { elements } | Kernel::GeluExactGradient { elements } => 20.0 * elements as f64,
            Kernel::SiluMultiply { elements } => 10.0 * elements as f64,
            Kernel::SiluMultiplyGradient { elements } => 14.0 * elements as f64,
            Kernel::Rope(sizes) | Kernel::RopeGradient(sizes) => 3.0 * sizes.elements() as f64,
            // The hash of an element is four products and their mixing.
            Kernel::Dropout(sizes) => 20.0 * sizes.elements() as f64,
            _ => {
                let traffic = self.old_traffic();
                (traffic.read.max(traffic.written).max(traffic.single)) as f64
            }
        })
    }

    /// The arithmetic beside a product's own of what is fused with it: of a GELU, its slope, a bias's gradient. A bias and a ReLU are one operation
    /// for each of many sums, and not counted.
    fn old_fused_flops(&self) -> Flops {
        Flops::new(match *self {
            Kernel::Matmul { rows, columns, activation, .. } | Kernel::EightBitMatmul { rows, columns, activation, .. }
                if activation.is_gelu() =>
            {
                12.0 * product(&[rows, columns])
            }
            Kernel::MatmulInputGradient { rows, contracted, gelu: true, .. }
            | Kernel::EightBitMatmulInputGradient { rows, contracted, gelu: true, .. } => 12.0 * product(&[rows, contracted]),
            Kernel::MatmulWeightGradient { rows, columns, bias: true, .. } => product(&[rows, columns]),
            _ => 0.0,
        })
    }

    /// The arithmetic that counts for model FLOPs utilisation: matrix products only, attention in full and without recomputation,
    /// as Megatron-LM and PaLM count it (Chowdhery et al. 2022, appendix B).
    fn old_model_flops(&self) -> Flops {
        let full = |sizes: &Attention| product(&[sizes.batch, sizes.heads(), sizes.head_dimension, sizes.queries, sizes.keys]);
        match *self {
            Kernel::Attention(sizes) => Flops::new(4.0 * full(&sizes)),
            Kernel::AttentionGradient(sizes) => Flops::new(8.0 * full(&sizes)),
            kernel if kernel.old_is_matrix_product() => kernel.old_flops(),
            _ => Flops::ZERO,
        }
    }
}
const MOST_OPERANDS: usize = 8;
fn product(extents: &[usize]) -> f64 {
    extents.iter().map(|&extent| extent as f64).product()
}
/// Elements of the operands of each side, without an allocation.
struct Elements {
    reads: ([usize; MOST_OPERANDS], usize),
    writes: ([usize; MOST_OPERANDS], usize),
}

/// Those of `kernel`, as its documentation has them.
fn elements(kernel: &Kernel) -> Elements {
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

fn only_moves(kernel: &Kernel) -> bool {
    matches!(
        kernel,
        Kernel::Slice { .. }
            | Kernel::Interleave { .. }
            | Kernel::Deinterleave { .. }
            | Kernel::TakeColumns { .. }
            | Kernel::PutColumns { .. }
    )
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Features {
    sizes: [f64; 7],
    flags: [bool; 5],
}
/// A kernel's coordinates.
fn features(kernel: &Kernel, accumulate: bool) -> Features {
    let at_all = |extents: &[usize], flags: [bool; 4]| {
        let mut sizes = [0.0; 7];
        for (size, &extent) in sizes.iter_mut().zip(extents) {
            *size = (extent.max(1) as f64).log2();
        }
        Features { sizes, flags: [accumulate, flags[0], flags[1], flags[2], flags[3]] }
    };
    let at = |extents: &[usize], [one, two, three]: [bool; 3]| at_all(extents, [one, two, three, false]);
    let plain = |extents: &[usize]| at(extents, [false; 3]);
    let product = |rows, columns, contracted, weight, fused: [bool; 3]| {
        at_all(&[rows, columns, contracted], [weight == WeightLayout::InOut, fused[0], fused[1], fused[2]])
    };
    match *kernel {
        // A GELU that keeps what it is applied to lies where one lies that does not: both are held against rooflines of their own, of which the one counts
        // what it writes more.
        Kernel::Matmul { rows, columns, contracted, weight, bias, activation } => {
            product(rows, columns, contracted, weight, [bias, activation == Activation::Relu, activation.is_gelu()])
        }
        Kernel::MatmulInputGradient { rows, columns, contracted, weight, gelu: fused }
        | Kernel::MatmulWeightGradient { rows, columns, contracted, weight, bias: fused } => {
            product(rows, columns, contracted, weight, [fused, false, false])
        }
        Kernel::Quantise { rows, columns, straight, transposed, .. } => at(&[rows, columns], [straight, transposed, false]),
        Kernel::EightBitMatmul { rows, columns, contracted, bias, activation } => {
            at(&[rows, columns, contracted], [bias, activation == Activation::Relu, activation.is_gelu()])
        }
        Kernel::EightBitMatmulInputGradient { rows, columns, contracted, gelu } => {
            at(&[rows, columns, contracted], [gelu, false, false])
        }
        Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, weight } => {
            product(rows, columns, contracted, weight, [false; 3])
        }
        Kernel::BiasAdd { rows, columns } | Kernel::BiasGradient { rows, columns } => plain(&[rows, columns]),
        Kernel::Relu { elements }
        | Kernel::ReluGradient { elements }
        | Kernel::Gelu { elements }
        | Kernel::GeluGradient { elements }
        | Kernel::GeluExact { elements }
        | Kernel::GeluExactGradient { elements }
        | Kernel::SiluMultiply { elements }
        | Kernel::SiluMultiplyGradient { elements }
        | Kernel::Add { elements }
        | Kernel::Scale { elements, .. }
        | Kernel::Multiply { elements }
        | Kernel::AdamW { elements, .. }
        | Kernel::SumOfSquares { elements }
        | Kernel::Sum { elements }
        | Kernel::Accumulate { elements }
        | Kernel::Narrow { elements }
        | Kernel::Zero { elements } => plain(&[elements]),
        Kernel::UpdateControl { .. } => plain(&[]),
        Kernel::Sgd { elements, momentum, nesterov, .. } => at(&[elements], [momentum, nesterov, false]),
        Kernel::Convolution(window)
        | Kernel::ConvolutionInputGradient(window)
        | Kernel::ConvolutionWeightGradient(window)
        | Kernel::MaxPool(window)
        | Kernel::MaxPoolGradient(window) => {
            let Window { batch, height, width, in_channels, out_channels, size, stride, padding: _ } = window;
            plain(&[batch, height, width, in_channels, out_channels, size, stride])
        }
        Kernel::BatchNorm { groups, positions, channels } | Kernel::BatchNormInputGradient { groups, positions, channels } => {
            plain(&[groups, positions, channels])
        }
        Kernel::BatchNormWeightGradient { groups, channels } => plain(&[groups, channels]),
        Kernel::BatchNormInference { positions, channels } => plain(&[positions, channels]),
        Kernel::RunningStatistics { channels, .. } => plain(&[channels]),
        Kernel::GlobalAveragePool { batch, positions, channels }
        | Kernel::GlobalAveragePoolGradient { batch, positions, channels } => plain(&[batch, positions, channels]),
        Kernel::LayerNorm { rows, features, .. }
        | Kernel::RmsNorm { rows, features, .. }
        | Kernel::RmsNormInputGradient { rows, features }
        | Kernel::RmsNormWeightGradient { rows, features }
        | Kernel::LayerNormInputGradient { rows, features }
        | Kernel::LayerNormWeightGradient { rows, features } => plain(&[rows, features]),
        Kernel::Rope(sizes) | Kernel::RopeGradient(sizes) => {
            plain(&[sizes.batch, sizes.positions, sizes.heads, sizes.head_dimension])
        }
        Kernel::Dropout(sizes) => plain(&[sizes.samples, sizes.positions, sizes.features]),
        Kernel::Prepend { batch, positions, features }
        | Kernel::PrependInputGradient { batch, positions, features }
        | Kernel::PrependWeightGradient { batch, positions, features }
        | Kernel::First { batch, positions, features }
        | Kernel::FirstGradient { batch, positions, features } => plain(&[batch, positions, features]),
        Kernel::Embedding { tokens, vocabulary, hidden, parts }
        | Kernel::EmbeddingWeightGradient { tokens, vocabulary, hidden, parts } => plain(&[tokens, vocabulary, hidden, parts]),
        Kernel::Attention(sizes) | Kernel::AttentionGradient(sizes) => {
            let Attention { batch, queries, keys, key_heads, group, head_dimension, causal, packed, .. } = sizes;
            // The pairs that are seen are to those that there are as the work of a causal part is to that of a whole.
            let unseen = (queries as f64 * keys as f64 / sizes.scores().max(1.0)).round() as usize;
            let merges = sizes.ring.is_some_and(KeyStep::merges);
            at_all(
                &[batch, queries, keys, key_heads, group, head_dimension, unseen],
                [causal, packed, sizes.relative.is_some() || merges, sizes.dropout.is_some()],
            )
        }
        Kernel::Split { rows, parts, columns } | Kernel::Join { rows, parts, columns } => plain(&[rows, parts, columns]),
        Kernel::Route { tokens, experts, top } | Kernel::RouteGradient { tokens, experts, top } => plain(&[tokens, experts, top]),
        Kernel::Dispatch(mixture)
        | Kernel::DispatchGradient(mixture)
        | Kernel::Combine(mixture)
        | Kernel::CombineInputGradient(mixture)
        | Kernel::CombineGateGradient(mixture) => {
            let Mixture { tokens, experts, capacity, top, hidden } = mixture;
            plain(&[tokens, experts, capacity, top, hidden])
        }
        Kernel::Lstm(sizes) | Kernel::LstmWeightGradient(sizes) => {
            at(&[sizes.batch, sizes.sequence, sizes.hidden], [sizes.initial, false, false])
        }
        Kernel::LstmGradient { sizes, outputs, last } => {
            at(&[sizes.batch, sizes.sequence, sizes.hidden], [sizes.initial, outputs, last])
        }
        Kernel::ExpertMatmul { experts, rows, columns, contracted }
        | Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted }
        | Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted } => {
            plain(&[experts, rows, columns, contracted])
        }
        Kernel::CrossEntropy { rows, classes }
        | Kernel::LogitStatistics { rows, classes, .. }
        | Kernel::CrossEntropyGradient { rows, classes, .. } => plain(&[rows, classes]),
        Kernel::CrossEntropyOfStatistics { rows, parts } => plain(&[rows, parts]),
        Kernel::Slice { outer, parts, inner }
        | Kernel::Interleave { outer, parts, inner }
        | Kernel::Deinterleave { outer, parts, inner } => plain(&[outer, parts, inner]),
        Kernel::TakeColumns { rows, columns, part, .. } | Kernel::PutColumns { rows, columns, part, .. } => {
            plain(&[rows, columns, part])
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Category {
    Activation,
    Attention,
    Bias,
    BiasGradient,
    Bucket,
    Embedding,
    Loss,
    Norm,
    Optimizer,
    Other,
    Product,
    Rearrange,
    Residual,
    Rope,
    Routing,
}
fn category(kernel: &Kernel) -> Category {
    match kernel {
        Kernel::Matmul { .. }
        | Kernel::MatmulInputGradient { .. }
        | Kernel::MatmulWeightGradient { .. }
        | Kernel::EightBitMatmul { .. }
        | Kernel::EightBitMatmulInputGradient { .. }
        | Kernel::EightBitMatmulWeightGradient { .. }
        | Kernel::ExpertMatmul { .. }
        | Kernel::ExpertMatmulInputGradient { .. }
        | Kernel::ExpertMatmulWeightGradient { .. }
        | Kernel::Convolution(_)
        | Kernel::ConvolutionInputGradient(_)
        | Kernel::ConvolutionWeightGradient(_)
        | Kernel::Lstm(_)
        | Kernel::LstmGradient { .. } => Category::Product,
        Kernel::Attention(_) | Kernel::AttentionGradient(_) => Category::Attention,
        Kernel::BiasAdd { .. } => Category::Bias,
        Kernel::BiasGradient { .. } => Category::BiasGradient,
        Kernel::Relu { .. }
        | Kernel::ReluGradient { .. }
        | Kernel::Gelu { .. }
        | Kernel::GeluGradient { .. }
        | Kernel::GeluExact { .. }
        | Kernel::GeluExactGradient { .. }
        | Kernel::SiluMultiply { .. }
        | Kernel::SiluMultiplyGradient { .. }
        | Kernel::Multiply { .. } => Category::Activation,
        Kernel::Add { .. } | Kernel::Dropout(_) => Category::Residual,
        Kernel::LayerNorm { .. }
        | Kernel::LayerNormInputGradient { .. }
        | Kernel::LayerNormWeightGradient { .. }
        | Kernel::RmsNorm { .. }
        | Kernel::RmsNormInputGradient { .. }
        | Kernel::RmsNormWeightGradient { .. }
        | Kernel::BatchNorm { .. }
        | Kernel::BatchNormInputGradient { .. }
        | Kernel::BatchNormWeightGradient { .. }
        | Kernel::BatchNormInference { .. }
        | Kernel::RunningStatistics { .. } => Category::Norm,
        Kernel::Rope(_) | Kernel::RopeGradient(_) => Category::Rope,
        Kernel::Split { .. }
        | Kernel::Join { .. }
        | Kernel::Slice { .. }
        | Kernel::Interleave { .. }
        | Kernel::Deinterleave { .. }
        | Kernel::Prepend { .. }
        | Kernel::PrependInputGradient { .. }
        | Kernel::PrependWeightGradient { .. }
        | Kernel::First { .. }
        | Kernel::FirstGradient { .. } => Category::Rearrange,
        Kernel::Embedding { .. } | Kernel::EmbeddingWeightGradient { .. } => Category::Embedding,
        Kernel::CrossEntropy { .. }
        | Kernel::LogitStatistics { .. }
        | Kernel::CrossEntropyOfStatistics { .. }
        | Kernel::CrossEntropyGradient { .. } => Category::Loss,
        Kernel::Route { .. }
        | Kernel::RouteGradient { .. }
        | Kernel::Dispatch(_)
        | Kernel::DispatchGradient(_)
        | Kernel::Combine(_)
        | Kernel::CombineInputGradient(_)
        | Kernel::CombineGateGradient(_) => Category::Routing,
        Kernel::Sgd { .. } | Kernel::AdamW { .. } => Category::Optimizer,
        Kernel::SumOfSquares { .. }
        | Kernel::Sum { .. }
        | Kernel::Zero { .. }
        | Kernel::Narrow { .. }
        | Kernel::Accumulate { .. }
        | Kernel::UpdateControl { .. } => Category::Bucket,
        _ => Category::Other,
    }
}

fn integers_of(kernel: &Kernel, read: usize) -> Option<usize> {
    match (kernel, read) {
        (Kernel::Embedding { vocabulary, parts, .. }, 0) | (Kernel::EmbeddingWeightGradient { vocabulary, parts, .. }, 1) => {
            Some(vocabulary * parts)
        }
        (Kernel::LogitStatistics { classes, parts, .. } | Kernel::CrossEntropyGradient { classes, parts, .. }, 1) => {
            Some(classes * parts)
        }
        (Kernel::CrossEntropy { classes, .. }, 1) => Some(*classes),
        (Kernel::MaxPoolGradient(window), 1) => Some(window.input_elements()),
        (Kernel::RouteGradient { experts, .. }, 2) => Some(*experts),
        (Kernel::Dispatch(sizes) | Kernel::DispatchGradient(sizes), 1) => Some(sizes.experts),
        (Kernel::DispatchGradient(sizes), 2) => Some(sizes.capacity),
        (Kernel::Combine(sizes) | Kernel::CombineInputGradient(sizes) | Kernel::CombineGateGradient(sizes), 2) => {
            Some(sizes.experts)
        }
        (Kernel::Combine(sizes) | Kernel::CombineInputGradient(sizes) | Kernel::CombineGateGradient(sizes), 3) => {
            Some(sizes.capacity)
        }
        _ => None,
    }
}

fn new_category(kernel: &Kernel) -> Category {
    if let Kernel::LstmWeightGradient(_) = kernel {
        return Category::Other;
    }
    match kernel.family() {
        KernelFamily::Product | KernelFamily::Convolution => Category::Product,
        KernelFamily::Attention => Category::Attention,
        KernelFamily::Bias => Category::Bias,
        KernelFamily::BiasGradient => Category::BiasGradient,
        KernelFamily::Activation => Category::Activation,
        KernelFamily::Residual => Category::Residual,
        KernelFamily::Norm => Category::Norm,
        KernelFamily::Rope => Category::Rope,
        KernelFamily::Rearrangement => Category::Rearrange,
        KernelFamily::Embedding => Category::Embedding,
        KernelFamily::Loss => Category::Loss,
        KernelFamily::Routing => Category::Routing,
        KernelFamily::Optimizer => Category::Optimizer,
        KernelFamily::Bucket => Category::Bucket,
        KernelFamily::Other => Category::Other,
    }
}
fn same(kernel: &Kernel) {
    let spec = kernel.spec();
    let precisions = [DataType::Fp32, DataType::Bf16, DataType::Fp16, DataType::Fp8, DataType::Tf32, DataType::Fp64];
    assert_eq!(spec.name, kernel.old_name());
    let t = kernel.old_traffic();
    let n = spec.traffic();
    assert_eq!([t.read, t.written, t.eight, t.single], [n.read, n.written, n.eight, n.single], "{kernel:?}");
    for p in precisions {
        assert_eq!(kernel.old_bytes(p), kernel.bytes(p), "{kernel:?}");
        assert_eq!(kernel.old_format(p), kernel.format(p), "{kernel:?}");
        // sides
        let Elements { reads, writes } = elements(kernel);
        let (rs, ws) = storages(kernel);
        let mut old_reads: Vec<_> = reads.0[..reads.1].iter().copied().zip(rs.iter().copied()).collect();
        let mut w = writes.0[..writes.1].to_vec();
        if let Kernel::Sgd { elements, .. } | Kernel::AdamW { elements, .. } = *kernel {
            if p.size() < DataType::Fp32.size() {
                w.push(elements);
            }
        }
        let old_writes: Vec<_> = w.iter().copied().zip(ws.iter().copied()).collect();
        assert_eq!(w.len(), old_writes.len());
        assert_eq!(old_reads, spec.reads().map(|o| (o.elements, o.storage)).collect::<Vec<_>>(), "{kernel:?}");
        assert_eq!(old_writes, spec.writes(p).map(|o| (o.elements, o.storage)).collect::<Vec<_>>(), "{kernel:?}");
        let optional = matches!(kernel, Kernel::BatchNorm { .. } | Kernel::Dispatch(_));
        assert_eq!(spec.writes(p).last().unwrap().is_optional(), optional);
        assert!(spec.reads().all(|o| !o.is_optional()));
    }
    for (i, o) in spec.reads().enumerate() {
        assert_eq!(Some(o.index_limit).filter(|l| *l > 0), integers_of(kernel, i), "{kernel:?} {i}");
    }
    assert!(spec.writes(DataType::Bf16).all(|o| o.index_limit == 0));
    assert_eq!(kernel.old_flops().value().to_bits(), kernel.flops().value().to_bits(), "{kernel:?}");
    assert_eq!(kernel.old_model_flops().value().to_bits(), kernel.model_flops().value().to_bits(), "{kernel:?}");
    assert_eq!(kernel.old_fused_flops().value().to_bits(), spec.fused_flops().value().to_bits(), "{kernel:?}");
    assert_eq!(kernel.old_is_matrix_product(), kernel.is_matrix_product(), "{kernel:?}");
    assert_eq!(matches!(kernel, Kernel::Attention(_) | Kernel::AttentionGradient(_)), spec.family == KernelFamily::Attention);
    assert_eq!(
        matches!(kernel, Kernel::Convolution(_) | Kernel::ConvolutionInputGradient(_) | Kernel::ConvolutionWeightGradient(_)),
        spec.family == KernelFamily::Convolution
    );
    assert_eq!(kernel.old_may_work_in_place(), kernel.may_work_in_place(), "{kernel:?}");
    assert_eq!(only_moves(kernel), spec.moves_any_width);
    assert_eq!(category(kernel), new_category(kernel), "{kernel:?}");
    // features: same sizes; flags as a multiset with the same number set
    let f = features(kernel, false);
    let sizes = spec.sizes.map(|size| (size.max(1) as f64).log2());
    assert_eq!(f.sizes, sizes, "{kernel:?}");
    assert_eq!(f.flags[1..], spec.flags[..], "{kernel:?}");
}
struct Random(u64);
impl Random {
    fn next(&mut self) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize
    }
    fn size(&mut self) -> usize {
        [1, 2, 3, 5, 8, 16, 33, 100, 768, 1024][self.next() % 10]
    }
    fn bit(&mut self) -> bool {
        self.next() % 2 == 0
    }
}
fn all(r: &mut Random) -> Vec<Kernel> {
    let [rows, columns, contracted, elements] = std::array::from_fn(|_| r.size());
    let weight = if r.bit() { WeightLayout::OutIn } else { WeightLayout::InOut };
    let activation = [Activation::None, Activation::Relu, Activation::Gelu, Activation::GeluKept][r.next() % 4];
    let (bias, gelu, straight, transposed) = (r.bit(), r.bit(), r.bit(), r.bit());
    let size = 1 + r.next() % 5;
    let window = Window {
        batch: r.size(),
        height: size + r.size(),
        width: size + r.size(),
        in_channels: r.size(),
        out_channels: r.size(),
        size,
        stride: 1 + r.next() % 3,
        padding: r.next() % size,
    };
    let pool = Window { out_channels: window.in_channels, ..window };
    let [groups, positions, channels, batch] = std::array::from_fn(|_| r.size());
    let rope = Rope {
        batch,
        positions,
        heads: r.size(),
        head_dimension: 2 * r.size(),
        theta: 10000,
        position_parts: r.size(),
        position_offset: r.size(),
    };
    let site = DropoutSite { rate: DropoutRate::TENTH, site: 3 };
    let dropout = Dropout {
        first_sample: r.size(),
        samples: r.size(),
        positions: r.size(),
        features: r.size(),
        parts: r.size(),
        sample_parts: r.size(),
        site,
    };
    let packed = r.bit();
    let ring =
        if !packed && r.bit() { Some(KeyStep { step: r.next() % 3, parts: 1 + r.next() % 4, unseen: r.bit() }) } else { None };
    let relative = if ring.is_none() && r.bit() {
        Some(RelativePositions { buckets: 32, max_distance: 128, bidirectional: r.bit() })
    } else {
        None
    };
    let queries = r.size();
    let attention = Attention {
        batch,
        queries,
        keys: if packed { queries } else { r.size() },
        key_heads: r.size(),
        group: if packed { 1 } else { r.size() },
        head_dimension: r.size(),
        causal: r.bit(),
        scaled: r.bit(),
        relative,
        packed,
        query_parts: 1 + r.next() % 4,
        query_offset: r.size() - 1,
        ring,
        dropout: if r.bit() {
            Some(AttentionDropout { site, first_sample: 1, position_parts: 1, head_parts: 2, group_parts: 1, sample_parts: 1 })
        } else {
            None
        },
    };
    let mixture = Mixture { tokens: r.size(), experts: r.size(), capacity: r.size(), top: 1 + r.next() % 3, hidden: r.size() };
    let lstm = Recurrence { batch, sequence: positions, hidden: r.size(), initial: r.bit() };
    let (features, classes, parts, vocabulary) = (r.size(), r.size(), 1 + r.next() % 8, r.size());
    let format = EightBits::E4M3;
    let epsilon = Epsilon::new(5);
    use Kernel as K;
    vec![
        K::Matmul { rows, columns, contracted, weight, bias, activation },
        K::MatmulInputGradient { rows, columns, contracted, weight, gelu },
        K::MatmulWeightGradient { rows, columns, contracted, weight, bias },
        K::Quantise { rows, columns, format, straight, transposed },
        K::EightBitMatmul { rows, columns, contracted, bias, activation },
        K::EightBitMatmulInputGradient { rows, columns, contracted, gelu },
        K::EightBitMatmulWeightGradient { rows, columns, contracted, weight },
        K::BiasAdd { rows, columns },
        K::BiasGradient { rows, columns },
        K::Relu { elements },
        K::ReluGradient { elements },
        K::Gelu { elements },
        K::GeluGradient { elements },
        K::GeluExact { elements },
        K::GeluExactGradient { elements },
        K::SiluMultiply { elements },
        K::SiluMultiplyGradient { elements },
        K::Add { elements },
        K::Convolution(window),
        K::ConvolutionInputGradient(window),
        K::ConvolutionWeightGradient(window),
        K::BatchNorm { groups, positions, channels },
        K::BatchNormInputGradient { groups, positions, channels },
        K::BatchNormWeightGradient { groups, channels },
        K::BatchNormInference { positions, channels },
        K::RunningStatistics { channels, contributions: 4 },
        K::MaxPool(pool),
        K::MaxPoolGradient(pool),
        K::GlobalAveragePool { batch, positions, channels },
        K::GlobalAveragePoolGradient { batch, positions, channels },
        K::LayerNorm { rows, features, epsilon },
        K::LayerNormInputGradient { rows, features },
        K::LayerNormWeightGradient { rows, features },
        K::RmsNorm { rows, features, epsilon },
        K::RmsNormInputGradient { rows, features },
        K::RmsNormWeightGradient { rows, features },
        K::Rope(rope),
        K::RopeGradient(rope),
        K::Dropout(dropout),
        K::Prepend { batch, positions, features },
        K::PrependInputGradient { batch, positions, features },
        K::PrependWeightGradient { batch, positions, features },
        K::First { batch, positions, features },
        K::FirstGradient { batch, positions, features },
        K::Embedding { tokens: rows, vocabulary, hidden: features, parts },
        K::EmbeddingWeightGradient { tokens: rows, vocabulary, hidden: features, parts },
        K::Attention(attention),
        K::AttentionGradient(attention),
        K::Split { rows, parts, columns },
        K::Join { rows, parts, columns },
        K::CrossEntropy { rows, classes },
        K::LogitStatistics { rows, classes, parts },
        K::CrossEntropyOfStatistics { rows, parts },
        K::CrossEntropyGradient { rows, classes, normalizer: 3, parts, scaled: r.bit() },
        K::Route { tokens: rows, experts: columns, top: mixture.top },
        K::RouteGradient { tokens: rows, experts: columns, top: mixture.top },
        K::Dispatch(mixture),
        K::DispatchGradient(mixture),
        K::Combine(mixture),
        K::CombineInputGradient(mixture),
        K::CombineGateGradient(mixture),
        K::ExpertMatmul { experts: groups, rows, columns, contracted },
        K::ExpertMatmulInputGradient { experts: groups, rows, columns, contracted },
        K::ExpertMatmulWeightGradient { experts: groups, rows, columns, contracted },
        K::Lstm(lstm),
        K::LstmGradient { sizes: lstm, outputs: r.bit(), last: r.bit() },
        K::LstmWeightGradient(lstm),
        K::Scale { elements, square: 4 },
        K::Multiply { elements },
        K::Sgd { elements, controlled: r.bit(), momentum: r.bit(), nesterov: r.bit() },
        K::AdamW { elements, controlled: r.bit() },
        K::UpdateControl { clip: r.bit(), scaled: r.bit() },
        K::Sum { elements },
        K::Accumulate { elements },
        K::Narrow { elements },
        K::Zero { elements },
        K::SumOfSquares { elements },
        K::Slice { outer: rows, parts, inner: columns },
        K::Interleave { outer: rows, parts, inner: columns },
        K::Deinterleave { outer: rows, parts, inner: columns },
        K::TakeColumns { rows, columns: columns + contracted, start: 0, part: columns },
        K::PutColumns { rows, columns: columns + contracted, start: contracted, part: columns },
    ]
}
#[test]
fn old_is_new() {
    let mut r = Random(7);
    let mut count = 0;
    for _ in 0..3000 {
        let kernels = all(&mut r);
        assert_eq!(kernels.len(), 82);
        for kernel in &kernels {
            same(kernel);
            count += 1;
            same(&kernel.without_constants());
            same(&kernel.for_member(1));
        }
    }
    for name in Model::names() {
        let model = Model::named(name).unwrap();
        for batch in [1, 3, 8] {
            for parts in [1, 2] {
                let graph = model.graph(name, &GraphOptions { batch, vocabulary_parts: parts, ..GraphOptions::ONE }).unwrap();
                for operator in &differentiate(&graph, 5).operators {
                    same(&operator.kernel(&operator.extents()));
                    count += 1;
                }
            }
        }
        let graph = model.graph(name, &GraphOptions { inference: true, ..GraphOptions::ONE }).unwrap();
        for operator in &graph.operators {
            same(&operator.kernel(&operator.extents()));
            count += 1;
        }
    }
    println!("{count} kernels");
}
#[test]
fn speed() {
    let kernels = all(&mut Random(3));
    let time = |name: &str, run: &dyn Fn(&Kernel) -> u64| {
        let mut best = f64::MAX;
        let mut s = 0u64;
        for _ in 0..20 {
            let t = std::time::Instant::now();
            for _ in 0..1000 {
                for k in &kernels {
                    s = s.wrapping_add(run(std::hint::black_box(k)));
                }
            }
            best = best.min(t.elapsed().as_secs_f64());
        }
        println!("{name}: {:.1} ns {s}", best / 82e3 * 1e9);
    };
    time("old name", &|k| k.old_name().len() as u64);
    time("new name", &|k| k.name().len() as u64);
    time("old traffic", &|k| k.old_traffic().single as u64);
    time("new traffic", &|k| k.traffic().single as u64);
    time("old in place", &|k| k.old_may_work_in_place() as u64);
    time("new in place", &|k| k.may_work_in_place() as u64);
    time("old flops", &|k| k.old_flops().value() as u64);
    time("new flops", &|k| k.flops().value() as u64);
    time("old roofline", &|k| {
        (k.old_flops().value() + k.old_flops().value() + k.old_fused_flops().value()) as u64
            + k.old_bytes(DataType::Bf16).count()
            + k.old_is_matrix_product() as u64
    });
    time("new roofline", &|k| {
        let s = k.spec();
        (s.flops().value() + s.flops().value() + s.fused_flops().value()) as u64
            + s.traffic().bytes(DataType::Bf16).count()
            + s.is_matrix_product() as u64
    });
    time("old sides", &|k| {
        let e = elements(k);
        let s = storages(k);
        (e.reads.0[0] + e.writes.0[0] + s.0.len()) as u64
    });
    time("new sides", &|k| {
        let s = k.spec();
        (s.reads().count() + s.writes(DataType::Bf16).next().unwrap().elements) as u64
    });
    time("old features", &|k| features(k, false).sizes[0] as u64);
}
