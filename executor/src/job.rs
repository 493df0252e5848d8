//! What the launcher and its ranks say to each other over the control connection.

use crate::data::DataSource;
use foretell_models::{Kernel, Model};
use foretell_program::{Exchange, MetricKind, Plan, Sample};
use foretell_units::{Bytes, Seconds};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What all ranks are to do: sent once, before anything else.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Job {
    Train(Box<TrainingJob>),
    Calibrate(CalibrationJob),
}

/// A training run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainingJob {
    /// The model.
    pub model: Model,
    /// Its name.
    pub name: String,
    /// How it is laid out.
    pub plan: Plan,
    /// What it learns from.
    pub data: DataSource,
    /// Of everything random.
    pub seed: u64,
    /// Training steps in all.
    pub length: Length,
    /// Whether it is evaluated after each epoch and at the end.
    pub evaluate: bool,
    /// The folder for each rank's spans, if they are to be kept.
    pub timeline: Option<PathBuf>,
}

/// How long a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Length {
    /// So many steps.
    Steps(usize),
    /// So many times through the training samples.
    Epochs(usize),
}

/// A calibration: what is to be timed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CalibrationJob {
    /// Kernels, and whether they add to what is there.
    pub kernels: Vec<(Kernel, bool)>,
    /// Bytes over which a kernel's operands are spread: about what a step touches, so that they are as far from the processor
    /// as they are in a step.
    pub footprint: Bytes,
    /// Sizes of messages.
    pub messages: Vec<Bytes>,
    /// How long each kernel is timed, over all passes; a slow one at least a few times a pass.
    pub patience: Seconds,
    /// How long the passes go on at least: long enough to see how the devices change their pace.
    pub duration: Seconds,
    /// The model whose data are loaded, if loading is to be timed.
    pub model: Option<Model>,
}

/// What a rank tells the launcher.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Report {
    /// Steps since the last report: ranks do not bother the launcher at every one, because it shares their cores.
    Steps(Vec<StepReport>),
    Evaluation(EvaluationReport),
    Finished {
        arena: Bytes,
    },
    Kernel {
        index: usize,
        sample: Sample,
    },
    /// How much slower than the samples the device was, window after window.
    Paces(Vec<f64>),
    /// The share of the calibration's kernels that is done, from 0 to 1.
    Progress(f64),
    Exchange {
        exchange: Exchange,
        bytes: Bytes,
        sample: Sample,
        processor: Seconds,
    },
    Overheads(Overheads),
    Failed {
        message: String,
        consequence: bool,
    },
}

/// One rank's part of a step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct StepReport {
    pub(crate) step: usize,
    /// Nanoseconds of the machine's clock.
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) learning_rate: f32,
    pub(crate) metrics: Vec<(MetricKind, f64)>,
}

/// One rank's part of an evaluation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct EvaluationReport {
    pub(crate) step: usize,
    pub(crate) epoch: usize,
    pub(crate) samples: usize,
    pub(crate) metrics: Vec<(MetricKind, f64)>,
}

/// What an interpreter costs beside its kernels and its communication.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Overheads {
    pub(crate) instruction: Sample,
    pub(crate) handoff: Sample,
    pub(crate) step: Sample,
    pub(crate) load_seconds_per_byte: Seconds,
    pub(crate) communication_share: f64,
}

/// What the launcher tells a rank while it works.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Stop waiting for the others: one is lost.
    Abort { lost: Option<usize> },
    /// All have finished, or the cause of a failure is known: end.
    Leave,
}
