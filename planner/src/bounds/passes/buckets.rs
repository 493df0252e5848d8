//! Instructions whose time depends on how gradients are bucketed.

use super::TimedList;
use foretell_models::Kernel;
use foretell_program::{CollectiveRole, Operation, StageProgram};
use std::ops::Range;

/// Decides which instructions of a range depend on the buckets.
///
/// In a longer model a bucket may fill up in another pass, hold gradients of other chunks, or be
/// nearly empty. So within a pass these instructions count as taking no time. There are two
/// exceptions. If the range is the whole list, its buckets are the real ones. And reductions from
/// the last pass on still occupy their stream, whatever buckets they come in.
pub(super) struct BucketedInstructions<'a> {
    list: &'a StageProgram,
    /// The range reaches beyond the last pass.
    pub(super) is_tail: bool,
    /// The range is the whole list.
    pub(super) is_whole: bool,
    /// Gradient reductions overlap with the range, so little may be left of them after it.
    reductions_overlap: bool,
}

impl<'a> BucketedInstructions<'a> {
    pub(super) fn new(timed: &TimedList<'a>, range: &Range<u32>) -> Self {
        let list = timed.list;
        let is_tail = list.passes.last().is_none_or(|pass| range.end > pass.instructions.end);
        let is_whole = *range == (0..list.instructions.len() as u32);
        Self { list, is_tail, is_whole, reductions_overlap: !is_whole && (!is_tail || timed.overlap.gradients) }
    }

    /// Returns `true` if an instruction depends on the buckets: a reduction that overlaps, a kernel
    /// that waits for one, and, unless the range is the whole list, a copy or a kernel that zeroes
    /// memory.
    pub(super) fn contains(&self, index: usize) -> bool {
        let instruction = &self.list.instructions[index];
        match *instruction.operation {
            Operation::Collective { .. } => self.is_overlapping_reduction(index),
            Operation::Copy { .. } | Operation::Compute { kernel: Kernel::Zero { .. }, .. } => !self.is_whole,
            Operation::Compute { .. } => instruction.after.iter().any(|before| self.is_overlapping_reduction(before.0 as usize)),
            _ => false,
        }
    }

    /// Returns `true` if an instruction is a gradient reduction that overlaps with passes.
    pub(super) fn is_overlapping_reduction(&self, index: usize) -> bool {
        let operation = &*self.list.instructions[index].operation;
        self.reductions_overlap && matches!(operation, Operation::Collective { role: CollectiveRole::Gradients, .. })
    }
}
