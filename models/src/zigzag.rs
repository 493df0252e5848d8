//! The order in which the positions of a causal sequence are stored, so that ranks which shard it
//! have equal work. This module must not know how layouts lead to parts.
//!
//! A causal query sees the keys before it, so of contiguous parts the last has the most work. In
//! zigzag order a sequence is cut into two chunks for each rank. Rank i of c has chunk i and then
//! chunk 2c - 1 - i, as in Megatron Core, torchtitan and ring-flash-attention. A part is still one
//! contiguous range of indices, so operators that do not depend on positions need not know the
//! order.

use serde::{Deserialize, Serialize};
use std::num::NonZeroU32;
use std::ops::Range;

/// The zigzag order of a sequence. It maps the index at which a position is stored to the position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Zigzag {
    /// Ranks that cut the sequence: two or more.
    pub ranks: NonZeroU32,
    /// Positions of a chunk, of which each rank has two.
    pub chunk: NonZeroU32,
}

/// Consecutive positions that are stored contiguously.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PositionRun {
    /// Index of the run's first position, counted from the start of the range that was asked for.
    pub start: usize,
    /// Its first position.
    pub position: usize,
    /// The number of positions.
    pub length: usize,
}

impl Zigzag {
    /// Returns the order of a sequence of `positions` over `ranks`. `None` for a single rank, and
    /// if the sequence does not divide into two equal chunks for each.
    pub fn new(ranks: usize, positions: usize) -> Option<Self> {
        let chunks = ranks.checked_mul(2).filter(|&chunks| chunks > 2 && positions.is_multiple_of(chunks))?;
        let nonzero = |number: usize| u32::try_from(number).ok().and_then(NonZeroU32::new);
        Some(Self { ranks: nonzero(ranks)?, chunk: nonzero(positions / chunks)? })
    }

    /// Returns the positions of the whole sequence.
    pub fn positions(self) -> usize {
        (2 * self.chunk.get() as usize).saturating_mul(self.ranks.get() as usize)
    }

    /// Returns the position that is stored at an index.
    pub fn position(self, index: usize) -> usize {
        let (chunk, offset) = (index / self.chunk.get() as usize, index % self.chunk.get() as usize);
        let rank = chunk / 2;
        // Beyond the sequence, where nothing is stored, no number overflows.
        let last = (2 * self.ranks.get() as usize - 1).saturating_sub(rank);
        (if chunk.is_multiple_of(2) { rank } else { last }) * self.chunk.get() as usize + offset
    }
}

/// The runs of positions that a range of indices has, in the order in which they are stored.
/// Without a zigzag order there is a single run, and positions are indices.
pub fn position_runs(order: Option<Zigzag>, indices: Range<usize>) -> impl Iterator<Item = PositionRun> {
    let first = indices.start;
    let mut next = first;
    std::iter::from_fn(move || {
        let left = indices.end.checked_sub(next).filter(|&left| left > 0)?;
        let (position, length) = match order {
            None => (next, left),
            Some(zigzag) => (zigzag.position(next), left.min(zigzag.chunk.get() as usize - next % zigzag.chunk.get() as usize)),
        };
        let run = PositionRun { start: next - first, position, length };
        next += length;
        Some(run)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

    use super::{PositionRun, Zigzag, position_runs};

    #[test]
    fn each_rank_has_one_chunk_from_each_end() {
        let order = Zigzag::new(3, 12).unwrap();
        let stored: Vec<usize> = (0..order.positions()).map(|index| order.position(index)).collect();
        assert_eq!(stored, [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]);
        for (ranks, positions) in [(1, 12), (3, 9), (4, 12), (0, 12), (2, 0), (usize::MAX, 12)] {
            assert_eq!(Zigzag::new(ranks, positions), None, "{ranks} {positions}");
        }
    }

    #[test]
    fn runs_cover_a_part_in_order() {
        let order = Zigzag::new(2, 12).unwrap();
        let runs = |indices| position_runs(Some(order), indices).collect::<Vec<_>>();
        let run = |start, position, length| PositionRun { start, position, length };
        assert_eq!(runs(0..6), [run(0, 0, 3), run(3, 9, 3)]);
        assert_eq!(runs(2..5), [run(0, 2, 1), run(1, 9, 2)]);
        assert_eq!(runs(6..12), [run(0, 3, 6 - 3), run(3, 6, 3)]);
        assert_eq!(runs(4..4), []);
        assert_eq!(position_runs(None, 4..9).collect::<Vec<_>>(), [run(0, 4, 5)]);
    }
}
