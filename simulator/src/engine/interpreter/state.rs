//! The state of one rank during a run.

use super::meter::Meter;
use super::processors::Processor;
use crate::engine::block_times::BlockTimes;
use crate::engine::blocks::BlockList;
use foretell_units::Picoseconds;

/// A rank during a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct RankState<'a> {
    pub(super) block_list: &'a BlockList,
    /// The durations of its blocks.
    pub(super) times: &'a [BlockTimes],
    /// The factor by which its device is slower than the cost model says.
    pub(super) pace: f64,
    /// Time from the end of an instruction until a dependent in another stream may begin.
    pub(super) handoff: Picoseconds,
    /// The rate at which its device runs a kernel without contention, over the rate of its costs.
    /// Above 1 if the device has a quota, since costs are long-run averages.
    pub(super) max_rate: f64,
    pub(super) interruption: Picoseconds,
    /// The resource index of its processor.
    pub(super) processor: u32,
    /// The start of its streams in [`Interpreter::progress`](super::Interpreter).
    pub(super) first_stream: u32,
    /// The start of its slots in `Interpreter::ends`.
    pub(super) first_slot: u32,
    /// The start of its communicators in `Interpreter::communicators`: its groups, then its send
    /// channels, then its receive channels.
    pub(super) first_communicator: u32,
    /// When its latest block ended.
    pub(super) end: Picoseconds,
    /// Whether its host needs time to launch kernels.
    pub(super) has_launches: bool,
    pub(super) meter: Meter,
    /// How much later its host is than [`BlockTimes::launched`], because it had to wait for the
    /// device.
    pub(super) host_delay: Picoseconds,
}

/// The arrays that hold the state of ranks.
pub(super) struct Memory<'a> {
    pub(super) ranks: &'a [RankState<'a>],
    pub(super) progress: &'a [Progress],
    pub(super) ends: &'a [Picoseconds],
    pub(super) communicators: &'a [u32],
    pub(super) processors: &'a [Processor],
}

impl Memory<'_> {
    /// Prefetches a rank's state by reading a word of each part. The returned value only keeps the
    /// reads from being optimised away.
    pub(super) fn prefetch(&self, rank: u32) -> u64 {
        let Some(state) = self.ranks.get(rank as usize) else { return 0 };
        let word = |stored: Option<&Picoseconds>| stored.map_or(0, |time| time.0);
        let progress = self.progress.get(state.first_stream as usize).map_or(0, |progress| u64::from(progress.0));
        let communicator = self.communicators.get(state.first_communicator as usize).copied().map_or(0, u64::from);
        let processor = self.processors.get(rank as usize).map_or(0, |processor| u64::from(processor.generation));
        state.end.0
            ^ state.meter.prefetch()
            ^ state.host_delay.0
            ^ progress
            ^ communicator
            ^ processor
            ^ word(self.ends.get(state.first_slot as usize))
    }
}

/// The progress of a stream: its next block, and whether that block has begun or has a planned
/// start.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress(u32);

impl Progress {
    pub(super) fn at(block: u32) -> Self {
        Self(block << 1)
    }

    pub(super) fn block(self) -> u32 {
        self.0 >> 1
    }

    pub(super) fn is_busy(self) -> bool {
        self.0 & 1 == 1
    }

    pub(super) fn busy(self) -> Self {
        Self(self.0 | 1)
    }
}
