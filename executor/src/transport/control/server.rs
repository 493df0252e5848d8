//! The launcher's side of the control connections.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::super::acceptor::{Acceptor, ConnectionOwner, spawn};
use super::super::handshake::{Hello, Verdict};
use super::super::key::RunKey;
use super::super::session::{Sealer, Session};
use super::super::{Peer, TransportError};
use super::frame::{FrameReader, FrameWriter, Message};
use super::life::LifeWatch;
use super::{Announcement, PeerTable, STALL_TIME};

/// An event on a rank's control connection.
#[derive(Debug)]
pub enum Event {
    /// A message.
    Message(Message),
    /// The connection ended or sent something invalid. No more events follow from this rank.
    Lost(TransportError),
}

/// The launcher's side of all control connections.
pub struct ControlServer {
    address: SocketAddr,
    shared: Arc<ServerState>,
    events: Mutex<mpsc::Receiver<(usize, Event)>>,
    acceptors: Vec<Acceptor>,
}

impl fmt::Debug for ControlServer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ControlServer({} ranks at {})", self.shared.world_size, self.address)
    }
}

/// The state that the server shares with the threads that accept and read connections.
struct ServerState {
    world_size: usize,
    events: mpsc::Sender<(usize, Event)>,
    /// Indexed by rank.
    ranks: Mutex<Vec<RankConnection>>,
    life: Mutex<LifeWatch>,
    /// Signalled whenever the state of a rank changes.
    changed: Condvar,
    /// Set, under the lock of `ranks`, when the server is dropped. From then on no connection is
    /// accepted.
    is_closed: AtomicBool,
}

#[derive(Default)]
struct RankConnection {
    state: JoinState,
    announcement: Option<Announcement>,
    writer: Option<Arc<Mutex<FrameWriter<TcpStream>>>>,
    /// A second handle of the same socket, to shut it down without waiting for a writer.
    socket: Option<TcpStream>,
    reader: Option<std::thread::JoinHandle<()>>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum JoinState {
    #[default]
    Absent,
    Admitted,
    Announced,
    Lost,
}

impl ControlServer {
    /// Listens on `address` for `world_size` ranks that hold `key`. Port 0 takes any free port.
    pub fn bind(address: SocketAddr, key: &RunKey, world_size: usize) -> Result<Self, TransportError> {
        let listener = TcpListener::bind(address)
            .map_err(|error| TransportError::system(format!("listen on {address} for the ranks"), error))?;
        Ok(Self::listen(vec![listener], key, world_size)?.0)
    }

    /// As [`bind`](Self::bind), with sockets that listen already, one per node. Returns their
    /// addresses too.
    pub fn listen(
        listeners: Vec<TcpListener>,
        key: &RunKey,
        world_size: usize,
    ) -> Result<(Self, Vec<SocketAddr>), TransportError> {
        let addresses = listeners.iter().map(TcpListener::local_addr).collect::<Result<Vec<_>, _>>();
        let addresses =
            addresses.map_err(|error| TransportError::system("learn the address that ranks are to connect to", error))?;
        let no_address = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        let address = addresses.first().copied().unwrap_or(no_address);
        let (sender, events) = mpsc::channel();
        let shared = Arc::new(ServerState {
            world_size,
            events: sender,
            ranks: Mutex::new((0..world_size).map(|_| RankConnection::default()).collect()),
            life: Mutex::new(LifeWatch::new(world_size, Instant::now())),
            changed: Condvar::new(),
            is_closed: AtomicBool::new(false),
        });
        let acceptors = listeners.into_iter().map(|listener| Acceptor::start(listener, key.clone(), Arc::clone(&shared)));
        let acceptors = acceptors.collect::<Result<Vec<_>, _>>()?;
        Ok((ControlServer { address, shared, events: Mutex::new(events), acceptors }, addresses))
    }

