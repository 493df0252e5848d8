//! Messages between the launcher and its ranks, over the control connection.
//!
//! The launcher sends a [`Job`] first and a [`LauncherMessage`] at the end. A rank sends
//! [`Report`]s.

mod report;

pub(crate) use report::{Bits, EvaluationReport, Overheads, PartTimes, Report, ReportSink, ScoreReport, StepReport};

use crate::data::{DataSource, InputOptions};
use crate::error::ExecutorError;
use crate::transport::StreamNumber;
use foretell_models::{Control, Kernel, Model};
use foretell_program::{Exchange, Period, Plan, Reach, RunLength, Turn};
use foretell_units::{Bytes, DataType, Seconds};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The work of all ranks.
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
    /// The model's name.
    pub name: String,
    /// How training is laid out, and its hyperparameters.
    pub plan: Plan,
    /// The source of training and evaluation samples.
    pub data: DataSource,
    /// How samples are read.
    pub input: InputOptions,
    /// The cores of each rank; its workers may use some of them.
    pub cores_per_rank: usize,
    /// The seed of everything random.
    pub seed: u64,
    /// When training ends.
    pub length: Length,
    /// Whether to evaluate after each epoch and at the end.
    pub evaluate: bool,
    /// The folder for the measured spans, one file per rank. `None`: they are not kept.
    pub timeline: Option<PathBuf>,
    /// The state that the run starts from.
    pub start: Start,
    /// How checkpoints are written, into the run's folder; `None` writes none.
    pub checkpoints: Option<Checkpoints>,
    /// The order of arrivals at each server to replay; `None`: as they arrive.
    #[serde(default)]
    pub replay: Option<ArrivalOrder>,
    /// What the run does when its loss is no longer finite.
    #[serde(default)]
    pub on_divergence: OnDivergence,
}

/// What a run does when its loss is no longer finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnDivergence {
    /// End with an error.
    #[default]
    End,
    /// Continue training.
    Continue,
}

/// The order of pulls and pushes at servers whose workers go at their own pace, by the server's
/// rank.
pub type ArrivalOrder = BTreeMap<usize, Vec<Turn>>;

impl TrainingJob {
    /// Whether all ranks evaluate after a step of a run of this length.
    pub(crate) fn evaluates_after(&self, step: usize, length: RunLength) -> bool {
        let every = self.plan.training.evaluate_every.unwrap_or(Period::Epochs(1));
        self.evaluate && (every.ends_with(step, length) || step + 1 == length.steps)
    }

    /// Whether all ranks save a checkpoint after a step of a run of this length, beside the one at
    /// its end.
    pub(crate) fn saves_after(&self, step: usize, length: RunLength) -> bool {
        self.checkpoints.as_ref().and_then(|checkpoint| checkpoint.every).is_some_and(|every| every.ends_with(step, length))
    }

    /// If replicas exchange parameters only at the end of a round, checks that the run and its
    /// checkpoints end there: within a round, the replicas have different models.
    ///
    /// # Errors
    /// [`ExecutorError::Unsupported`], naming numbers of steps that are possible.
    pub fn check_rounds(&self, steps_per_epoch: usize) -> Result<(), ExecutorError> {
        let round = self.plan.cycle().round_steps();
        let check = |what: &str, option: &str, steps: usize| {
            if steps.is_multiple_of(round) {
                return Ok(());
            }
            let (before, after) = (steps / round * round, steps.checked_next_multiple_of(round));
            let others: Vec<String> =
                [Some(before).filter(|&steps| steps > 0), after].iter().flatten().map(usize::to_string).collect();
            let others = others.join(" or ");
            Err(ExecutorError::Unsupported {
                what: format!("{what} of {steps} steps, when replicas exchange after every {round},"),
                hint: format!("use `{option}` with {others} steps, or an `every` that divides {steps}"),
            })
        };
        check("a run", "--steps", self.length.steps(steps_per_epoch)?)?;
        let every = self.checkpoints.as_ref().and_then(|checkpoints| checkpoints.every);
        let run = RunLength { steps: 0, steps_per_epoch };
        every.map_or(Ok(()), |every| check("a checkpoint after each run", "--save-every", every.steps(run)))
    }
}

