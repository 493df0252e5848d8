//! The layout of a segment: the offsets of its parts. All processes compute the same ones.
//!
//! In this order: a page with the header and one entry per rank, one doorbell per rank and stream,
//! one control block per ring, and the rings' bytes. Ranks are numbered by their index in the
//! segment.

use std::sync::atomic::{AtomicU32, AtomicU64};

use super::super::abort_flag::AbortFlag;
use super::super::doorbell::Doorbell;

pub(super) const PAGE: usize = 4096;
/// More ranks than a machine has. It bounds the tables and, together with the next constant, the
/// whole segment.
const MAX_RANKS: usize = 1024;
const MAX_RING_BYTES: usize = 1 << 30;

/// The beginning of the first page.
#[repr(C)]
pub(super) struct Header {
    pub(super) magic: u64,
    pub(super) ranks: u64,
    pub(super) streams: u64,
    pub(super) ring_bytes: u64,
    pub(super) abort: CacheAligned<AbortFlag>,
}

/// The entry of one rank.
#[repr(C, align(128))]
pub(super) struct RankEntry {
    /// The rank's number in the run. It does not change once the segment is shared.
    pub(super) rank: u64,
    /// `NEVER_ATTACHED`, `ATTACHED` or `LEFT`.
    pub(super) state: AtomicU32,
}

pub(super) const NEVER_ATTACHED: u32 = 0;
pub(super) const ATTACHED: u32 = 1;
pub(super) const LEFT: u32 = 2;

/// A value alone on its pair of cache lines, since processors prefetch lines in pairs.
#[repr(C, align(128))]
pub(super) struct CacheAligned<T>(pub(super) T);

/// The numbers of bytes that were ever written to and read from a ring.
#[repr(C)]
pub(super) struct RingControl {
    pub(super) written: CacheAligned<AtomicU64>,
    pub(super) read: CacheAligned<AtomicU64>,
}

/// The sizes of a segment and the offsets of its parts, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct SegmentLayout {
    pub(super) ranks: usize,
    pub(super) streams: usize,
    pub(super) ring_bytes: usize,
    doorbells: usize,
    controls: usize,
    data: usize,
    /// The length of the whole segment.
    pub(super) length: usize,
}

impl SegmentLayout {
    /// Computes the layout; `None` if a size is zero, too large, or not a power of two where it has
    /// to be.
    pub(super) fn new(ranks: usize, streams: usize, ring_bytes: usize) -> Option<Self> {
        let is_valid = (1..=MAX_RANKS).contains(&ranks)
            && (1..=usize::from(u16::MAX) + 1).contains(&streams)
            && (PAGE..=MAX_RING_BYTES).contains(&ring_bytes)
            && ring_bytes.is_power_of_two();
        if !is_valid {
            return None;
        }
        let rings = ranks * ranks * streams;
        let doorbells = PAGE + ranks * size_of::<RankEntry>();
        let controls = doorbells + ranks * streams * size_of::<Doorbell>();
        let data = (controls + rings * size_of::<RingControl>()).next_multiple_of(PAGE);
        // The kernel's file lengths are signed.
        let length = rings.checked_mul(ring_bytes)?.checked_add(data).filter(|length| *length <= isize::MAX as usize)?;
        Some(SegmentLayout { ranks, streams, ring_bytes, doorbells, controls, data, length })
    }

    pub(super) fn rank_entry(index: usize) -> usize {
        PAGE + index * size_of::<RankEntry>()
    }

    /// The doorbell of a rank for a stream.
    pub(super) fn doorbell(&self, index: usize, stream: usize) -> usize {
        assert!(index < self.ranks && stream < self.streams);
        self.doorbells + (index * self.streams + stream) * size_of::<Doorbell>()
    }

    /// The control block and the bytes of the ring from `source` to `destination` for a stream.
    pub(super) fn ring(&self, source: usize, destination: usize, stream: usize) -> (usize, usize) {
        assert!(source < self.ranks && destination < self.ranks && stream < self.streams);
        let ring = (source * self.ranks + destination) * self.streams + stream;
        (self.controls + ring * size_of::<RingControl>(), self.data + ring * self.ring_bytes)
    }
}
