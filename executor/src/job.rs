//! Messages between the launcher and its ranks, over the control connection.
//!
//! The launcher sends a [`Job`] first and an [`Order`] at the end. A rank sends [`Report`]s.

use crate::data::{DataSource, InputOptions};
use crate::error::ExecutorError;
use crate::reference::ReferenceTime;
use crate::transport::{ControlClient, Starved, StreamNumber, TransportError};
use foretell_models::{Control, Kernel, Model};
use foretell_program::{Exchange, MetricKind, Period, Plan, Reach, RunLength, Sample, Turn};
use foretell_units::diagnostic::Mistake;
use foretell_units::{Bytes, DataType, Seconds};
use miette::Diagnostic;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
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
    /// The training and evaluation samples.
    pub data: DataSource,
    /// How samples are read.
    pub input: InputOptions,
    /// The cores of each rank, of which its workers may use some.
    pub cores_per_rank: usize,
    /// The seed of everything random.
    pub seed: u64,
    /// When training ends.
    pub length: Length,
    /// Whether to evaluate after each epoch and at the end.
    pub evaluate: bool,
    /// The folder for the measured spans, one file per rank. `None`: they are not kept.
    pub timeline: Option<PathBuf>,
    /// What the run starts from.
    pub start: Start,
    /// How checkpoints are written, into the run's folder; `None` writes none.
    pub checkpoints: Option<Checkpoints>,
    /// The order of arrivals at each server to replay; `None`: as they arrive.
    #[serde(default)]
    pub replay: Option<ArrivalOrder>,
    /// What a loss that is not finite does.
    #[serde(default)]
    pub on_divergence: OnDivergence,
}

/// What a run does when its loss is no longer finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnDivergence {
    /// It ends with an error.
    #[default]
    End,
    /// It goes on.
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
        self.checkpoints.as_ref().and_then(|one| one.every).is_some_and(|every| every.ends_with(step, length))
    }

    /// Checks that the run and its checkpoints end after a round, where replicas exchange only
    /// then: within a round there is no one model to keep.
    ///
    /// # Errors
    /// [`ExecutorError::Unsupported`] with the numbers of steps that would do.
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

/// What a run starts from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Start {
    /// Initial values that are drawn.
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
    /// A checkpoint every so many steps (`None`: only after the last), of which so many are kept
    /// (`None`: all).
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

/// A rank's message to the launcher.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Report {
    /// The steps since the last report. A rank does not report every step, because the launcher
    /// shares the ranks' cores.
    Steps(Vec<StepReport>),
    Evaluation(EvaluationReport),
    /// The scores of one rank's samples of an evaluation batch.
    Scores(ScoreReport),
    /// The rank has written its part of the checkpoint after so many steps into its files, which
    /// are not on storage yet.
    CheckpointWritten {
        step: usize,
    },
    /// The rank's part of the checkpoint after so many steps is on storage. The first rank adds
    /// the state of loss scaling and clipping.
    CheckpointPart {
        step: usize,
        scaler: Option<Scaler>,
        times: PartTimes,
    },
    /// The rank received a signal that asks to stop.
    AskedToStop {
        signal: i32,
    },
    /// The number of steps that the rank had started when it was told to hold.
    Held {
        started: usize,
    },
    /// The turns of a server's workers in their order, and the number of pushes of each staleness.
    Turns {
        turns: Vec<Turn>,
        staleness: Vec<u64>,
    },
    Finished {
        /// The size of the device arena; zero after a calibration.
        arena: Bytes,
    },
    /// The duration of a kernel of the calibration job, by its index there.
    Kernel {
        index: usize,
        sample: Sample,
    },
    /// The device's durations in successive windows of time, relative to its usual best.
    Paces(Vec<f64>),
    /// The fraction of the calibration's kernels that is done.
    Progress(f64),
    /// The fraction of a core's time that a partial device got while it had work.
    Speed(f64),
    /// The duration of one kind of communication at one size.
    Exchange {
        /// The group's index in the calibration job.
        group: usize,
        exchange: Exchange,
        bytes: Bytes,
        sample: Sample,
        /// The part of the duration that the communication keeps the device busy.
        processor: Seconds,
    },
    Overheads(Overheads),
    /// The duration of the reference kernel.
    Reference(Sample),
    /// The connections on which the rank has waited for a while without a byte.
    Starved(Vec<Starved>),
    /// The answer to [`Order::CountSent`].
    Sent {
        to: usize,
        stream: StreamNumber,
        bytes: u64,
    },
    Failed {
        message: String,
        /// How to fix it; may be empty.
        hint: String,
        /// Whether the failure only follows from another one.
        consequence: bool,
    },
}

/// The seconds that a rank's part of a checkpoint took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct PartTimes {
    /// For which the next step waited: for the checkpoint before it, and for the copy.
    pub(crate) save: Bits,
    /// From the end of the step until the part was written.
    pub(crate) total: Bits,
}

