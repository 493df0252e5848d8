//! The prediction of unsynchronised workers of parameter servers.

use foretell_program::StalenessDistribution;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The prediction of workers that are not synchronised.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PacedPrediction {
    /// The staleness of pushes.
    pub staleness: StalenessDistribution,
    /// The share of the time for which a server is busy with pulls and pushes.
    pub server_load: f64,
    /// The mean step times of the fastest and of the slowest worker.
    pub worker_seconds: [f64; 2],
    /// The steps per second of each worker.
    pub worker_rates: Vec<f64>,
}
