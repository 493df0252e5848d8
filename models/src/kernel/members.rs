//! Which part of a whole a kernel works on, for kernels that depend on it, and the kernel without what does not change its time.

use super::{Epsilon, Kernel};
use crate::attention::Attention;

impl Kernel {
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
