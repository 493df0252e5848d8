//! A rank's side of its control connection.

use std::fmt;
use std::net::{SocketAddr, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::super::acceptor;
use super::super::doorbell::timespec;
use super::super::handshake::Hello;
use super::super::key::RunKey;
use super::super::{Peer, StreamNumber, TransportError};
use super::{Announcement, PeerTable, STALL_TIME, frame};

/// How often a rank looks for a key that is not there yet.
const KEY_INTERVAL: Duration = Duration::from_millis(50);

/// A rank's control connection. One thread may receive while others send.
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

    /// As [`join`](Self::join), with a key that may not be there yet, or that an earlier run may
    /// have left: `find_key` is called again until the launcher accepts its key or `timeout` has
    /// passed. Returns that key too.
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
        let (stream, key) = loop {
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
        frame::write(&self.stream, Peer::Launcher, message)
    }

    /// Waits for the launcher's next message, for at most `timeout`; without one, for ever.
    pub fn receive<T: DeserializeOwned>(&self, timeout: Option<Duration>) -> Result<T, TransportError> {
        let _reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        let started = Instant::now();
        loop {
            let left = timeout.map(|timeout| timespec(timeout.saturating_sub(started.elapsed())));
            match poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], left.as_ref()) {
                Ok(0) => return Err(TransportError::ControlTimedOut { peer: Peer::Launcher, waited: started.elapsed() }),
                Ok(_) => return frame::read(&self.stream, Peer::Launcher)?.parse(),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(TransportError::system("wait for the launcher's messages", error)),
            }
        }
    }
}
