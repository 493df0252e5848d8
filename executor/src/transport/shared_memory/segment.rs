//! The piece of memory that all ranks of a machine share: how it is laid out, made, inherited, attached to and aborted.
//!
//! It knows nothing of messages. All `unsafe` that turns offsets into references is in this file.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::super::channel::Doorbell;
use super::super::{StreamNumber, TransportError};
use super::place::{is_locked, lock, open_description};

/// Children learn the number of the inherited file descriptor from this variable.
const ENVIRONMENT_VARIABLE: &str = "FORETELL_SHARED_MEMORY";
const MAGIC: u64 = u64::from_le_bytes(*b"foretel1");
const PAGE: usize = 4096;
/// A machine has no more ranks than this; it bounds the table and, with the next, the size of a segment.
const MOST_RANKS: usize = 1024;
const MOST_RING_BYTES: usize = 1 << 30;

const NOT_ABORTED: u32 = 0;
const ABORTED_BY_LAUNCHER: u32 = u32::MAX;

const NEVER_ATTACHED: u32 = 0;
const ATTACHED: u32 = 1;
const LEFT: u32 = 2;

/// What a segment is made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentShape {
    /// The ranks of this machine, by their numbers in the whole run.
    pub ranks: Vec<usize>,
    /// How many streams there are; memory is only used for those opened.
    pub streams: usize,
    /// Bytes a ring holds: a power of two, a page at least.
    pub ring_bytes: usize,
}

impl SegmentShape {
    /// The ring size that did best on the machine this was written on (see `benchmark_shared_memory` in the tests): large enough
    /// to keep both sides busy, small enough for both directions to stay in a core's second-level cache.
    pub const DEFAULT_RING_BYTES: usize = 256 << 10;

    /// A shape with the default size of rings.
    pub fn new(ranks: Vec<usize>, streams: usize) -> Self {
        SegmentShape { ranks, streams, ring_bytes: Self::DEFAULT_RING_BYTES }
    }
}

/// The first page.
#[repr(C)]
struct Header {
    magic: u64,
    ranks: u64,
    streams: u64,
    ring_bytes: u64,
    abort: Lined<AtomicU32>,
}

/// One rank's entry in the table after the header.
#[repr(C, align(128))]
struct RankEntry {
    rank: u64,
    state: AtomicU32,
}

/// A value alone on its pair of cache lines (processors fetch them by two).
#[repr(C, align(128))]
pub(super) struct Lined<T>(pub(super) T);

/// How far a ring was written and read, in bytes since the start; both only grow.
#[repr(C)]
pub(super) struct RingControl {
    pub(super) written: Lined<AtomicU64>,
    pub(super) read: Lined<AtomicU64>,
}

/// Where everything lies, computed alike by all processes.
#[derive(Clone, Copy, Debug)]
struct Layout {
    ranks: usize,
    streams: usize,
    ring_bytes: usize,
    doorbells: usize,
    controls: usize,
    data: usize,
    length: usize,
}

impl Layout {
    fn new(ranks: usize, streams: usize, ring_bytes: usize) -> Option<Self> {
        let sensible = (1..=MOST_RANKS).contains(&ranks)
            && (1..=usize::from(u16::MAX) + 1).contains(&streams)
            && (PAGE..=MOST_RING_BYTES).contains(&ring_bytes)
            && ring_bytes.is_power_of_two();
        if !sensible {
            return None;
        }
        let rings = ranks * ranks * streams;
        let doorbells = PAGE + ranks * size_of::<RankEntry>();
        let controls = doorbells + ranks * streams * size_of::<Doorbell>();
        let data = (controls + rings * size_of::<RingControl>()).next_multiple_of(PAGE);
        // The kernel counts lengths in signed numbers.
        let length = rings.checked_mul(ring_bytes)?.checked_add(data).filter(|length| *length <= isize::MAX as usize)?;
        Some(Layout { ranks, streams, ring_bytes, doorbells, controls, data, length })
    }
}

/// The shared memory of a machine's ranks. The launcher keeps it until they have ended, and may [`abort`](Self::abort) through it.
#[derive(Debug)]
pub struct Segment {
    descriptor: OwnedFd,
    mapping: Arc<Mapping>,
    layout: Layout,
    ranks: Vec<usize>,
}

