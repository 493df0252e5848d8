//! Stops a run as soon as its step is certain to end after the deadline.

use super::Interpreter;
use super::event::Task;
use crate::engine::Deadline;
use crate::engine::blocks::BlockList;
use foretell_units::Picoseconds;

/// The cutoff of a run.
#[derive(Debug)]
pub(super) struct Cutoff {
    /// `None` if the run goes to its end.
    pub(super) remaining: Option<RemainingTimes>,
    /// The least duration of the step, once it is known to end after the deadline.
    pub(super) least_step: Option<Picoseconds>,
}

/// A deadline, with the least remaining time after each block.
#[derive(Debug)]
pub(super) struct RemainingTimes {
    step: Picoseconds,
    /// For each list and block, the least time from the block's end to the end of the step. Lists
    /// without known times have no entries.
    after_block: Vec<Vec<Picoseconds>>,
}

impl RemainingTimes {
    pub(super) fn new(deadline: &Deadline, block_lists: &[BlockList]) -> Self {
        let of_list = |(block_list, known): (&BlockList, &Vec<(u32, Picoseconds)>)| {
            let remaining = |last: u32| known.binary_search_by_key(&last, |&(time, _)| time).ok().map(|at| known[at].1);
            // All instructions of a block end at the latest with its last one, so only the last one
            // counts.
            let of_block = |block| {
                let last = block_list.instructions(block).last();
                last.and_then(|&last| remaining(last)).unwrap_or(Picoseconds::ZERO)
            };
            if known.is_empty() { Vec::new() } else { block_list.blocks.iter().map(of_block).collect() }
        };
        Self { step: deadline.step, after_block: block_lists.iter().zip(&deadline.remaining).map(of_list).collect() }
    }
}

impl Interpreter<'_> {
    /// Checks, at the end of a block, whether the step can still end by the deadline.
    pub(super) fn check_deadline(&mut self, task: Task, end: Picoseconds) {
        let Some(RemainingTimes { step, after_block }) = &self.cutoff.remaining else { return };
        let list = self.lowered.ranks[task.rank as usize].list;
        let remaining =
            after_block.get(list).and_then(|blocks| blocks.get(task.block as usize)).copied().unwrap_or(Picoseconds::ZERO);
        if end + remaining > *step {
            self.cutoff.least_step.get_or_insert(end + remaining);
        }
    }
}
