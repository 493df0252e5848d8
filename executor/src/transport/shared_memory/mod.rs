//! The transport between ranks of one machine: byte rings in a shared memory segment.
//!
//! The launcher creates a [`Segment`]. It is an anonymous file that child processes inherit, so
//! nothing stays behind after a crash. Every rank attaches to it. Each source, destination and
//! stream has a ring with one producer and one consumer; each rank and stream has a doorbell to
//! sleep on. A rank holds a lock on the segment, which shows the others that it lives.

mod layout;
mod liveness;
mod mapping;
mod ring;
mod segment;

pub use segment::{Segment, SegmentShape};

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::channel::Channel;
use super::endpoint::WaitPolicy;
use super::{StreamNumber, Transport, TransportError};
use ring::{RingReceiver, RingSender};
use segment::Attachment;

/// The transport of one rank to the other ranks of its machine.
pub struct SharedMemory {
    attachment: Arc<Attachment>,
    world_size: usize,
    wait_policy: WaitPolicy,
    /// The channels that this rank has opened.
    opened: Mutex<HashSet<(usize, StreamNumber)>>,
}

impl fmt::Debug for SharedMemory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "SharedMemory(rank {} of {})", self.attachment.rank(), self.world_size)
    }
}

impl SharedMemory {
    /// Attaches to `segment` as `rank`. The segment must have been created for this rank, and no
    /// other process may have attached as it.
    pub fn attach(segment: &Segment, rank: usize, world_size: usize, wait_policy: WaitPolicy) -> Result<Self, TransportError> {
        let attachment = Arc::new(Attachment::new(segment, rank)?);
        Ok(SharedMemory { attachment, world_size, wait_policy, opened: Mutex::default() })
    }

    /// The ranks of this machine, this one included.
    pub fn ranks(&self) -> &[usize] {
        self.attachment.segment().ranks()
    }
}

impl Transport for SharedMemory {
    fn rank(&self) -> usize {
        self.attachment.rank()
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn open(&self, peer: usize, stream: StreamNumber) -> Result<Channel, TransportError> {
        let segment = self.attachment.segment();
        let own_index = self.attachment.index();
        let peer_index = segment
            .index_of(peer)
            .filter(|index| *index != own_index)
            .ok_or(TransportError::NoSuchPeer { rank: peer, from: self.rank() })?;
        if usize::from(stream.0) >= segment.streams() {
            return Err(TransportError::NoSuchStream { rank: peer, stream, streams: segment.streams() });
        }
        if !self.opened.lock().unwrap_or_else(PoisonError::into_inner).insert((peer, stream)) {
            return Err(TransportError::AlreadyOpen { rank: peer, stream });
        }
        Ok(Channel {
            sender: Box::new(RingSender::new(Arc::clone(&self.attachment), peer_index, stream, self.wait_policy)),
            receiver: Box::new(RingReceiver::new(Arc::clone(&self.attachment), peer_index, stream, self.wait_policy)),
        })
    }

    fn nudge(&self, stream: StreamNumber) {
        if usize::from(stream.0) < self.attachment.segment().streams() {
            self.attachment.doorbell(self.attachment.index(), stream).ring();
        }
    }

    fn abort(&self, lost: Option<usize>) {
        self.attachment.segment().abort(lost);
    }
}
