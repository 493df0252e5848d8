//! Until when a run is worth going on: what is known of how long the step goes on after some blocks, and whether it can still end in time.

use super::Interpreter;
use super::event::Task;
use crate::engine::Deadline;
use crate::engine::blocks::BlockList;
use foretell_units::Picoseconds;

/// What is known of the blocks of each list.
#[derive(Debug)]
pub(super) struct RemainingTimes {
    step: Picoseconds,
    /// By list and block, how long the step goes on at least after it; nothing where nothing is known of any block.
    of_blocks: Vec<Vec<Picoseconds>>,
}

impl RemainingTimes {
    pub(super) fn new(deadline: &Deadline, codes: &[BlockList]) -> Self {
        let of_code = |(block_list, known): (&BlockList, &Vec<(u32, Picoseconds)>)| {
            let rest = |last: u32| known.binary_search_by_key(&last, |&(instruction, _)| instruction).ok().map(|at| known[at].1);
            // An instruction within a block has ended before that has.
            let of_block =
                |block| block_list.instructions(block).last().and_then(|&last| rest(last)).unwrap_or(Picoseconds::ZERO);
            if known.is_empty() { Vec::new() } else { block_list.blocks.iter().map(of_block).collect() }
        };
        Self { step: deadline.step, of_blocks: codes.iter().zip(&deadline.rest).map(of_code).collect() }
    }
}

impl Interpreter<'_> {
    /// A block has ended: sees whether the step can still end in time.
    pub(super) fn check_deadline(&mut self, task: Task, end: Picoseconds) {
        let Some(RemainingTimes { step, of_blocks }) = &self.deadline else { return };
        let list = self.lowered.ranks[task.rank as usize].list;
        let rest = of_blocks.get(list).and_then(|blocks| blocks.get(task.block as usize)).copied().unwrap_or(Picoseconds::ZERO);
        if end + rest > *step {
            self.past_deadline.get_or_insert(end + rest);
        }
    }
}
