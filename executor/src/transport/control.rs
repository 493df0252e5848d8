//! The rendezvous at the start of a run, and the line between the launcher and every rank until its end.
//!
//! The launcher holds a [`ControlServer`]; each rank joins it by a [`ControlClient`], says where other ranks can reach it, and
//! gets the table of all once the last has come. The connections stay open: ranks report on them, the launcher gives orders,
//! and a connection that drops tells the launcher which rank is gone. What the messages mean is not known here.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::acceptor::{self, Acceptor, Door, spawn};
use super::frame::{self, Message};
use super::handshake::{Hello, Verdict};
use super::key::RunKey;
use super::{Party, StreamNumber, TransportError};

/// Once a message has begun, the rest of it, and whatever is written, must get through in this time.
const STALL_TIME: Duration = Duration::from_secs(30);

/// What a rank says of itself when it joins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announcement {
    /// Where it accepts connections of other ranks, if it does. An unspecified address (`0.0.0.0`) means: the one it comes from.
    pub address: Option<SocketAddr>,
    /// The machine it is on: ranks with one name here can share memory.
    pub machine: String,
}

/// Everybody's announcement, by rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerTable {
    /// Rank i's announcement is the i-th.
    pub ranks: Vec<Announcement>,
}

impl PeerTable {
    /// All addresses, or the first rank without one.
    pub fn addresses(&self) -> Result<Vec<SocketAddr>, usize> {
        self.ranks.iter().enumerate().map(|(rank, announcement)| announcement.address.ok_or(rank)).collect()
    }
}

/// What a control server hears from a rank.
#[derive(Debug)]
pub enum Event {
    /// A message.
    Message(Message),
    /// The connection ended or made no sense; there will be no more events from this rank.
    Lost(TransportError),
}

/// The launcher's side.
pub struct ControlServer {
    address: SocketAddr,
    shared: Arc<ServerShared>,
    events: Mutex<mpsc::Receiver<(usize, Event)>>,
    acceptors: Vec<Acceptor>,
}

impl fmt::Debug for ControlServer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ControlServer({} ranks at {})", self.shared.world_size, self.address)
    }
}

struct ServerShared {
    world_size: usize,
    events: mpsc::Sender<(usize, Event)>,
    ranks: Mutex<Vec<Joined>>,
    changed: Condvar,
    /// Set, under the lock of `ranks`, when the server goes: nobody may enter any more.
    closed: AtomicBool,
}

#[derive(Default)]
struct Joined {
    state: JoinState,
    announcement: Option<Announcement>,
    connection: Option<Arc<Mutex<TcpStream>>>,
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
    /// Listens on `address` (port 0: any that is free) for `world_size` ranks that hold `key`.
    pub fn bind(address: SocketAddr, key: &RunKey, world_size: usize) -> Result<Self, TransportError> {
        let listener = TcpListener::bind(address)
            .map_err(|error| TransportError::system(format!("listen on {address} for the ranks"), error))?;
        Ok(Self::listen(vec![listener], key, world_size)?.0)
    }

    /// As [`bind`](Self::bind), with sockets that listen already, one for each host of the ranks; returns their addresses too.
    pub fn listen(
        listeners: Vec<TcpListener>,
        key: &RunKey,
        world_size: usize,
    ) -> Result<(Self, Vec<SocketAddr>), TransportError> {
        let addresses = listeners.iter().map(TcpListener::local_addr).collect::<Result<Vec<_>, _>>();
        let addresses =
            addresses.map_err(|error| TransportError::system("learn the address that ranks are to connect to", error))?;
        let nowhere = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        let address = addresses.first().copied().unwrap_or(nowhere);
        let (sender, events) = mpsc::channel();
        let shared = Arc::new(ServerShared {
            world_size,
            events: sender,
            ranks: Mutex::new((0..world_size).map(|_| Joined::default()).collect()),
            changed: Condvar::new(),
            closed: AtomicBool::new(false),
        });
        let acceptors = listeners.into_iter().map(|listener| Acceptor::start(listener, key.clone(), Arc::clone(&shared)));
        let acceptors = acceptors.collect::<Result<Vec<_>, _>>()?;
        Ok((ControlServer { address, shared, events: Mutex::new(events), acceptors }, addresses))
    }

