//! The two halves of a channel over a TCP connection.
//!
//! A message is one record with the 8 bytes of its length, then its payload in records of at most
//! [`RECORD_BYTES`]. Both sides know the length, so records need no headers. A payload counts as
//! received only after its tag was checked.

use std::io::IoSliceMut;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;

use super::super::channel::Channel;
use super::super::doorbell::timespec;
use super::super::endpoint::{Endpoint, ReceiveHalf, SendHalf, WaitPolicy, WakeSource};
use super::super::error::is_connection_gone;
use super::super::link::Traffic;
use super::super::message::{Incoming, Outgoing, WrongLength};
use super::super::session::{Opener, RECORD_TAG_BYTES, Sealer, Session};
use super::super::{Peer, StreamNumber, TransportError};
use super::TcpState;

/// The most bytes of a payload that one record has. A record stays in a second-level cache between
/// the kernel, the cipher and the reduction.
const RECORD_BYTES: usize = 128 << 10;
const LENGTH_BYTES: usize = 8;
const SEALED_LENGTH_BYTES: usize = LENGTH_BYTES + RECORD_TAG_BYTES;

/// A connection to one peer for one stream.
pub(super) struct Connection {
    /// Non-blocking.
    pub(super) socket: TcpStream,
    pub(super) peer: usize,
    pub(super) stream: StreamNumber,
    pub(super) traffic: Traffic,
    pub(super) shared: Arc<TcpState>,
}

/// The channel over a connection.
pub(super) fn channel(connection: Arc<Connection>, session: Session) -> Channel {
    let Session { sealer, opener } = session;
    let sender = SocketSender { connection: Arc::clone(&connection), sealer, buffer: Vec::new(), flushed: 0, covered: 0 };
    let receiver = SocketReceiver {
        connection,
        opener,
        length: [0; SEALED_LENGTH_BYTES],
        length_filled: 0,
        tag: [0; RECORD_TAG_BYTES],
        record_filled: 0,
        buffer: Vec::new(),
    };
    Channel { sender: Box::new(sender), receiver: Box::new(receiver) }
}

impl Connection {
    /// The number of bytes that a socket operation moved; 0 if it would have blocked.
    fn bytes_moved(&self, result: Result<usize, Errno>, doing: &str) -> Result<usize, TransportError> {
        match result {
            Ok(count) => Ok(count),
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(error) => {
                let error = std::io::Error::from(error);
                match is_connection_gone(&error) {
                    true => Err(self.lost(Some(error))),
                    false => Err(TransportError::system(format!("{doing} rank {} on {}", self.peer, self.stream), error)),
                }
            }
        }
    }

    /// The error for a connection that has ended: the abort of the run, or the loss of the peer.
    fn lost(&self, reason: Option<std::io::Error>) -> TransportError {
        let lost = || TransportError::lost(Peer::Rank(self.peer), reason);
        self.shared.abort.check().err().unwrap_or_else(lost)
    }

    fn is_ready(&self, flags: PollFlags) -> bool {
        let mut polled = [PollFd::new(&self.socket, flags)];
        // On an error the next operation on the socket fails and reports it.
        !matches!(poll(&mut polled, Some(&timespec(Duration::ZERO))), Ok(0))
    }
}

struct SocketSender {
    connection: Arc<Connection>,
    sealer: Sealer,
    /// Sealed bytes. Empty unless a message is being sent.
    buffer: Vec<u8>,
    /// How many bytes of `buffer` the socket has taken.
    flushed: usize,
    /// How many bytes of the message `buffer` covers.
    covered: usize,
}

impl SocketSender {
    /// Seals the next record of `message` into the empty buffer; before the first one, also the
    /// record with the message's length.
    fn seal_next(&mut self, message: &Outgoing<'_>) -> Result<(), TransportError> {
        let Self { sealer, buffer, covered, .. } = self;
        *covered = 0;
        let mut seal = |bytes: &[u8]| {
            let start = buffer.len();
            buffer.extend_from_slice(bytes);
            let tag = sealer.seal(&mut buffer[start..])?;
            buffer.extend_from_slice(&tag);
            *covered += bytes.len();
            Ok::<_, TransportError>(())
        };
        let [length, payload] = message.rest();
        if !length.is_empty() {
            seal(length)?;
        }
        let record = &payload[..payload.len().min(RECORD_BYTES)];
        if record.is_empty() { Ok(()) } else { seal(record) }
    }
}

impl SendHalf for SocketSender {
    fn try_send(&mut self, message: &mut Outgoing<'_>) -> Result<usize, TransportError> {
        if self.buffer.is_empty() {
            self.seal_next(message)?;
        }
        let result = rustix::net::send(&self.connection.socket, &self.buffer[self.flushed..], SendFlags::NOSIGNAL);
        let count = self.connection.bytes_moved(result, "send to")?;
        self.connection.traffic.add_sent(count);
        self.flushed += count;
        if self.flushed == self.buffer.len() {
            message.advance(self.covered);
            self.buffer.clear();
            self.flushed = 0;
        }
        Ok(count)
    }
}

