//! PyTorch's caching allocator: how many bytes it reserves for the allocations and releases of a
//! step.
//!
//! Requests are rounded up to 512 bytes. Each stream has a pool of small and one of large blocks. A
//! request gets the smallest free block that is large enough, which is split if enough would be
//! left over. Adjacent free blocks are merged. If no block is large enough, the allocator reserves
//! a new segment. Source: `c10/cuda/CUDACachingAllocator.cpp`.

use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

const MIB: u64 = 1 << 20;
/// Requests up to this size come from segments of [`SMALL_SEGMENT`].
const SMALL: u64 = MIB;
const SMALL_SEGMENT: u64 = 2 * MIB;
/// Larger requests below [`LEAST_LARGE`] come from segments of this size. The others get their own
/// segment, rounded up to [`LARGE_ROUNDING`].
const LARGE_SEGMENT: u64 = 20 * MIB;
const LEAST_LARGE: u64 = 10 * MIB;
const LARGE_ROUNDING: u64 = 2 * MIB;
/// Every request is rounded up to a multiple of this.
const ROUNDING: u64 = 512;

/// Returns the bytes that the allocator hands out for a request of `bytes`.
pub(super) fn rounded(bytes: u64) -> u64 {
    bytes.max(1).next_multiple_of(ROUNDING)
}

/// A piece of a segment.
#[derive(Clone, Copy, Debug)]
struct SegmentBlock {
    size: u64,
    pool: u32,
    is_free: bool,
    previous: Option<u32>,
    next: Option<u32>,
}

/// The allocator's state.
#[derive(Debug, Default)]
pub(super) struct CachingAllocator {
    blocks: Vec<SegmentBlock>,
    /// Free blocks: pool, size and index in `blocks`.
    free: BTreeSet<(u32, u64, u32)>,
    held: FxHashMap<u64, u32>,
    /// Bytes in segments.
    reserved: u64,
    /// The most bytes in segments.
    pub(super) peak_reserved: u64,
    /// The device's memory for segments, if it is limited.
    limit: Option<u64>,
    /// How often it returned all cached segments for lack of memory. Each time stalls the device.
    pub(super) flushes: u64,
    /// Whether a request did not fit even after a flush: the job runs out of memory.
    pub(super) runs_out: bool,
}

impl CachingAllocator {
    /// Returns an empty allocator that may reserve `limit` bytes; without a limit, any number.
    pub(super) fn limited(limit: Option<u64>) -> Self {
        CachingAllocator { limit, ..CachingAllocator::default() }
    }

    /// Serves a request on a stream.
    pub(super) fn allocate(&mut self, id: u64, bytes: u64, stream: u32) {
        let size = rounded(bytes);
        let is_small = size <= SMALL;
        let pool = stream * 2 + u32::from(is_small);
        let found = self.free.range((pool, size, 0)..(pool + 1, 0, 0)).next().copied();
        let index = match found {
            Some(entry @ (_, _, index)) => {
                self.free.remove(&entry);
                index
            }
            None => self.segment(size, pool),
        };
        let rest = self.blocks[index as usize].size - size;
        if if is_small { rest >= ROUNDING } else { rest > SMALL } {
            let next = self.blocks[index as usize].next;
            let tail = self.add(SegmentBlock { size: rest, pool, is_free: true, previous: Some(index), next });
            if let Some(next) = next {
                self.blocks[next as usize].previous = Some(tail);
            }
            self.blocks[index as usize].size = size;
            self.blocks[index as usize].next = Some(tail);
            self.free.insert((pool, rest, tail));
        }
        self.blocks[index as usize].is_free = false;
        self.held.insert(id, index);
    }

    /// Releases the allocation `id`.
    pub(super) fn release(&mut self, id: u64) {
        let Some(mut index) = self.held.remove(&id) else { return };
        self.blocks[index as usize].is_free = true;
        let SegmentBlock { previous, next, .. } = self.blocks[index as usize];
        if let Some(next) = next.filter(|&next| self.blocks[next as usize].is_free) {
            self.take(next);
            self.merge(index, next);
        }
        if let Some(previous) = previous.filter(|&previous| self.blocks[previous as usize].is_free) {
            self.take(previous);
            self.merge(previous, index);
            index = previous;
        }
        let SegmentBlock { size, pool, .. } = self.blocks[index as usize];
        self.free.insert((pool, size, index));
    }

    fn add(&mut self, block: SegmentBlock) -> u32 {
        self.blocks.push(block);
        (self.blocks.len() - 1) as u32
    }

    fn take(&mut self, index: u32) {
        let SegmentBlock { size, pool, .. } = self.blocks[index as usize];
        self.free.remove(&(pool, size, index));
    }

    fn merge(&mut self, first: u32, second: u32) {
        let SegmentBlock { size, next, .. } = self.blocks[second as usize];
        self.blocks[first as usize].size += size;
        self.blocks[first as usize].next = next;
        if let Some(next) = next {
            self.blocks[next as usize].previous = Some(first);
        }
    }

    fn segment(&mut self, size: u64, pool: u32) -> u32 {
        let size = match size {
            _ if size <= SMALL => SMALL_SEGMENT,
            _ if size < LEAST_LARGE => LARGE_SEGMENT,
            _ => size.next_multiple_of(LARGE_ROUNDING),
        };
        if self.limit.is_some_and(|limit| self.reserved + size > limit) {
            self.flush();
            self.runs_out |= self.limit.is_some_and(|limit| self.reserved + size > limit);
        }
        self.reserved += size;
        self.peak_reserved = self.peak_reserved.max(self.reserved);
        self.add(SegmentBlock { size, pool, is_free: false, previous: None, next: None })
    }

    /// Returns all segments that are entirely free to the device.
    fn flush(&mut self) {
        self.flushes += 1;
        let blocks = &self.blocks;
        let is_whole = |index: u32| blocks[index as usize].previous.is_none() && blocks[index as usize].next.is_none();
        let returned: Vec<(u32, u64, u32)> = self.free.iter().copied().filter(|&(_, _, index)| is_whole(index)).collect();
        for entry in returned {
            self.reserved -= entry.1;
            self.free.remove(&entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_split_reused_and_merged() {
        let mut allocator = CachingAllocator::default();
        allocator.allocate(1, 12 * MIB, 0);
        assert_eq!(allocator.peak_reserved, 12 * MIB);
        allocator.release(1);
        // Both come from the same segment, and what is left of it is merged again.
        allocator.allocate(2, 4 * MIB, 0);
        allocator.allocate(3, 6 * MIB, 0);
        allocator.release(2);
        allocator.release(3);
        allocator.allocate(4, 12 * MIB, 0);
        assert_eq!(allocator.peak_reserved, 12 * MIB);
        // Another stream has blocks of its own, and small requests have segments of their own.
        allocator.allocate(5, 3 * MIB, 1);
        allocator.allocate(6, 100, 0);
        assert_eq!(allocator.peak_reserved, (12 + 20 + 2) * MIB);
    }

    #[test]
    fn a_full_device_returns_unused_segments() {
        let mut allocator = CachingAllocator::limited(Some(40 * MIB));
        allocator.allocate(1, 30 * MIB, 0);
        allocator.release(1);
        allocator.allocate(2, 36 * MIB, 0);
        assert_eq!((allocator.flushes, allocator.reserved, allocator.runs_out), (1, 36 * MIB, false));
        // Half of a segment is used, so it stays, and nothing else has room.
        allocator.release(2);
        allocator.allocate(3, 18 * MIB, 0);
        allocator.allocate(4, 24 * MIB, 0);
        assert!(allocator.runs_out);
    }
}
