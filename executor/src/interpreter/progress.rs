//! The progress on which a rank's streams post how far they have come, and where they wait for each other.
//!
//! Each stream runs its instructions in the order of the list, so one number says all: everything of the stream below it is done. A
//! stream that must wait sleeps, and is woken by the one that it waits for: ranks may share cores with their own communication,
//! so nobody spins.

use crate::error::ExecutorError;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::Thread;

/// A cache runner of its own for each stream, so that posting does not disturb the others.
#[repr(align(64))]
#[derive(Debug, Default)]
struct Slot {
    /// One more than the last instruction that is done.
    progress: AtomicU32,
    /// The streams that sleep until this one posts what they wait for.
    sleepers: AtomicU64,
    /// By stream: the instruction of this one that it sleeps for.
    wanted: Vec<AtomicU32>,
    thread: OnceLock<Thread>,
}

impl Slot {
    fn for_streams(streams: usize) -> Self {
        Self { wanted: (0..streams).map(|_| AtomicU32::new(0)).collect(), ..Self::default() }
    }
}

/// Progress of all streams of one rank.
#[derive(Debug)]
pub(crate) struct Progress {
    slots: Vec<Slot>,
    failed: AtomicBool,
    failure: Mutex<Option<ExecutorError>>,
}

/// The most streams a rank can have: bits of the mask of sleepers.
pub(crate) const MAX_STREAMS: usize = 64;

impl Progress {
    pub(crate) fn new(streams: usize) -> Self {
        Self {
            slots: (0..streams).map(|_| Slot::for_streams(streams)).collect(),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
        }
    }

    /// The calling thread is the one that runs a stream.
    pub(crate) fn enter(&self, slot: usize) {
        let _ = self.slots[slot].thread.set(std::thread::current());
    }

    /// Before a step, while no stream runs.
    pub(crate) fn reset(&self) {
        for slot in &self.slots {
            slot.progress.store(0, Ordering::SeqCst);
        }
    }

    /// Everything of a stream up to and including an instruction is done. Wakes those who wait for no more than that: waking the others
    /// too cost some 9 us an instruction.
    pub(crate) fn post(&self, slot: usize, instruction: u32) {
        let entry = &self.slots[slot];
        entry.progress.store(instruction + 1, Ordering::SeqCst);
        let mut sleepers = entry.sleepers.load(Ordering::SeqCst);
        let mut satisfied = 0;
        while sleepers != 0 {
            let sleeper = sleepers.trailing_zeros();
            sleepers &= sleepers - 1;
            if entry.wanted[sleeper as usize].load(Ordering::SeqCst) <= instruction {
                satisfied |= 1 << sleeper;
            }
        }
        if satisfied != 0 {
            entry.sleepers.fetch_and(!satisfied, Ordering::SeqCst);
            self.wake(satisfied);
        }
    }

    fn wake(&self, mut sleepers: u64) {
        while sleepers != 0 {
            let slot = sleepers.trailing_zeros() as usize;
            sleepers &= sleepers - 1;
            if let Some(thread) = self.slots.get(slot).and_then(|slot| slot.thread.get()) {
                thread.unpark();
            }
        }
    }

    /// Sleeps, as the stream of slot `me`, until an instruction of another stream is done; `before_sleep` is called each time that it will.
    /// Returns whether it had to.
    pub(crate) fn wait(&self, me: usize, slot: usize, instruction: u32, before_sleep: impl Fn()) -> Result<bool, ExecutorError> {
        let entry = &self.slots[slot];
        if entry.progress.load(Ordering::Acquire) > instruction {
            return Ok(false);
        }
        loop {
            // First say for what we sleep, then look again: whoever posts in between wakes us.
            entry.wanted[me].store(instruction, Ordering::SeqCst);
            entry.sleepers.fetch_or(1 << me, Ordering::SeqCst);
            if entry.progress.load(Ordering::SeqCst) > instruction {
                return Ok(true);
            }
            if self.failed.load(Ordering::SeqCst) {
                return Err(ExecutorError::OtherStream);
            }
            before_sleep();
            std::thread::park();
        }
    }

    /// Whether the stream of slot `me` sleeps until one of `slot` posts what it waits for.
    pub(crate) fn sleeps_for(&self, me: usize, slot: usize) -> bool {
        self.slots[slot].sleepers.load(Ordering::Relaxed) & (1 << me) != 0
    }

    /// Remembers the first failure and wakes everyone to it.
    pub(crate) fn fail(&self, error: ExecutorError) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if failure.as_ref().is_none_or(ExecutorError::is_consequence) && !matches!(error, ExecutorError::OtherStream) {
            *failure = Some(error);
        }
        drop(failure);
        self.failed.store(true, Ordering::SeqCst);
        self.wake(u64::MAX);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    /// The failure that came first, if there was one.
    pub(crate) fn take_failure(&self) -> Option<ExecutorError> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_wait_for_each_other_and_wake_to_failures() {
        let progress = Progress::new(2);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                progress.enter(1);
                progress.wait(1, 0, 41, || ()).expect("stream 0 posts it")
            });
            progress.enter(0);
            std::thread::sleep(std::time::Duration::from_millis(5));
            progress.post(0, 41);
            other.join().expect("no panic");
            let other = scope.spawn(|| progress.wait(1, 0, 99, || ()).is_err());
            std::thread::sleep(std::time::Duration::from_millis(5));
            // The new thread is not the one that entered: it must be found by looking before it sleeps or by waking.
            progress.fail(ExecutorError::RankDied { rank: 0, host: None, cause: "was made to fail".into() });
            other.thread().unpark();
            assert!(other.join().expect("no panic"));
        });
        assert!(progress.take_failure().is_some());
    }
}
