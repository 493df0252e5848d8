//! The transport between machines: one authenticated TCP connection for each pair of ranks and stream.
//!
//! Of two ranks the lower connects and the higher accepts. A background thread accepts, so that opening channels in any order
//! cannot deadlock.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sockopt};

use super::acceptor::{self, Acceptor, Door};
use super::channel::{Channel, Endpoint, Patience, ReceiveHalf, SendHalf, Waiter};
use super::handshake::{Hello, Verdict};
use super::key::RunKey;
use super::message::{Incoming, Outgoing};
use super::{Party, StreamNumber, Transport, TransportError};

/// A reduction takes at most so many bytes from the socket at once, through a buffer that stays in the cache.
const RECEIVE_BYTES: usize = 256 << 10;

/// How [`Tcp`] connects and waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpOptions {
    /// How long opening a channel may take.
    pub connect_timeout: Duration,
    /// How channels wait.
    pub patience: Patience,
    /// The size to ask for sockets' buffers; `None` leaves it to the kernel, which adapts it to the path.
    pub socket_buffer: Option<usize>,
}

impl Default for TcpOptions {
    fn default() -> Self {
        TcpOptions { connect_timeout: Duration::from_secs(60), patience: Patience::default(), socket_buffer: None }
    }
}

/// The transport of one rank to all others by TCP.
pub struct Tcp {
    shared: Arc<Shared>,
    peers: Vec<SocketAddr>,
    _acceptor: Acceptor,
}

impl fmt::Debug for Tcp {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Tcp(rank {} of {})", self.shared.rank, self.peers.len())
    }
}

struct Shared {
    rank: usize,
    world_size: usize,
    key: RunKey,
    options: TcpOptions,
    abort: AtomicU32,
    table: Mutex<Table>,
    arrived: Condvar,
}

#[derive(Default)]
struct Table {
    /// Connections accepted from lower ranks; `None` between admission and arrival.
    accepted: HashMap<(usize, StreamNumber), Option<TcpStream>>,
    opened: HashSet<(usize, StreamNumber)>,
    connections: Vec<Weak<Connection>>,
}

const NOT_ABORTED: u32 = 0;
const ABORTED_BY_LAUNCHER: u32 = u32::MAX;

impl Tcp {
    /// The transport of `rank`, which listens on `listener` (whose address the others know) and finds rank i at `peers[i]`.
    pub fn new(
        rank: usize,
        listener: TcpListener,
        peers: Vec<SocketAddr>,
        key: RunKey,
        options: TcpOptions,
    ) -> Result<Self, TransportError> {
        if rank >= peers.len() {
            return Err(TransportError::NoSuchPeer { rank, from: rank });
        }
        let shared = Arc::new(Shared {
            rank,
            world_size: peers.len(),
            key: key.clone(),
            options,
            abort: AtomicU32::new(NOT_ABORTED),
            table: Mutex::default(),
            arrived: Condvar::new(),
        });
        let acceptor = Acceptor::start(listener, key, Arc::clone(&shared))?;
        Ok(Tcp { shared, peers, _acceptor: acceptor })
    }
}

impl Transport for Tcp {
    fn rank(&self) -> usize {
        self.shared.rank
    }

    fn world_size(&self) -> usize {
        self.shared.world_size
    }

    fn open(&self, peer: usize, stream: StreamNumber) -> Result<Channel, TransportError> {
        let shared = &self.shared;
        let address = self
            .peers
            .get(peer)
            .filter(|_| peer != shared.rank)
            .ok_or(TransportError::NoSuchPeer { rank: peer, from: shared.rank })?;
        if !shared.table().opened.insert((peer, stream)) {
            return Err(TransportError::AlreadyOpen { rank: peer, stream });
        }
        shared.abort_error()?;
        let socket = if shared.rank < peer {
            let hello = Hello { from: Party::Rank(shared.rank), to: Party::Rank(peer), stream };
            acceptor::connect(*address, &shared.key, hello, shared.options.connect_timeout, || shared.abort_error())?
        } else {
            shared.await_connection(peer, stream)?
        };
        shared
            .configure(&socket)
            .map_err(|error| TransportError::system(format!("configure the connection to rank {peer}"), error))?;
        let connection = Arc::new(Connection { socket, peer, stream, shared: Arc::clone(shared) });
        shared.table().connections.push(Arc::downgrade(&connection));
        Ok(Channel {
            sender: Box::new(SocketSender { connection: Arc::clone(&connection) }),
            receiver: Box::new(SocketReceiver { connection, buffer: Vec::new() }),
        })
    }

    /// Sockets wake those who block on them themselves, and beside a network's way that is little.
    fn nudge(&self, _stream: StreamNumber) {}

    fn abort(&self, lost: Option<usize>) {
        let word = lost.and_then(|rank| u32::try_from(rank).ok()).map_or(ABORTED_BY_LAUNCHER, |rank| rank.saturating_add(1));
        let _ = self.shared.abort.compare_exchange(NOT_ABORTED, word, Ordering::AcqRel, Ordering::Relaxed);
        // Whoever waits to read from one of these wakes up, finds it closed, and asks why. The peer must not take it for our
        // end: it will be told, or will see us end, itself.
        for connection in self.shared.table().connections.iter().filter_map(Weak::upgrade) {
            let _ = connection.socket.shutdown(Shutdown::Read);
        }
        self.shared.arrived.notify_all();
    }
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn abort_error(&self) -> Result<(), TransportError> {
        match self.abort.load(Ordering::Acquire) {
            NOT_ABORTED => Ok(()),
            ABORTED_BY_LAUNCHER => Err(TransportError::Aborted),
            word => Err(TransportError::PeerLost { rank: word as usize - 1 }),
        }
    }

