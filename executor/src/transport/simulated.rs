//! The one simulated network of all fault tests: a transport within one process, a clock, and
//! faults at places that a seed chooses.
//!
//! A fault happens at an operation of a rank, so it is where it was, whatever order the threads run
//! in. All bytes are records of real sessions, so that what a man in the middle drops, repeats or
//! changes is found by the code that finds it in a run. Time passes in one of two ways:
//!
//! - [`Scheduling::Turns`]: one thread of one rank at a time runs, and the seed decides which. Each
//!   turn takes a millisecond. A seed always gives the same run.
//! - [`Scheduling::Threads`]: threads run as they like. Time stands still while bytes move, and
//!   goes to the next event when nothing does: [`SimulatedNetwork::advance_if_idle`].

mod halves;
mod state;

pub(crate) use state::{Fault, NEVER, PlannedFault};

use super::doorbell::Doorbell;
use super::{Transport, TransportError};
use halves::SimulatedTransport;
use state::{LinkKey, SECOND, State};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Who decides which thread runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scheduling {
    Threads,
    Turns,
}

#[derive(Debug)]
pub(crate) struct SimulatedNetwork {
    size: usize,
    order: Scheduling,
    /// How long a fault may last before it may end a run.
    limit: Duration,
    /// The time at which the clock started.
    start: Instant,
    state: Mutex<State>,
    changed: Condvar,
    bell: Doorbell,
}

impl SimulatedNetwork {
    pub(crate) fn new(size: usize, order: Scheduling, limit: Duration, seed: u64, planned: Vec<PlannedFault>) -> Arc<Self> {
        let (state, changed) = (Mutex::new(State::new(size, seed, planned)), Condvar::new());
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

    /// How many times each fault happened.
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
                Scheduling::Threads => self.wait(state),
                Scheduling::Turns => self.yield_turn(state, rank),
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
            Scheduling::Threads => state,
            Scheduling::Turns => self.yield_turn(state, rank),
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
                Scheduling::Threads => self.wait(state),
                Scheduling::Turns => self.yield_turn(state, rank),
            };
        }
        Ok(())
    }

    /// How long ranks wait for each other.
    fn patience(&self) -> Duration {
        match self.order {
            // The launcher detects lost ranks and links, which ends waits for bytes that are never
            // sent.
            Scheduling::Threads => SECOND * 20_000,
            Scheduling::Turns => self.limit,
        }
    }

    fn wake(&self) {
        self.bell.ring();
        self.changed.notify_all();
    }
}
