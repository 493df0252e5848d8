//! What the launcher and its ranks say to each other over the control connection.

use crate::data::DataSource;
use crate::error::ExecutorError;
use foretell_models::{Kernel, Model};
use foretell_program::{Exchange, MetricKind, Plan, Reach, Sample};
use foretell_units::{Bytes, DataType, Seconds};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What all ranks are to do: sent once, before anything else.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Job {
    Train(Box<TrainingJob>),
    Calibrate(Box<CalibrationJob>),
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

impl Length {
    /// The training steps in all.
    ///
    /// # Errors
    /// [`ExecutorError::Unsupported`] where there are none, or more than can be counted.
    pub(crate) fn steps(self, steps_per_epoch: usize) -> Result<usize, ExecutorError> {
        let (steps, asked) = match self {
            Length::Steps(steps) => (Some(steps), format!("a run of {steps} steps")),
            Length::Epochs(epochs) => (epochs.checked_mul(steps_per_epoch), format!("a run of {epochs} epochs")),
        };
        match steps {
            Some(0) => Err(ExecutorError::Unsupported { what: asked, hint: "ask for 1 at least".into() }),
            Some(steps) => Ok(steps),
            None => Err(ExecutorError::Unsupported { what: asked, hint: "ask for fewer".into() }),
        }
    }
}

/// A calibration: what is to be timed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CalibrationJob {
    /// Kernels, and whether they add to what is there.
    pub kernels: Vec<(Kernel, bool)>,
    /// Where they stand: a processor runs these, a GPU runs the kernels one by one.
    pub timed_steps: Vec<TimedStep>,
    /// Of each kernel's reads and then writes, how many bytes a step touches between two uses: so that they are as far from the processor as
    /// they are in a step.
    pub reuse: Vec<Vec<Bytes>>,
    /// Of messages and exchanges of a step, by size: how many bytes it touches between writing what is sent and sending it.
    pub message_reuse: Vec<(Bytes, Bytes)>,
    /// About how many bytes a rank touches between two exchanges of a step: what is left in the caches of the way to other ranks when it takes it.
    pub between_exchanges: Bytes,
    /// The precision in which they are run.
    pub precision: DataType,
    /// About what a step touches: over no more is an operand spread.
    pub footprint: Bytes,
    /// Whose exchanges are timed, group after group. Besides all ranks there may be as many groups as the transport has further streams.
    pub groups: Vec<CalibratedGroup>,
    /// What each rank's device is; none where each has a core to itself.
    pub devices: Vec<CalibratedDevice>,
    /// How long each exchange is timed, and each kernel on a GPU, over all passes; a slow one at least a few times a pass.
    pub patience: Seconds,
    /// How long the passes go on at least: long enough to see how the devices change their pace.
    pub duration: Seconds,
    /// The model whose data are loaded, if loading is to be timed.
    pub model: Option<Model>,
}

/// A training step, or as much of one as it takes to time some of its kernels where they stand.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TimedStep {
    /// The model.
    pub model: Model,
    /// Its name.
    pub name: String,
    /// How it is laid out.
    pub plan: Plan,
    /// By the training Program's lists: the instructions that are timed, ascending.
    pub timed: Vec<Vec<u32>>,
}

/// Ranks whose exchanges are timed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CalibratedGroup {
    /// The ranks; those of messages between two are the first two.
    pub ranks: Vec<usize>,
    /// How far apart they are.
    pub reach: Reach,
    /// What is timed among them.
    pub exchanges: Vec<Exchange>,
    /// Sizes of messages, ascending.
    pub messages: Vec<Bytes>,
}

/// A device that is not a whole core of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CalibratedDevice {
    /// Its kind.
    pub kind: String,
    /// Ranks that are on its core, its own included.
    pub sharers: usize,
    /// The share of the core's time that it may have.
    pub speed: f64,
}

impl CalibratedDevice {
    /// Whether the clock on the wall says less of its kernels than that of the processor: it is not always running.
    pub(crate) fn is_partial(&self) -> bool {
        self.sharers > 1 || self.speed < 1.0
    }
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
    /// The share of the time for which a device that has only a share of a core had it while it had work.
    Speed(f64),
    Exchange {
        /// The number of the group.
        group: usize,
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

/// A number as its bits: JSON has no words for what is no number or not finite, and a run that diverges must be able to say so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Bits(u64);

impl From<f64> for Bits {
    fn from(value: f64) -> Self {
        Bits(value.to_bits())
    }
}

impl From<Bits> for f64 {
    fn from(Bits(bits): Bits) -> Self {
        f64::from_bits(bits)
    }
}

/// One rank's part of a step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct StepReport {
    pub(crate) step: usize,
    /// Nanoseconds of the machine's clock.
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) learning_rate: Bits,
    pub(crate) metrics: Vec<(MetricKind, Bits)>,
}

/// One rank's part of an evaluation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct EvaluationReport {
    pub(crate) step: usize,
    pub(crate) epoch: usize,
    pub(crate) samples: usize,
    pub(crate) metrics: Vec<(MetricKind, Bits)>,
}

/// What an interpreter costs beside its kernels and its communication.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Overheads {
    pub(crate) instruction: Sample,
    pub(crate) handoff: Sample,
    /// What launching a kernel takes of a GPU's host, in a step that is not captured.
    pub(crate) launch: Seconds,
    pub(crate) step: Sample,
    pub(crate) load_seconds_per_byte: Seconds,
    pub(crate) communication_share: f64,
    /// As a profile has it.
    pub(crate) communication_growth: Option<f64>,
}

/// What the launcher tells a rank while it works.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Stop waiting for the others: one is lost.
    Abort { lost: Option<usize> },
    /// All have finished, or the cause of a failure is known: end.
    Leave,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_carries_what_is_no_number() {
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.1] {
            let metrics = vec![(MetricKind::Loss, Bits::from(value))];
            let report = StepReport { step: 3, start: 1, end: 2, learning_rate: value.into(), metrics };
            let text = serde_json::to_vec(&Report::Steps(vec![report])).expect("it is written");
            let read: Report = serde_json::from_slice(&text).expect("it is read");
            let Report::Steps(read) = &read else { unreachable!("{read:?} is no report of steps") };
            assert_eq!(f64::from(read[0].learning_rate).to_bits(), value.to_bits());
            assert_eq!(f64::from(read[0].metrics[0].1).to_bits(), value.to_bits());
        }
    }

    #[test]
    fn a_run_has_a_step_at_least_and_a_countable_number() {
        assert_eq!(Length::Steps(7).steps(2).expect("seven"), 7);
        assert_eq!(Length::Epochs(7).steps(2).expect("fourteen"), 14);
        for length in [Length::Steps(0), Length::Epochs(0), Length::Epochs(usize::MAX)] {
            assert!(matches!(length.steps(2), Err(ExecutorError::Unsupported { .. })), "{length:?}");
        }
    }
}
