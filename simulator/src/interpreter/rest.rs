//! Until when a run is worth going on: what is known of how long the step goes on after some blocks, and whether it can still end in time.

use super::{Interpreter, Task};
use crate::code::Code;
use crate::simulation::Deadline;
use foretell_units::Picoseconds;

/// What is known of the blocks of each list.
#[derive(Debug)]
pub(super) struct Rest {
    step: Picoseconds,
    /// By list and block, how long the step goes on at least after it; nothing where nothing is known of any block.
    of_blocks: Vec<Vec<Picoseconds>>,
}

impl Rest {
    pub(super) fn new(deadline: &Deadline, codes: &[Code]) -> Self {
        let of_code = |(code, known): (&Code, &Vec<(u32, Picoseconds)>)| {
            let rest = |last: u32| known.binary_search_by_key(&last, |&(instruction, _)| instruction).ok().map(|at| known[at].1);
            // An instruction within a block has ended before that has.
            let of_block = |block| code.instructions(block).last().and_then(|&last| rest(last)).unwrap_or(Picoseconds::ZERO);
            if known.is_empty() { Vec::new() } else { code.blocks.iter().map(of_block).collect() }
        };
        Self { step: deadline.step, of_blocks: codes.iter().zip(&deadline.rest).map(of_code).collect() }
    }
}

impl Interpreter<'_> {
    /// A block has ended: sees whether the step can still end in time.
    pub(super) fn note_rest(&mut self, task: Task, end: Picoseconds) {
        let Some(Rest { step, of_blocks }) = &self.rest else { return };
        let list = self.lowered.ranks[task.rank as usize].list;
        let rest = of_blocks.get(list).and_then(|blocks| blocks.get(task.block as usize)).copied().unwrap_or(Picoseconds::ZERO);
        if end + rest > *step {
            self.later.get_or_insert(end + rest);
        }
    }
}
