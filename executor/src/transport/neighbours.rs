//! What the steps of a collective share: whom to send to, whom to receive from, and which part of a buffer goes where.

use std::collections::BTreeMap;
use std::ops::Range;

use super::TransportError;
use super::channel::{Channel, ReceiveHalf, Receiving, SendHalf, Sending, drive, exchange};
use super::message::{Incoming, Outgoing};

/// Channels to the members of a group, by position.
pub(super) type Channels = BTreeMap<usize, Channel>;

/// Whom a member sends to and whom it receives from.
pub(super) struct Neighbours<'a> {
    sender: &'a mut dyn SendHalf,
    receiver: &'a mut dyn ReceiveHalf,
}

impl<'a> Neighbours<'a> {
    pub(super) fn new(sender: &'a mut dyn SendHalf, receiver: &'a mut dyn ReceiveHalf) -> Self {
        Neighbours { sender, receiver }
    }

    pub(super) fn exchange(&mut self, outgoing: &[u8], incoming: Incoming<'_>) -> Result<(), TransportError> {
        exchange(self.sender, Outgoing::new(outgoing), self.receiver, incoming)
    }

    pub(super) fn drive(&mut self, outgoing: Option<Outgoing<'_>>, incoming: Option<Incoming<'_>>) -> Result<(), TransportError> {
        match (outgoing, incoming) {
            (Some(outgoing), Some(incoming)) => exchange(self.sender, outgoing, self.receiver, incoming),
            (Some(message), None) => drive(&mut [Sending { half: self.sender, message }], &mut []),
            (None, Some(message)) => drive(&mut [], &mut [Receiving { half: self.receiver, message }]),
            (None, None) => Ok(()),
        }
    }
}

/// The halves towards the next member of the ring and from the previous one.
pub(super) fn ring(
    channels: &mut Channels,
    position: usize,
    size: usize,
) -> Result<(&mut dyn SendHalf, &mut dyn ReceiveHalf), TransportError> {
    pair(channels, (position + 1) % size, (position + size - 1) % size)
}

/// The sending half towards `to` and the receiving half from `from`, which may be the same member. Both must be connected.
pub(super) fn pair(
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
        // Cannot be: `Group::new` and `Group::connect` opened both.
        _ => Err(TransportError::Segment { reason: format!("the channels to members {to} and {from} are not open") }),
    }
}

/// Two parts of `values` that do not overlap: one to read, one to write.
pub(super) fn two_ranges<T>(values: &mut [T], read: Range<usize>, write: Range<usize>) -> (&[T], &mut [T]) {
    if read.end <= write.start {
        let (left, right) = values.split_at_mut(write.start);
        (&left[read], &mut right[..write.end - write.start])
    } else {
        let (left, right) = values.split_at_mut(read.start);
        (&right[..read.end - read.start], &mut left[write])
    }
}

pub(super) fn starts(counts: &[usize]) -> Vec<usize> {
    counts
        .iter()
        .scan(0, |next, count| {
            let start = *next;
            *next += count;
            Some(start)
        })
        .collect()
}
