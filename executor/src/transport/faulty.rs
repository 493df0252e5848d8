//! A transport within one process, with faults at places that a test chooses: ranks that crash or
//! freeze at an operation, links that break or swallow bytes from a byte on, and short delays.
//!
//! Places are counted in operations of a rank and in bytes of a link, so that a seed puts a fault
//! where it was, whatever order the threads run in.

use super::doorbell::Doorbell;
use super::endpoint::{Endpoint, ReceiveHalf, SendHalf, WaitPolicy, WakeSource};
use super::message::{Incoming, Outgoing};
use super::{Channel, Peer, StreamNumber, Transport, TransportError};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Bytes that a link holds.
const CAPACITY: usize = 4096;
/// Time after which a wait counts as hung.
const HUNG: Duration = Duration::from_secs(30);

/// A fault of a rank or of its links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The rank's process ends.
    Crash,
    /// The rank's process is stopped.
    Freeze,
    /// The next link that the rank sends on breaks.
    Break,
    /// The next link that the rank sends on swallows all bytes from now on.
    Swallow,
    /// All links between the ranks below the rank and the others swallow bytes from now on.
    Partition,
}

/// What the launcher would find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finding {
    /// A rank sends no sign of life.
    Silent(usize),
    /// Bytes of one rank do not reach the other.
    Lost(usize, usize),
}

/// The network of a run.
#[derive(Debug)]
pub(crate) struct FaultyNetwork {
    size: usize,
    /// The rank that a fault hits, the operation at which, and the fault.
    fault: Option<(usize, usize, Fault)>,
    /// A rank sleeps before every so many operations; `None`: never.
    delay_every: Option<usize>,
    state: Mutex<State>,
    bell: Doorbell,
}

#[derive(Debug, Default)]
struct State {
    /// Operations of each rank.
    operations: Vec<usize>,
    links: BTreeMap<(usize, usize, StreamNumber), Link>,
    aborted: BTreeSet<usize>,
    crashed: Option<usize>,
    frozen: Option<usize>,
    /// The ranks below this one do not reach the others.
    partition: Option<usize>,
    /// The ranks that the fault hit; empty while it has not happened.
    hit: BTreeSet<usize>,
    finding: Option<Finding>,
}

#[derive(Debug, Default)]
struct Link {
    bytes: VecDeque<u8>,
    is_broken: bool,
    swallows: bool,
    /// Whether bytes were swallowed.
    has_swallowed: bool,
}

impl FaultyNetwork {
    pub(crate) fn new(size: usize, fault: Option<(usize, usize, Fault)>, delay_every: Option<usize>) -> Arc<Self> {
        let state = State { operations: vec![0; size], ..State::default() };
        Arc::new(Self { size, fault, delay_every, state: Mutex::new(state), bell: Doorbell::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn transport(self: &Arc<Self>, rank: usize) -> Arc<dyn Transport> {
        Arc::new(FaultyTransport { network: Arc::clone(self), rank })
    }

    /// Ends all waits, as the launcher does when the run has failed.
    pub(crate) fn abort_all(&self) {
        self.state().aborted.extend(0..self.size);
        self.bell.ring();
    }

    /// The ranks that the fault hit; empty if it has not happened.
    pub(crate) fn hit(&self) -> BTreeSet<usize> {
        self.state().hit.clone()
    }

    /// What the launcher would find, if it would find something.
    pub(crate) fn finding(&self) -> Option<Finding> {
        self.state().finding
    }

    /// The largest number of operations of a rank.
    pub(crate) fn operations(&self) -> usize {
        self.state().operations.iter().copied().max().unwrap_or(0)
    }
}

impl State {
    /// Notes an operation of `rank` on a link, and the fault if it happens now.
    fn operate(&mut self, rank: usize, key: (usize, usize, StreamNumber), fault: Option<(usize, usize, Fault)>) {
        self.operations[rank] += 1;
        let Some((target, at, fault)) = fault else { return };
        // A link that only receives cannot break by itself.
        let may_hit = matches!(fault, Fault::Crash | Fault::Freeze | Fault::Partition) || key.0 == rank;
        if target != rank || self.operations[rank] < at || !may_hit || !self.hit.is_empty() {
            return;
        }
        match fault {
            Fault::Crash => {
                self.crashed = Some(rank);
                self.hit.insert(rank);
                for (_, link) in self.links.iter_mut().filter(|((from, to, _), _)| *from == rank || *to == rank) {
                    link.is_broken = true;
                }
            }
            Fault::Freeze => {
                self.frozen = Some(rank);
                self.hit.insert(rank);
                self.finding = Some(Finding::Silent(rank));
                self.aborted.extend(0..self.operations.len());
            }
            Fault::Break => {
                for key in [key, (key.1, key.0, key.2)] {
                    self.links.entry(key).or_default().is_broken = true;
                }
                self.hit.extend([key.0, key.1]);
            }
            Fault::Swallow => {
                self.links.entry(key).or_default().swallows = true;
                self.hit.extend([key.0, key.1]);
            }
            Fault::Partition => {
                self.partition = Some(rank.max(1));
                self.hit.extend(0..self.operations.len());
            }
        }
    }

    fn swallows(&self, key: (usize, usize, StreamNumber)) -> bool {
        let is_parted = self.partition.is_some_and(|first| (key.0 < first) != (key.1 < first));
        is_parted || self.links.get(&key).is_some_and(|link| link.swallows)
    }
}

struct FaultyTransport {
    network: Arc<FaultyNetwork>,
    rank: usize,
}

impl Transport for FaultyTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.network.size
    }

    fn open(&self, peer: usize, stream: StreamNumber) -> Result<Channel, TransportError> {
        let half = |from, to| Half { network: Arc::clone(&self.network), rank: self.rank, peer, key: (from, to, stream) };
        Ok(Channel { sender: Box::new(half(self.rank, peer)), receiver: Box::new(half(peer, self.rank)) })
    }

    fn nudge(&self, _stream: StreamNumber) {}

    fn abort(&self, _lost: Option<usize>) {
        self.network.state().aborted.insert(self.rank);
        self.network.bell.ring();
    }
}

struct Half {
    network: Arc<FaultyNetwork>,
    rank: usize,
    peer: usize,
    key: (usize, usize, StreamNumber),
}

impl Half {
    /// Starts an operation: a delay perhaps, and the fault if it happens now.
    fn begin(&self) -> Result<MutexGuard<'_, State>, TransportError> {
        let mut state = self.network.state();
        state.operate(self.rank, self.key, self.network.fault);
        let count = state.operations[self.rank];
        if self.network.delay_every.is_some_and(|every| count.is_multiple_of(every)) {
            drop(state);
            std::thread::sleep(Duration::from_micros(300));
            state = self.network.state();
        }
        self.check_in(&state)?;
        Ok(state)
    }