/// The state that a run starts from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Start {
    /// Randomly drawn initial values.
    #[default]
    Fresh,
    /// The weights in a safetensors file, an index of several, or a folder of either.
    Weights(PathBuf),
    /// A checkpoint.
    Checkpoint {
        /// Its folder.
        path: PathBuf,
        /// The number of steps that were made before it.
        step: usize,
    },
}

impl Start {
    /// The number of steps that were made before.
    pub fn step(&self) -> usize {
        if let Start::Checkpoint { step, .. } = self { *step } else { 0 }
    }
}

/// How checkpoints are written. The last step always leaves one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoints {
    /// The number of steps between two checkpoints; `None` writes only the last.
    pub every: Option<Period>,
    /// The number of checkpoints to keep; `None` keeps all.
    pub keep: Option<usize>,
    /// The folder, which the launcher chooses.
    #[serde(default)]
    pub(crate) folder: PathBuf,
}

impl Checkpoints {
    /// Checkpoints after every period `every` (`None`: only after the last step); the last `keep`
    /// are kept (`None`: all).
    pub fn new(every: Option<Period>, keep: Option<usize>) -> Self {
        Self { every, keep, folder: PathBuf::new() }
    }
}

/// The length of a training run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Length {
    /// This many steps.
    Steps(usize),
    /// This many passes over the training samples.
    Epochs(usize),
}

impl Length {
    /// The number of training steps.
    ///
    /// # Errors
    /// [`ExecutorError::Unsupported`] if it is 0, or does not fit a `usize`.
    pub(crate) fn steps(self, steps_per_epoch: usize) -> Result<usize, ExecutorError> {
        let (steps, asked) = match self {
            Length::Steps(steps) => (Some(steps), format!("a run of {steps} steps")),
            Length::Epochs(epochs) => (epochs.checked_mul(steps_per_epoch), format!("a run of {epochs} epochs")),
        };
        match steps {
            Some(0) => Err(ExecutorError::Unsupported { what: asked, hint: "ask for at least 1".into() }),
            Some(steps) => Ok(steps),
            None => Err(ExecutorError::Unsupported { what: asked, hint: "ask for fewer".into() }),
        }
    }
}

/// A calibration: the kernels and communication to time, and under which conditions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CalibrationJob {
    /// The kernels to time, each with whether it accumulates into its output.
    pub kernels: Vec<(Kernel, bool)>,
    /// Plans in whose training steps the kernels occur. CPUs time the kernels inside these steps;
    /// GPUs time each kernel by itself and ignore this.
    pub timed_plans: Vec<TimedPlan>,
    /// Per kernel, the reuse distance of each operand, reads before writes: the bytes that a step
    /// touches between two uses of the operand. GPUs cycle through enough memory to reproduce it.
    pub reuse_distances: Vec<Vec<Bytes>>,
    /// Message sizes of a step, each with the bytes that the step touches between writing such a
    /// message and sending it.
    pub message_reuse_distances: Vec<(Bytes, Bytes)>,
    /// The bytes that a rank touches between two communications of a step. They displace the
    /// transport's own data from the caches.
    pub bytes_between_communications: Bytes,
    /// The precision of the kernels.
    pub precision: DataType,
    /// The bytes that a step touches. No operand is spread over more memory than that.
    pub footprint: Bytes,
    /// The groups whose communication is timed, one group after the other. Groups of fewer than all
    /// ranks use a transport stream each, which limits their number.
    pub groups: Vec<CalibratedGroup>,
    /// The device of each rank. Empty if each rank has a core of its own.
    pub devices: Vec<CalibratedDevice>,
    /// How long to time each communication, and each kernel on a GPU, over all passes. Slow ones
    /// are timed at least a few times per pass.
    pub time_per_item: Seconds,
    /// The least time for all passes together: long enough to observe how the devices' pace varies.
    pub least_duration: Seconds,
    /// The model whose data loading is timed. `None`: loading is not timed.
    pub model: Option<Model>,
}