impl Segment {
    /// Makes a new segment. Its memory is only really taken where it is touched.
    pub fn create(shape: &SegmentShape) -> Result<Self, TransportError> {
        let layout = Layout::new(shape.ranks.len(), shape.streams, shape.ring_bytes).ok_or_else(|| TransportError::Segment {
            reason: format!(
                "{} ranks, {} streams and rings of {} bytes were asked for; at least one of each, and a power of two of bytes, are needed",
                shape.ranks.len(),
                shape.streams,
                shape.ring_bytes
            ),
        })?;
        let system =
            |doing: &str, error| TransportError::system(format!("{doing} the shared memory of this machine's ranks"), error);
        let descriptor =
            memfd_create("foretell", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(|error| system("create", error))?;
        ftruncate(&descriptor, layout.length as u64).map_err(|error| system("size", error))?;
        // Sealed, no process can cut it short and so kill the others by a bus error.
        fcntl_add_seals(&descriptor, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|error| system("seal", error))?;
        let mapping = Arc::new(Mapping::new(descriptor.as_fd(), layout.length)?);
        let header = mapping.pointer.as_ptr().cast::<Header>();
        // SAFETY: the mapping is at least one page, zeroed, aligned to a page, and no other process has it yet.
        unsafe {
            (*header).magic = MAGIC;
            (*header).ranks = layout.ranks as u64;
            (*header).streams = layout.streams as u64;
            (*header).ring_bytes = layout.ring_bytes as u64;
        }
        for (slot, rank) in shape.ranks.iter().enumerate() {
            // SAFETY: `slot` is below `layout.ranks`, so the entry is inside the mapping; nobody else has it yet.
            unsafe { (*mapping.rank_entry(slot)).rank = *rank as u64 };
        }
        Ok(Segment { descriptor, mapping, layout, ranks: shape.ranks.clone() })
    }

    /// Lets the child that `command` will start inherit the segment, and tells it so by its environment.
    pub fn pass_to(&self, command: &mut Command) {
        let descriptor = self.descriptor.as_raw_fd();
        command.env(ENVIRONMENT_VARIABLE, descriptor.to_string());
        // SAFETY: between fork and exec the closure makes one system call, allocates nothing and takes no lock; the descriptor
        // is open in the child because it was in the parent. It is cleared there only, so no other child inherits it.
        unsafe {
            command.pre_exec(move || {
                let descriptor = BorrowedFd::borrow_raw(descriptor);
                fcntl_setfd(descriptor, FdFlags::empty()).map_err(Into::into)
            });
        }
    }

    /// The segment that the launcher passed to this process; `None` if there is none.
    pub fn from_environment() -> Result<Option<Self>, TransportError> {
        let Some(text) = std::env::var_os(ENVIRONMENT_VARIABLE) else { return Ok(None) };
        let number =
            text.to_str().and_then(|text| text.parse::<RawFd>().ok()).filter(|number| *number >= 0).ok_or_else(|| {
                TransportError::Segment { reason: format!("{ENVIRONMENT_VARIABLE} is not the number of a file descriptor") }
            })?;
        let file = open_description(number)?;
        // SAFETY: the descriptor was open a line above, and is borrowed for one call only.
        let inherited = unsafe { BorrowedFd::borrow_raw(number) };
        // Our own children need not have it. Failing that, nothing is lost but neatness.
        let _ = fcntl_setfd(inherited, FdFlags::CLOEXEC);
        Self::from_descriptor(file.into()).map(Some)
    }

    fn from_descriptor(descriptor: OwnedFd) -> Result<Self, TransportError> {
        let wrong = |reason: &str| TransportError::Segment { reason: reason.to_owned() };
        let seals = fcntl_get_seals(&descriptor).map_err(|_| wrong("it is not an anonymous file"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(wrong("it is not sealed against shrinking"));
        }
        let length =
            fstat(&descriptor).map_err(|error| TransportError::system("inspect the shared memory", error))?.st_size as usize;
        if length < PAGE {
            return Err(wrong("it is too short"));
        }
        let mapping = Arc::new(Mapping::new(descriptor.as_fd(), length)?);
        let header = mapping.header();
        let layout = Layout::new(header.ranks as usize, header.streams as usize, header.ring_bytes as usize)
            .filter(|layout| header.magic == MAGIC && layout.length == length)
            .ok_or_else(|| wrong("its header is not that of a segment of this version of foretell"))?;
        // SAFETY: every slot is inside the mapping, whose length was just checked, and `rank` does not change once made.
        let ranks = (0..layout.ranks).map(|slot| unsafe { (*mapping.rank_entry(slot)).rank as usize }).collect();
        Ok(Segment { descriptor, mapping, layout, ranks })
    }

    /// The ranks of this machine.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// How many streams there are.
    pub fn streams(&self) -> usize {
        self.layout.streams
    }

    /// Makes every rank's present and future waits fail: with the loss of `lost`, or as aborted. The first call decides.
    pub fn abort(&self, lost: Option<usize>) {
        let word = lost.and_then(|rank| u32::try_from(rank).ok()).map_or(ABORTED_BY_LAUNCHER, |rank| rank.saturating_add(1));
        let _ = self.mapping.header().abort.0.compare_exchange(NOT_ABORTED, word, Ordering::AcqRel, Ordering::Relaxed);
        for slot in 0..self.layout.ranks {
            for stream in 0..self.layout.streams {
                self.doorbell_at(slot, stream).ring();
            }
        }
    }

    pub(super) fn slot_of(&self, rank: usize) -> Option<usize> {
        self.ranks.iter().position(|candidate| *candidate == rank)
    }

    fn doorbell_at(&self, slot: usize, stream: usize) -> &Doorbell {
        assert!(slot < self.layout.ranks && stream < self.layout.streams);
        let offset = self.layout.doorbells + (slot * self.layout.streams + stream) * size_of::<Doorbell>();
        // SAFETY: inside the mapping by the assertion, aligned because the base and all sizes are multiples of 128, and made of
        // atomics only, of which zero bytes are valid.
        unsafe { &*self.mapping.at(offset).cast::<Doorbell>() }
    }

    fn abort_error(&self) -> Result<(), TransportError> {
        match self.mapping.header().abort.0.load(Ordering::Acquire) {
            NOT_ABORTED => Ok(()),
            ABORTED_BY_LAUNCHER => Err(TransportError::Aborted),
            word => Err(TransportError::PeerLost { rank: word as usize - 1 }),
        }
    }
}

/// A rank's own hold on the segment: while it lives, the others know that the rank does.
pub(super) struct Attached {
    segment: Segment,
    slot: usize,
}

impl Attached {
    pub(super) fn new(segment: &Segment, rank: usize) -> Result<Self, TransportError> {
        let slot = segment
            .slot_of(rank)
            .ok_or_else(|| TransportError::Segment { reason: format!("it was not made for rank {rank}") })?;
        // Locks belong to an open file description, which dies with its process: so each rank needs one of its own.
        let descriptor: OwnedFd = open_description(segment.descriptor.as_raw_fd())?.into();
        lock(descriptor.as_fd(), slot)
            .map_err(|error| TransportError::system(format!("take the place of rank {rank} in the shared memory"), error))?;
        let segment =
            Segment { descriptor, mapping: Arc::clone(&segment.mapping), layout: segment.layout, ranks: segment.ranks.clone() };
        segment.mapping.state(slot).store(ATTACHED, Ordering::Release);
        Ok(Attached { segment, slot })
    }

    pub(super) fn segment(&self) -> &Segment {
        &self.segment
    }

    pub(super) fn slot(&self) -> usize {
        self.slot
    }

    pub(super) fn rank(&self) -> usize {
        self.segment.ranks[self.slot]
    }

    /// An error if the run was aborted, or if the rank in `slot` was here and is not any more.
    pub(super) fn check(&self, slot: usize) -> Result<(), TransportError> {
        self.segment.abort_error()?;
        let gone = match self.segment.mapping.state(slot).load(Ordering::Acquire) {
            NEVER_ATTACHED => false,
            ATTACHED => !is_locked(self.segment.descriptor.as_fd(), slot),
            _ => true,
        };
        if gone { Err(TransportError::PeerLost { rank: self.segment.ranks[slot] }) } else { Ok(()) }
    }

    /// The doorbell of the rank in `slot` for `stream`.
    pub(super) fn doorbell(&self, slot: usize, stream: StreamNumber) -> &Doorbell {
        self.segment.doorbell_at(slot, usize::from(stream.0))
    }

    /// The ring from `source` to `destination` (both slots) on `stream`.
    pub(super) fn ring(&self, source: usize, destination: usize, stream: StreamNumber) -> RawRing {
        let layout = &self.segment.layout;
        let stream = usize::from(stream.0);
        assert!(source < layout.ranks && destination < layout.ranks && stream < layout.streams);
        let index = (source * layout.ranks + destination) * layout.streams + stream;
        RawRing {
            control: self.segment.mapping.at(layout.controls + index * size_of::<RingControl>()).cast(),
            data: self.segment.mapping.at(layout.data + index * layout.ring_bytes),
            capacity: layout.ring_bytes,
        }
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.segment.mapping.state(self.slot).store(LEFT, Ordering::Release);
    }
}

/// Where a ring lies. Valid as long as the [`Attached`] it came from; its holder keeps that alive beside it.
#[derive(Clone, Copy)]
pub(super) struct RawRing {
    pub(super) control: *const RingControl,
    pub(super) data: *mut u8,
    pub(super) capacity: usize,
}

#[derive(Debug)]
struct Mapping {
    pointer: NonNull<u8>,
    length: usize,
}

// SAFETY: the memory is only reached through atomics and through ring regions that their indices give to one side at a time.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(descriptor: BorrowedFd<'_>, length: usize) -> Result<Self, TransportError> {
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

    fn header(&self) -> &Header {
        // SAFETY: a mapping has a page at least; the plain fields never change once other processes see them.
        unsafe { &*self.pointer.as_ptr().cast::<Header>() }
    }

    fn rank_entry(&self, slot: usize) -> *mut RankEntry {
        self.at(PAGE + slot * size_of::<RankEntry>()).cast()
    }

    fn state(&self, slot: usize) -> &AtomicU32 {
        // SAFETY: callers pass slots of the layout, so the entry is inside the mapping; the field is an atomic.
        unsafe { &(*self.rank_entry(slot)).state }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and whoever holds a pointer into it holds an `Arc` of it too.
        let _ = unsafe { munmap(self.pointer.as_ptr().cast(), self.length) };
    }
}
