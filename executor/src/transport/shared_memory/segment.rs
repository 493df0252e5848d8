//! The shared memory segment of a machine's ranks: how it is created, inherited, attached to and
//! aborted. It knows nothing of messages.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::{FdFlags, fcntl_setfd};

use super::super::doorbell::Doorbell;
use super::super::{StreamNumber, TransportError};
use super::layout::{ATTACHED, LEFT, NEVER_ATTACHED, PAGE, SegmentLayout};
use super::liveness::{is_locked, lock, open_description};
use super::mapping::{Mapping, RawRing};

/// The variable in which child processes find the number of the inherited file descriptor.
const ENVIRONMENT_VARIABLE: &str = "FORETELL_SHARED_MEMORY";
/// The first bytes of a segment. They change with the layout.
const MAGIC: u64 = u64::from_le_bytes(*b"foretel1");

/// The sizes of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentShape {
    /// The ranks of this machine, by their numbers in the run.
    pub ranks: Vec<usize>,
    /// The number of streams. Only those that are opened use memory.
    pub streams: usize,
    /// The capacity of a ring in bytes: a power of two, and at least a page.
    pub ring_bytes: usize,
}

impl SegmentShape {
    /// The fastest ring size on the development machine (`executor/benches/transport.rs`): large
    /// enough to keep both sides busy, small enough for both directions to stay in a core's
    /// second-level cache.
    pub const DEFAULT_RING_BYTES: usize = 256 << 10;

    /// A shape with rings of the default size.
    pub fn new(ranks: Vec<usize>, streams: usize) -> Self {
        SegmentShape { ranks, streams, ring_bytes: Self::DEFAULT_RING_BYTES }
    }
}

/// The shared memory of a machine's ranks. The launcher keeps it until they have ended, and can
/// [`abort`](Self::abort) the run through it.
#[derive(Debug)]
pub struct Segment {
    descriptor: OwnedFd,
    mapping: Arc<Mapping>,
    layout: SegmentLayout,
    /// The ranks' numbers in the run, by index in the segment.
    ranks: Vec<usize>,
}