/// The training steps of a plan in which some kernels are timed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TimedPlan {
    /// The model.
    pub model: Model,
    /// The model's name.
    pub name: String,
    /// How training is laid out.
    pub plan: Plan,
    /// Per step Program and list, the instructions to time, ascending. Programs are those of
    /// [`foretell_program::Compiled::step_programs`].
    pub timed: Vec<Vec<Vec<u32>>>,
}

/// A group of ranks whose communication is timed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CalibratedGroup {
    /// The ranks. Messages are timed between the first two.
    pub ranks: Vec<usize>,
    /// How far their messages travel.
    pub reach: Reach,
    /// The kinds of communication to time.
    pub exchanges: Vec<Exchange>,
    /// The message sizes, ascending.
    pub messages: Vec<Bytes>,
}

/// A device that shares a core with others, or may use only a part of its time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CalibratedDevice {
    /// The kind, as the topology names it.
    pub kind: String,
    /// The number of ranks on this core, this one included.
    pub ranks_on_core: usize,
    /// The fraction of the core's time that the device may use: at most 1.
    pub speed: f64,
}

impl CalibratedDevice {
    /// Whether the device does not run all the time. Its kernels are then timed in CPU time instead
    /// of wall-clock time.
    pub(crate) fn is_partial(&self) -> bool {
        self.ranks_on_core > 1 || self.speed < 1.0
    }
}

/// The launcher's message to a working rank.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum LauncherMessage {
    /// Stop waiting for other ranks: one is lost.
    Abort { lost: Option<usize> },
    /// Start no more steps, and report how many were started.
    Hold,
    /// End training once this many steps were made.
    StopAfter { steps: usize },
    /// Report how many bytes were sent to a rank on a stream.
    CountSent { to: usize, stream: StreamNumber },
    /// Exit: all ranks have finished, or the cause of a failure is known.
    Leave,
}

/// The state of loss scaling and of clipping.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scaler {
    /// The factor on the loss.
    pub loss_scale: f32,
    /// The number of updates, without those that were skipped.
    pub updates: f32,
    /// The number of steps since the factor changed.
    pub growth_tracker: f32,
    /// The number of steps whose update was skipped.
    pub skipped_steps: f32,
}

impl Scaler {
    /// Reads the state from the control of an update.
    pub(crate) fn of_control(control: &[f32]) -> Self {
        let number = |number: Control| control[number.place()];
        Self {
            loss_scale: number(Control::LossScale),
            updates: number(Control::Updates),
            growth_tracker: number(Control::Streak),
            skipped_steps: number(Control::SkippedSteps),
        }
    }

    /// Writes the state into the control of an update.
    pub(crate) fn put_into(self, control: &mut [f32]) {
        for (number, value) in [
            (Control::LossScale, self.loss_scale),
            (Control::Updates, self.updates),
            (Control::Streak, self.growth_tracker),
            (Control::SkippedSteps, self.skipped_steps),
        ] {
            if let Some(place) = control.get_mut(number.place()) {
                *place = value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_of_no_steps_or_of_too_many_is_refused() {
        assert_eq!(Length::Steps(7).steps(2).expect("7 steps"), 7);
        assert_eq!(Length::Epochs(7).steps(2).expect("14 steps"), 14);
        for length in [Length::Steps(0), Length::Epochs(0), Length::Epochs(usize::MAX)] {
            assert!(matches!(length.steps(2), Err(ExecutorError::Unsupported { .. })), "{length:?}");
        }
    }
}