    /// Where ranks connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until all ranks have joined, then gives everyone the table. The error names who is missing, or who came and left.
    pub fn gather(&self, timeout: Duration) -> Result<PeerTable, TransportError> {
        let started = Instant::now();
        let mut ranks = self.shared.ranks();
        loop {
            if let Some(rank) = ranks.iter().position(|joined| joined.state == JoinState::Lost) {
                return Err(TransportError::PeerLost { rank });
            }
            let announced: Vec<Announcement> = ranks.iter().filter_map(|joined| joined.announcement.clone()).collect();
            if announced.len() == self.shared.world_size {
                drop(ranks);
                let table = PeerTable { ranks: announced };
                self.broadcast(&table)?;
                return Ok(table);
            }
            let waited = started.elapsed();
            if waited >= timeout {
                let missing = ranks.iter().enumerate().filter(|(_, joined)| joined.announcement.is_none());
                return Err(TransportError::MissingRanks { ranks: missing.map(|(rank, _)| rank).collect(), waited });
            }
            ranks = self.shared.changed.wait_timeout(ranks, timeout - waited).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// What the ranks say, in the order in which it came, each with its rank; `None` if there is nothing within `timeout`.
    pub fn next_event(&self, timeout: Duration) -> Option<(usize, Event)> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(timeout).ok()
    }

    /// Sends `message` to `rank`.
    pub fn send<T: Serialize + ?Sized>(&self, rank: usize, message: &T) -> Result<(), TransportError> {
        let connection = self.shared.ranks().get(rank).and_then(|joined| joined.connection.clone());
        let connection = connection.ok_or(TransportError::PeerLost { rank })?;
        let stream = connection.lock().unwrap_or_else(PoisonError::into_inner);
        frame::write(&*stream, Party::Rank(rank), message)
    }

    /// Sends `message` to every rank, also past those that are lost; the first error is returned.
    pub fn broadcast<T: Serialize + ?Sized>(&self, message: &T) -> Result<(), TransportError> {
        (0..self.shared.world_size).map(|rank| self.send(rank, message)).fold(Ok(()), Result::and)
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        self.acceptors.clear();
        let mut ranks = self.shared.ranks();
        self.shared.closed.store(true, Ordering::Relaxed);
        let readers: Vec<_> = ranks
            .iter_mut()
            .filter_map(|joined| {
                if let Some(socket) = joined.socket.take() {
                    let _ = socket.shutdown(Shutdown::Both);
                }
                joined.connection = None;
                joined.reader.take()
            })
            .collect();
        drop(ranks);
        for reader in readers {
            let _ = reader.join();
        }
    }
}

impl ServerShared {
    fn ranks(&self) -> MutexGuard<'_, Vec<Joined>> {
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads all that `rank` says until its connection ends.
    fn listen_to(&self, rank: usize, stream: TcpStream) {
        let error = match self.register(rank, &stream) {
            Ok(()) => loop {
                match frame::read(&stream, Party::Rank(rank)) {
                    // Nobody listens any more when the server is being dropped.
                    Ok(message) => drop(self.events.send((rank, Event::Message(message)))),
                    Err(error) => break error,
                }
            },
            Err(error) => error,
        };
        if let Some(joined) = self.ranks().get_mut(rank) {
            joined.state = JoinState::Lost;
            joined.connection = None;
            joined.socket = None;
        }
        self.changed.notify_all();
        drop(self.events.send((rank, Event::Lost(error))));
    }

    fn register(&self, rank: usize, stream: &TcpStream) -> Result<(), TransportError> {
        let party = Party::Rank(rank);
        let prepare = |error| TransportError::system(format!("configure the control connection to {party}"), error);
        stream.set_read_timeout(Some(STALL_TIME)).map_err(prepare)?;
        let mut announcement: Announcement = frame::read(stream, party)?.parse()?;
        stream.set_read_timeout(None).map_err(prepare)?;
        stream.set_write_timeout(Some(STALL_TIME)).map_err(prepare)?;
        if let Some(address) = announcement.address.as_mut().filter(|address| address.ip().is_unspecified()) {
            address.set_ip(stream.peer_addr().map_err(prepare)?.ip());
        }
        let writer = Arc::new(Mutex::new(stream.try_clone().map_err(prepare)?));
        if let Some(joined) = self.ranks().get_mut(rank) {
            joined.state = JoinState::Announced;
            joined.announcement = Some(announcement);
            joined.connection = Some(writer);
        }
        self.changed.notify_all();
        Ok(())
    }
}

impl Door for ServerShared {
    fn admit(&self, hello: &Hello) -> Verdict {
        let Party::Rank(rank) = hello.from else { return Verdict::Unexpected };
        match self.ranks().get_mut(rank) {
            Some(joined) if hello.to == Party::Launcher && joined.state == JoinState::Absent => {
                joined.state = JoinState::Admitted;
                Verdict::Welcome
            }
            Some(_) if hello.to == Party::Launcher => Verdict::Duplicate,
            _ => Verdict::Unexpected,
        }
    }

