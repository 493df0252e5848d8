//! Channels, and making progress on several of them at once.
//!
//! A channel is a pair of independent halves, so that a thread can send to a peer while it receives
//! from the same one. [`transfer`] moves any number of messages at once. So all ranks of a ring can
//! send and receive at the same time without deadlock.

use super::TransportError;
use super::endpoint::{Endpoint, ReceiveHalf, SendHalf};
use super::message::{Incoming, Outgoing};
use super::waiting::wait_for_any;

/// A two-way channel to one peer on one stream. Messages arrive complete and in order, each with
/// the length that both sides expect.
pub struct Channel {
    /// The half that sends to the peer.
    pub sender: Box<dyn SendHalf>,
    /// The half that receives from the peer.
    pub receiver: Box<dyn ReceiveHalf>,
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Channel(rank {}, {})", self.sender.peer(), self.sender.stream())
    }
}

impl Channel {
    /// Sends `bytes` as one message. Returns once the transport has all of it, perhaps before the
    /// peer has received it.
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), TransportError> {
        transfer(&mut [PendingSend { half: &mut *self.sender, message: Outgoing::new(bytes) }], &mut [])
    }

    /// Receives one message of exactly `into.len()` bytes.
    pub fn receive(&mut self, into: &mut [u8]) -> Result<(), TransportError> {
        transfer(&mut [], &mut [PendingReceive { half: &mut *self.receiver, message: Incoming::copy(into) }])
    }
}

/// A message and the half that sends it.
pub struct PendingSend<'half, 'message> {
    /// The half that sends.
    pub half: &'half mut dyn SendHalf,
    /// The message to send.
    pub message: Outgoing<'message>,
}

/// A message and the half that receives it.
pub struct PendingReceive<'half, 'message> {
    /// The half that receives.
    pub half: &'half mut dyn ReceiveHalf,
    /// The message to receive.
    pub message: Incoming<'message>,
}

/// Sends one message while receiving another.
pub fn send_receive(
    sender: &mut dyn SendHalf,
    outgoing: Outgoing<'_>,
    receiver: &mut dyn ReceiveHalf,
    incoming: Incoming<'_>,
) -> Result<(), TransportError> {
    transfer(&mut [PendingSend { half: sender, message: outgoing }], &mut [PendingReceive { half: receiver, message: incoming }])
}

/// Sends and receives all these messages at once, each as fast as its peer allows. Returns when all
/// are done.
pub fn transfer(sends: &mut [PendingSend<'_, '_>], receives: &mut [PendingReceive<'_, '_>]) -> Result<(), TransportError> {
    loop {
        match advance(sends, receives)? {
            Advance::Finished => return Ok(()),
            Advance::Moved => {}
            Advance::Stuck => wait_for_any(&unfinished(sends, receives))?,
        }
    }
}

/// The result of one attempt on all messages.
enum Advance {
    Finished,
    Moved,
    Stuck,
}

fn advance(sends: &mut [PendingSend<'_, '_>], receives: &mut [PendingReceive<'_, '_>]) -> Result<Advance, TransportError> {
    let mut moved = 0;
    let mut finished = true;
    for PendingSend { half, message } in sends {
        if !message.is_done() {
            moved += half.try_send(message)?;
            finished &= message.is_done();
        }
    }
    for PendingReceive { half, message } in receives {
        if !message.is_done() {
            moved += half.try_receive(message)?;
            finished &= message.is_done();
        }
    }
    Ok(match (finished, moved) {
        (true, _) => Advance::Finished,
        (false, 0) => Advance::Stuck,
        (false, _) => Advance::Moved,
    })
}

/// The halves of unfinished messages, each with what its peer has to do. Receives come first: if
/// everything is stuck, a time-out should name the peer that has not sent.
fn unfinished<'a>(
    sends: &'a [PendingSend<'_, '_>],
    receives: &'a [PendingReceive<'_, '_>],
) -> Vec<(&'a dyn Endpoint, &'static str)> {
    let receives = receives.iter().filter(|receive| !receive.message.is_done());
    let sends = sends.iter().filter(|send| !send.message.is_done());
    receives
        .map(|receive| (&*receive.half as &dyn Endpoint, "send"))
        .chain(sends.map(|send| (&*send.half as &dyn Endpoint, "receive")))
        .collect()
}
