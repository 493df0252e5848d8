//! The document of `foretell check`: a comparison, its verdicts, and the run's data on the
//! machine's pace, on loading and on checkpoints. It must not know how these were measured.

use crate::compare::{Comparison, number};
use foretell_units::{Bytes, Seconds};
use schemars::JsonSchema;
use serde::Serialize;

/// The JSON document of `foretell check`.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct CheckDocument {
    /// The comparison of the timelines.
    #[serde(flatten)]
    pub comparison: Comparison,
    /// Whether the measured step is between the prediction's 10th and 90th percentile.
    pub inside_interval: bool,
    /// Predicted over measured peak memory, less one; `None` if memory was not measured.
    pub memory_error: Option<f64>,
    /// The machine's part of the error: the prediction over the prediction at the run's pace, less
    /// one. Below 0 if the machine was slower than at calibration. `None` if the run's pace is not
    /// known.
    pub machine_error: Option<f64>,
    /// The model's part of the error: the prediction at the run's pace over the measured step, less
    /// one. 1 + `error` = (1 + `machine_error`) · (1 + `model_error`).
    pub model_error: Option<f64>,
    /// The prediction at the run's pace; `None` if that is not known.
    pub at_pace: Option<AtPace>,
    /// Whether loading limits the step; `None` if the run's samples are in memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input: Option<InputCheck>,
    /// What a checkpoint cost; `None` if the run wrote none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointCheck>,
}

/// The cost of a checkpoint, predicted and measured (the median over the run's checkpoints).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct CheckpointCheck {
    /// Predicted time that a step waits for the checkpoint.
    #[serde(rename = "predicted_seconds", serialize_with = "number")]
    #[schemars(with = "f64")]
    pub predicted: Seconds,
    /// Measured time that a step waits for the checkpoint.
    #[serde(rename = "measured_seconds", serialize_with = "number")]
    #[schemars(with = "f64")]
    pub measured: Seconds,
    /// Predicted seconds until the checkpoint is on storage; `None` if the rate of storage is not
    /// known.
    pub predicted_write_seconds: Option<f64>,
    /// Measured seconds until the checkpoint is on storage.
    pub measured_write_seconds: Option<f64>,
}

impl CheckpointCheck {
    /// Compares seconds that a step waits, and seconds until the checkpoint is on storage. `None`
    /// if nothing was predicted or measured.
    pub fn new(predicted: [Option<f64>; 2], measured: [Option<f64>; 2]) -> Option<Self> {
        Some(Self {
            predicted: Seconds::new(predicted[0]?),
            measured: Seconds::new(measured[0]?),
            predicted_write_seconds: predicted[1],
            measured_write_seconds: measured[1],
        })
    }

    /// A line of text.
    pub fn sentence(&self) -> String {
        let written = match (self.predicted_write_seconds, self.measured_write_seconds) {
            (Some(predicted), Some(measured)) => {
                let (predicted, measured) = (Seconds::new(predicted), Seconds::new(measured));
                format!("; it was on storage after {measured}, predicted {predicted}")
            }
            _ => "; the prediction knew no rate of storage".into(),
        };
        format!("a step waited {} for a checkpoint, predicted {}{written}", self.measured, self.predicted)
    }
}

/// The prediction of a step at the pace that the machine had during the run.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct AtPace {
    /// The time of the reference kernel in the run over that at calibration: 1.1 if the machine was
    /// a tenth slower. The median over the run's parts of the mean over ranks.
    pub pace: f64,
    /// The predicted step.
    #[serde(rename = "predicted_step_seconds", serialize_with = "number")]
    #[schemars(with = "f64")]
    pub predicted_step: Seconds,
    /// Its 10th percentile.
    #[serde(rename = "step_seconds_p10", serialize_with = "number")]
    #[schemars(with = "f64")]
    pub p10: Seconds,
    /// Its 90th percentile.
    #[serde(rename = "step_seconds_p90", serialize_with = "number")]
    #[schemars(with = "f64")]
    pub p90: Seconds,
    /// Whether the measured step is between the two.
    pub inside_interval: bool,
    /// How many times the ranks ran the reference kernel.
    pub reference_kernels: usize,
    /// The time that a rank spent on the reference kernel, outside its steps.
    pub reference_seconds: f64,
}

