//! What communication runs beside kernels.

use crate::collective::CollectiveRole;
use crate::program::Operation;
use serde::{Deserialize, Serialize};

/// What communication runs beside kernels; what does not, they wait for. Our executor has all of it beside them; frameworks differ (DDP's and
/// Megatron's overlapped reduction of gradients, FSDP's prefetch of parameters, asynchronous tensor parallelism).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Overlap {
    /// Collectives of activations over `tensor`, which only what reads them waits for.
    pub tensor: bool,
    /// Gathers and shifts of keys and values.
    pub context: bool,
    /// Exchanges of tokens between experts.
    pub expert: bool,
    /// Reductions of gradients. If not, they come after the backward pass.
    pub gradients: bool,
    /// Gathers of parameters.
    pub parameters: bool,
    /// Sends between stages. Only of stacks other than our own, whose sends are put into buffers: where a message waits for its receiver, two stages
    /// whose kernels wait for what they send each other would wait forever.
    pub pipeline: bool,
}

impl Default for Overlap {
    fn default() -> Self {
        Self { tensor: true, context: true, expert: true, gradients: true, parameters: true, pipeline: true }
    }
}

impl Overlap {
    /// Whether kernels run beside an operation.
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
            Operation::Receive { .. } | Operation::Load { .. } | Operation::Copy { .. } => true,
            Operation::Compute { .. } => false,
        }
    }
}
