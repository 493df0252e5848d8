//! The one simulated network of all fault tests: a transport within one process, a clock, and
//! faults at places that a seed chooses.
//!
//! A fault happens at an operation of a rank, so it is where it was, whatever order the threads run
//! in. All bytes are records of real sessions, so that what a man in the middle drops, repeats or
//! changes is found by the code that finds it in a run. Time passes in one of two ways:
//!
//! - [`Order::Turns`]: one thread of one rank at a time runs, and the seed decides which. Each turn
//!   takes [`TICK`]. A seed always gives the same run.
//! - [`Order::Threads`]: threads run as they like. Time stands still while bytes move, and goes to
//!   the next event when nothing does: [`SimulatedNetwork::advance_if_idle`].

use super::doorbell::Doorbell;
use super::endpoint::{Endpoint, ReceiveHalf, SendHalf, WaitPolicy, WakeSource};
use super::link::{Starved, Traffic};
use super::message::{Incoming, Outgoing};
use super::patience::Retries;
use super::session::{RECORD_TAG_BYTES, Session};
use super::{Channel, Peer, StreamNumber, Transport, TransportError};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes that a link holds.
const CAPACITY: usize = 4096;
/// The duration of a turn.
const TICK: Duration = Duration::from_millis(1);
/// Turns after which a run counts as hung.
const MOST_TURNS: usize = 300_000;
/// Longest time in which nothing happens: ranks send a heartbeat each second.
const SECOND: Duration = Duration::from_secs(1);
/// A time that does not come.
pub(crate) const NEVER: Duration = Duration::MAX;

/// A fault of a rank or of its links.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// The rank's process ends.
    Crash,
    /// The rank's process is stopped, and continued later or never.
    Stall,
    /// The whole run is stopped and continued later.
    Suspend,
    /// What the rank sends on its next link arrives later from now on.
    Delay,
    /// The next link that the rank sends on breaks.
    Break,
    /// What is sent on the next link that the rank sends on does not arrive from now on.
    Swallow,
    /// What ranks below the rank and the others send to each other arrives later or never.
    Partition,
    /// A man in the middle takes the next record.
    Drop,
    /// He sends the next record twice.
    Duplicate,
    /// He flips a bit of the next record.
    Flip,
}

/// Where and when a fault happens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planned {
    pub(crate) rank: usize,
    /// The operation of the rank, or the next one that the fault can hit.
    pub(crate) at: usize,
    pub(crate) fault: Fault,
    /// How long a stall, suspend or partition lasts, and how long a delay is.
    pub(crate) lasts: Duration,
}

/// Who decides which thread runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Threads,
    Turns,
}

type LinkKey = (usize, usize, StreamNumber);

#[derive(Debug)]
pub(crate) struct SimulatedNetwork {
    size: usize,
    order: Order,
    /// How long a fault may last before it may end a run.
    limit: Duration,
    /// The time at which the clock started.
    start: Instant,
    state: Mutex<State>,
    changed: Condvar,
    bell: Doorbell,
}

#[derive(Debug)]
struct State {
    random: ChaCha8Rng,
    now: Duration,
    turns: usize,
    /// The rank whose turn it is, and the ranks whose work has not ended.
    turn: usize,
    working: BTreeSet<usize>,
    /// Operations of each rank, and their sum at the last look for an idle network.
    operations: Vec<usize>,
    looked_at: usize,
    planned: Vec<Planned>,
    links: BTreeMap<LinkKey, Link>,
    connecting: BTreeSet<LinkKey>,
    aborted: BTreeSet<usize>,
    crashed: BTreeSet<usize>,
    /// By rank, until when its process is stopped.
    stalled: Vec<Duration>,
    /// The ranks below this one do not reach the others until this time.
    partition: (usize, Duration),
    /// The ranks that faults hit which may end a run.
    hit: BTreeSet<usize>,
    /// How often each fault happened.
    injected: BTreeMap<Fault, usize>,
}

#[derive(Debug, Default)]
struct Link {
    records: VecDeque<Record>,
    traffic: Traffic,
    delay: Duration,
    is_broken: bool,
    swallows: bool,
    tampering: Option<Fault>,
}

#[derive(Clone, Debug)]
struct Record {
    arrival: Duration,
    bytes: Vec<u8>,
    tag: [u8; RECORD_TAG_BYTES],
}

