//! The entry for questions: it bounds how many are answered at the same time, and cancels those
//! that a later question replaced.

use super::child::RunningChild;
use super::typed::Typed;
use super::{Answer, Limits, Refusal, Request};
use crate::failure::{Failure, code};
use crate::progress_of::tail;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The most questions that wait for their turn.
const MOST_WAITING: usize = 16;

/// Time between two checks of whether a waiting question was cancelled.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The longest that closing takes. A process that is killed is gone in milliseconds.
const CLOSING: Duration = Duration::from_secs(2);

/// Answers questions within limits.
///
/// A question has a lane, identified by a name. A later question in the same lane replaces the
/// earlier one.
pub struct Desk {
    program: PathBuf,
    line: clap::Command,
    limits: Limits,
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Default)]
struct State {
    working: usize,
    waiting: usize,
    lanes: HashMap<String, Arc<Lane>>,
}

/// A question's place in its lane.
pub struct Place {
    name: String,
    lane: Arc<Lane>,
}

/// A question that waits or is worked on.
#[derive(Default)]
struct Lane {
    is_cancelled: AtomicBool,
    /// The file with its progress, once there is one.
    progress: Mutex<Option<PathBuf>>,
}

impl Desk {
    /// A desk whose children are this program. `line` is clap's description of its command line.
    pub fn new(line: clap::Command, limits: Limits) -> Result<Self, Failure> {
        let program = std::env::current_exe()
            .map_err(|error| Failure::undone(code::SYSTEM, format!("the path of this program is not known: {error}")))?;
        Ok(Self { program, line, limits, state: Mutex::default(), freed: Condvar::new() })
    }

    /// Clap's description of the command line.
    pub fn line(&self) -> &clap::Command {
        &self.line
    }

    /// Answers a question. Blocks until the answer is there, or the question is cancelled.
    pub fn ask(&self, lane: &str, request: &Request) -> Result<Answer, Refusal> {
        self.ask_in(self.enter(lane)?, request)
    }

    /// Answers a question that already has its lane, and so may have been cancelled meanwhile.
    pub fn ask_in(&self, Place { name, lane: own }: Place, request: &Request) -> Result<Answer, Refusal> {
        let answer = Typed::new(&self.line, request).and_then(|typed| self.answer(&own, typed, request));
        let mut state = lock(&self.state);
        // A later question may have the lane by now.
        if state.lanes.get(&name).is_some_and(|known| Arc::ptr_eq(known, &own)) {
            state.lanes.remove(&name);
        }
        answer
    }

    fn answer(&self, own: &Lane, typed: Typed, request: &Request) -> Result<Answer, Refusal> {
        let _turn = self.turn(own)?;
        let working = RunningChild::start(&self.program, request, typed, &self.limits)?;
        *lock(&own.progress) = request.progress.then(|| working.progress_file());
        working.finish(&self.limits, &own.is_cancelled)
    }

    /// Whether a question has this lane.
    pub fn is_taken(&self, lane: &str) -> bool {
        lock(&self.state).lanes.contains_key(lane)
    }

    /// Cancels the questions whose lane starts with `start`.
    pub fn cancel(&self, start: &str) {
        let state = lock(&self.state);
        let cancelled = state.lanes.iter().filter(|(lane, _)| lane.starts_with(start));
        cancelled.for_each(|(_, lane)| lane.is_cancelled.store(true, Ordering::Relaxed));
        self.freed.notify_all();
    }

    /// Cancels all questions, and waits briefly until no process works on one.
    pub fn close(&self) {
        self.cancel("");
        let state = lock(&self.state);
        let is_busy = |state: &mut State| state.working + state.waiting > 0;
        drop(self.freed.wait_timeout_while(state, CLOSING, is_busy));
    }

    /// The last line of a search's progress. `None` if the lane has no search, or the search has
    /// written no line.
    pub fn progress(&self, lane: &str) -> Option<String> {
        let lane = lock(&self.state).lanes.get(lane).cloned()?;
        let path = lock(&lane.progress).clone()?;
        tail(&path)?.lines().rev().find(|line| line.starts_with('{') && line.ends_with('}')).map(str::to_owned)
    }

    /// Takes a lane, and cancels the question that has it.
    pub fn enter(&self, lane: &str) -> Result<Place, Refusal> {
        let mut state = lock(&self.state);
        if state.waiting >= MOST_WAITING {
            return Err(Refusal::Busy);
        }
        let own = Arc::new(Lane::default());
        if let Some(before) = state.lanes.insert(lane.to_owned(), Arc::clone(&own)) {
            before.is_cancelled.store(true, Ordering::Relaxed);
        }
        Ok(Place { name: lane.to_owned(), lane: own })
    }

    /// Waits until fewer questions are being answered than the limit allows.
    fn turn(&self, own: &Lane) -> Result<Turn<'_>, Refusal> {
        let mut state = lock(&self.state);
        state.waiting += 1;
        while state.working >= self.limits.at_once && !own.is_cancelled.load(Ordering::Relaxed) {
            state = self.freed.wait_timeout(state, POLL_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.waiting -= 1;
        if own.is_cancelled.load(Ordering::Relaxed) {
            return Err(Refusal::Cancelled);
        }
        state.working += 1;
        Ok(Turn(self))
    }
}

/// The right to be answered; dropping it frees the slot.
struct Turn<'a>(&'a Desk);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).working -= 1;
        self.0.freed.notify_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
