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
    /// Muon for the weights of matrix products in hidden layers, and AdamW for all other
    /// parameters. Muon's update of a matrix is its momentum made orthogonal, with the length
    /// that AdamW's updates have (Jordan et al. 2024, "Muon"; Liu et al. 2025, arXiv:2502.16982).
    Muon,
}

impl Optimizer {
    /// The name in plan files and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Optimizer::Sgd => "sgd",
            Optimizer::Adam => "adam",
            Optimizer::AdamW => "adamw",
            Optimizer::Lamb => "lamb",
            Optimizer::Muon => "muon",
        }
    }

    /// The names of the values that it keeps for a parameter, as PyTorch's optimizers name them.
    /// SGD without momentum keeps none of them.
    pub const fn state_names(self, is_hidden_matrix: bool) -> &'static [&'static str] {
        match self {
            Optimizer::Sgd => &["momentum_buffer"],
            Optimizer::Muon if is_hidden_matrix => &["momentum_buffer"],
            Optimizer::Adam | Optimizer::AdamW | Optimizer::Lamb | Optimizer::Muon => &["exp_avg", "exp_avg_sq"],
        }
    }

    /// The momentum that its authors use: PyTorch's users that of SGD, Jordan et al. that of Muon.
    pub const fn usual_momentum(self) -> f32 {
        match self {
            Optimizer::Muon => 0.95,
            Optimizer::Sgd | Optimizer::Adam | Optimizer::AdamW | Optimizer::Lamb => 0.9,
        }
    }

    /// Whether it updates each parameter as a whole, so that no two share a bucket.
    pub const fn is_by_parameter(self) -> bool {
        matches!(self, Optimizer::Lamb | Optimizer::Muon)
    }
}
