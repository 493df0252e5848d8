//! The spans of a run, for whoever asks for them.

use crate::engine::blocks::{Block, BlockList};
use crate::lowering::Lowered;
use foretell_program::{InstructionId, Span};
use foretell_units::Picoseconds;

/// Every instruction's span, by the place of the simulated rank.
#[derive(Debug)]
pub(super) struct Recorder {
    pub(super) spans: Vec<Vec<Span>>,
}

impl Recorder {
    pub(super) fn new(lowered: &Lowered<'_>) -> Self {
        let unknown =
            |instruction| Span { instruction: InstructionId(instruction), start: Picoseconds::ZERO, end: Picoseconds::MAX };
        let spans = |list: usize| (0..lowered.lists[list].actions.len() as u32).map(unknown).collect();
        Self { spans: lowered.ranks.iter().map(|rank| spans(rank.list)).collect() }
    }

    /// A block begins.
    pub(super) fn begin(&mut self, rank: u32, block_list: &BlockList, block: &Block, now: Picoseconds) {
        if let Some(&first) = block_list.instructions(block).first() {
            self.spans[rank as usize][first as usize].start = now;
        }
    }

    /// A block ends.
    pub(super) fn end(&mut self, rank: u32, block_list: &BlockList, block: &Block, now: Picoseconds) {
        if let Some(&last) = block_list.instructions(block).last() {
            self.spans[rank as usize][last as usize].end = now;
        }
    }

    /// Part of a block's work was done; at what time a part of it was, `time_of` says. `ends` has the work at each instruction's end.
    pub(super) fn progress(
        &mut self,
        rank: u32,
        instructions: &[u32],
        ends: impl Iterator<Item = f64>,
        done: f64,
        time_of: impl Fn(f64) -> Picoseconds,
    ) {
        let spans = &mut self.spans[rank as usize];
        for (pair, end) in instructions.windows(2).zip(ends) {
            let (one, next) = (pair[0] as usize, pair[1] as usize);
            if end > done {
                return;
            }
            if spans[one].end == Picoseconds::MAX {
                let time = time_of(end);
                spans[one].end = time;
                spans[next].start = time;
            }
        }
    }
}
