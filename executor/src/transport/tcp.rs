//! The transport between machines: one authenticated TCP connection for each pair of ranks and
//! stream.
//!
//! The lower of two ranks connects and the higher accepts. A background thread accepts, so that the
//! ranks may open their channels in any order without deadlock.

mod connection;

use std::collections::HashSet;
use std::collections::hash_map::{Entry, HashMap};
use std::fmt;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::abort_flag::AbortFlag;
use super::acceptor::{self, Acceptor, ConnectionOwner};
use super::channel::Channel;
use super::endpoint::WaitPolicy;
use super::handshake::{Hello, Verdict};
use super::key::RunKey;
use super::{Peer, StreamNumber, Transport, TransportError};
use connection::Connection;

/// How [`Tcp`] connects and waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpOptions {
    /// How long opening a channel may take.
    pub connect_timeout: Duration,
    /// How channels wait.
    pub wait_policy: WaitPolicy,
}

impl Default for TcpOptions {
    fn default() -> Self {
        TcpOptions { connect_timeout: Duration::from_secs(60), wait_policy: WaitPolicy::default() }
    }
}

/// The transport of one rank to all others by TCP.
pub struct Tcp {
    shared: Arc<TcpState>,
    /// The addresses of all ranks, indexed by rank.
    peers: Vec<SocketAddr>,
    _acceptor: Acceptor,
}

impl fmt::Debug for Tcp {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Tcp(rank {} of {})", self.shared.rank, self.peers.len())
    }
}

/// The state that the transport shares with its connections and the threads that accept them.
struct TcpState {
    rank: usize,
    world_size: usize,
    key: RunKey,
    options: TcpOptions,
    abort: AbortFlag,
    table: Mutex<ConnectionTable>,
    /// Signalled when a connection from a lower rank has arrived.
    arrived: Condvar,
}

#[derive(Default)]
struct ConnectionTable {
    /// Connections from lower ranks. `None` while the handshake ends, and once the channel is open.
    accepted: HashMap<(usize, StreamNumber), Option<TcpStream>>,
    /// The channels that this rank has opened.
    opened: HashSet<(usize, StreamNumber)>,
    connections: Vec<Weak<Connection>>,
}

impl Tcp {
    /// The transport of `rank`. The other ranks reach it through `listener`; rank i is at
    /// `peers[i]`.
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
        let shared = Arc::new(TcpState {
            rank,
            world_size: peers.len(),
            key: key.clone(),
            options,
            abort: AbortFlag::default(),
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
        shared.abort.check()?;
        let socket = if shared.rank < peer {
            let hello = Hello { from: Peer::Rank(shared.rank), to: Peer::Rank(peer), stream };
            acceptor::connect(*address, &shared.key, hello, shared.options.connect_timeout, || shared.abort.check())?
        } else {
            shared.await_connection(peer, stream)?
        };
        socket
            .set_nonblocking(true)
            .map_err(|error| TransportError::system(format!("configure the connection to rank {peer}"), error))?;
        let connection = Arc::new(Connection { socket, peer, stream, shared: Arc::clone(shared) });
        shared.table().connections.push(Arc::downgrade(&connection));
        Ok(connection::channel(connection))
    }

    /// Does nothing: bytes on a socket wake the thread that blocks on it, and the wake-up is short
    /// compared with a message's way through a network.
    fn nudge(&self, _stream: StreamNumber) {}

    fn abort(&self, lost: Option<usize>) {
        self.shared.abort.set(lost);
        // A thread that waits to read wakes up, finds its connection closed, and checks the flag.
        // Writing stays open, so that the peer does not take the abort for the end of this process.
        for connection in self.shared.table().connections.iter().filter_map(Weak::upgrade) {
            let _ = connection.socket.shutdown(Shutdown::Read);
        }
        self.shared.arrived.notify_all();
    }
}

impl TcpState {
    fn table(&self) -> MutexGuard<'_, ConnectionTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the connection of a lower rank.
    fn await_connection(&self, peer: usize, stream: StreamNumber) -> Result<TcpStream, TransportError> {
        let started = Instant::now();
        let mut table = self.table();
        loop {
            self.abort.check()?;
            // The entry stays, as `None`, so that a second connection for this channel is refused.
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
}

impl ConnectionOwner for TcpState {
    fn admit(&self, hello: &Hello) -> Verdict {
        let Peer::Rank(peer) = hello.from else { return Verdict::Unexpected };
        if hello.to != Peer::Rank(self.rank) || peer >= self.rank {
            return Verdict::Unexpected;
        }
        match self.table().accepted.entry((peer, hello.stream)) {
            Entry::Occupied(_) => Verdict::Duplicate,
            Entry::Vacant(entry) => {
                entry.insert(None);
                Verdict::Welcome
            }
        }
    }

    fn accept(self: Arc<Self>, hello: Hello, stream: TcpStream) {
        if let Peer::Rank(peer) = hello.from {
            self.table().accepted.insert((peer, hello.stream), Some(stream));
            self.arrived.notify_all();
        }
    }
}