impl SimulatedNetwork {
    pub(crate) fn new(size: usize, order: Order, limit: Duration, seed: u64, planned: Vec<Planned>) -> Arc<Self> {
        let state = State {
            random: ChaCha8Rng::seed_from_u64(seed),
            now: Duration::ZERO,
            turns: 0,
            turn: 0,
            working: (0..size).collect(),
            operations: vec![0; size],
            looked_at: 0,
            planned,
            links: BTreeMap::new(),
            connecting: BTreeSet::new(),
            aborted: BTreeSet::new(),
            crashed: BTreeSet::new(),
            stalled: vec![Duration::ZERO; size],
            partition: (0, Duration::ZERO),
            hit: BTreeSet::new(),
            injected: BTreeMap::new(),
        };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Arc::new(Self { size, order, limit, start: Instant::now(), state, changed, bell: Doorbell::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn transport(self: &Arc<Self>, rank: usize) -> Arc<dyn Transport> {
        Arc::new(SimulatedTransport { network: Arc::clone(self), rank })
    }

    /// The time of the simulated clock.
    pub(crate) fn now(&self) -> Instant {
        self.start + self.state().now
    }

    /// The whole seconds of the simulated clock.
    pub(crate) fn seconds(&self) -> u64 {
        self.state().now.as_secs()
    }

    /// Ends all waits, as the launcher does when the run has failed.
    pub(crate) fn abort_all(&self) {
        self.state().aborted.extend(0..self.size);
        self.wake();
    }

    /// The ranks that faults hit which may end a run.
    pub(crate) fn hit(&self) -> BTreeSet<usize> {
        self.state().hit.clone()
    }

    /// How often each fault happened.
    pub(crate) fn injected(&self) -> BTreeMap<Fault, usize> {
        self.state().injected.clone()
    }

    /// The largest number of operations of a rank.
    pub(crate) fn operations(&self) -> usize {
        self.state().operations.iter().copied().max().unwrap_or(0)
    }

    /// The turns so far, and the time: the same for the same seed.
    pub(crate) fn turns(&self) -> (usize, Duration) {
        let state = self.state();
        (state.turns, state.now)
    }

    /// Waits for the first turn of `rank`.
    pub(crate) fn enter(&self, rank: usize) {
        let mut state = self.state();
        while state.turn != rank {
            state = self.wait(state);
        }
    }

    /// Ends the work of `rank`: its links break once what it sent is read.
    pub(crate) fn leave(&self, rank: usize) {
        let mut state = self.state();
        state.working.remove(&rank);
        state.break_links(rank);
        if !state.working.is_empty() {
            state.next_turn();
        }
        self.changed.notify_all();
    }

    /// If nothing has moved since the last call, goes to the time of the next event. Returns
    /// whether it did.
    pub(crate) fn advance_if_idle(&self) -> bool {
        let mut state = self.state();
        let operations = state.operations.iter().sum();
        if std::mem::replace(&mut state.looked_at, operations) != operations {
            return false;
        }
        let now = state.now;
        let second = Duration::from_secs(now.as_secs()) + SECOND;
        let arrivals = state.links.values().filter_map(|link| Some(link.records.front()?.arrival));
        let events = arrivals.chain(state.stalled.iter().copied()).chain([state.partition.1]);
        state.now = events.filter(|&time| time > now).min().map_or(second, |event| event.min(second));
        drop(state);
        self.wake();
        true
    }

    /// Whether a rank's process runs, so that it sends heartbeats.
    pub(crate) fn is_alive(&self, rank: usize) -> bool {
        let state = self.state();
        !state.crashed.contains(&rank) && state.stalled[rank] <= state.now
    }

    /// Returns once the process of `rank` is not stopped.
    ///
    /// # Errors
    /// [`TransportError::Aborted`] if it has ended.
    pub(crate) fn hold(&self, rank: usize) -> Result<(), TransportError> {
        let state = self.state();
        self.held(state, rank).map(drop)
    }

    fn held<'a>(&'a self, mut state: MutexGuard<'a, State>, rank: usize) -> Result<MutexGuard<'a, State>, TransportError> {
        loop {
            state.require_alive(rank)?;
            if state.stalled[rank] <= state.now {
                return Ok(state);
            }
            state = match self.order {
                Order::Threads => self.wait(state),
                Order::Turns => self.yield_turn(state, rank),
            };
        }
    }

    /// Lets others run. Returns at the next turn of `rank`.
    fn yield_turn<'a>(&'a self, mut state: MutexGuard<'a, State>, rank: usize) -> MutexGuard<'a, State> {
        state.next_turn();
        self.changed.notify_all();
        while state.turn != rank {
            state = self.wait(state);
        }
        state
    }

    /// The state as `rank` sees it now; with turns, at its next one.
    fn look(&self, rank: usize) -> MutexGuard<'_, State> {
        let state = self.state();
        match self.order {
            Order::Threads => state,
            Order::Turns => self.yield_turn(state, rank),
        }
    }

    /// Starts an operation of `rank` on a link: the faults that happen now come first.
    fn begin(&self, rank: usize, key: LinkKey) -> Result<MutexGuard<'_, State>, TransportError> {
        let mut state = self.look(rank);
        state.require_alive(rank)?;
        state.operate(rank, key, self.limit);
        self.held(state, rank)
    }

    /// Lets `pause` pass for `rank`.
    fn sleep(&self, rank: usize, pause: Duration) -> Result<(), TransportError> {
        let mut state = self.state();
        let until = state.now + pause;
        while state.now < until {
            state.require_alive(rank)?;
            state = match self.order {
                Order::Threads => self.wait(state),
                Order::Turns => self.yield_turn(state, rank),
            };
        }
        Ok(())
    }

    /// How long ranks wait for each other.
    fn patience(&self) -> Duration {
        match self.order {
            // The launcher finds what is lost. This ends a wait for something that nobody sends.
            Order::Threads => SECOND * 20_000,
            Order::Turns => self.limit,
        }
    }

    fn wake(&self) {
        self.bell.ring();
        self.changed.notify_all();
    }
}

impl State {
    fn next_turn(&mut self) {
        self.turns += 1;
        assert!(self.turns < MOST_TURNS, "the run hangs");
        self.now += TICK;
        let ready: Vec<usize> = self.working.iter().copied().filter(|&rank| self.stalled[rank] <= self.now).collect();
        self.turn = match ready.len() {
            0 => {
                let first = self.working.iter().copied().min_by_key(|&rank| self.stalled[rank]).unwrap_or(0);
                // A rank that is stopped for ever is killed when the run is over.
                if self.stalled[first] == NEVER {
                    self.aborted.insert(first);
                    self.stalled[first] = self.now;
                }
                self.now = self.now.max(self.stalled[first]);
                first
            }
            count => ready[self.random.random_range(0..count)],
        };
    }

