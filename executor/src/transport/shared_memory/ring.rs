//! The two ends of a ring of bytes with one producer and one consumer, each in a process of its own.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::channel::{Endpoint, Patience, ReceiveHalf, SendHalf, Waiter};
use super::super::message::{Incoming, Outgoing};
use super::super::{StreamNumber, TransportError};
use super::segment::{Attached, RawRing, RingControl};

/// So many bytes are moved before the other side is told: it starts on them while they are still in the cache.
const PIECE: u64 = 64 << 10;

/// What both ends have.
struct End {
    attached: Arc<Attached>,
    ring: RawRing,
    peer_slot: usize,
    stream: StreamNumber,
    patience: Patience,
}

// SAFETY: the pointers lead into a mapping that `attached` keeps alive and that any thread may use; an end has one owner.
unsafe impl Send for End {}

impl End {
    fn control(&self) -> &RingControl {
        // SAFETY: `attached` keeps the mapping alive, the segment computed the place, and the fields are atomics.
        unsafe { &*self.ring.control }
    }

    fn peer(&self) -> usize {
        self.attached.segment().ranks()[self.peer_slot]
    }

    fn capacity(&self) -> u64 {
        self.ring.capacity as u64
    }

    /// Bytes of the ring from `position` on, at most `count`, up to where it wraps around.
    fn contiguous(&self, position: u64, count: u64) -> (usize, usize) {
        let start = (position & (self.capacity() - 1)) as usize;
        (start, (count as usize).min(self.ring.capacity - start))
    }

    fn tell_peer(&self) {
        self.attached.doorbell(self.peer_slot, self.stream).ring();
    }

    fn waiter(&self) -> Waiter<'_> {
        Waiter::Doorbell(self.attached.doorbell(self.attached.slot(), self.stream))
    }

    fn corrupt(&self) -> TransportError {
        TransportError::Segment { reason: format!("the ring shared with rank {} on {} is corrupt", self.peer(), self.stream) }
    }
}

/// The producer.
pub(super) struct RingSender {
    end: End,
    written: u64,
    /// What the consumer had read when last looked at: looking again costs a cache miss.
    read_seen: u64,
}

impl RingSender {
    pub(super) fn new(attached: Arc<Attached>, peer_slot: usize, stream: StreamNumber, patience: Patience) -> Self {
        let ring = attached.ring(attached.slot(), peer_slot, stream);
        let end = End { attached, ring, peer_slot, stream, patience };
        let written = end.control().written.0.load(Ordering::Relaxed);
        let read_seen = end.control().read.0.load(Ordering::Acquire);
        RingSender { end, written, read_seen }
    }
}

impl SendHalf for RingSender {
    fn try_send(&mut self, message: &mut Outgoing<'_>) -> Result<usize, TransportError> {
        let rest = message.rest();
        let wanted = (rest.iter().map(|part| part.len() as u64).sum::<u64>()).min(PIECE);
        if self.end.capacity() - (self.written - self.read_seen) < wanted {
            let read = self.end.control().read.0.load(Ordering::Acquire);
            if self.written.wrapping_sub(read) > self.end.capacity() {
                return Err(self.end.corrupt());
            }
            self.read_seen = read;
        }
        let free = self.end.capacity() - (self.written - self.read_seen);
        let count = wanted.min(free);
        if count == 0 {
            return Ok(0);
        }
        let mut position = self.written;
        let until = self.written + count;
        for mut part in rest {
            while !part.is_empty() && position < until {
                let (start, length) = self.end.contiguous(position, until - position);
                let length = length.min(part.len());
                let (now, later) = part.split_at(length);
                // SAFETY: the `count` bytes from `written` on are free, so the consumer does not touch them until `written`
                // moves; `start + length` is within the ring; `now` is this process's own memory.
                unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), self.end.ring.data.add(start), length) };
                position += length as u64;
                part = later;
            }
        }
        self.written = until;
        self.end.control().written.0.store(until, Ordering::Release);
        self.end.tell_peer();
        message.advance(count as usize);
        Ok(count as usize)
    }
}

/// The consumer.
pub(super) struct RingReceiver {
    end: End,
    read: u64,
    written_seen: u64,
}

impl RingReceiver {
    pub(super) fn new(attached: Arc<Attached>, peer_slot: usize, stream: StreamNumber, patience: Patience) -> Self {
        let ring = attached.ring(peer_slot, attached.slot(), stream);
        let end = End { attached, ring, peer_slot, stream, patience };
        let read = end.control().read.0.load(Ordering::Relaxed);
        RingReceiver { end, read, written_seen: read }
    }
}

impl ReceiveHalf for RingReceiver {
    fn try_receive(&mut self, message: &mut Incoming<'_>) -> Result<usize, TransportError> {
        let wanted = (message.remaining() as u64).min(PIECE);
        if self.written_seen - self.read < wanted {
            let written = self.end.control().written.0.load(Ordering::Acquire);
            if written.wrapping_sub(self.read) > self.end.capacity() {
                return Err(self.end.corrupt());
            }
            self.written_seen = written;
        }
        let count = wanted.min(self.written_seen - self.read);
        if count == 0 {
            return Ok(0);
        }
        let until = self.read + count;
        let mut position = self.read;
        while position < until {
            let (start, length) = self.end.contiguous(position, until - position);
            // SAFETY: the bytes between `read` and `written` are the consumer's until `read` moves past them; the range is
            // within the ring; the slice is gone before `read` is stored.
            let bytes = unsafe { std::slice::from_raw_parts(self.end.ring.data.add(start), length) };
            message.accept(bytes).map_err(|wrong| TransportError::LengthMismatch {
                rank: self.end.peer(),
                stream: self.end.stream,
                expected: wrong.expected,
                announced: wrong.announced,
            })?;
            position += length as u64;
        }
        self.read = until;
        self.end.control().read.0.store(until, Ordering::Release);
        self.end.tell_peer();
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

    fn waiter(&self) -> Waiter<'_> {
        self.end.waiter()
    }

    fn check(&self) -> Result<(), TransportError> {
        self.end.attached.check(self.end.peer_slot)
    }

    fn patience(&self) -> Patience {
        self.end.patience
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

    fn waiter(&self) -> Waiter<'_> {
        self.end.waiter()
    }

    fn check(&self) -> Result<(), TransportError> {
        self.end.attached.check(self.end.peer_slot)
    }

    fn patience(&self) -> Patience {
        self.end.patience
    }
}
