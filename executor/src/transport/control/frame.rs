//! Frames of the control connection: a 4-byte length, at most [`MAX_FRAME_BYTES`], then JSON.

use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::super::{Peer, TransportError};

/// The longest control message. A rank's report of a long run, with all its spans, is well below
/// it.
pub const MAX_FRAME_BYTES: u32 = 256 << 20;

/// A control message as it arrived, not yet parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    sender: Peer,
    bytes: Vec<u8>,
}

impl Message {
    /// Parses the message as a `T`.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, TransportError> {
        serde_json::from_slice(&self.bytes).map_err(|source| TransportError::MalformedMessage { peer: self.sender, source })
    }
}

/// Writes `message` to `peer`.
pub(super) fn write<T: Serialize + ?Sized>(mut stream: impl Write, peer: Peer, message: &T) -> Result<(), TransportError> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message).map_err(|source| TransportError::MalformedMessage { peer, source })?;
    let length = frame.len() - 4;
    let announced =
        u32::try_from(length).ok().filter(|length| *length <= MAX_FRAME_BYTES).ok_or_else(|| too_long(peer, length as u64))?;
    frame[..4].copy_from_slice(&announced.to_le_bytes());
    stream.write_all(&frame).map_err(|error| stream_error(peer, error))
}

/// Reads the next message of `peer`.
pub(super) fn read(mut stream: impl Read, peer: Peer) -> Result<Message, TransportError> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).map_err(|error| stream_error(peer, error))?;
    let length = u32::from_le_bytes(length);
    if length > MAX_FRAME_BYTES {
        return Err(too_long(peer, u64::from(length)));
    }
    // The buffer grows with the bytes that arrive. An announced length alone takes no memory.
    let mut bytes = Vec::new();
    stream.take(u64::from(length)).read_to_end(&mut bytes).map_err(|error| stream_error(peer, error))?;
    if bytes.len() < length as usize {
        return Err(TransportError::lost(peer));
    }
    Ok(Message { sender: peer, bytes })
}

fn too_long(peer: Peer, length: u64) -> TransportError {
    TransportError::FrameTooLong { peer, length, limit: u64::from(MAX_FRAME_BYTES) }
}

fn stream_error(peer: Peer, error: io::Error) -> TransportError {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, UnexpectedEof};
    match error.kind() {
        UnexpectedEof | BrokenPipe | ConnectionReset | ConnectionAborted | NotConnected => TransportError::lost(peer),
        _ => TransportError::system(format!("send or receive a control message of {peer}"), error),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

    use super::*;

    #[test]
    fn a_frame_that_announces_too_much_is_refused_before_it_is_read() {
        let mut bytes = Vec::from((MAX_FRAME_BYTES + 1).to_le_bytes());
        bytes.extend([0; 100]);
        let mut stream = bytes.as_slice();
        let error = read(&mut stream, Peer::Rank(3)).unwrap_err();
        let length = MAX_FRAME_BYTES + 1;
        assert_eq!(
            error.to_string(),
            format!("a control message of {length} bytes to or from rank 3 is longer than the {MAX_FRAME_BYTES} bytes allowed")
        );
        assert_eq!(stream.len(), 100);
    }

    #[test]
    fn a_frame_that_ends_early_is_a_lost_peer() {
        let mut bytes = Vec::from(MAX_FRAME_BYTES.to_le_bytes());
        bytes.extend([0; 100]);
        assert!(matches!(read(&bytes[..], Peer::Rank(3)), Err(TransportError::PeerLost { rank: 3 })));
    }
}
