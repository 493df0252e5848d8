//! The steps that collectives consist of: one send and one receive, each with a member of the
//! group.

use std::collections::BTreeMap;
use std::ops::Range;

use super::TransportError;
use super::channel::{Channel, PendingReceive, PendingSend, send_receive, transfer};
use super::endpoint::{ReceiveHalf, SendHalf};
use super::message::{Incoming, Outgoing};

/// Channels to the members of a group, by position in the group.
pub(super) type Channels = BTreeMap<usize, Channel>;

/// The member to send to and the member to receive from.
pub(super) struct Neighbours<'a> {
    sender: &'a mut dyn SendHalf,
    receiver: &'a mut dyn ReceiveHalf,
}

impl<'a> Neighbours<'a> {
    pub(super) fn new(sender: &'a mut dyn SendHalf, receiver: &'a mut dyn ReceiveHalf) -> Self {
        Neighbours { sender, receiver }
    }

    /// Sends `outgoing` while receiving `incoming`.
    pub(super) fn send_receive(&mut self, outgoing: &[u8], incoming: Incoming<'_>) -> Result<(), TransportError> {
        send_receive(self.sender, Outgoing::new(outgoing), self.receiver, incoming)
    }

    /// As [`send_receive`](Self::send_receive), where either message may be absent.
    pub(super) fn transfer(
        &mut self,
        outgoing: Option<Outgoing<'_>>,
        incoming: Option<Incoming<'_>>,
    ) -> Result<(), TransportError> {
        match (outgoing, incoming) {
            (Some(outgoing), Some(incoming)) => send_receive(self.sender, outgoing, self.receiver, incoming),
            (Some(message), None) => transfer(&mut [PendingSend { half: self.sender, message }], &mut []),
            (None, Some(message)) => transfer(&mut [], &mut [PendingReceive { half: self.receiver, message }]),
            (None, None) => Ok(()),
        }
    }
}

/// The halves to the next member of the ring and from the previous one.
pub(super) fn ring_neighbours(
    channels: &mut Channels,
    position: usize,
    size: usize,
) -> Result<(&mut dyn SendHalf, &mut dyn ReceiveHalf), TransportError> {
    halves(channels, (position + 1) % size, (position + size - 1) % size)
}

/// The sending half to member `to` and the receiving half from member `from`, which may be the
/// same. Both must be connected.
pub(super) fn halves(
    channels: &mut Channels,
    to: usize,
    from: usize,
) -> Result<(&mut dyn SendHalf, &mut dyn ReceiveHalf), TransportError> {
    let (mut sender, mut receiver) = (None, None);
    for (position, Channel { sender: send_half, receiver: receive_half }) in channels {
        if *position == to {
            sender = Some(&mut **send_half);
        }
        if *position == from {
            receiver = Some(&mut **receive_half);
        }
    }
    match (sender, receiver) {
        (Some(sender), Some(receiver)) => Ok((sender, receiver)),
        // Not reached: `Group::new` and `Group::connect` have opened both.
        _ => Err(TransportError::Segment { reason: format!("the channels to members {to} and {from} are not open") }),
    }
}

/// Splits `values` into a range to read and a range to write. The two must not overlap.
pub(super) fn split_ranges<T>(values: &mut [T], read: Range<usize>, write: Range<usize>) -> (&[T], &mut [T]) {
    if read.end <= write.start {
        let (left, right) = values.split_at_mut(write.start);
        (&left[read], &mut right[..write.end - write.start])
    } else {
        let (left, right) = values.split_at_mut(read.start);
        (&right[..read.end - read.start], &mut left[write])
    }
}