    /// The address that ranks connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until all ranks have joined, then sends the table of announcements to all of them.
    ///
    /// # Errors
    /// [`TransportError::MissingRanks`] after `timeout`, or [`TransportError::PeerLost`] for a rank
    /// that joined and left.
    pub fn wait_for_ranks(&self, timeout: Duration) -> Result<PeerTable, TransportError> {
        let started = Instant::now();
        let mut ranks = self.shared.ranks();
        loop {
            if let Some(rank) = ranks.iter().position(|rank| rank.state == JoinState::Lost) {
                return Err(TransportError::PeerLost { rank, reason: None });
            }
            let announced: Vec<Announcement> = ranks.iter().filter_map(|rank| rank.announcement.clone()).collect();
            if announced.len() == self.shared.world_size {
                drop(ranks);
                let table = PeerTable { ranks: announced };
                self.broadcast(&table)?;
                return Ok(table);
            }
            let waited = started.elapsed();
            if waited >= timeout {
                let missing = ranks.iter().enumerate().filter(|(_, rank)| rank.announcement.is_none());
                return Err(TransportError::MissingRanks { ranks: missing.map(|(rank, _)| rank).collect(), waited });
            }
            ranks = self.shared.changed.wait_timeout(ranks, timeout - waited).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Returns the next event and its rank, in the order of arrival; `None` if none comes within
    /// `timeout`.
    pub fn next_event(&self, timeout: Duration) -> Option<(usize, Event)> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(timeout).ok()
    }

    /// Sends `message` to `rank`.
    pub fn send<T: Serialize + ?Sized>(&self, rank: usize, message: &T) -> Result<(), TransportError> {
        let writer = self.shared.ranks().get(rank).and_then(|connection| connection.writer.clone());
        let writer = writer.ok_or(TransportError::PeerLost { rank, reason: None })?;
        writer.lock().unwrap_or_else(PoisonError::into_inner).write(message)
    }

    /// The ranks that have joined and not left, and from which nothing has arrived for `limit`.
    /// Call it several times a second.
    pub fn silent_ranks(&self, limit: Duration) -> Vec<usize> {
        self.shared.life().silent(limit, Instant::now())
    }

    /// Returns whether no rank is connected: each has left or has not joined. All events of those
    /// that left have then been queued.
    pub fn have_all_left(&self) -> bool {
        self.shared.ranks().iter().all(|connection| matches!(connection.state, JoinState::Absent | JoinState::Lost))
    }

    /// Sends `message` to every rank, even if some are lost. Returns the first error.
    pub fn broadcast<T: Serialize + ?Sized>(&self, message: &T) -> Result<(), TransportError> {
        (0..self.shared.world_size).map(|rank| self.send(rank, message)).fold(Ok(()), Result::and)
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        self.acceptors.clear();
        let mut ranks = self.shared.ranks();
        self.shared.is_closed.store(true, Ordering::Relaxed);
        let readers: Vec<_> = ranks
            .iter_mut()
            .filter_map(|connection| {
                if let Some(socket) = connection.socket.take() {
                    let _ = socket.shutdown(Shutdown::Both);
                }
                connection.writer = None;
                connection.reader.take()
            })
            .collect();
        drop(ranks);
        for reader in readers {
            let _ = reader.join();
        }
    }
}

impl ServerState {
    fn ranks(&self) -> MutexGuard<'_, Vec<RankConnection>> {
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Take it after the lock of `ranks`, not before.
    fn life(&self) -> MutexGuard<'_, LifeWatch> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the messages of `rank` until its connection ends.
    fn read_all(&self, rank: usize, stream: TcpStream, session: Session) {
        let mut reader = FrameReader::new(stream, session.opener, Peer::Rank(rank));
        let error = match self.register(rank, &mut reader, session.sealer) {
            Ok(()) => loop {
                match reader.read(|| self.note(rank)) {
                    Ok(None) => {}
                    // The receiver is gone while the server is being dropped.
                    Ok(Some(message)) => drop(self.events.send((rank, Event::Message(message)))),
                    Err(error) => break error,
                }
            },
            // The rank had not joined yet, and may connect again.
            Err(TransportError::PeerLost { .. }) => return self.forget(rank),
            Err(error) => error,
        };
        if let Some(connection) = self.ranks().get_mut(rank) {
            connection.writer = None;
            connection.socket = None;
        }
        // The state follows the event: once all ranks have left, all events are there.
        drop(self.events.send((rank, Event::Lost(error))));
        if let Some(connection) = self.ranks().get_mut(rank) {
            connection.state = JoinState::Lost;
        }
        self.life().forget(rank);
        self.changed.notify_all();
    }