    fn enter(self: Arc<Self>, hello: Hello, stream: TcpStream) {
        let (Party::Rank(rank), Ok(socket)) = (hello.from, stream.try_clone()) else { return };
        let mut ranks = self.ranks();
        if self.closed.load(Ordering::Relaxed) {
            return;
        }
        let server = Arc::clone(&self);
        if let Some(joined) = ranks.get_mut(rank) {
            joined.socket = Some(socket);
            joined.reader = spawn("foretell-control", move || server.listen_to(rank, stream)).ok();
        }
    }
}

/// A rank's side. One thread may receive while others send.
pub struct ControlClient {
    stream: TcpStream,
    reading: Mutex<()>,
    writing: Mutex<()>,
}

impl fmt::Debug for ControlClient {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ControlClient({:?})", self.stream.peer_addr())
    }
}

impl ControlClient {
    /// Joins the run as `rank` at the launcher's `server`, and waits for the others.
    pub fn join(
        server: SocketAddr,
        key: &RunKey,
        rank: usize,
        announcement: &Announcement,
        timeout: Duration,
    ) -> Result<(Self, PeerTable), TransportError> {
        let same = || Ok(Some(key.clone()));
        Self::join_by(server, &same, rank, announcement, timeout).map(|(client, table, _)| (client, table))
    }

    /// As [`join`](Self::join), by a key that is looked for again and again: while there is none, or one that an earlier run left, it is waited
    /// for another. Returns the key that opened.
    pub fn join_by(
        server: SocketAddr,
        find_key: &dyn Fn() -> Result<Option<RunKey>, TransportError>,
        rank: usize,
        announcement: &Announcement,
        timeout: Duration,
    ) -> Result<(Self, PeerTable, RunKey), TransportError> {
        /// How often it is looked whether there is a key.
        const GLANCE: Duration = Duration::from_millis(50);
        let started = Instant::now();
        let left = || timeout.saturating_sub(started.elapsed());
        let hello = Hello { from: Party::Rank(rank), to: Party::Launcher, stream: StreamNumber(0) };
        let (stream, key) = loop {
            let Some(key) = find_key()? else {
                if left().is_zero() {
                    return Err(TransportError::Credentials { reason: "no launcher has left its secret in time" });
                }
                std::thread::sleep(GLANCE);
                continue;
            };
            let is_replaced = || !matches!(find_key(), Ok(Some(now)) if now == key);
            let give_up = || if is_replaced() { Err(TransportError::Aborted) } else { Ok(()) };
            match acceptor::connect(server, &key, hello, left(), give_up) {
                Err(error @ (TransportError::NotAuthenticated { .. } | TransportError::Aborted)) => {
                    if left().is_zero() || !is_replaced() {
                        return Err(error);
                    }
                }
                stream => break (stream?, key),
            }
        };
        stream
            .set_write_timeout(Some(STALL_TIME))
            .and_then(|()| stream.set_read_timeout(Some(STALL_TIME)))
            .map_err(|error| TransportError::system("configure the control connection to the launcher", error))?;
        let client = ControlClient { stream, reading: Mutex::default(), writing: Mutex::default() };
        client.send(announcement)?;
        let table = client.receive(Some(left()))?;
        Ok((client, table, key))
    }

    /// Sends `message` to the launcher.
    pub fn send<T: Serialize + ?Sized>(&self, message: &T) -> Result<(), TransportError> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        frame::write(&self.stream, Party::Launcher, message)
    }

    /// Waits for the launcher's next message, for `timeout` at the most or without end.
    pub fn receive<T: DeserializeOwned>(&self, timeout: Option<Duration>) -> Result<T, TransportError> {
        let _reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        let started = Instant::now();
        loop {
            let left = timeout.map(|timeout| timeout.saturating_sub(started.elapsed()));
            let left = left.map(|left| Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos() as _ });
            match poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], left.as_ref()) {
                Ok(0) => return Err(TransportError::ControlTimedOut { party: Party::Launcher, waited: started.elapsed() }),
                Ok(_) => return frame::read(&self.stream, Party::Launcher)?.parse(),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(TransportError::system("wait for the launcher's messages", error)),
            }
        }
    }

    /// Ends the connection: a thread that waits in [`receive`](Self::receive) returns with the launcher lost.
    pub fn close(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}
