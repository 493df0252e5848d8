//! The input pipeline: storage delivers samples, workers decode them, and batches wait in a queue
//! until a step takes one.
//!
//! The simulation goes sample by sample for one rank. Storage delivers one sample after another,
//! and each goes to the first free worker. A batch is begun as soon as the queue has room for it,
//! that is when the step `prefetch` steps earlier has taken its batch.
//!
//! In the long run a step takes as long as the slowest part ([`InputPipeline::bound`]), provided
//! the queue is deep enough to keep all parts busy. This file must not know Programs.

use foretell_units::{Bytes, BytesPerSecond, Seconds};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The input pipeline of one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InputPipeline {
    /// Bytes of a sample in storage.
    pub bytes_per_sample: Bytes,
    /// Bandwidth that storage gives this rank; `None` for unlimited.
    pub storage: Option<BytesPerSecond>,
    /// Time that one worker needs to decode a sample.
    pub decode: Seconds,
    /// Number of workers of the rank.
    pub workers: usize,
    /// Number of batches that may be ready or in progress at once, before a step takes them.
    pub prefetch: usize,
    /// Number of the rank's samples in one step.
    pub samples: usize,
    /// Number of cores that the rank's kernels and its workers share, if kernels run on CPUs;
    /// `None` if the workers have their own cores.
    pub shared_cores: Option<f64>,
}

/// The part of the pipeline that limits the step time in the long run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum InputBound {
    /// The step's work without waiting for input.
    Step,
    /// The bandwidth of storage.
    Storage,
    /// Decoding by the workers.
    Workers,
    /// The cores that workers and kernels share: together they have more work than the cores can do
    /// within the other bounds.
    Cores,
    /// The depth of the queue: too few batches are in progress to keep storage or workers busy.
    Prefetch,
}

/// The result of simulating the pipeline.
#[derive(Clone, Debug, PartialEq)]
pub struct InputRun {
    /// The start of each step, after waiting for its batch.
    pub begins: Vec<Seconds>,
    /// The time from the previous step's end until each step's batch was ready; 0 if it was ready
    /// before.
    pub waits: Vec<Seconds>,
}

impl InputPipeline {
    /// Time that storage needs for the samples of a step.
    fn reading(&self) -> Seconds {
        let samples = self.samples as f64;
        self.storage.map_or(Seconds::ZERO, |storage| self.bytes_per_sample / storage * samples)
    }

    /// Average time that the workers need for the samples of a step. It may count fractions of a
    /// sample per worker.
    fn decoding(&self) -> Seconds {
        self.decode * (self.samples as f64 / self.workers.max(1) as f64)
    }

    /// Least time of a step in which the shared cores do the step's own work and the decoding. Zero
    /// if no cores are shared.
    fn on_shared_cores(&self, step: Seconds) -> Seconds {
        self.shared_cores.map_or(Seconds::ZERO, |cores| (step + self.decode * self.samples as f64) / cores.max(1.0))
    }

    /// Time from the beginning of a batch until it is ready, with nothing else in progress.
    fn alone(&self) -> Seconds {
        let run = self.simulate(Seconds::ZERO, 1);
        *run.begins.first().expect("invariant: one step was simulated")
    }

    /// Returns the long-run time of a step whose own work takes `step`, in closed form, and the
    /// part that limits it.
    ///
    /// It is the maximum of the work, storage, the workers, the cores if they are shared, and the
    /// latency of one batch divided by `prefetch`, the number of batches in progress.
    pub fn bound(&self, step: Seconds) -> (Seconds, InputBound) {
        let parts = [
            (step, InputBound::Step),
            (self.reading(), InputBound::Storage),
            (self.decoding(), InputBound::Workers),
            (self.on_shared_cores(step), InputBound::Cores),
            (self.alone() / self.prefetch.max(1) as f64, InputBound::Prefetch),
        ];
        // On a tie the first part wins.
        parts.into_iter().fold((Seconds::ZERO, InputBound::Step), |most, part| if part.0 > most.0 { part } else { most })
    }

    /// Simulates `steps` steps whose own work takes `step`, beginning with an empty queue.
    pub fn simulate(&self, step: Seconds, steps: usize) -> InputRun {
        let read = self.storage.map_or(Seconds::ZERO, |storage| self.bytes_per_sample / storage);
        // The time at which each worker becomes free, earliest first, in whole picoseconds because
        // floats have no total order.
        let mut workers: BinaryHeap<Reverse<u64>> = (0..self.workers.max(1)).map(|_| Reverse(0)).collect();
        let mut storage_is_free = Seconds::ZERO;
        let (mut begins, mut waits) = (Vec::with_capacity(steps), Vec::with_capacity(steps));
        let mut last_end = Seconds::ZERO;
        for batch in 0..steps {
            // The queue has room once the step `prefetch` batches earlier has taken its batch.
            let room = batch.checked_sub(self.prefetch.max(1)).and_then(|before| begins.get(before)).copied().unwrap_or_default();
            let mut ready = room;
            for _ in 0..self.samples {
                storage_is_free = storage_is_free.max(room) + read;
                let Reverse(free) = workers.pop().expect("invariant: there is a worker");
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

    /// Returns the simulated long-run time of a step: the average over the second half of a run, or
    /// the least time that the shared cores need, if that is longer.
    pub fn steady_step(&self, step: Seconds) -> Seconds {
        // Several times as many steps as batches can be in progress, so the queue settles well
        // before the second half.
        let steps = 8 * (self.prefetch + 8);
        let begins = self.simulate(step, steps).begins;
        let simulated = (begins[steps - 1] - begins[steps / 2]) / (steps - 1 - steps / 2) as f64;
        simulated.max(self.on_shared_cores(step))
    }
}

const PICOSECOND: f64 = 1e-12;
