//! `foretell check` for a run of another framework: compares predicted and measured step, memory
//! and operators.

use super::TrainedSteps;
use crate::failure::Failure;
use crate::run_folder::{MEASURED_OPERATORS, Measured, PREDICTED_OPERATORS, Predicted, RunFolder};
use foretell_reports::{Column, table};
use foretell_units::{Bytes, Seconds};
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Kinds of operators that a table lists, the longest first.
const MOST_LISTED: usize = 16;

/// The comparison of a run of another framework with its prediction.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct FrameworkCheck {
    /// The predicted step.
    predicted_step_seconds: f64,
    /// Its 10th percentile.
    step_seconds_p10: f64,
    /// Its 90th percentile.
    step_seconds_p90: f64,
    /// The median measured step.
    measured_step_seconds: f64,
    /// Predicted over measured step, less one.
    error: f64,
    /// Whether the measured step is between the two percentiles.
    inside_interval: bool,
    /// The most bytes of tensors that any rank was predicted to hold.
    predicted_memory_bytes: u64,
    /// The most bytes of tensors that any rank held.
    measured_memory_bytes: u64,
    /// Predicted over measured bytes, less one.
    memory_error: f64,
    /// Kinds of operators, the longest first.
    operators: Vec<OperatorCheck>,
}

/// A kind of operator in a step.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct OperatorCheck {
    /// The kind's name.
    name: String,
    /// Predicted seconds of a step.
    predicted_seconds: f64,
    /// Measured seconds of a step.
    measured_seconds: f64,
}

/// Whether a folder has a run of another framework.
pub fn is_of_framework(folder: &RunFolder) -> bool {
    folder.file(MEASURED_OPERATORS).exists()
}

/// Compares the run in a folder.
pub fn check(folder: &RunFolder) -> Result<FrameworkCheck, Failure> {
    let predicted: Predicted = folder.read("predicted.json")?;
    let measured: Measured = folder.read("measured.json")?;
    let trained: TrainedSteps = folder.read(MEASURED_OPERATORS)?;
    let of_operators: BTreeMap<String, f64> = folder.read(PREDICTED_OPERATORS)?;
    let prediction = &predicted.prediction;
    let (step, [p10, p90]) =
        (prediction.step_seconds.value(), [prediction.step_seconds_p10, prediction.step_seconds_p90].map(Seconds::value));
    let most = |bytes: &mut dyn Iterator<Item = u64>| bytes.max().unwrap_or(0);
    let held = most(&mut prediction.peak_memory_bytes.iter().map(|bytes| bytes.count()));
    let was_held = most(&mut measured.peak_memory_bytes.iter().copied());
    let names: BTreeSet<&String> = of_operators.keys().chain(trained.operators.keys()).collect();
    let mut operators: Vec<OperatorCheck> = names
        .into_iter()
        .map(|name| OperatorCheck {
            name: name.clone(),
            predicted_seconds: of_operators.get(name).copied().unwrap_or(0.0),
            measured_seconds: trained.operators.get(name).copied().unwrap_or(0.0),
        })
        .collect();
    operators.sort_by(|operator, other| other.measured_seconds.total_cmp(&operator.measured_seconds));
    Ok(FrameworkCheck {
        predicted_step_seconds: step,
        step_seconds_p10: p10,
        step_seconds_p90: p90,
        measured_step_seconds: measured.step_seconds,
        error: relative(step, measured.step_seconds),
        inside_interval: (p10..=p90).contains(&measured.step_seconds),
        predicted_memory_bytes: held,
        measured_memory_bytes: was_held,
        memory_error: relative(held as f64, was_held as f64),
        operators,
    })
}

fn relative(predicted: f64, measured: f64) -> f64 {
    predicted / measured.max(f64::MIN_POSITIVE) - 1.0
}

impl FrameworkCheck {
    /// The comparison as text.
    pub fn text(&self) -> String {
        let inside = if self.inside_interval { "inside" } else { "outside" };
        let step = format!(
            "predicted {}, measured {}: error {:+.1} %, {inside} the 80 % interval",
            Seconds::new(self.predicted_step_seconds),
            Seconds::new(self.measured_step_seconds),
            self.error * 100.0
        );
        let memory = format!(
            "tensors of a rank: predicted {}, measured {}: error {:+.1} %",
            Bytes::new(self.predicted_memory_bytes),
            Bytes::new(self.measured_memory_bytes),
            self.memory_error * 100.0
        );
        let columns = [
            Column::words("operators of a step"),
            Column::numbers("predicted"),
            Column::numbers("measured"),
            Column::numbers("error"),
        ];
        let row = |check: &OperatorCheck| {
            let error = relative(check.predicted_seconds, check.measured_seconds) * 100.0;
            let error = if check.measured_seconds > 0.0 { format!("{error:+.1} %") } else { "-".into() };
            let [predicted, measured] =
                [check.predicted_seconds, check.measured_seconds].map(|time| Seconds::new(time).to_string());
            vec![check.name.clone(), predicted, measured, error]
        };
        let rows: Vec<Vec<String>> = self.operators.iter().take(MOST_LISTED).map(row).collect();
        format!("{step}\n{memory}\n{}", table(&columns, &rows))
    }
}