    fn await_connection(&self, peer: usize, stream: StreamNumber) -> Result<TcpStream, TransportError> {
        let started = Instant::now();
        let mut table = self.table();
        loop {
            self.abort_error()?;
            // `None` stays behind, so that a second connection for the same is known as one.
            if let Some(socket) = table.accepted.get_mut(&(peer, stream)).and_then(Option::take) {
                return Ok(socket);
            }
            let waited = started.elapsed();
            if waited >= self.options.connect_timeout {
                return Err(TransportError::TimedOut { rank: peer, stream, activity: "connect", waited });
            }
            table =
                self.arrived.wait_timeout(table, self.options.connect_timeout - waited).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn configure(&self, socket: &TcpStream) -> std::io::Result<()> {
        if let Some(bytes) = self.options.socket_buffer {
            sockopt::set_socket_send_buffer_size(socket, bytes)?;
            sockopt::set_socket_recv_buffer_size(socket, bytes)?;
        }
        socket.set_nonblocking(true)
    }
}

impl Door for Shared {
    fn admit(&self, hello: &Hello) -> Verdict {
        let Party::Rank(peer) = hello.from else { return Verdict::Unexpected };
        if hello.to != Party::Rank(self.rank) || peer >= self.rank {
            return Verdict::Unexpected;
        }
        match self.table().accepted.entry((peer, hello.stream)) {
            std::collections::hash_map::Entry::Occupied(_) => Verdict::Duplicate,
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(None);
                Verdict::Welcome
            }
        }
    }

    fn enter(self: Arc<Self>, hello: Hello, stream: TcpStream) {
        if let Party::Rank(peer) = hello.from {
            self.table().accepted.insert((peer, hello.stream), Some(stream));
            self.arrived.notify_all();
        }
    }
}

struct Connection {
    socket: TcpStream,
    peer: usize,
    stream: StreamNumber,
    shared: Arc<Shared>,
}

impl Connection {
    /// How many bytes a socket operation moved; none if it would block.
    fn moved(&self, result: Result<usize, Errno>, doing: &str) -> Result<usize, TransportError> {
        match result {
            Ok(count) => Ok(count),
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(Errno::PIPE | Errno::CONNRESET | Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NOTCONN) => Err(self.lost()),
            Err(error) => Err(TransportError::system(format!("{doing} rank {} on {}", self.peer, self.stream), error)),
        }
    }

    /// The connection has ended: because the run was aborted, or because the peer is gone.
    fn lost(&self) -> TransportError {
        self.shared.abort_error().err().unwrap_or(TransportError::PeerLost { rank: self.peer })
    }

    fn poll(&self, flags: PollFlags) -> bool {
        let mut polled = [PollFd::new(&self.socket, flags)];
        // An error is found, and told, by the operation that follows.
        !matches!(poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0))
    }
}

struct SocketSender {
    connection: Arc<Connection>,
}

impl SendHalf for SocketSender {
    fn try_send(&mut self, message: &mut Outgoing<'_>) -> Result<usize, TransportError> {
        let [header, payload] = message.rest();
        // Header and payload in one call: with TCP_NODELAY two would be two packets.
        let parts = [IoSlice::new(header), IoSlice::new(payload)];
        let result =
            rustix::net::sendmsg(&self.connection.socket, &parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL);
        let count = self.connection.moved(result, "send to")?;
        message.advance(count);
        Ok(count)
    }
}

struct SocketReceiver {
    connection: Arc<Connection>,
    buffer: Vec<u8>,
}

impl ReceiveHalf for SocketReceiver {
    fn try_receive(&mut self, message: &mut Incoming<'_>) -> Result<usize, TransportError> {
        let Self { connection, buffer } = self;
        let wanted = message.remaining();
        let (result, direct) = match message.vacant() {
            Some([header, payload]) => {
                (rustix::io::readv(&connection.socket, &mut [IoSliceMut::new(header), IoSliceMut::new(payload)]), true)
            }
            None => {
                buffer.resize(RECEIVE_BYTES, 0);
                (rustix::io::read(&connection.socket, &mut buffer[..wanted.min(RECEIVE_BYTES)]), false)
            }
        };
        if result == Ok(0) {
            return Err(connection.lost());
        }
        let count = connection.moved(result, "receive from")?;
        let taken = if direct { message.filled(count) } else { message.accept(&buffer[..count]) };
        taken.map_err(|wrong| TransportError::LengthMismatch {
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
        self.connection.poll(PollFlags::OUT)
    }

    fn waiter(&self) -> Waiter<'_> {
        Waiter::Socket(self.connection.socket.as_fd(), PollFlags::OUT)
    }

    fn check(&self) -> Result<(), TransportError> {
        self.connection.shared.abort_error()
    }

    fn patience(&self) -> Patience {
        self.connection.shared.options.patience
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
        self.connection.poll(PollFlags::IN)
    }

    fn waiter(&self) -> Waiter<'_> {
        Waiter::Socket(self.connection.socket.as_fd(), PollFlags::IN)
    }

    fn check(&self) -> Result<(), TransportError> {
        self.connection.shared.abort_error()
    }

    fn patience(&self) -> Patience {
        self.connection.shared.options.patience
    }
}
