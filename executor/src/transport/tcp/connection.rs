//! The two halves of a channel over a TCP connection.

use std::io::{IoSlice, IoSliceMut};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags};

use super::super::channel::Channel;
use super::super::doorbell::timespec;
use super::super::endpoint::{Endpoint, ReceiveHalf, SendHalf, WaitPolicy, WakeSource};
use super::super::message::{Incoming, Outgoing};
use super::super::{StreamNumber, TransportError};
use super::TcpState;

/// The most bytes of a reduction that are read from the socket at once, through a buffer that stays
/// in the cache.
const RECEIVE_BYTES: usize = 256 << 10;

/// A connection to one peer for one stream.
pub(super) struct Connection {
    /// Non-blocking.
    pub(super) socket: TcpStream,
    pub(super) peer: usize,
    pub(super) stream: StreamNumber,
    pub(super) shared: Arc<TcpState>,
}

/// The channel over a connection.
pub(super) fn channel(connection: Arc<Connection>) -> Channel {
    Channel {
        sender: Box::new(SocketSender { connection: Arc::clone(&connection) }),
        receiver: Box::new(SocketReceiver { connection, buffer: Vec::new() }),
    }
}

impl Connection {
    /// The number of bytes that a socket operation moved; 0 if it would have blocked.
    fn bytes_moved(&self, result: Result<usize, Errno>, doing: &str) -> Result<usize, TransportError> {
        match result {
            Ok(count) => Ok(count),
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(Errno::PIPE | Errno::CONNRESET | Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NOTCONN) => Err(self.lost()),
            Err(error) => Err(TransportError::system(format!("{doing} rank {} on {}", self.peer, self.stream), error)),
        }
    }

    /// The error for a connection that has ended: the abort of the run, or the loss of the peer.
    fn lost(&self) -> TransportError {
        self.shared.abort.check().err().unwrap_or(TransportError::PeerLost { rank: self.peer })
    }

    fn is_ready(&self, flags: PollFlags) -> bool {
        let mut polled = [PollFd::new(&self.socket, flags)];
        // On an error the next operation on the socket fails and reports it.
        !matches!(poll(&mut polled, Some(&timespec(Duration::ZERO))), Ok(0))
    }
}

struct SocketSender {
    connection: Arc<Connection>,
}

impl SendHalf for SocketSender {
    fn try_send(&mut self, message: &mut Outgoing<'_>) -> Result<usize, TransportError> {
        let [header, payload] = message.rest();
        // Header and payload in one call: with TCP_NODELAY two calls would make two packets.
        let parts = [IoSlice::new(header), IoSlice::new(payload)];
        let result =
            rustix::net::sendmsg(&self.connection.socket, &parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL);
        let count = self.connection.bytes_moved(result, "send to")?;
        message.advance(count);
        Ok(count)
    }
}

struct SocketReceiver {
    connection: Arc<Connection>,
    /// For messages that cannot be read straight into their place. Empty until the first one.
    buffer: Vec<u8>,
}

impl ReceiveHalf for SocketReceiver {
    fn try_receive(&mut self, message: &mut Incoming<'_>) -> Result<usize, TransportError> {
        let Self { connection, buffer } = self;
        let remaining = message.remaining();
        let (result, is_in_place) = match message.vacant() {
            Some([header, payload]) => {
                (rustix::io::readv(&connection.socket, &mut [IoSliceMut::new(header), IoSliceMut::new(payload)]), true)
            }
            None => {
                buffer.resize(RECEIVE_BYTES, 0);
                (rustix::io::read(&connection.socket, &mut buffer[..remaining.min(RECEIVE_BYTES)]), false)
            }
        };
        if result == Ok(0) {
            return Err(connection.lost());
        }
        let count = connection.bytes_moved(result, "receive from")?;
        let accepted = if is_in_place { message.filled(count) } else { message.accept(&buffer[..count]) };
        accepted.map_err(|wrong| TransportError::LengthMismatch {
            rank: connection.peer,
            stream: connection.stream,
            expected: wrong.expected,
            announced: wrong.announced,
        })?;
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
