//! The two halves of a channel over MPI.
//!
//! A message goes in segments of at most [`SEGMENT_BYTES`], the first of which begins with the
//! message's length. No segment has bytes of two messages. MPI keeps the order of segments between
//! two ranks with one tag. Both halves copy, so that no memory of the caller is lent to MPI.

use super::super::channel::Channel;
use super::super::endpoint::{Endpoint, ReceiveHalf, SendHalf, WaitPolicy, WakeSource};
use super::super::link::Traffic;
use super::super::message::{Incoming, Outgoing, WrongLength};
use super::super::{StreamNumber, TransportError};
use super::engine::{Direction, Engine, Slot};
use std::sync::Arc;

/// The most bytes of a segment: one stays in a second-level cache, as with TCP's records.
const SEGMENT_BYTES: usize = 128 << 10;
/// Segments in transit in one direction: one is transferred while the other is filled or read.
const SLOTS: usize = 2;

/// The state that both halves of a channel share.
pub(super) struct Line {
    pub(super) peer: usize,
    pub(super) stream: StreamNumber,
    pub(super) traffic: Traffic,
    pub(super) engine: Arc<Engine>,
}

/// Makes the channel over a line. The channel starts to receive at once.
pub(super) fn channel(line: &Arc<Line>) -> Result<Channel, TransportError> {
    let slots = |direction| [(); SLOTS].map(|()| Slot::new(&line.engine, direction, SEGMENT_BYTES));
    let mut receiving = slots(Direction::Receive);
    receiving.iter_mut().try_for_each(|slot| slot.begin(SEGMENT_BYTES, line.peer, line.stream))?;
    Ok(Channel {
        sender: Box::new(MpiHalf { line: Arc::clone(line), slots: slots(Direction::Send), next: 0 }),
        receiver: Box::new(MpiHalf { line: Arc::clone(line), slots: receiving, next: 0 }),
    })
}

struct MpiHalf {
    line: Arc<Line>,
    /// Used in rotation.
    slots: [Slot; SLOTS],
    /// The slot whose segment is the oldest.
    next: usize,
}

impl SendHalf for MpiHalf {
    fn try_send(&mut self, message: &mut Outgoing<'_>) -> Result<usize, TransportError> {
        let MpiHalf { line, slots, next } = self;
        let slot = &mut slots[*next];
        if slot.complete()?.is_none() {
            return Ok(0);
        }
        let Some(buffer) = slot.buffer() else { return Ok(0) };
        let [header, payload] = message.rest();
        // A slot whose message failed has no buffer any more.
        let room = buffer.len().checked_sub(header.len()).ok_or(TransportError::Aborted)?;
        let payload = &payload[..payload.len().min(room)];
        let length = header.len() + payload.len();
        buffer[..header.len()].copy_from_slice(header);
        buffer[header.len()..length].copy_from_slice(payload);
        slot.begin(length, line.peer, line.stream)?;
        *next = (*next + 1) % SLOTS;
        line.traffic.add_sent(length);
        message.advance(length);
        Ok(length)
    }
}

impl ReceiveHalf for MpiHalf {
    fn try_receive(&mut self, message: &mut Incoming<'_>) -> Result<usize, TransportError> {
        let MpiHalf { line, slots, next } = self;
        let slot = &mut slots[*next];
        let Some(length) = slot.complete()? else {
            line.traffic.add_received(0);
            return Ok(0);
        };
        line.traffic.add_received(length);
        let wrong = |WrongLength { expected, announced }| TransportError::LengthMismatch {
            rank: line.peer,
            stream: line.stream,
            expected,
            announced,
        };
        let remaining = message.remaining();
        let buffer = slot.buffer().expect("invariant: the message is complete");
        let segment = &buffer[..length.min(buffer.len())];
        message.accept(segment).map_err(wrong)?;
        if length > remaining {
            return Err(wrong(WrongLength { expected: remaining as u64, announced: length as u64 }));
        }
        slot.begin(SEGMENT_BYTES, line.peer, line.stream)?;
        *next = (*next + 1) % SLOTS;
        Ok(length)
    }
}

impl Endpoint for MpiHalf {
    fn peer(&self) -> usize {
        self.line.peer
    }

    fn stream(&self) -> StreamNumber {
        self.line.stream
    }

    fn ready(&self) -> bool {
        self.slots[self.next].is_ready()
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Nothing
    }

    fn check(&self) -> Result<(), TransportError> {
        self.line.engine.abort.check()
    }

    fn wait_policy(&self) -> WaitPolicy {
        self.line.engine.wait_policy
    }
}
