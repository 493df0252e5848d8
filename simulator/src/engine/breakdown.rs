//! How a rank spends a step.

use crate::si;
use foretell_units::Seconds;
use serde::{Deserialize, Serialize};

/// What the last rank to finish spends a step on. Every instant counts once, so the parts sum to the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Breakdown {
    /// Kernels of the forward and backward pass, whatever else goes on beside them.
    #[serde(with = "si")]
    pub compute: Seconds,
    /// No kernel, but data on the move from or to this rank.
    #[serde(with = "si")]
    pub exposed_communication: Seconds,
    /// Nothing: waiting for other ranks, and what it costs to hand over between streams and steps.
    #[serde(with = "si")]
    pub bubble: Seconds,
    /// No kernel and no communication, but samples being read.
    #[serde(with = "si")]
    pub data: Seconds,
    /// Kernels that update the parameters.
    #[serde(with = "si")]
    pub optimizer: Seconds,
}

impl Breakdown {
    /// The sum of the parts: the step.
    pub fn total(&self) -> Seconds {
        self.compute + self.exposed_communication + self.bubble + self.data + self.optimizer
    }
}