/// Where a rank's reports go: to the launcher, or to a test.
pub(crate) trait ReportSink: Send + Sync {
    /// Sends a report.
    fn send(&self, report: &Report) -> Result<(), TransportError>;
}

impl Report {
    /// The report of a rank that failed. A `consequence` blames another rank.
    pub(crate) fn failed(error: &dyn Diagnostic, consequence: bool) -> Self {
        let Mistake { message, hint } = Mistake::of(error);
        Report::Failed { message, hint, consequence }
    }
}

impl ReportSink for ControlClient {
    fn send(&self, report: &Report) -> Result<(), TransportError> {
        ControlClient::send(self, report)
    }
}

/// An `f64` as its bits. JSON has no NaN and no infinities, which a diverging run must report.
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

/// One rank's part of a training step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct StepReport {
    /// The step, counted from 0.
    pub(crate) step: usize,
    /// Start of the step, in nanoseconds of the monotonic clock.
    pub(crate) start: u64,
    /// End of the step, in nanoseconds of the monotonic clock.
    pub(crate) end: u64,
    pub(crate) learning_rate: Bits,
    /// The metrics that this rank contributes, to be summed over ranks.
    pub(crate) metrics: Vec<(MetricKind, Bits)>,
    /// The samples that this rank could not use and replaced, as indices into the training split.
    pub(crate) bad_samples: BTreeSet<usize>,
    /// The reference kernel, timed before the step; `None` where it is not.
    pub(crate) reference: Option<ReferenceTime>,
}

/// One rank's part of an evaluation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct EvaluationReport {
    /// The last training step before the evaluation.
    pub(crate) step: usize,
    /// The epoch that it ends or interrupts, counted from 0.
    pub(crate) epoch: usize,
    /// The number of evaluation samples, over all ranks.
    pub(crate) samples: usize,
    /// The number of them that this rank has evaluated.
    pub(crate) own_samples: usize,
    /// The metrics that this rank contributes, to be summed over ranks.
    pub(crate) metrics: Vec<(MetricKind, Bits)>,
    /// The samples that this rank could not use and replaced, as indices into the evaluation split.
    pub(crate) bad_samples: BTreeSet<usize>,
}

/// One rank's scores of an evaluation batch.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ScoreReport {
    /// The last training step before the evaluation.
    pub(crate) step: usize,
    /// For each sample the bits of the probability of each class, then those of its label, -1 if it
    /// does not count.
    pub(crate) samples: Vec<Vec<u32>>,
}

/// The interpreter's costs beside kernels and communication.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Overheads {
    /// Per instruction.
    pub(crate) instruction: Sample,
    /// Per dependency on another stream: from the end of one instruction to the start of the next.
    pub(crate) handoff: Sample,
    /// Host time to launch a GPU kernel in a step that is not captured as a graph. Zero on CPUs.
    pub(crate) launch: Seconds,
    /// Per step.
    pub(crate) step: Sample,
    /// To prepare samples, per byte.
    pub(crate) load_seconds_per_byte: Seconds,
    /// The fraction of the device that communication takes while it runs.
    pub(crate) communication_share: f64,
    /// How fast communication progresses beside a kernel, relative to the kernel, as a profile has
    /// it. `None`: not measured.
    pub(crate) communication_growth: Option<f64>,
}

/// The launcher's message to a working rank.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Order {
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
    /// Takes it out of the control of an update.
    pub(crate) fn of_control(control: &[f32]) -> Self {
        let number = |number: Control| control[number.place()];
        Self {
            loss_scale: number(Control::LossScale),
            updates: number(Control::Updates),
            growth_tracker: number(Control::Streak),
            skipped_steps: number(Control::SkippedSteps),
        }
    }

    /// Puts it into the control of an update.
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
    fn a_report_carries_nan_infinities_and_negative_zero() {
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.1] {
            let metrics = vec![(MetricKind::Loss, Bits::from(value))];
            let (learning_rate, bad_samples) = (value.into(), BTreeSet::new());
            let report = StepReport { step: 3, start: 1, end: 2, learning_rate, metrics, bad_samples, reference: None };
            let text = serde_json::to_vec(&Report::Steps(vec![report])).expect("a report is JSON");
            let read: Report = serde_json::from_slice(&text).expect("JSON is a report");
            let Report::Steps(read) = &read else { unreachable!("expected steps, got {read:?}") };
            assert_eq!(f64::from(read[0].learning_rate).to_bits(), value.to_bits());
            assert_eq!(f64::from(read[0].metrics[0].1).to_bits(), value.to_bits());
        }
    }

    #[test]
    fn a_run_of_no_steps_or_of_too_many_is_refused() {
        assert_eq!(Length::Steps(7).steps(2).expect("7 steps"), 7);
        assert_eq!(Length::Epochs(7).steps(2).expect("14 steps"), 14);
        for length in [Length::Steps(0), Length::Epochs(0), Length::Epochs(usize::MAX)] {
            assert!(matches!(length.steps(2), Err(ExecutorError::Unsupported { .. })), "{length:?}");
        }
    }
}
