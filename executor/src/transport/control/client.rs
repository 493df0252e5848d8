//! A rank's side of its control connection.

use std::fmt;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::super::acceptor;
use super::super::doorbell::timespec;
use super::super::handshake::Hello;
use super::super::key::RunKey;
use super::super::patience::{MOST_GAP, Patience};
use super::super::{Peer, StreamNumber, TransportError};
use super::frame::{FrameReader, FrameWriter};
use super::{Announcement, HEARTBEAT, PeerTable, STALL_TIME};

/// How often a rank looks for a key that is not there yet.
const KEY_INTERVAL: Duration = Duration::from_millis(50);
/// How much longer than the launcher a rank waits for the others to join.
const JOIN_MARGIN: Duration = Duration::from_secs(30);

/// A rank's control connection. One thread may receive while others send. A thread of its own sends
/// a heartbeat from the moment that the rank has announced itself until this value is dropped.
pub struct ControlClient {
    stream: TcpStream,
    reader: Mutex<FrameReader<TcpStream>>,
    writer: Arc<Mutex<FrameWriter<TcpStream>>>,
    /// Dropping it ends the heartbeat.
    _heart: mpsc::Sender<()>,
}

impl fmt::Debug for ControlClient {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ControlClient({:?})", self.stream.peer_addr())
    }
}

impl ControlClient {
    /// Joins the run as `rank` at the launcher's address `server`, and waits for all other ranks.
    /// Returns the connection and everyone's announcements.
    pub fn join(
        server: SocketAddr,
        key: &RunKey,
        rank: usize,
        announcement: &Announcement,
        timeout: Duration,
    ) -> Result<(Self, PeerTable), TransportError> {
        let find_key = || Ok(Some(key.clone()));
        Self::join_with(server, &find_key, rank, announcement, timeout).map(|(client, table, _)| (client, table))
    }

    /// As [`join`](Self::join), if the key may not exist yet, or may be one that an earlier run has
    /// left: `find_key` is called again until the launcher accepts its key or `timeout` has passed.
    /// Returns that key too.
    pub fn join_with(
        server: SocketAddr,
        find_key: &dyn Fn() -> Result<Option<RunKey>, TransportError>,
        rank: usize,
        announcement: &Announcement,
        timeout: Duration,
    ) -> Result<(Self, PeerTable, RunKey), TransportError> {
        let started = Instant::now();
        let left = || timeout.saturating_sub(started.elapsed());
        let hello = Hello { from: Peer::Rank(rank), to: Peer::Launcher, stream: StreamNumber(0) };
        let (stream, session, key) = loop {
            let Some(key) = find_key()? else {
                if left().is_zero() {
                    return Err(TransportError::Credentials { reason: "rank 0 has not written its secret in time" });
                }
                std::thread::sleep(KEY_INTERVAL);
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
                connected => {
                    let (stream, session) = connected?;
                    break (stream, session, key);
                }
            }
        };
        let system = |error| TransportError::system("configure the control connection to the launcher", error);
        let clone = || stream.try_clone().map_err(system);
        stream.set_write_timeout(Some(STALL_TIME)).and_then(|()| stream.set_read_timeout(Some(STALL_TIME))).map_err(system)?;
        let reader = Mutex::new(FrameReader::new(clone()?, session.opener, Peer::Launcher));
        let mut writer = FrameWriter::new(clone()?, session.sealer, Peer::Launcher);
        writer.write(announcement)?;
        let writer = Arc::new(Mutex::new(writer));
        let (heart, beats) = mpsc::channel();
        let client = ControlClient { stream, reader, writer: Arc::clone(&writer), _heart: heart };
        acceptor::spawn("foretell-heartbeat", move || beat(&writer, &beats))?;
        // The launcher says when it has waited long enough for the other ranks. This rank's own
        // patience must be longer: otherwise it would leave first and be blamed for it.
        let table = client.receive(Some(timeout + JOIN_MARGIN))?;
        Ok((client, table, key))
    }

    /// Sends `message` to the launcher.
    pub fn send<T: Serialize + ?Sized>(&self, message: &T) -> Result<(), TransportError> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner).write(message)
    }

    /// Waits for the launcher's next message, for at most `timeout`, or without limit if it is
    /// `None`.
    pub fn receive<T: DeserializeOwned>(&self, timeout: Option<Duration>) -> Result<T, TransportError> {
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        let mut patience = timeout.map(|timeout| Patience::new(timeout, MOST_GAP, Instant::now()));
        loop {
            let left = patience.as_mut().map(|patience| patience.left(Instant::now()));
            let slice = left.map(|left| timespec(left.min(MOST_GAP / 2)));
            match poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], slice.as_ref()) {
                Ok(0) if left.is_some_and(|left| left.is_zero()) => {
                    let waited = patience.expect("invariant: only a wait with a limit runs out").waited();
                    return Err(TransportError::ControlTimedOut { peer: Peer::Launcher, waited });
                }
                Ok(0) => {}
                Ok(_) => {
                    if let Some(message) = reader.read(|| {})? {
                        return message.parse();
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(TransportError::system("wait for the launcher's messages", error)),
            }
        }
    }
}

impl Drop for ControlClient {
    fn drop(&mut self) {
        // The heartbeat's thread may hold the socket open for a moment longer. What was sent before
        // still arrives.
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

/// Sends heartbeats until the other end of `stop` is dropped or the connection is gone.
fn beat(writer: &Mutex<FrameWriter<TcpStream>>, stop: &mpsc::Receiver<()>) {
    while stop.recv_timeout(HEARTBEAT) == Err(RecvTimeoutError::Timeout) {
        if writer.lock().unwrap_or_else(PoisonError::into_inner).write_heartbeat().is_err() {
            return;
        }
    }
}
