//! The transport of clusters whose ranks Open MPI's `mpirun` started: MPI's messages between two
//! ranks, below our collectives.
//!
//! A stream is a tag on a communicator of this run. MPI has neither time-outs nor a way to survive
//! the loss of a rank, so nothing here blocks in it: waits poll, with the time limits of every
//! transport, and the launcher's control connections tell which rank is lost. Bytes that MPI sends
//! are not encrypted by Foretell.

mod engine;
mod halves;
mod library;

use super::channel::Channel;
use super::endpoint::WaitPolicy;
use super::link::{Starved, Traffic};
use super::{StreamNumber, Transport, TransportError};
use engine::{Engine, Finish, MOST_STREAMS};
use halves::Line;
use std::fmt;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// The transport of one rank to all others by MPI.
pub struct Mpi {
    engine: Arc<Engine>,
    orders: SyncSender<Finish>,
    lines: Mutex<Vec<Opened>>,
}

/// A channel that was opened; the line is gone once the channel is dropped.
struct Opened {
    peer: usize,
    stream: StreamNumber,
    line: Weak<Line>,
}

impl fmt::Debug for Mpi {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Mpi(rank {} of {})", self.engine.rank, self.engine.world_size)
    }
}

impl Mpi {
    /// The version of the Open MPI that is installed here, such as `Open MPI v4.1.4`.
    ///
    /// # Errors
    /// [`TransportError::Mpi`] if there is none, or another MPI.
    pub fn version() -> Result<String, TransportError> {
        library::Library::get().map(|library| library.version.clone())
    }

    /// Starts MPI in this process, which `mpirun` has started as `rank`. All ranks must start it
    /// within `timeout`.
    ///
    /// # Errors
    /// [`TransportError::Mpi`] if MPI cannot be started, or disagrees about the rank or the number
    /// of ranks.
    pub fn start(rank: usize, world_size: usize, wait_policy: WaitPolicy, timeout: Duration) -> Result<Self, TransportError> {
        let (engine, orders) = Engine::start(rank, world_size, wait_policy, timeout)?;
        Ok(Mpi { engine, orders, lines: Mutex::default() })
    }

    fn lines(&self) -> MutexGuard<'_, Vec<Opened>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transport for Mpi {
    fn rank(&self) -> usize {
        self.engine.rank
    }

    fn world_size(&self) -> usize {
        self.engine.world_size
    }

    fn open(&self, peer: usize, stream: StreamNumber) -> Result<Channel, TransportError> {
        let Engine { rank, world_size, .. } = *self.engine;
        if peer == rank || peer >= world_size {
            return Err(TransportError::NoSuchPeer { rank: peer, from: rank });
        }
        if stream.0 >= MOST_STREAMS {
            return Err(TransportError::NoSuchStream { rank: peer, stream, streams: MOST_STREAMS.into() });
        }
        let mut lines = self.lines();
        if lines.iter().any(|opened| (opened.peer, opened.stream) == (peer, stream)) {
            return Err(TransportError::AlreadyOpen { rank: peer, stream });
        }
        let line = Arc::new(Line { peer, stream, traffic: Traffic::default(), engine: Arc::clone(&self.engine) });
        let channel = halves::channel(&line)?;
        lines.push(Opened { peer, stream, line: Arc::downgrade(&line) });
        Ok(channel)
    }

    /// Does nothing: threads that wait look again within a fraction of a millisecond.
    fn nudge(&self, _stream: StreamNumber) {}

    fn abort(&self, lost: Option<usize>) {
        self.engine.abort.set(lost);
    }

    fn starved(&self) -> Vec<Starved> {
        let lines = self.lines();
        let lines = lines.iter().filter_map(|opened| opened.line.upgrade());
        let starved = |line: Arc<Line>| {
            Some(Starved { peer: line.peer, stream: line.stream, received: Some(line.traffic.starved_after()?) })
        };
        lines.filter_map(starved).collect()
    }

    fn sent(&self, peer: usize, stream: StreamNumber) -> Option<u64> {
        let lines = self.lines();
        let opened = lines.iter().find(|opened| (opened.peer, opened.stream) == (peer, stream))?;
        opened.line.upgrade().map(|line| line.traffic.sent())
    }

    fn leave(&self, timeout: Duration) -> Result<(), TransportError> {
        let ended = |reason: String| TransportError::Mpi { reason, hint: "see the logs of the other ranks" };
        let (reply, result) = sync_channel(1);
        self.orders.send(reply).map_err(|_| ended("MPI ended before the run".into()))?;
        result.recv_timeout(timeout).unwrap_or_else(|_| Err(ended(format!("MPI did not end within {timeout:?}"))))
    }
}
