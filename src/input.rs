//! The input pipeline: how long a step waits for samples. Its costs are those of the plan, or
//! measured on the run's data, or from the calibration.

#[cfg(not(target_family = "wasm"))]
mod of_run;

use crate::output;
use crate::plan_file::LoadedPlan;
use foretell_program::{InputCosts, Operation, Profile, Program, RankTimeline, Timeline};
use foretell_reports::{Column, table};
use foretell_simulator::{InputBound, InputPipeline, Prediction};
use foretell_simulator::{PlanPrediction, PredictedInput};
use foretell_topologies::{Architecture, Topology};
use foretell_units::diagnostic::{Mistake, one_line};
use foretell_units::{BytesPerSecond, Picoseconds, Seconds};
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

#[cfg(not(target_family = "wasm"))]
pub use of_run::{cores_per_rank, waiting_for};

/// Number of steps simulated from an empty queue, to find the first step's wait.
const START: usize = 100;

/// How long steps wait for samples, and why.
pub struct Waiting {
    bound: InputBound,
    pipeline: InputPipeline,
    /// Bandwidth of storage for all ranks together; `None` if it is not known.
    storage: Option<BytesPerSecond>,
    /// The step time without waiting.
    step: Seconds,
    /// Waiting time per step in the long run.
    wait: Seconds,
    /// Waiting time of the first step, which starts with an empty queue.
    first: Seconds,
    /// Number of ranks that read samples.
    ranks: usize,
}

/// The costs of a sample, and the workers and queue that prepare it.
struct Source {
    costs: InputCosts,
    workers: usize,
    prefetch: usize,
}

/// Predicts how long steps wait for the plan's input pipeline; `None` if the plan has no `input`.
pub fn waiting(loaded: &LoadedPlan, profile: Option<&Profile>, program: &Program, prediction: &Prediction) -> Option<Waiting> {
    let input = loaded.file.input?;
    let costs = costs(loaded, profile.and_then(|profile| profile.input));
    if costs.is_none() {
        let message = "the plan's `input` states no `bytes_per_sample` and the profile has no costs of input, so loading is not \
                       predicted";
        let hint = "state `bytes_per_sample` and `decode`, or calibrate with `--data`";
        output::note(&one_line(&Mistake::new(message, hint)));
    }
    let source = Source { costs: costs?, workers: input.workers, prefetch: input.prefetch };
    predict(&source, &loaded.topology, program, prediction)
}

/// The costs that the plan states, and the measured ones for those that it does not.
fn costs(loaded: &LoadedPlan, measured: Option<InputCosts>) -> Option<InputCosts> {
    let (bytes, decode) = loaded.file.input.map_or((None, None), |input| (input.bytes_per_sample, input.decode));
    bytes.or(measured.map(|costs| costs.bytes_per_sample)).map(|bytes_per_sample| InputCosts {
        bytes_per_sample,
        decode: decode.or(measured.map(|costs| costs.decode)).unwrap_or(Seconds::ZERO),
        // Only a measurement states the rate of reading.
        read: measured.map_or(BytesPerSecond::new(f64::INFINITY), |costs| costs.read),
    })
}

/// Samples that a rank of each list reads per step.
fn samples_by_list(program: &Program) -> Vec<usize> {
    let samples = program.lists.iter().map(|list| {
        // Of several inputs (images, labels), only the largest counts.
        let mut by_input = BTreeMap::new();
        for instruction in &list.instructions {
            if let Operation::Load { input, samples, .. } = *instruction.operation {
                *by_input.entry(input).or_insert(0) += samples;
            }
        }
        // Labels come with the samples, which are read by the first stage.
        if list.stage == 0 { by_input.values().copied().max().unwrap_or(0) } else { 0 }
    });
    samples.collect()
}

fn predict(source: &Source, topology: &Topology, program: &Program, prediction: &Prediction) -> Option<Waiting> {
    let samples = samples_by_list(program);
    let readers = program.list_of_rank.iter().map(|&list| samples[list as usize]).filter(|&samples| samples > 0);
    let (ranks, total) = readers.fold((0usize, 0usize), |(ranks, total), samples| (ranks + 1, total + samples));
    let most = samples.iter().copied().max().filter(|&most| most > 0)?;
    let is_cpu = topology.device_kinds().iter().any(|kind| kind.architecture == Architecture::Cpu);
    let cores = topology.device_count() as f64 / program.mesh.world_size().max(1) as f64;
    // Without workers the rank's own core reads and decodes.
    let cores = if source.workers == 0 { 1.0 } else { cores.max(1.0) };
    let measured = Some(source.costs.read).filter(|rate| rate.value().is_finite());
    let storage = topology.storage_bandwidth().or(measured);
    let pipeline = InputPipeline {
        bytes_per_sample: source.costs.bytes_per_sample,
        // All ranks read at the same time, each in proportion to its samples.
        storage: storage.map(|rate| rate * (most as f64 / total as f64)),
        decode: source.costs.decode,
        workers: source.workers.max(1),
        prefetch: source.prefetch.max(1),
        samples: most,
        // Without workers a rank decodes inside its step, also with a GPU.
        shared_cores: (is_cpu || source.workers == 0).then_some(cores),
    };
    let step = prediction.step_seconds;
    let (_, bound) = pipeline.bound(step);
    let steady = pipeline.steady_step(step).max(step);
    let first = pipeline.simulate(step, START).waits.first().copied().unwrap_or_default();
    Some(Waiting { bound, pipeline, storage, step, wait: steady - step, first, ranks })
}

