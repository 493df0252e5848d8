//! Records the span of each instruction of a run.

use crate::engine::blocks::{BlockList, StreamBlock};
use crate::lowering::Lowered;
use foretell_program::{InstructionId, Span};
use foretell_units::Picoseconds;

/// The spans of all instructions.
#[derive(Debug)]
pub(super) struct Recorder {
    /// By simulated rank, then by instruction. An unknown end is [`Picoseconds::MAX`].
    pub(super) spans: Vec<Vec<Span>>,
}

impl Recorder {
    pub(super) fn new(lowered: &Lowered<'_>) -> Self {
        let unknown =
            |instruction| Span { instruction: InstructionId(instruction), start: Picoseconds::ZERO, end: Picoseconds::MAX };
        let spans = |list: usize| (0..lowered.lists[list].actions.len() as u32).map(unknown).collect();
        Self { spans: lowered.ranks.iter().map(|rank| spans(rank.list)).collect() }
    }

    /// Records the start of a block.
    pub(super) fn begin(&mut self, rank: u32, block_list: &BlockList, block: &StreamBlock, now: Picoseconds) {
        if let Some(&first) = block_list.instructions(block).first() {
            self.spans[rank as usize][first as usize].start = now;
        }
    }

    /// Records the end of a block.
    pub(super) fn end(&mut self, rank: u32, block_list: &BlockList, block: &StreamBlock, now: Picoseconds) {
        if let Some(&last) = block_list.instructions(block).last() {
            self.spans[rank as usize][last as usize].end = now;
        }
    }

    /// Records the instructions of a block that end within its first `done` picoseconds of work.
    /// `ends` has the work until the end of each instruction, and `time_of` maps work to time.
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
