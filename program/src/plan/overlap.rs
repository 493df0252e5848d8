//! The communication that overlaps with kernels.

use crate::collective::CollectiveRole;
use crate::program::Operation;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The communication that overlaps with kernels. Kernels wait for all other communication.
///
/// Our executor overlaps everything. Frameworks differ: overlapped gradient reduction in DDP and
/// Megatron, parameter prefetch in FSDP, asynchronous tensor parallelism.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Overlap {
    /// Collectives of activations over `tensor`. Only the kernels that read the results wait for
    /// them.
    pub tensor: bool,
    /// Gathers and shifts of keys and values over `context`.
    pub context: bool,
    /// All-to-alls of tokens to experts and back.
    pub expert: bool,
    /// Reductions of gradients. If `false`, they come after the backward pass.
    pub gradients: bool,
    /// Gathers of parameters.
    pub parameters: bool,
    /// Sends between stages. `false` only for other stacks, whose sends are buffered. Our sends
    /// wait for the receiver: two stages whose kernels waited for their sends to each other would
    /// deadlock.
    pub pipeline: bool,
}

impl Default for Overlap {
    fn default() -> Self {
        Self { tensor: true, context: true, expert: true, gradients: true, parameters: true, pipeline: true }
    }
}

impl Overlap {
    /// Whether kernels overlap with an operation.
    pub fn allows(&self, operation: &Operation) -> bool {
        match operation {
            Operation::Collective { role, .. } => match role {
                CollectiveRole::Tensor => self.tensor,
                CollectiveRole::Context => self.context,
                CollectiveRole::Expert => self.expert,
                CollectiveRole::Gradients => self.gradients,
                CollectiveRole::Parameters => self.parameters,
            },
            Operation::Send { .. } => self.pipeline,
            Operation::Receive { .. } | Operation::Load { .. } | Operation::Copy { .. } | Operation::Write { .. } => true,
            Operation::Compute { .. } | Operation::Save { .. } => false,
        }
    }
}
