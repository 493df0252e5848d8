//! Frames of the control connection: a length of four bytes, at most [`MOST_FRAME_BYTES`], then JSON.

use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Party, TransportError};

/// The longest control message. A rank's report of a long run, with all its spans, stays well below.
pub const MOST_FRAME_BYTES: u32 = 256 << 20;

/// A control message that arrived, not yet read as any type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    from: Party,
    bytes: Vec<u8>,
}

impl Message {
    /// Reads the message as a `T`.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, TransportError> {
        serde_json::from_slice(&self.bytes).map_err(|source| TransportError::MalformedMessage { party: self.from, source })
    }

    /// The JSON as it came.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// Writes `message` to `party`.
pub(super) fn write<T: Serialize + ?Sized>(mut stream: impl Write, party: Party, message: &T) -> Result<(), TransportError> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message).map_err(|source| TransportError::MalformedMessage { party, source })?;
    let length = frame.len() - 4;
    let announced =
        u32::try_from(length).ok().filter(|length| *length <= MOST_FRAME_BYTES).ok_or_else(|| too_long(party, length as u64))?;
    frame[..4].copy_from_slice(&announced.to_le_bytes());
    stream.write_all(&frame).map_err(|error| failed(party, error))
}

/// Reads the next message of `party`.
pub(super) fn read(mut stream: impl Read, party: Party) -> Result<Message, TransportError> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).map_err(|error| failed(party, error))?;
    let length = u32::from_le_bytes(length);
    if length > MOST_FRAME_BYTES {
        return Err(too_long(party, u64::from(length)));
    }
    // The buffer grows with what really comes, not with what was announced.
    let mut bytes = Vec::new();
    stream.take(u64::from(length)).read_to_end(&mut bytes).map_err(|error| failed(party, error))?;
    if bytes.len() < length as usize {
        return Err(TransportError::lost(party));
    }
    Ok(Message { from: party, bytes })
}

fn too_long(party: Party, length: u64) -> TransportError {
    TransportError::FrameTooLong { party, length, limit: u64::from(MOST_FRAME_BYTES) }
}

fn failed(party: Party, error: io::Error) -> TransportError {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, UnexpectedEof};
    match error.kind() {
        UnexpectedEof | BrokenPipe | ConnectionReset | ConnectionAborted | NotConnected => TransportError::lost(party),
        _ => TransportError::system(format!("exchange control messages with {party}"), error),
    }
}
