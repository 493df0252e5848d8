//! Adapts a kernel to a micro-batch, to a member of a group of ranks, and to timing.

use super::{Epsilon, Kernel, Smoothing};
use crate::attention::Attention;
use crate::zigzag::Zigzag;

impl Kernel {
    /// The kernel for the micro-batch whose first sample is `first_sample` of the global batch.
    /// Only dropout depends on it.
    pub fn with_first_sample(mut self, first_sample: usize) -> Self {
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

    /// The kernel in a group of ranks that has cut a micro-batch's samples into `sample_parts`.
    /// Only dropout depends on it.
    pub fn with_sample_parts(mut self, sample_parts: usize) -> Self {
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

    /// The kernel on a sequence that is stored in this order. Only kernels that depend on positions
    /// change.
    pub fn with_order(mut self, order: Option<Zigzag>) -> Self {
        match &mut self {
            Kernel::Attention(sizes) | Kernel::AttentionGradient(sizes) => sizes.zigzag = order,
            Kernel::Rope(sizes) | Kernel::RopeGradient(sizes) => sizes.zigzag = order,
            Kernel::Dropout(sizes) => sizes.zigzag = order,
            _ => {}
        }
        self
    }

    /// Resolves the part of the samples that the member `index` of a group has.
    ///
    /// Returns the kernel with `sample_parts` 1, the member's index among those that have the same
    /// samples, and the number of the micro-batch's samples before its own. `samples_before` is the
    /// number of samples before those of the group. A kernel without dropout, `index` and
    /// `samples_before` are returned as they are.
    pub fn resolve_samples(mut self, index: usize, samples_before: usize) -> (Self, usize, usize) {
        let (parts, samples) = match &mut self {
            Kernel::Dropout(sizes) => (&mut sizes.sample_parts, sizes.samples),
            Kernel::Attention(Attention { dropout: Some(dropout), batch, .. })
            | Kernel::AttentionGradient(Attention { dropout: Some(dropout), batch, .. }) => (&mut dropout.sample_parts, *batch),
            _ => return (self, index, samples_before),
        };
        let parts = std::mem::replace(parts, 1).max(1);
        (self, index / parts, samples_before + index % parts * samples)
    }

    /// The kernel that the member `index` of a group runs, with the offsets of its part of a
    /// sequence. A step of ring attention has the member's causal mask instead.
    pub fn for_member(self, index: usize) -> Self {
        match self {
            Kernel::Attention(sizes) => Kernel::Attention(sizes.for_member(index)),
            Kernel::AttentionGradient(sizes) => Kernel::AttentionGradient(sizes.for_member(index)),
            Kernel::Rope(sizes) => Kernel::Rope(sizes.for_member(index)),
            Kernel::RopeGradient(sizes) => Kernel::RopeGradient(sizes.for_member(index)),
            kernel => kernel,
        }
    }

    /// Whether some member of a group has more work than another.
    pub fn is_uneven(&self) -> bool {
        match self {
            Kernel::Attention(sizes) | Kernel::AttentionGradient(sizes) => sizes.is_uneven(),
            kernel => kernel.for_member(0).without_constants() != kernel.without_constants(),
        }
    }

    /// The kernel in the form in which it is timed: values that change the result but not the time
    /// are replaced by fixed ones, so that kernels of equal time are equal.
    pub fn without_constants(self) -> Self {
        match self {
            Kernel::LogitStatistics { rows, classes, .. } => Kernel::LogitStatistics { rows, classes, parts: 1 },
            Kernel::CrossEntropyGradient { rows, classes, .. } => {
                Kernel::CrossEntropyGradient { rows, classes, normalizer: 1, parts: 1, scaled: false }
            }
            Kernel::WeightedCrossEntropy { rows, classes, .. } => {
                Kernel::WeightedCrossEntropy { rows, classes, smoothing: Smoothing::default() }
            }
            Kernel::WeightedCrossEntropyGradient { rows, classes, .. } => {
                let smoothing = Smoothing::default();
                Kernel::WeightedCrossEntropyGradient { rows, classes, smoothing, normalizer: 1, scaled: false }
            }
            Kernel::LambDirection { elements, .. } => Kernel::LambDirection { elements, controlled: false, exempt: false },
            Kernel::LambStep { elements, .. } => Kernel::LambStep { elements, controlled: false },
            Kernel::MuonDirection { elements, .. } => Kernel::MuonDirection { elements, controlled: false },
            Kernel::MuonStep { elements, .. } => Kernel::MuonStep { elements, longest: 1, controlled: false, exempt: false },
            Kernel::Average { elements, .. } => Kernel::Average { elements, parts: 2 },
            Kernel::OuterStep { elements, momentum, nesterov, mixed, .. } => {
                Kernel::OuterStep { elements, replicas: 2, momentum, nesterov, mixed }
            }
            Kernel::RunningStatistics { channels, .. } => Kernel::RunningStatistics { channels, contributions: 1 },
            Kernel::Sgd { elements, momentum, nesterov, .. } => {
                Kernel::Sgd { elements, momentum, nesterov, controlled: false, exempt: false }
            }
            Kernel::AdamW { elements, .. } => Kernel::AdamW { elements, controlled: false, exempt: false },
            Kernel::LayerNorm { rows, features, .. } => Kernel::LayerNorm { rows, features, epsilon: Epsilon::new(5) },
            Kernel::RmsNorm { rows, features, .. } => Kernel::RmsNorm { rows, features, epsilon: Epsilon::new(5) },
            Kernel::Rope(sizes) => Kernel::Rope(sizes.without_constants()),
            Kernel::RopeGradient(sizes) => Kernel::RopeGradient(sizes.without_constants()),
            Kernel::Attention(sizes) => Kernel::Attention(sizes.without_constants()),
            Kernel::AttentionGradient(sizes) => Kernel::AttentionGradient(sizes.without_constants()),
            Kernel::Dropout(sizes) => Kernel::Dropout(sizes.without_constants()),
            kernel => kernel,
        }
    }

    /// The number of parts into which a group of ranks has cut the work, for kernels that must know
    /// which part is theirs: the rank's index in the group. 1 for other kernels.
    pub fn parts(&self) -> usize {
        match *self {
            Kernel::Slice { parts, .. }
            | Kernel::Embedding { parts, .. }
            | Kernel::EmbeddingWeightGradient { parts, .. }
            | Kernel::LogitStatistics { parts, .. }
            | Kernel::LabelRanks { parts, .. }
            | Kernel::CrossEntropyGradient { parts, .. } => parts,
            Kernel::Attention(sizes) | Kernel::AttentionGradient(sizes) => sizes.parts(),
            Kernel::Rope(sizes) | Kernel::RopeGradient(sizes) => sizes.position_parts,
            Kernel::Dropout(sizes) => sizes.parts * sizes.sample_parts,
            _ => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::dropout::{Dropout, DropoutSite};
    use crate::kernel::Kernel;

    #[test]
    fn the_part_of_the_samples_varies_fastest_with_the_index_in_a_group() {
        let sizes = Dropout {
            first_sample: 8,
            samples: 4,
            positions: 2,
            features: 3,
            parts: 3,
            sample_parts: 2,
            zigzag: None,
            site: DropoutSite::TIMED,
        };
        let kernel = Kernel::Dropout(sizes);
        assert_eq!(kernel.parts(), 6);
        let own = Kernel::Dropout(Dropout { sample_parts: 1, ..sizes });
        // The second half of the samples, and the last third of the positions.
        assert_eq!(kernel.resolve_samples(5, 10), (own, 2, 14));
        assert_eq!(kernel.resolve_samples(4, 10), (own, 2, 10));
        assert_eq!(own.resolve_samples(2, 10), (own, 2, 10));
    }
}
