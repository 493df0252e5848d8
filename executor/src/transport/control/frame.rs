//! Frames of the control connection, after its handshake. A frame is two records: the length of its
//! JSON text as 4 bytes, at most [`MAX_FRAME_BYTES`], then the text. A heartbeat is the length 0
//! without a text.

use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::super::error::is_connection_gone;
use super::super::session::{Opener, RECORD_TAG_BYTES, Sealer};
use super::super::{Peer, TransportError};

/// The longest control message. A rank's report of a long run, with all its spans, is well below
/// it.
pub const MAX_FRAME_BYTES: u32 = 256 << 20;

const LENGTH_BYTES: usize = 4;
/// The text is read in pieces of this size. Memory grows with the bytes that arrive: an announced
/// length alone takes none.
const PIECE_BYTES: usize = 1 << 20;

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

/// The sending side of a control connection.
pub(super) struct FrameWriter<W> {
    stream: W,
    sealer: Sealer,
    peer: Peer,
    /// `true` after a write that failed, perhaps in the middle of a frame.
    is_broken: bool,
}

impl<W: Write> FrameWriter<W> {
    pub(super) fn new(stream: W, sealer: Sealer, peer: Peer) -> Self {
        Self { stream, sealer, peer, is_broken: false }
    }

    /// Sends `message`.
    pub(super) fn write<T: Serialize + ?Sized>(&mut self, message: &T) -> Result<(), TransportError> {
        let peer = self.peer;
        let mut text = serde_json::to_vec(message).map_err(|source| TransportError::MalformedMessage { peer, source })?;
        let length = u32::try_from(text.len()).ok().filter(|length| *length <= MAX_FRAME_BYTES);
        let length = length.ok_or_else(|| too_long(peer, text.len() as u64))?;
        let mut frame = self.seal_length(length)?;
        let tag = self.sealer.seal(&mut text)?;
        frame.extend(text);
        frame.extend(tag);
        self.send(&frame)
    }

    /// Tells the other side that this process runs.
    pub(super) fn write_heartbeat(&mut self) -> Result<(), TransportError> {
        let frame = self.seal_length(0)?;
        self.send(&frame)
    }

    fn seal_length(&mut self, length: u32) -> Result<Vec<u8>, TransportError> {
        let mut bytes = length.to_le_bytes();
        let tag = self.sealer.seal(&mut bytes)?;
        Ok([&bytes[..], &tag].concat())
    }

    fn send(&mut self, frame: &[u8]) -> Result<(), TransportError> {
        if self.is_broken {
            return Err(TransportError::lost(self.peer, None));
        }
        let sent = self.stream.write_all(frame);
        self.is_broken = sent.is_err();
        sent.map_err(|error| stream_error(self.peer, error))
    }
}

/// The receiving side of a control connection.
pub(super) struct FrameReader<R> {
    stream: R,
    opener: Opener,
    peer: Peer,
}

impl<R: Read> FrameReader<R> {
    pub(super) fn new(stream: R, opener: Opener, peer: Peer) -> Self {
        Self { stream, opener, peer }
    }

    /// The stream, to configure it.
    pub(super) fn stream(&self) -> &R {
        &self.stream
    }

    /// Reads the next frame; `None` is a heartbeat. Calls `moved` at the end of the frame, and
    /// whenever another [`PIECE_BYTES`] of it have arrived.
    pub(super) fn read(&mut self, mut moved: impl FnMut()) -> Result<Option<Message>, TransportError> {
        let peer = self.peer;
        let mut length = [0; LENGTH_BYTES];
        self.fill(&mut length)?;
        self.open(&mut length)?;
        moved();
        let length = u32::from_le_bytes(length);
        if length > MAX_FRAME_BYTES {
            return Err(too_long(peer, u64::from(length)));
        }
        if length == 0 {
            return Ok(None);
        }
        let length = length as usize;
        let mut bytes = Vec::new();
        while bytes.len() < length {
            let filled = bytes.len();
            bytes.resize((filled + PIECE_BYTES).min(length), 0);
            self.fill(&mut bytes[filled..])?;
            moved();
        }
        self.open(&mut bytes)?;
        Ok(Some(Message { sender: peer, bytes }))
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), TransportError> {
        self.stream.read_exact(bytes).map_err(|error| stream_error(self.peer, error))
    }