impl Segment {
    /// Creates a segment. The kernel allocates its pages when they are first used.
    pub fn create(shape: &SegmentShape) -> Result<Self, TransportError> {
        let SegmentShape { ranks, streams, ring_bytes } = shape;
        let layout = SegmentLayout::new(ranks.len(), *streams, *ring_bytes).ok_or_else(|| TransportError::Segment {
            reason: format!(
                "{} ranks, {streams} streams and rings of {ring_bytes} bytes were asked for; at least one of each is needed, and a power of two of bytes",
                ranks.len(),
            ),
        })?;
        let system =
            |doing: &str, error| TransportError::system(format!("{doing} the shared memory of this machine's ranks"), error);
        let descriptor =
            memfd_create("foretell", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(|error| system("create", error))?;
        ftruncate(&descriptor, layout.length as u64).map_err(|error| system("size", error))?;
        // Without the seals a process could shorten the file, and the others would die of a bus
        // error.
        fcntl_add_seals(&descriptor, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|error| system("seal", error))?;
        let mapping = Arc::new(Mapping::new(descriptor.as_fd(), layout.length)?);
        // SAFETY: the file was created here, so no other process has it yet.
        unsafe { mapping.initialise(MAGIC, &layout, ranks) };
        Ok(Segment { descriptor, mapping, layout, ranks: ranks.clone() })
    }

    /// Makes the process that `command` will start inherit the segment, and tells it in its
    /// environment.
    pub fn pass_to(&self, command: &mut Command) {
        let descriptor = self.descriptor.as_raw_fd();
        command.env(ENVIRONMENT_VARIABLE, descriptor.to_string());
        // SAFETY: between fork and exec the closure makes one system call, allocates nothing and
        // takes no lock. The descriptor is open in the child because it was open in the parent. The
        // flag is cleared in this child only, so no other child inherits the descriptor.
        unsafe {
            command.pre_exec(move || {
                let descriptor = BorrowedFd::borrow_raw(descriptor);
                fcntl_setfd(descriptor, FdFlags::empty()).map_err(Into::into)
            });
        }
    }

    /// The segment that this process has inherited; `None` if it has not inherited one.
    pub fn from_environment() -> Result<Option<Self>, TransportError> {
        let Some(text) = std::env::var_os(ENVIRONMENT_VARIABLE) else { return Ok(None) };
        let number =
            text.to_str().and_then(|text| text.parse::<RawFd>().ok()).filter(|number| *number >= 0).ok_or_else(|| {
                TransportError::Segment { reason: format!("{ENVIRONMENT_VARIABLE} is not the number of a file descriptor") }
            })?;
        let file = open_description(number)?;
        // SAFETY: the descriptor was open a line above, and is borrowed for one call only.
        let inherited = unsafe { BorrowedFd::borrow_raw(number) };
        // Child processes of this rank do not need it. If the call fails, they have one descriptor
        // too many.
        let _ = fcntl_setfd(inherited, FdFlags::CLOEXEC);
        Self::from_descriptor(file.into()).map(Some)
    }

    fn from_descriptor(descriptor: OwnedFd) -> Result<Self, TransportError> {
        let invalid = |reason: &str| TransportError::Segment { reason: reason.to_owned() };
        let seals = fcntl_get_seals(&descriptor).map_err(|_| invalid("it is not an anonymous file"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(invalid("it is not sealed against shrinking"));
        }
        let length =
            fstat(&descriptor).map_err(|error| TransportError::system("inspect the shared memory", error))?.st_size as usize;
        if length < PAGE {
            return Err(invalid("it is too short"));
        }
        let mapping = Arc::new(Mapping::new(descriptor.as_fd(), length)?);
        let header = mapping.header();
        let layout = SegmentLayout::new(header.ranks as usize, header.streams as usize, header.ring_bytes as usize)
            .filter(|layout| header.magic == MAGIC && layout.length == length)
            .ok_or_else(|| invalid("its header is not that of a segment of this version of foretell"))?;
        let ranks = (0..layout.ranks).map(|index| mapping.rank(index)).collect();
        Ok(Segment { descriptor, mapping, layout, ranks })
    }

    /// The ranks of this machine.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// The number of streams.
    pub fn streams(&self) -> usize {
        self.layout.streams
    }

    /// Makes all present and future waits of the ranks fail: with the loss of `lost`, or without
    /// one as aborted. Only the first call has an effect.
    pub fn abort(&self, lost: Option<usize>) {
        self.mapping.header().abort.0.set(lost);
        for index in 0..self.layout.ranks {
            for stream in 0..self.layout.streams {
                self.mapping.doorbell(&self.layout, index, stream).ring();
            }
        }
    }

    /// The index of a rank in the segment.
    pub(super) fn index_of(&self, rank: usize) -> Option<usize> {
        self.ranks.iter().position(|candidate| *candidate == rank)
    }
}

/// A rank's own hold on the segment. As long as it exists, the other ranks see that this one lives.
pub(super) struct Attachment {
    segment: Segment,
    index: usize,
}

impl Attachment {
    pub(super) fn new(segment: &Segment, rank: usize) -> Result<Self, TransportError> {
        let index = segment
            .index_of(rank)
            .ok_or_else(|| TransportError::Segment { reason: format!("it was not created for rank {rank}") })?;
        // A lock belongs to an open file description, so each rank needs one of its own.
        let descriptor: OwnedFd = open_description(segment.descriptor.as_raw_fd())?.into();
        lock(descriptor.as_fd(), index)
            .map_err(|error| TransportError::system(format!("attach to the shared memory as rank {rank}"), error))?;
        let segment =
            Segment { descriptor, mapping: Arc::clone(&segment.mapping), layout: segment.layout, ranks: segment.ranks.clone() };
        segment.mapping.state(index).store(ATTACHED, Ordering::Release);
        Ok(Attachment { segment, index })
    }

    pub(super) fn segment(&self) -> &Segment {
        &self.segment
    }

    /// This rank's index in the segment.
    pub(super) fn index(&self) -> usize {
        self.index
    }

    pub(super) fn rank(&self) -> usize {
        self.segment.ranks[self.index]
    }

    /// Returns an error if the run was aborted, or if the rank at `index` has attached and is gone.
    pub(super) fn check(&self, index: usize) -> Result<(), TransportError> {
        self.segment.mapping.header().abort.0.check()?;
        let is_gone = match self.segment.mapping.state(index).load(Ordering::Acquire) {
            NEVER_ATTACHED => false,
            ATTACHED => !is_locked(self.segment.descriptor.as_fd(), index),
            _ => true,
        };
        if is_gone { Err(TransportError::PeerLost { rank: self.segment.ranks[index], reason: None }) } else { Ok(()) }
    }

    /// The doorbell of the rank at `index` for `stream`.
    pub(super) fn doorbell(&self, index: usize, stream: StreamNumber) -> &Doorbell {
        self.segment.mapping.doorbell(&self.segment.layout, index, usize::from(stream.0))
    }

    /// The ring from `source` to `destination`, both indices of ranks, for `stream`.
    pub(super) fn ring(&self, source: usize, destination: usize, stream: StreamNumber) -> RawRing {
        self.segment.mapping.ring(&self.segment.layout, source, destination, usize::from(stream.0))
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.segment.mapping.state(self.index).store(LEFT, Ordering::Release);
    }
}
