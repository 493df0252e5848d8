//! What is known of a rank while it runs.

use super::meter::Meter;
use super::processors::Processor;
use crate::engine::block_work::BlockWork;
use crate::engine::blocks::BlockList;
use foretell_units::Picoseconds;

/// A rank while it runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct RankState<'a> {
    pub(super) block_list: &'a BlockList,
    /// What each of its blocks takes, and of its host.
    pub(super) work: &'a [BlockWork],
    /// How much slower than its costs its device is.
    pub(super) pace: f64,
    pub(super) handoff: Picoseconds,
    /// How many times as fast as its costs its device goes while it runs: not 1 where it has a share of a processor's time.
    pub(super) fastest: f64,
    pub(super) interruption: Picoseconds,
    pub(super) processor: u32,
    /// Where its streams begin in [`Interpreter::progress`], and its slots in [`Interpreter::ends`].
    pub(super) first_stream: u32,
    pub(super) first_slot: u32,
    /// Where its groups, and after them those whom it sends to and those from whom it receives, begin in [`Interpreter::communicators`].
    pub(super) first_communicator: u32,
    /// When its last block so far ended.
    pub(super) end: Picoseconds,
    /// Whether its host takes time to launch anything.
    pub(super) has_launches: bool,
    pub(super) meter: Meter,
    /// How far its host is behind that, for what held it up.
    pub(super) behind: Picoseconds,
}

/// Where what is known of ranks lies.
pub(super) struct Memory<'a> {
    pub(super) ranks: &'a [RankState<'a>],
    pub(super) progress: &'a [Progress],
    pub(super) ends: &'a [Picoseconds],
    pub(super) communicators: &'a [u32],
    pub(super) processors: &'a [Processor],
}

impl Memory<'_> {
    /// Reads a word of each place, so that they are at hand. What they are does not matter.
    pub(super) fn fetch(&self, rank: u32) -> u64 {
        let Some(state) = self.ranks.get(rank as usize) else { return 0 };
        let word = |one: Option<&Picoseconds>| one.map_or(0, |time| time.0);
        let progress = self.progress.get(state.first_stream as usize).map_or(0, |progress| u64::from(progress.0));
        let communicator = self.communicators.get(state.first_communicator as usize).copied().map_or(0, u64::from);
        let processor = self.processors.get(rank as usize).map_or(0, |processor| u64::from(processor.generation));
        state.end.0
            ^ state.meter.fetch()
            ^ state.behind.0
            ^ progress
            ^ communicator
            ^ processor
            ^ word(self.ends.get(state.first_slot as usize))
    }
}

/// How far a stream is: the block that is next, and whether that has begun or will at a time that is known.
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