/// The memory for the next `length` bytes of a message's payload: the message's destination if it
/// can be read into directly, else `buffer`.
fn record_of<'a>(message: &'a mut Incoming<'_>, buffer: &'a mut [u8], length: usize) -> &'a mut [u8] {
    match message.vacant() {
        Some([_, payload]) => &mut payload[..length],
        None => &mut buffer[..length],
    }
}

struct SocketReceiver {
    connection: Arc<Connection>,
    opener: Opener,
    /// The record with the message's length, and how much of it has arrived.
    length: [u8; SEALED_LENGTH_BYTES],
    length_filled: usize,
    /// The tag of the payload's next record.
    tag: [u8; RECORD_TAG_BYTES],
    /// How much of the payload's next record has arrived, tag included.
    record_filled: usize,
    /// Holds payloads that cannot be read straight into their destination. Empty until the first
    /// one.
    buffer: Vec<u8>,
}

impl SocketReceiver {
    /// Opens the record with the message's length.
    fn open_length(&mut self, peer: Peer) -> Result<[u8; LENGTH_BYTES], TransportError> {
        let (mut length, mut tag) = ([0; LENGTH_BYTES], [0; RECORD_TAG_BYTES]);
        length.copy_from_slice(&self.length[..LENGTH_BYTES]);
        tag.copy_from_slice(&self.length[LENGTH_BYTES..]);
        self.opener.open(&mut length, tag, peer)?;
        Ok(length)
    }
}

impl ReceiveHalf for SocketReceiver {
    fn try_receive(&mut self, message: &mut Incoming<'_>) -> Result<usize, TransportError> {
        let connection = Arc::clone(&self.connection);
        let wrong_length = |wrong: WrongLength| TransportError::LengthMismatch {
            rank: connection.peer,
            stream: connection.stream,
            expected: wrong.expected,
            announced: wrong.announced,
        };
        let peer = Peer::Rank(connection.peer);
        let record_length = message.payload_remaining().min(RECORD_BYTES);
        let is_in_place = message.vacant().is_some();
        if !is_in_place && self.buffer.is_empty() {
            self.buffer.resize(RECORD_BYTES, 0);
        }
        // A message without a payload has no record for it.
        let tag_length = if record_length == 0 { 0 } else { RECORD_TAG_BYTES };
        let record = record_of(message, &mut self.buffer, record_length);
        let result = rustix::io::readv(
            &connection.socket,
            &mut [
                IoSliceMut::new(&mut self.length[self.length_filled..]),
                IoSliceMut::new(&mut record[self.record_filled.min(record_length)..]),
                IoSliceMut::new(&mut self.tag[self.record_filled.saturating_sub(record_length)..tag_length]),
            ],
        );
        if result == Ok(0) {
            return Err(connection.lost(None));
        }
        let count = connection.bytes_moved(result, "receive from")?;
        connection.traffic.add_received(count);
        let of_length = count.min(SEALED_LENGTH_BYTES - self.length_filled);
        self.length_filled += of_length;
        self.record_filled += count - of_length;
        if of_length > 0 && self.length_filled == SEALED_LENGTH_BYTES {
            message.accept(&self.open_length(peer)?).map_err(wrong_length)?;
        }
        if record_length > 0 && self.record_filled == record_length + RECORD_TAG_BYTES {
            self.record_filled = 0;
            self.opener.open(record_of(message, &mut self.buffer, record_length), self.tag, peer)?;
            let taken = if is_in_place { message.filled(record_length) } else { message.accept(&self.buffer[..record_length]) };
            taken.map_err(wrong_length)?;
        }
        if message.is_done() {
            self.length_filled = 0;
        }
        Ok(count)
    }
}

impl Endpoint for SocketSender {
    fn peer(&self) -> usize {
        self.connection.peer
    }

    fn stream(&self) -> StreamNumber {
        self.connection.stream
    }

    fn ready(&self) -> bool {
        self.connection.is_ready(PollFlags::OUT)
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Socket(self.connection.socket.as_fd(), PollFlags::OUT)
    }

    fn check(&self) -> Result<(), TransportError> {
        self.connection.shared.abort.check()
    }

    fn wait_policy(&self) -> WaitPolicy {
        self.connection.shared.options.wait_policy
    }
}

impl Endpoint for SocketReceiver {
    fn peer(&self) -> usize {
        self.connection.peer
    }

    fn stream(&self) -> StreamNumber {
        self.connection.stream
    }

    fn ready(&self) -> bool {
        self.connection.is_ready(PollFlags::IN)
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Socket(self.connection.socket.as_fd(), PollFlags::IN)
    }

    fn check(&self) -> Result<(), TransportError> {
        self.connection.shared.abort.check()
    }

    fn wait_policy(&self) -> WaitPolicy {
        self.connection.shared.options.wait_policy
    }
}
