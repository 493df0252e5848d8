//! A rank's messages to the launcher.

use super::Scaler;
use crate::reference::ReferenceTime;
use crate::transport::{ControlClient, Starved, StreamNumber, TransportError};
use foretell_program::{Exchange, MetricKind, Sample, Turn};
use foretell_units::diagnostic::Mistake;
use foretell_units::{Bytes, Seconds};
use miette::Diagnostic;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// A rank's message to the launcher.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Report {
    /// The steps since the last report. A rank does not report every step, because the launcher
    /// shares the ranks' cores.
    Steps(Vec<StepReport>),
    Evaluation(EvaluationReport),
    /// The scores of one rank's samples of an evaluation batch.
    Scores(ScoreReport),
    /// The rank has written its part of the checkpoint after `step` steps into the files, but not
    /// synced it yet.
    CheckpointWritten {
        step: usize,
    },
    /// The rank's part of the checkpoint after `step` steps is on storage. The first rank adds the
    /// state of loss scaling and clipping.
    CheckpointPart {
        step: usize,
        scaler: Option<Scaler>,
        times: PartTimes,
    },
    /// The rank received a signal that asks to stop.
    AskedToStop {
        signal: i32,
    },
    /// The number of steps that the rank had started when it was told to start no more.
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
        /// The part of the duration during which the communication keeps the device busy.
        processor: Seconds,
    },
    Overheads(Overheads),
    /// The duration of the reference kernel.
    Reference(Sample),
    /// The connections on which the rank has waited for a while without a byte.
    Starved(Vec<Starved>),
    /// The answer to [`LauncherMessage::CountSent`](super::LauncherMessage::CountSent).
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
    /// Time that the next step waited: for the previous checkpoint, and for the copy.
    pub(crate) save: Bits,
    /// Time from the start of the save until the part was on storage.
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
    /// Time to prepare samples, per byte.
    pub(crate) load_seconds_per_byte: Seconds,
    /// The fraction of the device that communication takes while it runs.
    pub(crate) communication_share: f64,
    /// How fast communication progresses beside a kernel, relative to the kernel, as a profile has
    /// it. `None`: not measured.
    pub(crate) communication_growth: Option<f64>,
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
}
