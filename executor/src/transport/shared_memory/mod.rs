//! The transport between ranks of one machine: rings of bytes in one piece of shared memory.
//!
//! The launcher makes a [`Segment`] (an anonymous file that its children inherit, so that nothing stays behind after any
//! crash) and every rank attaches to it. For each (source, destination, stream) there is a ring with one producer and one
//! consumer; for each (rank, stream) a doorbell to sleep at. A rank that dies is noticed by the lock it held on the segment.

mod place;
mod ring;
mod segment;

pub use segment::{Segment, SegmentShape};

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::channel::{Channel, Patience};
use super::{StreamNumber, Transport, TransportError};
use ring::{RingReceiver, RingSender};
use segment::Attached;

/// The transport of one rank to the other ranks of its machine.
pub struct SharedMemory {
    attached: Arc<Attached>,
    world_size: usize,
    patience: Patience,
    opened: Mutex<HashSet<(usize, StreamNumber)>>,
}

impl fmt::Debug for SharedMemory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "SharedMemory(rank {} of {})", self.attached.rank(), self.world_size)
    }
}

impl SharedMemory {
    /// Joins `segment` as `rank`, which must be one of those the segment was made for and not be taken by another process.
    pub fn attach(segment: &Segment, rank: usize, world_size: usize, patience: Patience) -> Result<Self, TransportError> {
        let attached = Arc::new(Attached::new(segment, rank)?);
        Ok(SharedMemory { attached, world_size, patience, opened: Mutex::default() })
    }

    /// The ranks of this machine, this one included.
    pub fn ranks(&self) -> &[usize] {
        self.attached.segment().ranks()
    }
}

impl Transport for SharedMemory {
    fn rank(&self) -> usize {
        self.attached.rank()
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn open(&self, peer: usize, stream: StreamNumber) -> Result<Channel, TransportError> {
        let segment = self.attached.segment();
        let own_slot = self.attached.slot();
        let peer_slot = segment
            .slot_of(peer)
            .filter(|slot| *slot != own_slot)
            .ok_or(TransportError::NoSuchPeer { rank: peer, from: self.rank() })?;
        if usize::from(stream.0) >= segment.streams() {
            return Err(TransportError::NoSuchStream { rank: peer, stream, streams: segment.streams() });
        }
        if !self.opened.lock().unwrap_or_else(PoisonError::into_inner).insert((peer, stream)) {
            return Err(TransportError::AlreadyOpen { rank: peer, stream });
        }
        Ok(Channel {
            sender: Box::new(RingSender::new(Arc::clone(&self.attached), peer_slot, stream, self.patience)),
            receiver: Box::new(RingReceiver::new(Arc::clone(&self.attached), peer_slot, stream, self.patience)),
        })
    }

    fn nudge(&self, stream: StreamNumber) {
        if usize::from(stream.0) < self.attached.segment().streams() {
            self.attached.doorbell(self.attached.slot(), stream).ring();
        }
    }

    fn abort(&self, lost: Option<usize>) {
        self.attached.segment().abort(lost);
    }
}