    /// Forgets a connection of `rank` that ended before the rank had announced itself.
    fn forget(&self, rank: usize) {
        if let Some(connection) = self.ranks().get_mut(rank).filter(|connection| connection.state == JoinState::Admitted) {
            connection.state = JoinState::Absent;
            connection.socket = None;
            self.life().forget(rank);
        }
    }

    /// Notes that bytes of `rank` have arrived.
    fn note(&self, rank: usize) {
        self.life().hear(rank, Instant::now());
    }

    /// Reads the announcement of `rank`, with which it has joined.
    fn register(&self, rank: usize, reader: &mut FrameReader<TcpStream>, sealer: Sealer) -> Result<(), TransportError> {
        let peer = Peer::Rank(rank);
        let system = |error| TransportError::system(format!("configure the control connection to {peer}"), error);
        reader.stream().set_read_timeout(Some(STALL_TIME)).map_err(system)?;
        let mut announcement: Announcement = loop {
            if let Some(message) = reader.read(|| self.note(rank))? {
                break message.parse()?;
            }
        };
        let stream = reader.stream();
        stream.set_read_timeout(None).map_err(system)?;
        stream.set_write_timeout(Some(STALL_TIME)).map_err(system)?;
        if let Some(address) = announcement.address.as_mut().filter(|address| address.ip().is_unspecified()) {
            address.set_ip(stream.peer_addr().map_err(system)?.ip());
        }
        let writer = FrameWriter::new(stream.try_clone().map_err(system)?, sealer, peer);
        if let Some(connection) = self.ranks().get_mut(rank) {
            connection.state = JoinState::Announced;
            connection.announcement = Some(announcement);
            connection.writer = Some(Arc::new(Mutex::new(writer)));
        }
        self.changed.notify_all();
        Ok(())
    }
}

impl ConnectionOwner for ServerState {
    fn admit(&self, hello: &Hello) -> Verdict {
        let Peer::Rank(rank) = hello.from else { return Verdict::Unexpected };
        match self.ranks().get_mut(rank) {
            Some(connection) if hello.to == Peer::Launcher && connection.state == JoinState::Absent => {
                connection.state = JoinState::Admitted;
                self.life().hear(rank, Instant::now());
                Verdict::Welcome
            }
            Some(_) if hello.to == Peer::Launcher => Verdict::Duplicate,
            _ => Verdict::Unexpected,
        }
    }

    fn withdraw(&self, hello: &Hello) {
        if let Peer::Rank(rank) = hello.from {
            self.forget(rank);
        }
    }

    fn accept(self: Arc<Self>, hello: &Hello, stream: TcpStream, session: Session) -> bool {
        let (Peer::Rank(rank), Ok(socket)) = (hello.from, stream.try_clone()) else { return false };
        let mut ranks = self.ranks();
        if self.is_closed.load(Ordering::Relaxed) {
            return true;
        }
        let server = Arc::clone(&self);
        let reader = spawn("foretell-control", move || server.read_all(rank, stream, session));
        match (ranks.get_mut(rank), reader) {
            (Some(connection), Ok(reader)) => {
                connection.socket = Some(socket);
                connection.reader = Some(reader);
                true
            }
            _ => false,
        }
    }
}
