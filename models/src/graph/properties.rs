//! Properties of an operator's computation that sharding needs, beside its loops.

use super::loops::{Extent, SEQUENCE};
use super::operator::Operator;
use crate::attention::RelativePositions;
use crate::kernel::Kernel;

impl Operator {
    /// Whether it computes on the shard of the classes that a rank has, and so must know which
    /// shard that is.
    pub fn works_on_parts_of_classes(&self) -> bool {
        matches!(self.kind, Kernel::LogitStatistics { .. } | Kernel::LabelRanks { .. })
    }

    /// Whether it reads logits first, and makes a loss or a part of one.
    pub(super) fn makes_loss(&self) -> bool {
        matches!(self.kind, Kernel::CrossEntropy { .. } | Kernel::LogitStatistics { .. } | Kernel::WeightedCrossEntropy { .. })
    }

    /// Whether it is attention. Its sequence is sharded by other means than that of operators that
    /// work position by position.
    pub fn is_attention(&self) -> bool {
        matches!(self.kind, Kernel::Attention(_) | Kernel::AttentionGradient(_))
    }

    /// Returns the role of the loop of which a kernel must know the rank's part, such as the
    /// positions of a rotary embedding. `None` if the work is the same on every part.
    pub fn positional_role(&self) -> Option<Extent> {
        match self.kind {
            Kernel::Embedding { .. } | Kernel::EmbeddingWeightGradient { .. } => Some(Extent::Vocabulary),
            Kernel::LogitStatistics { .. } | Kernel::LabelRanks { .. } | Kernel::CrossEntropyGradient { .. } => {
                Some(Extent::Features)
            }
            Kernel::Attention(_)
            | Kernel::AttentionGradient(_)
            | Kernel::Rope(_)
            | Kernel::RopeGradient(_)
            | Kernel::Dropout(_) => Some(Extent::Positions),
            _ => None,
        }
    }

    /// Whether several axes of the mesh may cut the loop of [`Operator::positional_role`] together.
    pub fn is_positional_along_several_axes(&self) -> bool {
        matches!(self.kind, Kernel::Dropout(_))
    }

    /// Whether a kernel must know which part of the loops of this role a rank has: for the role of
    /// [`Operator::positional_role`], and for the heads of attention with dropout.
    pub fn depends_on_part_of(&self, role: Extent) -> bool {
        let drops_by_head = self.is_attention() && self.has_dropout() && matches!(role, Extent::Heads | Extent::Group);
        self.positional_role() == Some(role) || drops_by_head
    }

    /// Whether it gives the same results if a sequence's positions are stored in another order that
    /// its kernel knows. A scan, a recurrence or a window of positions does not. Neither does
    /// attention to keys after the query, whose keys may belong to another sequence.
    pub fn follows_order_of_positions(&self) -> bool {
        match self.kind {
            Kernel::Attention(sizes) | Kernel::AttentionGradient(sizes) => {
                sizes.causal && sizes.relative.is_none_or(|relative| relative == RelativePositions::SINKS)
            }
            Kernel::Planned(work) => work.kind.works_by_position(),
            Kernel::Rope(_)
            | Kernel::RopeGradient(_)
            | Kernel::Dropout(_)
            | Kernel::Dispatch(_)
            | Kernel::DispatchGradient(_)
            | Kernel::Combine(_)
            | Kernel::CombineInputGradient(_)
            | Kernel::CombineGateGradient(_) => true,
            // Other work mixes positions if its loop over a sequence has this role.
            _ => self.loops.iter().all(|walked| walked.name != SEQUENCE || walked.role != Extent::Positions),
        }
    }

    /// Whether it drops elements, which depends on the numbers of its samples in the global batch.
    pub fn has_dropout(&self) -> bool {
        match self.kind {
            Kernel::Dropout(_) => true,
            Kernel::Attention(sizes) | Kernel::AttentionGradient(sizes) => sizes.dropout.is_some(),
            _ => false,
        }
    }
}
