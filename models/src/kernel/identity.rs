//! Which kernel it is: its name, what of it is one rank's, and what of it does not matter to how long it takes.

use super::{Epsilon, Kernel};
use crate::attention::Attention;

impl Kernel {
    /// The kernel's name in reports, as in [`Kernel`]'s serialised form.
    pub fn name(&self) -> &'static str {
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

    /// The same for the micro-batch that begins with a sample of the global batch, which dropout must know.
    pub fn from_sample(mut self, first_sample: usize) -> Self {
        match &mut self {
            Kernel::Dropout(sizes) => sizes.first_sample = first_sample,
            Kernel::Attention(sizes) | Kernel::AttentionGradient(sizes) => {
                if let Some(dropout) = &mut sizes.dropout {
                    dropout.first_sample = first_sample;
                }
            }
            _ => {}
        }
        self
    }

    /// The same where the ranks of a group have cut a micro-batch's samples into so many parts, which dropout must know, too.
    pub fn among_samples_of(mut self, sample_parts: usize) -> Self {
        match &mut self {
            Kernel::Dropout(sizes) => sizes.sample_parts = sample_parts,
            Kernel::Attention(sizes) | Kernel::AttentionGradient(sizes) => {
                if let Some(dropout) = &mut sizes.dropout {
                    dropout.sample_parts = sample_parts;
                }
            }
            _ => {}
        }
        self
    }

    /// What the member `index` of a group runs before whose ranks lie `samples_before` samples of the micro-batch: the kernel without the parts
    /// into which the group has cut samples, the member's index among those that have the same samples, and the samples before its own.
    pub fn on_own_samples(mut self, index: usize, samples_before: usize) -> (Self, usize, usize) {
        let (parts, samples) = match &mut self {
            Kernel::Dropout(sizes) => (&mut sizes.sample_parts, sizes.samples),
            Kernel::Attention(Attention { dropout: Some(dropout), batch, .. })
            | Kernel::AttentionGradient(Attention { dropout: Some(dropout), batch, .. }) => (&mut dropout.sample_parts, *batch),
            _ => return (self, index, samples_before),
        };
        let cut = std::mem::replace(parts, 1).max(1);
        (self, index / cut, samples_before + index % cut * samples)
    }

    /// What the member `index` of a group of ranks runs: kernels whose work depends on which part of a sequence the rank has, made concrete.
    pub fn for_member(self, index: usize) -> Self {
        match self {
            Kernel::Attention(sizes) => Kernel::Attention(sizes.for_member(index)),
            Kernel::AttentionGradient(sizes) => Kernel::AttentionGradient(sizes.for_member(index)),
            Kernel::Rope(sizes) => Kernel::Rope(sizes.for_member(index)),
            Kernel::RopeGradient(sizes) => Kernel::RopeGradient(sizes.for_member(index)),
            kernel => kernel,
        }
    }

    /// The kernel without what changes what it computes but not how long it takes: as it is timed.
    pub fn without_constants(self) -> Self {
        match self {
            Kernel::LogitStatistics { rows, classes, .. } => Kernel::LogitStatistics { rows, classes, parts: 1 },
            Kernel::CrossEntropyGradient { rows, classes, .. } => {
                Kernel::CrossEntropyGradient { rows, classes, normalizer: 1, parts: 1, scaled: false }
            }
            Kernel::RunningStatistics { channels, .. } => Kernel::RunningStatistics { channels, contributions: 1 },
            Kernel::Sgd { elements, momentum, nesterov, .. } => Kernel::Sgd { elements, momentum, nesterov, controlled: false },
            Kernel::AdamW { elements, .. } => Kernel::AdamW { elements, controlled: false },
            Kernel::LayerNorm { rows, features, .. } => Kernel::LayerNorm { rows, features, epsilon: Epsilon::new(5) },
            Kernel::RmsNorm { rows, features, .. } => Kernel::RmsNorm { rows, features, epsilon: Epsilon::new(5) },
            Kernel::Rope(sizes) => Kernel::Rope(sizes.without_positions()),
            Kernel::RopeGradient(sizes) => Kernel::RopeGradient(sizes.without_positions()),
            Kernel::Attention(sizes) => Kernel::Attention(sizes.without_step()),
            Kernel::AttentionGradient(sizes) => Kernel::AttentionGradient(sizes.without_step()),
            Kernel::Dropout(sizes) => Kernel::Dropout(sizes.without_place()),
            kernel => kernel,
        }
    }

    /// Into how many parts the whole is cut of which the kernel works on the one of the rank's index in its group; 1 for those that need not
    /// know.
    pub fn parts(&self) -> usize {
        match *self {
            Kernel::Slice { parts, .. }
            | Kernel::Embedding { parts, .. }
            | Kernel::EmbeddingWeightGradient { parts, .. }
            | Kernel::LogitStatistics { parts, .. }
            | Kernel::CrossEntropyGradient { parts, .. } => parts,
            Kernel::Attention(sizes) | Kernel::AttentionGradient(sizes) => sizes.parts(),
            Kernel::Rope(sizes) | Kernel::RopeGradient(sizes) => sizes.position_parts,
            Kernel::Dropout(sizes) => sizes.parts * sizes.sample_parts,
            _ => 1,
        }
    }

    /// Whether the first write may be the first read's memory.
    pub fn may_work_in_place(&self) -> bool {
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
}

#[cfg(test)]
mod tests {
    use crate::dropout::{Dropout, DropoutSite};
    use crate::kernel::Kernel;

    #[test]
    fn of_a_groups_index_the_part_of_the_samples_varies_fastest() {
        let sizes =
            Dropout { first_sample: 8, samples: 4, positions: 2, features: 3, parts: 3, sample_parts: 2, site: DropoutSite::ANY };
        let kernel = Kernel::Dropout(sizes);
        assert_eq!(kernel.parts(), 6);
        let own = Kernel::Dropout(Dropout { sample_parts: 1, ..sizes });
        // The second half of the samples, and the last third of the positions.
        assert_eq!(kernel.on_own_samples(5, 10), (own, 2, 14));
        assert_eq!(kernel.on_own_samples(4, 10), (own, 2, 10));
        assert_eq!(own.on_own_samples(2, 10), (own, 2, 10));
    }
}