    fn require_alive(&self, rank: usize) -> Result<(), TransportError> {
        let is_over = self.aborted.contains(&rank) || self.crashed.contains(&rank);
        if is_over { Err(TransportError::Aborted) } else { Ok(()) }
    }

    fn link(&mut self, key: LinkKey) -> &mut Link {
        self.links.entry(key).or_default()
    }

    fn break_links(&mut self, rank: usize) {
        for (_, link) in self.links.iter_mut().filter(|((from, to, _), _)| *from == rank || *to == rank) {
            link.is_broken = true;
        }
    }

    /// Counts an operation of `rank` on a link, and injects the first fault that is due.
    fn operate(&mut self, rank: usize, key: LinkKey, limit: Duration) {
        self.operations[rank] += 1;
        // A link that only receives cannot break by itself.
        let of_rank = [Fault::Crash, Fault::Stall, Fault::Suspend, Fault::Partition];
        let is_due = |planned: &Planned| {
            planned.rank == rank && planned.at <= self.operations[rank] && (of_rank.contains(&planned.fault) || key.0 == rank)
        };
        let Some(index) = self.planned.iter().position(is_due) else { return };
        let Planned { fault, lasts, .. } = self.planned.remove(index);
        let until = self.now.saturating_add(lasts);
        let is_long = lasts > limit;
        match fault {
            Fault::Crash => {
                self.crashed.insert(rank);
                self.break_links(rank);
                self.hit.insert(rank);
            }
            Fault::Stall => {
                self.stalled[rank] = until;
                self.hit.extend(is_long.then_some(rank));
            }
            Fault::Suspend => self.now = until,
            Fault::Delay => self.link(key).delay = lasts,
            Fault::Break => {
                self.link(key).is_broken = true;
                self.link((key.1, key.0, key.2)).is_broken = true;
                self.hit.extend([key.0, key.1]);
            }
            Fault::Swallow => {
                self.link(key).swallows = true;
                self.hit.extend([key.0, key.1]);
            }
            Fault::Partition => {
                self.partition = (rank.max(1), until);
                self.hit.extend((0..self.operations.len()).filter(|_| is_long));
            }
            // It counts when a record is there.
            Fault::Drop | Fault::Duplicate | Fault::Flip => return self.link(key).tampering = Some(fault),
        }
        *self.injected.entry(fault).or_default() += 1;
    }

