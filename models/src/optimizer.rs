//! The optimizers whose updates there are kernels for.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Optimizer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// Stochastic gradient descent, with a velocity when the momentum is not zero.
    #[default]
    Sgd,
    /// Adam (Kingma and Ba 2015).
    Adam,
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2019).
    AdamW,
    /// LAMB: Adam whose update of each parameter has a length in proportion to that of the
    /// parameter (You et al. 2020).
    Lamb,
}

impl Optimizer {
    /// The name in plan files and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Optimizer::Sgd => "sgd",
            Optimizer::Adam => "adam",
            Optimizer::AdamW => "adamw",
            Optimizer::Lamb => "lamb",
        }
    }

    /// The names of the values that it keeps for each parameter, as PyTorch's optimizers name them.
    /// SGD without momentum keeps none of them.
    pub const fn state_names(self) -> &'static [&'static str] {
        match self {
            Optimizer::Sgd => &["momentum_buffer"],
            Optimizer::Adam | Optimizer::AdamW | Optimizer::Lamb => &["exp_avg", "exp_avg_sq"],
        }
    }
}
