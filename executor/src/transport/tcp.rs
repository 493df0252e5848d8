//! The transport between machines: one encrypted TCP connection for each pair of ranks and stream.
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
use super::link::{Starved, Traffic};
use super::patience::{MOST_GAP, Patience};
use super::session::Session;
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
    /// Connections from lower ranks.
    accepted: HashMap<(usize, StreamNumber), Accepted>,
    /// The channels that this rank has opened.
    opened: HashSet<(usize, StreamNumber)>,
    connections: Vec<Weak<Connection>>,
    /// The channels whose connections this rank is making.
    connecting: Vec<(usize, StreamNumber)>,
}

/// A connection from a lower rank.
enum Accepted {
    /// It was admitted, and its handshake is ending.
    Arriving,
    /// It waits for this rank to open the channel.
    Waiting(TcpStream, Box<Session>),
    /// A channel uses it.
    Taken,
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
        let (socket, session) = if shared.rank < peer {
            let hello = Hello { from: Peer::Rank(shared.rank), to: Peer::Rank(peer), stream };
            shared.table().connecting.push((peer, stream));
            let connected =
                acceptor::connect(*address, &shared.key, hello, shared.options.connect_timeout, || shared.abort.check());
            shared.table().connecting.retain(|channel| *channel != (peer, stream));
            connected?
        } else {
            shared.await_connection(peer, stream)?
        };
        socket
            .set_nonblocking(true)
            .map_err(|error| TransportError::system(format!("configure the connection to rank {peer}"), error))?;
        let connection = Arc::new(Connection { socket, peer, stream, traffic: Traffic::default(), shared: Arc::clone(shared) });
        shared.table().connections.push(Arc::downgrade(&connection));
        Ok(connection::channel(connection, session))
    }

    /// Does nothing: bytes on a socket wake the thread that blocks on it, and the wake-up is short
    /// compared with a message's time in the network.
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

    fn starved(&self) -> Vec<Starved> {
        let table = self.shared.table();
        let connecting = table.connecting.iter().map(|&(peer, stream)| Starved { peer, stream, received: None });
        let connected = table.connections.iter().filter_map(Weak::upgrade).filter_map(|connection| {
            let received = connection.traffic.starved_after()?;
            Some(Starved { peer: connection.peer, stream: connection.stream, received: Some(received) })
        });
        connecting.chain(connected).collect()
    }

    fn sent(&self, peer: usize, stream: StreamNumber) -> Option<u64> {
        let table = self.shared.table();
        let mut connections = table.connections.iter().filter_map(Weak::upgrade);
        connections.find(|connection| (connection.peer, connection.stream) == (peer, stream)).map(|found| found.traffic.sent())
    }
}

impl TcpState {
    fn table(&self) -> MutexGuard<'_, ConnectionTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the connection of a lower rank.
    fn await_connection(&self, peer: usize, stream: StreamNumber) -> Result<(TcpStream, Session), TransportError> {
        let mut patience = Patience::new(self.options.connect_timeout, MOST_GAP, Instant::now());
        let mut table = self.table();
        loop {
            self.abort.check()?;
            if let Some(accepted @ Accepted::Waiting(..)) = table.accepted.get_mut(&(peer, stream)) {
                // The entry stays, so that a second connection for this channel is refused.
                let Accepted::Waiting(socket, session) = std::mem::replace(accepted, Accepted::Taken) else { continue };
                return Ok((socket, *session));
            }
            let left = patience.left(Instant::now());
            if left.is_zero() {
                let waited = patience.waited();
                return Err(TransportError::TimedOut { rank: peer, stream, activity: "connect", waited });
            }
            table = self.arrived.wait_timeout(table, left.min(MOST_GAP / 2)).unwrap_or_else(PoisonError::into_inner).0;
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
            // The peer connects again, so it has given up its earlier connection.
            Entry::Occupied(mut entry) if matches!(entry.get(), Accepted::Waiting(..)) => {
                entry.insert(Accepted::Arriving);
                Verdict::Welcome
            }
            Entry::Occupied(_) => Verdict::Duplicate,
            Entry::Vacant(entry) => {
                entry.insert(Accepted::Arriving);
                Verdict::Welcome
            }
        }
    }

    fn withdraw(&self, hello: &Hello) {
        let Peer::Rank(peer) = hello.from else { return };
        let mut table = self.table();
        if matches!(table.accepted.get(&(peer, hello.stream)), Some(Accepted::Arriving)) {
            table.accepted.remove(&(peer, hello.stream));
        }
    }

    fn accept(self: Arc<Self>, hello: &Hello, stream: TcpStream, session: Session) -> bool {
        let Peer::Rank(peer) = hello.from else { return false };
        self.table().accepted.insert((peer, hello.stream), Accepted::Waiting(stream, Box::new(session)));
        self.arrived.notify_all();
        true
    }
}