    /// The earliest time at which something that is sent now may arrive.
    fn first_arrival(&self, key: LinkKey) -> Duration {
        let (first, until) = self.partition;
        let is_parted = until > self.now && (key.0 < first) != (key.1 < first);
        if is_parted { until } else { self.now }
    }

    /// Puts a record on its way. Records never overtake each other.
    fn deliver(&mut self, key: LinkKey, mut record: Record) {
        let (first, now) = (self.first_arrival(key), self.now);
        let flipped = self.random.random_range(0..record.bytes.len() * 8);
        let link = self.link(key);
        let last = link.records.back().map_or(Duration::ZERO, |last| last.arrival);
        record.arrival = if link.swallows { NEVER } else { first.max(now + link.delay).max(last) };
        link.traffic.add_sent(record.bytes.len());
        let tampering = link.tampering.take();
        match tampering {
            Some(Fault::Drop) => {}
            Some(Fault::Duplicate) => link.records.extend([record.clone(), record]),
            Some(Fault::Flip) => {
                record.bytes[flipped / 8] ^= 1 << (flipped % 8);
                link.records.push_back(record);
            }
            _ => link.records.push_back(record),
        }
        if let Some(fault) = tampering {
            self.hit.extend([key.0, key.1]);
            *self.injected.entry(fault).or_default() += 1;
        }
    }

    fn has_space(&self, key: LinkKey) -> bool {
        let held = |link: &Link| link.records.iter().map(|record| record.bytes.len()).sum::<usize>();
        self.links.get(&key).is_none_or(|link| held(link) < CAPACITY)
    }

    fn has_arrived(&self, key: LinkKey) -> bool {
        self.links.get(&key).and_then(|link| link.records.front()).is_some_and(|record| record.arrival <= self.now)
    }

    /// Whether a link is broken and nothing more arrives on it.
    fn is_lost(&self, key: LinkKey) -> bool {
        let is_last = |link: &Link| link.records.front().is_none_or(|record| record.arrival == NEVER);
        self.links.get(&key).is_some_and(|link| link.is_broken && is_last(link))
    }
}

/// The transport of one rank.
struct SimulatedTransport {
    network: Arc<SimulatedNetwork>,
    rank: usize,
}

impl Transport for SimulatedTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.network.size
    }

    fn open(&self, peer: usize, stream: StreamNumber) -> Result<Channel, TransportError> {
        let (network, key) = (&self.network, (self.rank, peer, stream));
        let now = || network.start + network.state().now;
        let waited = network.patience();
        let mut retries = Retries::new(waited, TICK, now());
        loop {
            let mut state = network.begin(self.rank, key)?;
            if state.first_arrival(key) <= state.now {
                state.connecting.remove(&key);
                break;
            }
            state.connecting.insert(key);
            drop(state);
            let late = TransportError::TimedOut { rank: peer, stream, activity: "connect", waited };
            network.sleep(self.rank, retries.pause(now()).ok_or(late)?)?;
        }
        let half = |from: usize, to: usize| -> Result<Half, TransportError> {
            let mut secret = [7; 32];
            secret[..3].copy_from_slice(&[from as u8, to as u8, stream.0 as u8]);
            let session = Session::new(&secret, &secret)?;
            let (network, key) = (Arc::clone(&self.network), (from, to, stream));
            Ok(Half { network, rank: self.rank, peer, key, session, opened: VecDeque::new() })
        };
        Ok(Channel { sender: Box::new(half(self.rank, peer)?), receiver: Box::new(half(peer, self.rank)?) })
    }

    fn nudge(&self, _stream: StreamNumber) {}

    fn abort(&self, _lost: Option<usize>) {
        self.network.state().aborted.insert(self.rank);
        self.network.wake();
    }

    fn starved(&self) -> Vec<Starved> {
        let state = self.network.state();
        let connecting = state.connecting.iter().filter(|(from, ..)| *from == self.rank);
        let connecting = connecting.map(|&(_, peer, stream)| Starved { peer, stream, received: None });
        // Bytes that have arrived, and that a busy thread has not read, are not missing.
        let waiting = state.links.iter().filter(|(key, _)| key.1 == self.rank && !state.has_arrived(**key));
        let waiting = waiting.filter_map(|(&(peer, _, stream), link)| {
            Some(Starved { peer, stream, received: Some(link.traffic.starved_after()?) })
        });
        connecting.chain(waiting).collect()
    }

    fn sent(&self, peer: usize, stream: StreamNumber) -> Option<u64> {
        self.network.state().links.get(&(self.rank, peer, stream)).map(|link| link.traffic.sent())
    }
}

