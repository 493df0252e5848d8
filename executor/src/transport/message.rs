//! One message while it is sent or received: an 8-byte length header, then the payload.
//!
//! Both sides know a message's length from the Program, so the header only checks that they agree.
//! A channel is a plain byte pipe. It asks an [`Outgoing`] for the bytes to send next, and passes
//! an [`Incoming`] pieces of any size as they arrive. An incoming payload is copied, or reduced
//! straight from the channel's own memory.

use super::reduce::{self, ElementType};

const HEADER_BYTES: usize = 8;

/// A message while it is sent.
#[derive(Debug)]
pub struct Outgoing<'a> {
    header: [u8; HEADER_BYTES],
    payload: &'a [u8],
    /// Bytes sent so far, header included.
    sent: usize,
}

impl<'a> Outgoing<'a> {
    /// Creates a message. Nothing of it has been sent.
    pub fn new(payload: &'a [u8]) -> Self {
        Outgoing { header: (payload.len() as u64).to_le_bytes(), payload, sent: 0 }
    }

    /// The bytes still to be sent, in order: the rest of the header, and the rest of the payload.
    pub fn rest(&self) -> [&[u8]; 2] {
        let header = self.header.get(self.sent..).unwrap_or_default();
        let payload = self.payload.get(self.sent.saturating_sub(HEADER_BYTES)..).unwrap_or_default();
        [header, payload]
    }

    /// Records that the next `bytes` bytes of [`rest`](Self::rest) have been sent.
    pub fn advance(&mut self, bytes: usize) {
        self.sent += bytes;
    }

    /// Returns whether the whole message has been sent.
    pub fn is_done(&self) -> bool {
        self.sent >= HEADER_BYTES + self.payload.len()
    }
}

/// The peer announced another length than this side expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongLength {
    /// The length expected here, in bytes.
    pub expected: u64,
    /// The length in the peer's header, in bytes.
    pub announced: u64,
}

/// A message while it is received.
#[derive(Debug)]
pub struct Incoming<'a> {
    header: [u8; HEADER_BYTES],
    /// Bytes received so far, header included.
    received: usize,
    sink: Sink<'a>,
}

/// What is done with the payload.
#[derive(Debug)]
enum Sink<'a> {
    Copy(&'a mut [u8]),
    Reduce {
        element: ElementType,
        into: &'a mut [u8],
        /// The other operand; `None` to add to `into` itself.
        own: Option<&'a [u8]>,
        /// The first bytes of an element that has not arrived completely.
        partial: [u8; 4],
    },
}

impl<'a> Incoming<'a> {
    /// A message whose payload fills `into`.
    pub fn copy(into: &'a mut [u8]) -> Self {
        Self::new(Sink::Copy(into))
    }

    /// A message whose elements are added to those of `into`.
    pub fn reduce(element: ElementType, into: &'a mut [u8]) -> Self {
        Self::new(Sink::Reduce { element, into, own: None, partial: [0; 4] })
    }

    /// A message whose elements, added to those of `own`, fill `into`. Both have the same length.
    pub fn combine(element: ElementType, into: &'a mut [u8], own: &'a [u8]) -> Self {
        debug_assert_eq!(into.len(), own.len());
        Self::new(Sink::Reduce { element, into, own: Some(own), partial: [0; 4] })
    }

    fn new(sink: Sink<'a>) -> Self {
        Incoming { header: [0; HEADER_BYTES], received: 0, sink }
    }

    fn payload_length(&self) -> usize {
        match &self.sink {
            Sink::Copy(into) => into.len(),
            Sink::Reduce { into, .. } => into.len(),
        }
    }

    /// Bytes still to come, header included. A channel never takes more than these for this
    /// message.
    pub fn remaining(&self) -> usize {
        HEADER_BYTES + self.payload_length() - self.received
    }

    /// Bytes of the payload still to come.
    pub fn payload_remaining(&self) -> usize {
        self.payload_length() - self.received.saturating_sub(HEADER_BYTES)
    }

    /// Returns whether the whole message has been received.
    pub fn is_done(&self) -> bool {
        self.remaining() == 0
    }

    /// Takes the message's next bytes, at most [`remaining`](Self::remaining) of them.
    ///
    /// # Errors
    /// [`WrongLength`] once the header is complete and announces another length.
    pub fn accept(&mut self, bytes: &[u8]) -> Result<(), WrongLength> {
        let mut bytes = bytes;
        if let Some(vacant) = self.header.get_mut(self.received..).filter(|vacant| !vacant.is_empty()) {
            let count = vacant.len().min(bytes.len());
            let (head, rest) = bytes.split_at(count);
            vacant[..count].copy_from_slice(head);
            bytes = rest;
            self.filled(count)?;
        }
        let offset = self.received.saturating_sub(HEADER_BYTES);
        let count = bytes.len().min(self.remaining());
        let bytes = &bytes[..count];
        match &mut self.sink {
            Sink::Copy(into) => into[offset..offset + count].copy_from_slice(bytes),
            Sink::Reduce { element, into, own, partial } => reduce_piece(*element, into, *own, partial, offset, bytes),
        }
        self.received += count;
        Ok(())
    }

    /// The memory for the message's next bytes, so that a channel can read straight into it: the
    /// rest of the header, and the rest of the payload. `None` if they must go through
    /// [`accept`](Self::accept).
    pub fn vacant(&mut self) -> Option<[&mut [u8]; 2]> {
        match &mut self.sink {
            Sink::Copy(into) => Some([
                self.header.get_mut(self.received..).unwrap_or_default(),
                into.get_mut(self.received.saturating_sub(HEADER_BYTES)..).unwrap_or_default(),
            ]),
            Sink::Reduce { .. } => None,
        }
    }

    /// Records that the first `bytes` bytes of [`vacant`](Self::vacant) were filled.
    ///
    /// # Errors
    /// As for [`accept`](Self::accept).
    pub fn filled(&mut self, bytes: usize) -> Result<(), WrongLength> {
        let header_was_incomplete = self.received < HEADER_BYTES;
        self.received += bytes;
        if header_was_incomplete && self.received >= HEADER_BYTES {
            let announced = u64::from_le_bytes(self.header);
            let expected = self.payload_length() as u64;
            if announced != expected {
                return Err(WrongLength { expected, announced });
            }
        }
        Ok(())
    }
}

/// Reduces `bytes`, which begin at byte `offset` of the payload. They may begin and end inside an
/// element: `partial` keeps the first bytes of such an element until the rest arrives.
fn reduce_piece(element: ElementType, into: &mut [u8], own: Option<&[u8]>, partial: &mut [u8; 4], offset: usize, bytes: &[u8]) {
    let width = element.width();
    let mut reduce = |first: usize, bytes: &[u8]| {
        let range = first..first + bytes.len();
        match own {
            Some(own) => reduce::combine(element, &mut into[range.clone()], &own[range], bytes),
            None => reduce::accumulate(element, &mut into[range], bytes),
        }
    };
    let mut bytes = bytes;
    let mut first = offset;
    let within = offset % width;
    if within != 0 {
        let count = (width - within).min(bytes.len());
        let (head, rest) = bytes.split_at(count);
        partial[within..within + count].copy_from_slice(head);
        bytes = rest;
        if within + count < width {
            return;
        }
        reduce(offset - within, &partial[..width]);
        first = offset + count;
    }
    let (elements, tail) = bytes.split_at(bytes.len() / width * width);
    reduce(first, elements);
    partial[..tail.len()].copy_from_slice(tail);
}