/// Whether loading limits the step, predicted and measured.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct InputCheck {
    /// The part of the input pipeline that limits the step according to the prediction, in words.
    pub predicted_bound: String,
    /// Whether the run is predicted to be input-bound.
    pub predicted_input_bound: bool,
    /// Whether kernels waited for samples for more than a tenth of the measured step.
    pub input_bound: bool,
    /// Predicted time per step in which kernels wait for samples.
    #[serde(rename = "predicted_wait_seconds", serialize_with = "number")]
    #[schemars(with = "f64")]
    pub predicted_wait: Seconds,
    /// Measured time per step in which kernels wait for samples.
    #[serde(rename = "measured_wait_seconds", serialize_with = "number")]
    #[schemars(with = "f64")]
    pub measured_wait: Seconds,
}

impl InputCheck {
    /// A run is called input-bound if kernels wait for samples for more than this share of a step.
    /// Below it, more workers would hardly help.
    const BOUND: f64 = 0.1;

    /// Judges a measured step by its wait.
    pub fn new(
        predicted_bound: &str,
        predicted_input_bound: bool,
        predicted_wait: Seconds,
        measured_wait: Seconds,
        measured_step: Seconds,
    ) -> Self {
        let input_bound = measured_wait > measured_step * Self::BOUND;
        let predicted_bound = predicted_bound.to_owned();
        Self { predicted_bound, predicted_input_bound, input_bound, predicted_wait, measured_wait }
    }

    /// A line of text.
    pub fn sentence(&self) -> String {
        let verdict = if self.input_bound { "input-bound" } else { "not input-bound" };
        let predicted = if self.predicted_input_bound { "input-bound" } else { "not input-bound" };
        format!(
            "the run is {verdict}: a step waits {} for samples; predicted: {predicted}, {} ({})",
            self.measured_wait, self.predicted_wait, self.predicted_bound
        )
    }
}

impl CheckDocument {
    /// Adds the prediction's percentiles and the peak memory of the fullest rank, which timelines
    /// do not contain.
    pub fn new(
        comparison: Comparison,
        p10: Seconds,
        p90: Seconds,
        predicted_memory: Bytes,
        measured_memory: Option<Bytes>,
    ) -> Self {
        let inside_interval = (p10..=p90).contains(&comparison.measured_step);
        let measured_memory = measured_memory.filter(|&measured| measured > Bytes::ZERO);
        let memory_error = measured_memory.map(|measured| predicted_memory / measured - 1.0);
        Self {
            comparison,
            inside_interval,
            memory_error,
            machine_error: None,
            model_error: None,
            at_pace: None,
            input: None,
            checkpoint: None,
        }
    }

    /// Replaces the timelines' totals. A run measures steps from end to end, including the
    /// reporting between two steps; the prediction is judged by that time.
    pub fn set_steps(&mut self, predicted: Seconds, measured: Seconds, p10: Seconds, p90: Seconds) {
        self.comparison.predicted_step = predicted;
        self.comparison.measured_step = measured;
        self.comparison.error = if measured > Seconds::ZERO { predicted / measured - 1.0 } else { 0.0 };
        self.inside_interval = (p10..=p90).contains(&measured);
    }

    /// Splits the error into that of the machine and that of the model. Call it after
    /// [`CheckDocument::set_steps`].
    pub fn set_pace(&mut self, at_pace: AtPace) {
        let (predicted, measured) = (self.comparison.predicted_step, self.comparison.measured_step);
        if at_pace.predicted_step <= Seconds::ZERO || measured <= Seconds::ZERO {
            return;
        }
        self.machine_error = Some(predicted / at_pace.predicted_step - 1.0);
        self.model_error = Some(at_pace.predicted_step / measured - 1.0);
        let inside_interval = (at_pace.p10..=at_pace.p90).contains(&measured);
        self.at_pace = Some(AtPace { inside_interval, ..at_pace });
    }
}