    fn check_in(&self, state: &State) -> Result<(), TransportError> {
        let is_over = state.aborted.contains(&self.rank) || state.crashed == Some(self.rank);
        if is_over { Err(TransportError::Aborted) } else { Ok(()) }
    }

    fn is_sender(&self) -> bool {
        self.key.0 == self.rank
    }
}

impl SendHalf for Half {
    fn try_send(&mut self, message: &mut Outgoing<'_>) -> Result<usize, TransportError> {
        let mut state = self.begin()?;
        let swallows = state.swallows(self.key);
        let link = state.links.entry(self.key).or_default();
        if link.is_broken {
            return Err(TransportError::lost(Peer::Rank(self.peer), None));
        }
        let [header, payload] = message.rest();
        let free = CAPACITY - link.bytes.len();
        let bytes: Vec<u8> = header.iter().chain(payload).copied().take(free).collect();
        let count = bytes.len();
        if swallows {
            link.has_swallowed |= count > 0;
        } else {
            link.bytes.extend(bytes);
        }
        message.advance(count);
        drop(state);
        self.network.bell.ring();
        Ok(count)
    }
}

impl ReceiveHalf for Half {
    fn try_receive(&mut self, message: &mut Incoming<'_>) -> Result<usize, TransportError> {
        let mut state = self.begin()?;
        let link = state.links.entry(self.key).or_default();
        let count = link.bytes.len().min(message.remaining());
        let bytes: Vec<u8> = link.bytes.drain(..count).collect();
        if count == 0 && link.is_broken {
            return Err(TransportError::lost(Peer::Rank(self.peer), None));
        }
        if count == 0 && link.has_swallowed {
            // This rank starves for bytes that were sent: the launcher finds that.
            state.finding.get_or_insert(Finding::Lost(self.key.0, self.key.1));
            let size = state.operations.len();
            state.aborted.extend(0..size);
            drop(state);
            self.network.bell.ring();
            return Err(TransportError::Aborted);
        }
        drop(state);
        message.accept(&bytes).map_err(|wrong| TransportError::LengthMismatch {
            rank: self.peer,
            stream: self.key.2,
            expected: wrong.expected,
            announced: wrong.announced,
        })?;
        self.network.bell.ring();
        Ok(count)
    }
}

impl Endpoint for Half {
    fn peer(&self) -> usize {
        self.peer
    }

    fn stream(&self) -> StreamNumber {
        self.key.2
    }

    fn ready(&self) -> bool {
        let state = self.network.state();
        if self.check_in(&state).is_err() {
            return true;
        }
        let Some(link) = state.links.get(&self.key) else { return self.is_sender() };
        match self.is_sender() {
            true => link.is_broken || link.bytes.len() < CAPACITY,
            false => link.is_broken || link.has_swallowed || !link.bytes.is_empty(),
        }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Doorbell(&self.network.bell)
    }

    fn check(&self) -> Result<(), TransportError> {
        self.check_in(&self.network.state())
    }

    fn wait_policy(&self) -> WaitPolicy {
        WaitPolicy { spin: Duration::ZERO, timeout: HUNG }
    }
}
