//! The breakdown of a rank's step time.

use crate::si;
use foretell_units::Seconds;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The breakdown of the step time of the last rank to finish. Every instant counts in one part, so
/// the parts add up to the step time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Breakdown {
    /// Kernels of the forward and backward pass, whatever overlaps them.
    #[serde(with = "si")]
    #[schemars(with = "f64")]
    pub compute: Seconds,
    /// Communication or copies of this rank while no kernel runs.
    #[serde(with = "si")]
    #[schemars(with = "f64")]
    pub exposed_communication: Seconds,
    /// Idle: waiting for other ranks, handoffs between streams, and the overhead of the step.
    #[serde(with = "si")]
    #[schemars(with = "f64")]
    pub bubble: Seconds,
    /// Reading of samples while neither kernels nor communication run.
    #[serde(with = "si")]
    #[schemars(with = "f64")]
    pub data: Seconds,
    /// Kernels that update the parameters, whatever overlaps them.
    #[serde(with = "si")]
    #[schemars(with = "f64")]
    pub optimizer: Seconds,
}

impl Breakdown {
    /// The step time: the sum of the parts.
    pub fn total(&self) -> Seconds {
        self.compute + self.exposed_communication + self.bubble + self.data + self.optimizer
    }
}
