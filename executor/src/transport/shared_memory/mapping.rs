//! A segment mapped into this process. All `unsafe` code that turns offsets into references is
//! here.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::super::TransportError;
use super::super::doorbell::Doorbell;
use super::layout::{Header, RankEntry, RingControl, SegmentLayout};

/// The mapped memory of a segment. Dropping it unmaps the memory.
#[derive(Debug)]
pub(super) struct Mapping {
    pointer: NonNull<u8>,
    length: usize,
}

// SAFETY: the memory is accessed only through atomics, and through regions of rings that belong to
// one side at a time.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// The memory of a ring. Valid as long as its mapping, which its holder keeps alive.
#[derive(Clone, Copy)]
pub(super) struct RawRing {
    pub(super) control: *const RingControl,
    pub(super) data: *mut u8,
    /// Length of `data` in bytes: a power of two.
    pub(super) capacity: usize,
}

impl Mapping {
    /// Maps `length` bytes of a file, at least one page.
    pub(super) fn new(descriptor: BorrowedFd<'_>, length: usize) -> Result<Self, TransportError> {
        // SAFETY: a new mapping at an address that the kernel chooses touches nothing that exists.
        let pointer =
            unsafe { mmap(std::ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, descriptor, 0) }
                .map_err(|error| {
                    TransportError::system(format!("map {length} bytes of memory shared by this machine's ranks"), error)
                })?;
        let pointer = NonNull::new(pointer.cast::<u8>())
            .ok_or_else(|| TransportError::Segment { reason: "it was mapped at address zero".to_owned() })?;
        Ok(Mapping { pointer, length })
    }

    fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset < self.length);
        // SAFETY: inside the mapping by the assertion.
        unsafe { self.pointer.as_ptr().add(offset) }
    }

    /// Writes the header and the ranks' entries of a new segment.
    ///
    /// # Safety
    /// No other process has the segment yet. The mapping has the layout's length.
    pub(super) unsafe fn initialise(&self, magic: u64, layout: &SegmentLayout, ranks: &[usize]) {
        let header = self.pointer.as_ptr().cast::<Header>();
        // SAFETY: the mapping is at least one page, zeroed and aligned to a page, and by the
        // caller's promise nothing else accesses it.
        unsafe {
            (*header).magic = magic;
            (*header).ranks = layout.ranks as u64;
            (*header).streams = layout.streams as u64;
            (*header).ring_bytes = layout.ring_bytes as u64;
        }
        for (index, rank) in ranks.iter().enumerate() {
            // SAFETY: the entry is inside the mapping, and nothing else accesses it.
            unsafe { (*self.rank_entry(index)).rank = *rank as u64 };
        }
    }

    pub(super) fn header(&self) -> &Header {
        // SAFETY: a mapping has at least one page. The plain fields do not change once other
        // processes see them.
        unsafe { &*self.pointer.as_ptr().cast::<Header>() }
    }

    fn rank_entry(&self, index: usize) -> *mut RankEntry {
        self.at(SegmentLayout::rank_entry(index)).cast()
    }

    /// The run's number of the rank at `index`, which must be one of the layout.
    pub(super) fn rank(&self, index: usize) -> usize {
        // SAFETY: the entry is inside the mapping, and the field does not change once other
        // processes see it.
        unsafe { (*self.rank_entry(index)).rank as usize }
    }

    /// The state of the rank at `index`, which must be one of the layout.
    pub(super) fn state(&self, index: usize) -> &AtomicU32 {
        // SAFETY: the entry is inside the mapping; the field is an atomic.
        unsafe { &(*self.rank_entry(index)).state }
    }

    /// The doorbell of the rank at `index` for a stream.
    pub(super) fn doorbell(&self, layout: &SegmentLayout, index: usize, stream: usize) -> &Doorbell {
        // SAFETY: the offset is inside the mapping, and aligned because the base and all sizes are
        // multiples of
        // 128. A doorbell consists of atomics, for which zero bytes are valid.
        unsafe { &*self.at(layout.doorbell(index, stream)).cast::<Doorbell>() }
    }

    /// The ring from `source` to `destination`, both indices of ranks, for a stream.
    pub(super) fn ring(&self, layout: &SegmentLayout, source: usize, destination: usize, stream: usize) -> RawRing {
        let (control, data) = layout.ring(source, destination, stream);
        RawRing { control: self.at(control).cast(), data: self.at(data), capacity: layout.ring_bytes }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours. Every holder of a pointer into it also holds an `Arc` of it.
        let _ = unsafe { munmap(self.pointer.as_ptr().cast(), self.length) };
    }
}
