//! The input pipeline: samples are read from storage, decoded by workers, and wait in a queue of batches until a step takes one.
//!
//! It is simulated sample by sample for a rank: storage gives it one sample after the other, a sample goes to the worker that is free first, and a batch is
//! begun when the queue has room for it, which is when the step so many batches before has taken its own. In the long run a step takes as
//! long as the slowest part ([`InputPipeline::bound`]), if the queue is deep enough for all parts to be busy at once. It must not know Programs.

use foretell_units::{Bytes, BytesPerSecond, Seconds};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// How one rank gets its samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InputPipeline {
    /// Of a sample in storage.
    pub bytes_per_sample: Bytes,
    /// What storage gives this rank; as fast as it likes if not stated.
    pub storage: Option<BytesPerSecond>,
    /// What one worker takes for a sample.
    pub decode: Seconds,
    /// Workers of the rank.
    pub workers: usize,
    /// Batches that may be ready or on their way before a step takes them.
    pub prefetch: usize,
    /// Samples of the rank in one step.
    pub samples: usize,
}

/// What a step waits for in the long run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InputBound {
    /// Its own work.
    Step,
    /// Storage.
    Storage,
    /// The workers.
    Workers,
    /// Neither is busy all the time: there are too few batches on their way.
    Prefetch,
}

/// How a run gets its samples.
#[derive(Clone, Debug, PartialEq)]
pub struct InputRun {
    /// When each step began, after it had waited for its batch.
    pub begins: Vec<Seconds>,
    /// What each step waited for its batch after the one before had ended.
    pub waits: Vec<Seconds>,
}

impl InputPipeline {
    /// What storage takes for a step's samples.
    fn reading(&self) -> Seconds {
        let samples = self.samples as f64;
        self.storage.map_or(Seconds::ZERO, |storage| self.bytes_per_sample / storage * samples)
    }

    /// What the workers take for a step's samples, on average: no worker has half a sample.
    fn decoding(&self) -> Seconds {
        self.decode * (self.samples as f64 / self.workers.max(1) as f64)
    }

    /// From when a batch is begun until it is ready, alone.
    fn alone(&self) -> Seconds {
        let run = self.simulate(Seconds::ZERO, 1);
        run.begins.first().copied().unwrap_or_default()
    }

    /// The closed form of a step in the long run where the step's own work takes `step`, and what bounds it: the slowest of the work, storage,
    /// the workers, and a batch's own way through both, of which `prefetch` are under way at once.
    pub fn bound(&self, step: Seconds) -> (Seconds, InputBound) {
        let parts = [
            (step, InputBound::Step),
            (self.reading(), InputBound::Storage),
            (self.decoding(), InputBound::Workers),
            (self.alone() / self.prefetch.max(1) as f64, InputBound::Prefetch),
        ];
        // Of equal parts the first.
        parts.into_iter().fold((Seconds::ZERO, InputBound::Step), |most, part| if part.0 > most.0 { part } else { most })
    }

    /// Simulates so many steps whose own work takes `step`, from an empty queue.
    pub fn simulate(&self, step: Seconds, steps: usize) -> InputRun {
        let read = self.storage.map_or(Seconds::ZERO, |storage| self.bytes_per_sample / storage);
        // When each worker is free, the earliest first; whole picoseconds, which can be ordered.
        let mut workers: BinaryHeap<Reverse<u64>> = (0..self.workers.max(1)).map(|_| Reverse(0)).collect();
        let mut storage_is_free = Seconds::ZERO;
        let (mut begins, mut waits) = (Vec::with_capacity(steps), Vec::with_capacity(steps));
        let mut last_end = Seconds::ZERO;
        for batch in 0..steps {
            // The queue has room when the step so many batches before has taken its own.
            let room = batch.checked_sub(self.prefetch.max(1)).and_then(|before| begins.get(before)).copied().unwrap_or_default();
            let mut ready = room;
            for _ in 0..self.samples {
                storage_is_free = storage_is_free.max(room) + read;
                let free = workers.pop().map_or(0, |Reverse(free)| free);
                let decoded = storage_is_free.max(Seconds::new(free as f64 * PICOSECOND)) + self.decode;
                workers.push(Reverse((decoded.value() / PICOSECOND).round() as u64));
                ready = ready.max(decoded);
            }
            let begin = ready.max(last_end);
            waits.push(begin - last_end);
            begins.push(begin);
            last_end = begin + step;
        }
        InputRun { begins, waits }
    }

    /// What a step takes in the long run, by simulation: over the second half of so many steps that every part has been full for long.
    pub fn steady_step(&self, step: Seconds) -> Seconds {
        // Several times as many as can be under way; the queue is empty or full long before.
        let steps = 8 * (self.prefetch + 8);
        let begins = self.simulate(step, steps).begins;
        match (begins.get(steps / 2), begins.last()) {
            (Some(&middle), Some(&last)) => (last - middle) / (steps - 1 - steps / 2) as f64,
            _ => step,
        }
    }
}

const PICOSECOND: f64 = 1e-12;