struct Half {
    network: Arc<SimulatedNetwork>,
    rank: usize,
    peer: usize,
    key: LinkKey,
    session: Session,
    /// Bytes of the last record that the rank has not taken yet.
    opened: VecDeque<u8>,
}

impl Half {
    /// The most bytes that an operation moves: with turns, as the seed says.
    fn most(&self, state: &mut State) -> usize {
        match self.network.order {
            Order::Threads => CAPACITY,
            Order::Turns => state.random.random_range(1..2000),
        }
    }
}

impl SendHalf for Half {
    fn try_send(&mut self, message: &mut Outgoing<'_>) -> Result<usize, TransportError> {
        let network = Arc::clone(&self.network);
        let mut state = network.begin(self.rank, self.key)?;
        if state.link(self.key).is_broken {
            return Err(TransportError::lost(Peer::Rank(self.peer), None));
        }
        if !state.has_space(self.key) {
            return Ok(0);
        }
        let most = self.most(&mut state);
        let [header, payload] = message.rest();
        let mut bytes: Vec<u8> = header.iter().chain(payload).copied().take(most).collect();
        let count = bytes.len();
        let tag = self.session.sealer.seal(&mut bytes)?;
        state.deliver(self.key, Record { arrival: Duration::ZERO, bytes, tag });
        message.advance(count);
        drop(state);
        network.bell.ring();
        Ok(count)
    }
}

impl ReceiveHalf for Half {
    fn try_receive(&mut self, message: &mut Incoming<'_>) -> Result<usize, TransportError> {
        let network = Arc::clone(&self.network);
        let mut state = network.begin(self.rank, self.key)?;
        if self.opened.is_empty() && state.has_arrived(self.key) {
            let Some(mut record) = state.link(self.key).records.pop_front() else { return Ok(0) };
            self.session.opener.open(&mut record.bytes, record.tag, Peer::Rank(self.peer))?;
            self.opened.extend(record.bytes);
        }
        if self.opened.is_empty() && state.is_lost(self.key) {
            return Err(TransportError::lost(Peer::Rank(self.peer), None));
        }
        let most = self.most(&mut state).min(message.remaining()).min(self.opened.len());
        let bytes: Vec<u8> = self.opened.drain(..most).collect();
        state.link(self.key).traffic.add_received(bytes.len());
        drop(state);
        message.accept(&bytes).map_err(|wrong| TransportError::LengthMismatch {
            rank: self.peer,
            stream: self.key.2,
            expected: wrong.expected,
            announced: wrong.announced,
        })?;
        network.bell.ring();
        Ok(bytes.len())
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
        let state = self.network.look(self.rank);
        let can_move = match self.key.0 == self.rank {
            true => state.has_space(self.key) || state.links.get(&self.key).is_some_and(|link| link.is_broken),
            false => !self.opened.is_empty() || state.has_arrived(self.key) || state.is_lost(self.key),
        };
        can_move || state.require_alive(self.rank).is_err()
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Doorbell(&self.network.bell)
    }

    fn check(&self) -> Result<(), TransportError> {
        self.network.state().require_alive(self.rank)
    }

    fn wait_policy(&self) -> WaitPolicy {
        match self.network.order {
            Order::Threads => WaitPolicy { spin: Duration::ZERO, timeout: self.network.patience() },
            // It never blocks: `ready` lets the others run.
            Order::Turns => WaitPolicy { spin: NEVER, timeout: self.network.patience() },
        }
    }

    fn now(&self) -> Instant {
        self.network.now()
    }
}
