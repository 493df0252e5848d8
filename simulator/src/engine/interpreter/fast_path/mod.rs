//! The fast path: runs a rank ahead of the event queue while its blocks depend on no other rank.
//!
//! Such blocks are kernels on an idle processor, and collectives that only this rank has to reach
//! (equivalent ranks are folded onto it) and that load no link; or a kernel and a collective that
//! overlap ([`overlapped_pair`]). If the successor of each is forced ([`forced_order`], by the
//! streams' [`vector_clocks`]), starts and ends are sums of durations. [`run_ahead`] computes up to
//! 256 blocks together, and one event stands for all of them.
//!
//! The rank's state does not change before that event. Anything that needs the rank earlier first
//! makes it catch up: blocks that have ended are recorded, and the block under way continues as an
//! ordinary block.
//!
//! The oracle is the interpreter without the fast path, which takes an event for each block
//! (`FastPath::Off`). `the_fast_path_agrees_with_running_event_by_event` compares the two span by
//! span and breakdown by breakdown. It must not know schedules: it sees blocks and streams.

mod forced_order;
mod overlapped_pair;
mod run_ahead;
#[cfg(test)]
mod tests;
mod vector_clocks;

pub(in crate::engine) use forced_order::ForcedOrder;

use foretell_units::Picoseconds;

/// The ranks that run ahead, and the blocks that each runs through.
#[derive(Debug)]
pub(super) struct RunAheadState {
    is_allowed: bool,
    /// For each rank, its index in `runs`, or [`NONE`].
    run_of_rank: Vec<u32>,
    /// The blocks of each run. Overlapped pairs are left out, since they can be derived from the
    /// block before them.
    runs: Vec<Vec<TimedBlock>>,
    /// Runs that no rank uses.
    free: Vec<u32>,
    /// Number of blocks that ended without their own event.
    pub(super) blocks_without_event: u64,
}

/// A block with its start and end.
#[derive(Clone, Copy, Debug)]
struct TimedBlock {
    block: u32,
    start: Picoseconds,
    end: Picoseconds,
}

const NONE: u32 = u32::MAX;

impl RunAheadState {
    pub(super) fn new(ranks: usize, is_allowed: bool) -> Self {
        Self { is_allowed, run_of_rank: vec![NONE; ranks], runs: Vec::new(), free: Vec::new(), blocks_without_event: 0 }
    }

    /// Disables run-ahead; returns the previous setting.
    pub(super) fn forbid(&mut self) -> bool {
        std::mem::replace(&mut self.is_allowed, false)
    }

    /// Restores a setting that [`Self::forbid`] returned.
    pub(super) fn restore(&mut self, is_allowed: bool) {
        self.is_allowed = is_allowed;
    }

    /// The index of an empty run.
    fn take_run(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.runs.push(Vec::with_capacity(8));
            self.runs.len() as u32 - 1
        })
    }
}
