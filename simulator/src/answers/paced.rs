//! What a prediction says of workers that go at their own pace.

use foretell_program::StalenessDistribution;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The prediction of workers that go at their own pace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PacedPrediction {
    /// The staleness of pushes.
    pub staleness: StalenessDistribution,
    /// The share of the time in which a server takes turns.
    pub server_load: f64,
    /// The time of the fastest worker's own step, and of the slowest.
    pub worker_seconds: [f64; 2],
    /// The steps that each worker makes in a second.
    pub worker_rates: Vec<f64>,
}
