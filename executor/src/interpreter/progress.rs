//! How far each stream of a rank has come, and how streams wait for each other.
//!
//! A stream runs its instructions in the order of the list, so one number per stream suffices:
//! everything below it is done. A waiting stream blocks and the stream that it waits for wakes it.
//! It never spins: the core may be needed by the stream that it waits for.

use crate::error::ExecutorError;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::Thread;

/// The progress of one stream, in a cache line of its own: an update does not slow the others.
#[repr(align(64))]
#[derive(Debug, Default)]
struct StreamState {
    /// One more than the last instruction that is done.
    done_below: AtomicU32,
    /// The streams that wait for this one, as a bit mask.
    waiters: AtomicU64,
    /// Per waiting stream, the instruction of this stream that it waits for.
    awaited: Vec<AtomicU32>,
    thread: OnceLock<Thread>,
}

impl StreamState {
    fn new(streams: usize) -> Self {
        Self { awaited: (0..streams).map(|_| AtomicU32::new(0)).collect(), ..Self::default() }
    }
}

/// The progress of all streams of one rank. Streams are numbered from 0.
#[derive(Debug)]
pub(super) struct StreamProgress {
    streams: Vec<StreamState>,
    failed: AtomicBool,
    failure: Mutex<Option<ExecutorError>>,
}

/// The most streams that a rank can have: the bits of [`StreamState::waiters`].
pub(super) const MAX_STREAMS: usize = 64;

impl StreamProgress {
    pub(super) fn new(streams: usize) -> Self {
        Self {
            streams: (0..streams).map(|_| StreamState::new(streams)).collect(),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
        }
    }

    /// Registers the calling thread as the one that runs `stream`.
    pub(super) fn register_thread(&self, stream: usize) {
        let _ = self.streams[stream].thread.set(std::thread::current());
    }

    /// Prepares for a new step. Call it while no stream runs.
    pub(super) fn reset(&self) {
        for stream in &self.streams {
            stream.done_below.store(0, Ordering::SeqCst);
        }
    }

    /// Marks all instructions of `stream` up to `instruction` as done. Wakes only the streams that
    /// now have what they wait for: waking the others too cost some 9 us per instruction.
    pub(super) fn mark_done(&self, stream: usize, instruction: u32) {
        let state = &self.streams[stream];
        state.done_below.store(instruction + 1, Ordering::SeqCst);
        let mut waiters = state.waiters.load(Ordering::SeqCst);
        let mut satisfied = 0;
        while waiters != 0 {
            let waiter = waiters.trailing_zeros();
            waiters &= waiters - 1;
            if state.awaited[waiter as usize].load(Ordering::SeqCst) <= instruction {
                satisfied |= 1 << waiter;
            }
        }
        if satisfied != 0 {
            state.waiters.fetch_and(!satisfied, Ordering::SeqCst);
            self.wake(satisfied);
        }
    }

    /// Wakes the threads of the streams in a bit mask.
    fn wake(&self, mut mask: u64) {
        while mask != 0 {
            let stream = mask.trailing_zeros() as usize;
            mask &= mask - 1;
            if let Some(thread) = self.streams.get(stream).and_then(|state| state.thread.get()) {
                thread.unpark();
            }
        }
    }

    /// Blocks the thread of `waiter` until `instruction` of `stream` is done. Calls `before_sleep`
    /// each time before the thread blocks.
    ///
    /// # Errors
    /// [`ExecutorError::OtherStream`] if a stream has failed.
    pub(super) fn wait(
        &self,
        waiter: usize,
        stream: usize,
        instruction: u32,
        before_sleep: impl Fn(),
    ) -> Result<(), ExecutorError> {
        let state = &self.streams[stream];
        if state.done_below.load(Ordering::Acquire) > instruction {
            return Ok(());
        }
        loop {
            // Announce the wait before the last look: an update in between wakes this thread.
            state.awaited[waiter].store(instruction, Ordering::SeqCst);
            state.waiters.fetch_or(1 << waiter, Ordering::SeqCst);
            if state.done_below.load(Ordering::SeqCst) > instruction {
                return Ok(());
            }
            if self.failed.load(Ordering::SeqCst) {
                return Err(ExecutorError::OtherStream);
            }
            before_sleep();
            std::thread::park();
        }
    }

    /// Whether `waiter` is blocked until `stream` is done with an instruction.
    pub(super) fn is_waiting(&self, waiter: usize, stream: usize) -> bool {
        self.streams[stream].waiters.load(Ordering::Relaxed) & (1 << waiter) != 0
    }

    /// Records a failure and wakes all streams. The first failure that is not a consequence of
    /// another one is kept.
    pub(super) fn fail(&self, error: ExecutorError) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if failure.as_ref().is_none_or(ExecutorError::is_consequence) && !matches!(error, ExecutorError::OtherStream) {
            *failure = Some(error);
        }
        drop(failure);
        self.failed.store(true, Ordering::SeqCst);
        self.wake(u64::MAX);
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    /// Takes the recorded failure, if there is one.
    pub(super) fn take_failure(&self) -> Option<ExecutorError> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_wait_for_each_other_and_wake_to_failures() {
        let progress = StreamProgress::new(2);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                progress.register_thread(1);
                progress.wait(1, 0, 41, || ()).expect("stream 0 marks it as done");
            });
            progress.register_thread(0);
            std::thread::sleep(std::time::Duration::from_millis(5));
            progress.mark_done(0, 41);
            other.join().expect("no panic");
            let other = scope.spawn(|| progress.wait(1, 0, 99, || ()).is_err());
            std::thread::sleep(std::time::Duration::from_millis(5));
            // The new thread is not the registered one, so `fail` does not wake it: unpark does.
            progress.fail(ExecutorError::RankDied { rank: 0, host: None, cause: "failed in a test".into(), hint: String::new() });
            other.thread().unpark();
            assert!(other.join().expect("no panic"));
        });
        assert!(progress.take_failure().is_some());
    }
}
