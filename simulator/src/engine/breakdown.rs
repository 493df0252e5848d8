//! How a rank spends a step.

use crate::si;
use foretell_units::Seconds;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the last rank to finish spends a step. Every instant counts once, so the parts add up to the
/// step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Breakdown {
    /// Kernels of the forward and backward pass, whatever else runs beside them.
    #[serde(with = "si")]
    #[schemars(with = "f64")]
    pub compute: Seconds,
    /// No kernel, but communication or copies of this rank.
    #[serde(with = "si")]
    #[schemars(with = "f64")]
    pub exposed_communication: Seconds,
    /// Idle: waiting for other ranks, handoffs between streams, and the overhead of the step.
    #[serde(with = "si")]
    #[schemars(with = "f64")]
    pub bubble: Seconds,
    /// No kernel and no communication, but samples being read.
    #[serde(with = "si")]
    #[schemars(with = "f64")]
    pub data: Seconds,
    /// Kernels that update the parameters, whatever else runs beside them.
    #[serde(with = "si")]
    #[schemars(with = "f64")]
    pub optimizer: Seconds,
}

impl Breakdown {
    /// The step: the sum of the parts.
    pub fn total(&self) -> Seconds {
        self.compute + self.exposed_communication + self.bubble + self.data + self.optimizer
    }
}
