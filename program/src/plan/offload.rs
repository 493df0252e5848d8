//! Offloading: tensors that are kept in the host's memory while the device does not use them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The tensors that are kept in the memory of the device's host, and copied to the device when
/// needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// None.
    #[default]
    None,
    /// The optimizer's state of each parameter, its single-precision copy included. The rank's
    /// shard of a bucket is copied in before the bucket's update and out after it, beside the
    /// updates of other buckets (Calculon's `optimizer_offload`, Isaev et al. 2023). The device
    /// computes the update, unlike in ZeRO-Offload (Ren et al. 2021).
    Optimizer,
    /// The activations that forward passes leave for backward passes. They are copied out after
    /// their last use in the forward pass, and back one block before the gradients that read them.
    Activations,
    /// The optimizer's state and activations.
    Both,
    /// Parameters, while no layer uses them, and the optimizer's state, which the host updates
    /// (DeepSpeed's stage 3 with `offload_param` and `offload_optimizer`). For stacks whose
    /// operators were traced. The compiled Program, which is never run under such a stack, has only
    /// the optimizer's state on the host.
    State,
}

impl Offload {
    /// Every choice.
    pub const ALL: [Self; 5] = [Self::None, Self::Optimizer, Self::Activations, Self::Both, Self::State];

    /// Whether everything stays on the device.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }

    /// The name in plan files.
    pub const fn name(self) -> &'static str {
        match self {
            Offload::None => "none",
            Offload::Optimizer => "optimizer",
            Offload::Activations => "activations",
            Offload::Both => "both",
            Offload::State => "state",
        }
    }

    /// Whether the optimizer's state lies on the host.
    pub const fn is_of_optimizer(self) -> bool {
        matches!(self, Offload::Optimizer | Offload::Both | Offload::State)
    }

    /// Whether activations lie on the host between the passes.
    pub const fn is_of_activations(self) -> bool {
        matches!(self, Offload::Activations | Offload::Both)
    }
}