/// Makes every rank's first load take `wait` longer, and moves everything after it.
fn delay(timeline: &mut Timeline, program: &Program, wait: Seconds) {
    let wait = Picoseconds::from(wait);
    // Ranks that were simulated as one share a timeline.
    let mut delayed: BTreeMap<*const RankTimeline, Arc<RankTimeline>> = BTreeMap::new();
    for (list, rank) in program.list_of_rank.iter().zip(&mut timeline.ranks) {
        let instructions = &program.lists[*list as usize].instructions;
        let shared = delayed.entry(Arc::as_ptr(rank)).or_insert_with(|| {
            let mut own = RankTimeline::clone(rank);
            let is_load = |id: usize| {
                instructions.get(id).is_some_and(|instruction| matches!(*instruction.operation, Operation::Load { .. }))
            };
            let loads = own.spans.iter().filter(|span| is_load(span.instruction.0 as usize));
            let first = loads.min_by_key(|span| span.start).map(|span| span.instruction);
            for span in &mut own.spans {
                span.start += if first == Some(span.instruction) { Picoseconds::ZERO } else { wait };
                span.end += wait;
            }
            own.end += wait;
            Arc::new(own)
        });
        *rank = Arc::clone(shared);
    }
}

/// The input pipeline in an answer.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "InputPipeline")]
pub struct InputAnswer {
    /// The part of the pipeline that limits the step.
    bound: InputBound,
    /// The step without waiting for samples.
    own_step_seconds: f64,
    /// Time per step that waits for samples.
    wait_seconds: f64,
    /// Time that the first step waits.
    first_wait_seconds: f64,
    /// Ranks that read samples.
    reading_ranks: usize,
    /// Size of a sample in storage.
    bytes_per_sample: u64,
    /// Time that a worker takes for a sample.
    decode_seconds: f64,
    /// Workers of each rank.
    workers: usize,
    /// Batches that may be ready or in preparation at the same time.
    prefetch: usize,
}

impl Waiting {
    /// Adds the wait to a prediction and its spans.
    pub fn apply(&self, predicted: &mut PlanPrediction) {
        predicted.prediction = self.applied(predicted.prediction.clone());
        predicted.input =
            Some(PredictedInput { bound: self.bound, wait_seconds: self.wait.value(), workers: self.pipeline.workers });
        let mut timeline = predicted.timeline.clone();
        delay(&mut timeline, predicted.program(), self.wait);
        predicted.timeline = timeline;
    }

    /// Adds the wait to a prediction.
    pub fn applied(&self, prediction: Prediction) -> Prediction {
        prediction.waiting_for_input(self.wait)
    }

    /// Formats the answer as a table.
    pub fn table(&self) -> String {
        let storage = self.storage.map_or_else(
            || "not stated in the topology; assumed unbounded".to_string(),
            |rate| format!("{rate} for {} ranks", self.ranks),
        );
        let rows = [
            ("input pipeline bound by", bound_phrase(self.bound).to_string()),
            ("a step waits for samples", format!("{} in addition to its {}", self.wait, self.step)),
            ("the first step waits", self.first.to_string()),
            ("a sample", format!("{}, decoded in {}", self.pipeline.bytes_per_sample, self.pipeline.decode)),
            ("storage", storage),
        ];
        let rows: Vec<Vec<String>> = rows.map(|(what, value)| vec![what.into(), value]).into();
        table(&[Column::words(""), Column::words("")], &rows)
    }

    /// The answer as JSON.
    pub fn document(&self) -> InputAnswer {
        InputAnswer {
            bound: self.bound,
            own_step_seconds: self.step.value(),
            wait_seconds: self.wait.value(),
            first_wait_seconds: self.first.value(),
            reading_ranks: self.ranks,
            bytes_per_sample: self.pipeline.bytes_per_sample.count(),
            decode_seconds: self.pipeline.decode.value(),
            workers: self.pipeline.workers,
            prefetch: self.pipeline.prefetch,
        }
    }
}

/// The part of a pipeline that limits a step, in words.
pub fn bound_phrase(bound: InputBound) -> &'static str {
    match bound {
        InputBound::Step => "the step itself: samples arrive in time",
        InputBound::Storage => "storage: the run is input-bound",
        InputBound::Workers => "decoding: the run is input-bound; more `workers` help",
        InputBound::Cores => "the cores, which decoding and kernels share: the run is input-bound; fewer ranks per machine help",
        InputBound::Prefetch => "too few batches in flight: a larger `prefetch` helps",
    }
}