    /// Reads the tag of a record and opens the record.
    fn open(&mut self, bytes: &mut [u8]) -> Result<(), TransportError> {
        let mut tag = [0; RECORD_TAG_BYTES];
        self.fill(&mut tag)?;
        self.opener.open(bytes, tag, self.peer)
    }
}

fn too_long(peer: Peer, length: u64) -> TransportError {
    TransportError::FrameTooLong { peer, length, limit: u64::from(MAX_FRAME_BYTES) }
}

fn stream_error(peer: Peer, error: io::Error) -> TransportError {
    if is_connection_gone(&error) {
        let reason = (error.kind() != io::ErrorKind::UnexpectedEof).then_some(error);
        return TransportError::lost(peer, reason);
    }
    TransportError::system(format!("send or receive a control message of {peer}"), error)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

    use super::super::super::session::Session;
    use super::*;

    fn writer() -> FrameWriter<Vec<u8>> {
        FrameWriter::new(Vec::new(), Session::new(&[1; 32], &[2; 32]).unwrap().sealer, Peer::Rank(3))
    }

    fn reader(bytes: &[u8]) -> FrameReader<&[u8]> {
        FrameReader::new(bytes, Session::new(&[2; 32], &[1; 32]).unwrap().opener, Peer::Rank(3))
    }

    #[test]
    fn a_frame_that_announces_too_much_is_refused_before_it_is_read() {
        let mut bytes = writer().seal_length(MAX_FRAME_BYTES + 1).unwrap();
        bytes.extend([0; 100]);
        let mut reader = reader(&bytes);
        let error = reader.read(|| {}).unwrap_err();
        let length = MAX_FRAME_BYTES + 1;
        assert_eq!(
            error.to_string(),
            format!("a control message of {length} bytes to or from rank 3 is longer than the {MAX_FRAME_BYTES} bytes allowed")
        );
        assert_eq!(reader.stream.len(), 100);
    }

    #[test]
    fn a_frame_that_ends_early_is_a_lost_peer() {
        let mut bytes = writer().seal_length(MAX_FRAME_BYTES).unwrap();
        bytes.extend([0; 100]);
        assert!(matches!(reader(&bytes).read(|| {}), Err(TransportError::PeerLost { rank: 3, .. })));
    }

    #[test]
    fn every_changed_byte_and_every_cut_of_two_frames_is_noticed() {
        let mut writer = writer();
        writer.write("train").unwrap();
        writer.write_heartbeat().unwrap();
        writer.write("leave").unwrap();
        let bytes = writer.stream;
        let read_all = |bytes: &[u8]| {
            let mut reader = reader(bytes);
            let mut texts = Vec::new();
            while texts.len() < 2 {
                texts.extend(reader.read(|| {})?.map(|message| message.parse::<String>().unwrap()));
            }
            Ok::<_, TransportError>(texts)
        };
        assert_eq!(read_all(&bytes).unwrap(), ["train", "leave"]);
        for index in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[index] ^= 0x40;
            assert!(matches!(read_all(&changed), Err(TransportError::Tampered { .. })), "byte {index}");
            assert!(matches!(read_all(&bytes[..index]), Err(TransportError::PeerLost { .. })), "cut at {index}");
        }
        let twice = [&bytes[..], &bytes].concat();
        let mut reader = reader(&twice);
        (0..3).for_each(|_| drop(reader.read(|| {}).unwrap()));
        assert!(matches!(reader.read(|| {}), Err(TransportError::Tampered { .. })));
    }
}
