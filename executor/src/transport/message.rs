//! One message on its way: a length header of eight bytes, then the payload.
//!
//! Both sides know a message's length from the Program; the header only proves that they agree. A channel is a plain pipe of
//! bytes: it asks an [`Outgoing`] for what to send next, and feeds an [`Incoming`] with pieces of whatever size arrives. The
//! incoming payload is copied, or reduced straight from the channel's own memory.

use super::reduce::{self, Number, Reduction};

const HEADER_BYTES: usize = 8;

/// A message being sent.
#[derive(Debug)]
pub struct Outgoing<'a> {
    header: [u8; HEADER_BYTES],
    payload: &'a [u8],
    sent: usize,
}

impl<'a> Outgoing<'a> {
    /// A message with this payload, of which nothing is sent yet.
    pub fn new(payload: &'a [u8]) -> Self {
        Outgoing { header: (payload.len() as u64).to_le_bytes(), payload, sent: 0 }
    }

    /// What is still to be sent, in order: the rest of the header and the rest of the payload.
    pub fn rest(&self) -> [&[u8]; 2] {
        let header = self.header.get(self.sent..).unwrap_or_default();
        let payload = self.payload.get(self.sent.saturating_sub(HEADER_BYTES)..).unwrap_or_default();
        [header, payload]
    }

    /// Notes that the next `bytes` bytes of [`rest`](Self::rest) are sent.
    pub fn advance(&mut self, bytes: usize) {
        self.sent += bytes;
    }

    /// Whether everything is sent.
    pub fn is_done(&self) -> bool {
        self.sent >= HEADER_BYTES + self.payload.len()
    }
}

/// The peer announced another length than this side expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongLength {
    /// What this side expects, in bytes.
    pub expected: u64,
    /// What the peer announced, in bytes.
    pub announced: u64,
}

/// A message being received.
#[derive(Debug)]
pub struct Incoming<'a> {
    header: [u8; HEADER_BYTES],
    taken: usize,
    sink: Sink<'a>,
}

#[derive(Debug)]
enum Sink<'a> {
    Copy(&'a mut [u8]),
    Reduce { number: Number, reduction: Reduction, into: &'a mut [u8], own: Option<&'a [u8]>, split: [u8; 4] },
}

impl<'a> Incoming<'a> {
    /// A message whose payload is to fill `into`.
    pub fn copy(into: &'a mut [u8]) -> Self {
        Self::new(Sink::Copy(into))
    }

    /// A message of numbers to be reduced into those of `into`.
    pub fn reduce(number: Number, reduction: Reduction, into: &'a mut [u8]) -> Self {
        Self::new(Sink::Reduce { number, reduction, into, own: None, split: [0; 4] })
    }

    /// A message of numbers whose reduction with `own` (of the same length) is to fill `into`.
    pub fn combine(number: Number, reduction: Reduction, into: &'a mut [u8], own: &'a [u8]) -> Self {
        debug_assert_eq!(into.len(), own.len());
        Self::new(Sink::Reduce { number, reduction, into, own: Some(own), split: [0; 4] })
    }

    fn new(sink: Sink<'a>) -> Self {
        Incoming { header: [0; HEADER_BYTES], taken: 0, sink }
    }

    fn payload_length(&self) -> usize {
        match &self.sink {
            Sink::Copy(into) => into.len(),
            Sink::Reduce { into, .. } => into.len(),
        }
    }

    /// How many bytes, header included, are still to come. A channel never takes more than these for this message.
    pub fn remaining(&self) -> usize {
        HEADER_BYTES + self.payload_length() - self.taken
    }

    /// Whether the whole message is here.
    pub fn is_done(&self) -> bool {
        self.remaining() == 0
    }

    /// Takes the message's next bytes, at most [`remaining`](Self::remaining) of them.
    pub fn accept(&mut self, bytes: &[u8]) -> Result<(), WrongLength> {
        let mut bytes = bytes;
        if let Some(vacant) = self.header.get_mut(self.taken..).filter(|vacant| !vacant.is_empty()) {
            let count = vacant.len().min(bytes.len());
            let (head, rest) = bytes.split_at(count);
            vacant[..count].copy_from_slice(head);
            bytes = rest;
            self.filled(count)?;
        }
        let offset = self.taken.saturating_sub(HEADER_BYTES);
        let count = bytes.len().min(self.remaining());
        let bytes = &bytes[..count];
        match &mut self.sink {
            Sink::Copy(into) => into[offset..offset + count].copy_from_slice(bytes),
            Sink::Reduce { number, reduction, into, own, split } => {
                reduce_piece(*number, *reduction, into, *own, split, offset, bytes);
            }
        }
        self.taken += count;
        Ok(())
    }

    /// The memory where the message's next bytes belong as they are (rest of the header, rest of the payload), so that a
    /// channel can read right into it; `None` if they must go through [`accept`](Self::accept).
    pub fn vacant(&mut self) -> Option<[&mut [u8]; 2]> {
        match &mut self.sink {
            Sink::Copy(into) => Some([
                self.header.get_mut(self.taken..).unwrap_or_default(),
                into.get_mut(self.taken.saturating_sub(HEADER_BYTES)..).unwrap_or_default(),
            ]),
            Sink::Reduce { .. } => None,
        }
    }

    /// Notes that the first `bytes` bytes of [`vacant`](Self::vacant) were filled.
    pub fn filled(&mut self, bytes: usize) -> Result<(), WrongLength> {
        let header_was_open = self.taken < HEADER_BYTES;
        self.taken += bytes;
        if header_was_open && self.taken >= HEADER_BYTES {
            let announced = u64::from_le_bytes(self.header);
            let expected = self.payload_length() as u64;
            if announced != expected {
                return Err(WrongLength { expected, announced });
            }
        }
        Ok(())
    }
}

/// Reduces `bytes`, which belong at byte `offset` of the payload. A piece may begin or end inside a number: `split` holds the
/// first bytes of such a number until the rest arrives.
fn reduce_piece(
    number: Number,
    reduction: Reduction,
    into: &mut [u8],
    own: Option<&[u8]>,
    split: &mut [u8; 4],
    offset: usize,
    bytes: &[u8],
) {
    let width = number.width();
    let mut reduce = |first: usize, bytes: &[u8]| {
        let range = first..first + bytes.len();
        match own {
            Some(own) => reduce::combine(number, reduction, &mut into[range.clone()], &own[range], bytes),
            None => reduce::accumulate(number, reduction, &mut into[range], bytes),
        }
    };
    let mut bytes = bytes;
    let mut first = offset;
    let within = offset % width;
    if within != 0 {
        let count = (width - within).min(bytes.len());
        let (head, rest) = bytes.split_at(count);
        split[within..within + count].copy_from_slice(head);
        bytes = rest;
        if within + count < width {
            return;
        }
        reduce(offset - within, &split[..width]);
        first = offset + count;
    }
    let (numbers, tail) = bytes.split_at(bytes.len() / width * width);
    reduce(first, numbers);
    split[..tail.len()].copy_from_slice(tail);
}
