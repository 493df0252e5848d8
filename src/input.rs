//! The plan's `input` section: how long a step waits for samples. This is simulated only. The
//! executor reads or generates samples on one thread of each rank, which is the `load` of a
//! Program.

use crate::plan_file::LoadedPlan;
use foretell_program::{Operation, Program};
use foretell_reports::{Column, table};
use foretell_simulator::{InputBound, InputPipeline, Prediction};
use foretell_units::Seconds;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Number of steps simulated from an empty queue, to find the first step's wait.
const START: usize = 100;

/// How long steps wait for samples, and why.
pub struct Waiting {
    bound: InputBound,
    /// The step time without waiting.
    step: Seconds,
    /// Waiting time per step in the long run.
    wait: Seconds,
    /// Waiting time of the first step, which starts with an empty queue.
    first: Seconds,
    /// Number of ranks that read samples.
    ranks: usize,
}

/// Predicts how long steps wait for the plan's input pipeline; `None` if the plan has no `input`.
pub fn waiting(loaded: &LoadedPlan, program: &Program, prediction: &Prediction) -> Option<Waiting> {
    let input = loaded.file.input?;
    // Samples that a rank of each list reads per step. Of several inputs (images, labels) one
    // counts.
    let samples: Vec<usize> = program
        .lists
        .iter()
        .map(|list| {
            let mut by_input = BTreeMap::new();
            for instruction in &list.instructions {
                if let Operation::Load { input, samples, .. } = *instruction.operation {
                    *by_input.entry(input).or_insert(0) += samples;
                }
            }
            // Labels come with the samples, which the first stage reads.
            if list.stage == 0 { by_input.values().copied().max().unwrap_or(0) } else { 0 }
        })
        .collect();
    let readers = program.list_of_rank.iter().map(|&list| samples[list as usize]).filter(|&samples| samples > 0);
    let (ranks, total) = readers.fold((0usize, 0usize), |(ranks, total), samples| (ranks + 1, total + samples));
    let most = samples.iter().copied().max().filter(|&most| most > 0)?;
    let pipeline = InputPipeline {
        bytes_per_sample: input.bytes_per_sample,
        // All ranks read at once, each in proportion to its samples.
        storage: loaded.topology.storage_bandwidth().map(|rate| rate * (most as f64 / total as f64)),
        decode: input.decode,
        workers: input.workers.max(1),
        prefetch: input.prefetch.max(1),
        samples: most,
    };
    let step = prediction.step_seconds;
    let (_, bound) = pipeline.bound(step);
    let steady = pipeline.steady_step(step).max(step);
    let first = pipeline.simulate(step, START).waits.first().copied().unwrap_or_default();
    Some(Waiting { bound, step, wait: steady - step, first, ranks })
}

impl Waiting {
    /// Adds the waiting time to a prediction.
    pub fn applied(&self, prediction: Prediction) -> Prediction {
        prediction.waiting_for_input(self.wait)
    }

    /// Formats the answer as a table.
    pub fn table(&self, loaded: &LoadedPlan) -> String {
        let bound = match self.bound {
            InputBound::Step => "the step itself: samples arrive in time",
            InputBound::Storage => "storage: the run is input-bound",
            InputBound::Workers => "decoding: the run is input-bound; more `workers` help",
            InputBound::Prefetch => "too few batches in flight: a larger `prefetch` helps",
        };
        let storage = loaded.topology.storage_bandwidth().map_or_else(
            || "not stated in the topology; assumed unbounded".to_string(),
            |rate| format!("{rate} for {} ranks", self.ranks),
        );
        let rows = [
            ("input pipeline bound by", bound.to_string()),
            ("a step waits for samples", format!("{} in addition to its {}", self.wait, self.step)),
            ("the first step waits", self.first.to_string()),
            ("storage", storage),
        ];
        let rows: Vec<Vec<String>> = rows.map(|(what, value)| vec![what.into(), value]).into();
        table(&[Column::words(""), Column::words("")], &rows)
    }

    /// The answer as JSON.
    pub fn document(&self) -> Value {
        json!({
            "bound": self.bound,
            "own_step_seconds": self.step.value(),
            "wait_seconds": self.wait.value(),
            "first_wait_seconds": self.first.value(),
            "reading_ranks": self.ranks,
        })
    }
}
