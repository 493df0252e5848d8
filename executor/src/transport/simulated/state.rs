//! The state of the simulated network: its links, the records on their way, and the faults that are
//! planned and have happened.

use super::super::link::Traffic;
use super::super::session::RECORD_TAG_BYTES;
use super::super::{StreamNumber, TransportError};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Bytes that a link holds.
pub(super) const CAPACITY: usize = 4096;
/// The duration of a turn.
pub(super) const TICK: Duration = Duration::from_millis(1);
/// Turns after which a run counts as hung.
const MOST_TURNS: usize = 300_000;
/// Longest time in which nothing happens: ranks send a heartbeat each second.
pub(super) const SECOND: Duration = Duration::from_secs(1);
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
pub(crate) struct PlannedFault {
    pub(crate) rank: usize,
    /// The operation of the rank, or the next one that the fault can hit.
    pub(crate) at: usize,
    pub(crate) fault: Fault,
    /// How long a stall, suspend or partition lasts, and how long a delay is.
    pub(crate) lasts: Duration,
}

pub(super) type LinkKey = (usize, usize, StreamNumber);

#[derive(Debug)]
pub(super) struct State {
    pub(super) random: ChaCha8Rng,
    pub(super) now: Duration,
    pub(super) turns: usize,
    /// The rank whose turn it is, and the ranks whose work has not ended.
    pub(super) turn: usize,
    pub(super) working: BTreeSet<usize>,
    /// Operations of each rank, and their sum at the last look for an idle network.
    pub(super) operations: Vec<usize>,
    pub(super) looked_at: usize,
    pub(super) planned: Vec<PlannedFault>,
    pub(super) links: BTreeMap<LinkKey, Link>,
    pub(super) connecting: BTreeSet<LinkKey>,
    pub(super) aborted: BTreeSet<usize>,
    pub(super) crashed: BTreeSet<usize>,
    /// By rank, until when its process is stopped.
    pub(super) stalled: Vec<Duration>,
    /// The ranks below this one do not reach the others until this time.
    pub(super) partition: (usize, Duration),
    /// The ranks that faults hit which may end a run.
    pub(super) hit: BTreeSet<usize>,
    /// How many times each fault happened.
    pub(super) injected: BTreeMap<Fault, usize>,
}

#[derive(Debug, Default)]
pub(super) struct Link {
    pub(super) records: VecDeque<Record>,
    pub(super) traffic: Traffic,
    pub(super) delay: Duration,
    pub(super) is_broken: bool,
    pub(super) swallows: bool,
    pub(super) tampering: Option<Fault>,
}

#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) arrival: Duration,
    pub(super) bytes: Vec<u8>,
    pub(super) tag: [u8; RECORD_TAG_BYTES],
}

impl State {
    pub(super) fn new(size: usize, seed: u64, planned: Vec<PlannedFault>) -> Self {
        Self {
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
        }
    }

    pub(super) fn next_turn(&mut self) {
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

    pub(super) fn require_alive(&self, rank: usize) -> Result<(), TransportError> {
        let is_over = self.aborted.contains(&rank) || self.crashed.contains(&rank);
        if is_over { Err(TransportError::Aborted) } else { Ok(()) }
    }

    pub(super) fn link(&mut self, key: LinkKey) -> &mut Link {
        self.links.entry(key).or_default()
    }

    pub(super) fn break_links(&mut self, rank: usize) {
        for (_, link) in self.links.iter_mut().filter(|((from, to, _), _)| *from == rank || *to == rank) {
            link.is_broken = true;
        }
    }

    /// Counts an operation of `rank` on a link, and injects the first fault that is due.
    pub(super) fn operate(&mut self, rank: usize, key: LinkKey, limit: Duration) {
        self.operations[rank] += 1;
        // A link that only receives cannot break by itself.
        let of_rank = [Fault::Crash, Fault::Stall, Fault::Suspend, Fault::Partition];
        let is_due = |planned: &PlannedFault| {
            planned.rank == rank && planned.at <= self.operations[rank] && (of_rank.contains(&planned.fault) || key.0 == rank)
        };
        let Some(index) = self.planned.iter().position(is_due) else { return };
        let PlannedFault { fault, lasts, .. } = self.planned.remove(index);
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
    pub(super) fn first_arrival(&self, key: LinkKey) -> Duration {
        let (first, until) = self.partition;
        let is_parted = until > self.now && (key.0 < first) != (key.1 < first);
        if is_parted { until } else { self.now }
    }

    /// Puts a record on its way. Records never overtake each other.
    pub(super) fn deliver(&mut self, key: LinkKey, mut record: Record) {
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

    pub(super) fn has_space(&self, key: LinkKey) -> bool {
        let held = |link: &Link| link.records.iter().map(|record| record.bytes.len()).sum::<usize>();
        self.links.get(&key).is_none_or(|link| held(link) < CAPACITY)
    }

    pub(super) fn has_arrived(&self, key: LinkKey) -> bool {
        self.links.get(&key).and_then(|link| link.records.front()).is_some_and(|record| record.arrival <= self.now)
    }

    /// Whether a link is broken and nothing more arrives on it.
    pub(super) fn is_lost(&self, key: LinkKey) -> bool {
        let is_last = |link: &Link| link.records.front().is_none_or(|record| record.arrival == NEVER);
        self.links.get(&key).is_some_and(|link| link.is_broken && is_last(link))
    }
}
