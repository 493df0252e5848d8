//! The two ends of a byte ring with one producer and one consumer, each in its own process.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::endpoint::{Endpoint, ReceiveHalf, SendHalf, WaitPolicy, WakeSource};
use super::super::message::{Incoming, Outgoing};
use super::super::{StreamNumber, TransportError};
use super::layout::RingControl;
use super::mapping::RawRing;
use super::segment::Attachment;

/// The most bytes that are moved before the other side is told, so that it reads them while they
/// are still in the cache.
const PIECE: u64 = 64 << 10;

/// The fields that each end has for itself.
struct RingEnd {
    attachment: Arc<Attachment>,
    ring: RawRing,
    /// The peer's index in the segment.
    peer_index: usize,
    stream: StreamNumber,
    wait_policy: WaitPolicy,
}

// SAFETY: the pointers lead into a mapping that `attachment` keeps alive and that any thread may
// use. An end has one owner.
unsafe impl Send for RingEnd {}

impl RingEnd {
    fn control(&self) -> &RingControl {
        // SAFETY: `attachment` keeps the mapping alive, the segment computed the address, and the
        // fields are atomics.
        unsafe { &*self.ring.control }
    }

    fn peer(&self) -> usize {
        self.attachment.segment().ranks()[self.peer_index]
    }

    fn capacity(&self) -> u64 {
        self.ring.capacity as u64
    }

    /// The start and length of the longest contiguous range from `position` on, of at most `count`
    /// bytes.
    fn contiguous(&self, position: u64, count: u64) -> (usize, usize) {
        let start = (position & (self.capacity() - 1)) as usize;
        (start, (count as usize).min(self.ring.capacity - start))
    }

    fn wake_peer(&self) {
        self.attachment.doorbell(self.peer_index, self.stream).ring();
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Doorbell(self.attachment.doorbell(self.attachment.index(), self.stream))
    }

    fn corrupt(&self) -> TransportError {
        TransportError::Segment { reason: format!("the ring shared with rank {} on {} is corrupt", self.peer(), self.stream) }
    }
}

/// The producing end.
pub(super) struct RingSender {
    end: RingEnd,
    written: u64,
    /// The consumer's position when it was last read. Reading it again costs a cache miss.
    last_read: u64,
}

impl RingSender {
    pub(super) fn new(attachment: Arc<Attachment>, peer_index: usize, stream: StreamNumber, wait_policy: WaitPolicy) -> Self {
        let ring = attachment.ring(attachment.index(), peer_index, stream);
        let end = RingEnd { attachment, ring, peer_index, stream, wait_policy };
        let written = end.control().written.0.load(Ordering::Relaxed);
        let last_read = end.control().read.0.load(Ordering::Acquire);
        RingSender { end, written, last_read }
    }
}

impl SendHalf for RingSender {
    fn try_send(&mut self, message: &mut Outgoing<'_>) -> Result<usize, TransportError> {
        let rest = message.rest();
        let wanted = (rest.iter().map(|part| part.len() as u64).sum::<u64>()).min(PIECE);
        if self.end.capacity() - (self.written - self.last_read) < wanted {
            let read = self.end.control().read.0.load(Ordering::Acquire);
            if self.written.wrapping_sub(read) > self.end.capacity() {
                return Err(self.end.corrupt());
            }
            self.last_read = read;
        }
        let free = self.end.capacity() - (self.written - self.last_read);
        let count = wanted.min(free);
        if count == 0 {
            return Ok(0);
        }
        let mut position = self.written;
        let end = self.written + count;
        for mut part in rest {
            while !part.is_empty() && position < end {
                let (start, length) = self.end.contiguous(position, end - position);
                let length = length.min(part.len());
                let (piece, later) = part.split_at(length);
                // SAFETY: the `count` bytes from `written` on are free, so the consumer does not
                // touch them until `written` moves; `start + length` is within the ring; `piece` is
                // this process's own memory.
                unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), self.end.ring.data.add(start), length) };
                position += length as u64;
                part = later;
            }
        }
        self.written = end;
        self.end.control().written.0.store(end, Ordering::Release);
        self.end.wake_peer();
        message.advance(count as usize);
        Ok(count as usize)
    }
}

/// The consuming end.
pub(super) struct RingReceiver {
    end: RingEnd,
    read: u64,
    /// The producer's position when it was last read.
    last_written: u64,
}

impl RingReceiver {
    pub(super) fn new(attachment: Arc<Attachment>, peer_index: usize, stream: StreamNumber, wait_policy: WaitPolicy) -> Self {
        let ring = attachment.ring(peer_index, attachment.index(), stream);
        let end = RingEnd { attachment, ring, peer_index, stream, wait_policy };
        let read = end.control().read.0.load(Ordering::Relaxed);
        RingReceiver { end, read, last_written: read }
    }
}

impl ReceiveHalf for RingReceiver {
    fn try_receive(&mut self, message: &mut Incoming<'_>) -> Result<usize, TransportError> {
        let wanted = (message.remaining() as u64).min(PIECE);
        if self.last_written - self.read < wanted {
            let written = self.end.control().written.0.load(Ordering::Acquire);
            if written.wrapping_sub(self.read) > self.end.capacity() {
                return Err(self.end.corrupt());
            }
            self.last_written = written;
        }
        let count = wanted.min(self.last_written - self.read);
        if count == 0 {
            return Ok(0);
        }
        let end = self.read + count;
        let mut position = self.read;
        while position < end {
            let (start, length) = self.end.contiguous(position, end - position);
            // SAFETY: the bytes between `read` and `written` are the consumer's until `read` moves
            // past them; the range is within the ring; the slice is gone before `read` is stored.
            let bytes = unsafe { std::slice::from_raw_parts(self.end.ring.data.add(start), length) };
            message.accept(bytes).map_err(|wrong| TransportError::LengthMismatch {
                rank: self.end.peer(),
                stream: self.end.stream,
                expected: wrong.expected,
                announced: wrong.announced,
            })?;
            position += length as u64;
        }
        self.read = end;
        self.end.control().read.0.store(end, Ordering::Release);
        self.end.wake_peer();
        Ok(count as usize)
    }
}

impl Endpoint for RingSender {
    fn peer(&self) -> usize {
        self.end.peer()
    }

    fn stream(&self) -> StreamNumber {
        self.end.stream
    }

    fn ready(&self) -> bool {
        self.written.wrapping_sub(self.end.control().read.0.load(Ordering::Acquire)) != self.end.capacity()
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.end.wake_source()
    }

    fn check(&self) -> Result<(), TransportError> {
        self.end.attachment.check(self.end.peer_index)
    }

    fn wait_policy(&self) -> WaitPolicy {
        self.end.wait_policy
    }
}

impl Endpoint for RingReceiver {
    fn peer(&self) -> usize {
        self.end.peer()
    }

    fn stream(&self) -> StreamNumber {
        self.end.stream
    }

    fn ready(&self) -> bool {
        self.end.control().written.0.load(Ordering::Acquire) != self.read
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.end.wake_source()
    }

    fn check(&self) -> Result<(), TransportError> {
        self.end.attachment.check(self.end.peer_index)
    }

    fn wait_policy(&self) -> WaitPolicy {
        self.end.wait_policy
    }
}
