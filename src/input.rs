//! The plan's `input` section: how ranks get their samples, and what of a step that makes wait. It is simulated only; the executor reads or
//! generates samples on one thread of each rank, which is the `load` of a Program.

use crate::plan_file::LoadedPlan;
use foretell_program::{Operation, Program};
use foretell_reports::{Column, table};
use foretell_simulator::{InputBound, InputPipeline, Prediction};
use foretell_units::Seconds;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Steps in which the start is shown; by then it is over, unless the pipeline is as good as the steps are long.
const START: usize = 100;

/// What a step waits for.
pub struct Waiting {
    bound: InputBound,
    /// The step's own work.
    step: Seconds,
    /// What each step waits in the long run.
    wait: Seconds,
    /// What the first step waits, with nothing in the queue.
    first: Seconds,
    /// Ranks that read samples.
    ranks: usize,
}

/// What the plan's input pipeline makes of a step; `None` where the plan has none.
pub fn waiting(loaded: &LoadedPlan, program: &Program, prediction: &Prediction) -> Option<Waiting> {
    let input = loaded.file.input?;
    // Samples of each rank's step, where it reads any: of several inputs (images, labels) those of one.
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
            // Labels come with the samples that the first stage reads.
            if list.stage == 0 { by_input.values().copied().max().unwrap_or(0) } else { 0 }
        })
        .collect();
    let readers = program.list_of_rank.iter().map(|&list| samples[list as usize]).filter(|&samples| samples > 0);
    let (ranks, total) = readers.fold((0usize, 0usize), |(ranks, total), samples| (ranks + 1, total + samples));
    let most = samples.iter().copied().max().filter(|&most| most > 0)?;
    let pipeline = InputPipeline {
        bytes_per_sample: input.bytes_per_sample,
        // All read at once, each as much as it has samples.
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
    /// The prediction with what steps wait for samples.
    pub fn applied(&self, prediction: Prediction) -> Prediction {
        prediction.waiting_for_input(self.wait)
    }

    /// What a person sees of it.
    pub fn table(&self, loaded: &LoadedPlan) -> String {
        let bound = match self.bound {
            InputBound::Step => "the step itself: samples are there in time",
            InputBound::Storage => "storage: the run is input-bound",
            InputBound::Workers => "decoding: the run is input-bound; more `workers` help",
            InputBound::Prefetch => "too few batches on their way: a larger `prefetch` helps",
        };
        let storage = loaded.topology.storage_bandwidth().map_or_else(
            || "not stated in the topology, taken for unbounded".to_string(),
            |rate| format!("{rate} for {} ranks", self.ranks),
        );
        let rows = [
            ("input pipeline bound by", bound.to_string()),
            ("a step waits for samples", format!("{} beside {} of its own", self.wait, self.step)),
            ("the first step waits", self.first.to_string()),
            ("storage", storage),
        ];
        let rows: Vec<Vec<String>> = rows.map(|(what, value)| vec![what.into(), value]).into();
        table(&[Column::words(""), Column::words("")], &rows)
    }

    /// The same for programs.
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
