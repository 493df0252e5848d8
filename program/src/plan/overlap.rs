//! The communication that overlaps with kernels.

use super::Plan;
use crate::collective::CollectiveRole;
use crate::program::Operation;
use crate::schedule::WovenOrders;
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
    /// Passes: a stage runs a forward and a backward pass of different micro-batches together.
    /// While one waits for tokens of its experts, or for activations over `tensor` or `context`,
    /// the other computes (DualPipe and DualPipeV, DeepSeek-AI 2024, "DeepSeek-V3 Technical
    /// Report"; Megatron-Core's `--overlap-moe-expert-parallel-comm`). `schedule: zb-v` then has
    /// DualPipeV's order. Only passes that do not wait for each other are paired: with `zb-v` and
    /// at least twice as many micro-batches as stages, with `interleaved` of two chunks or more, or
    /// on a single stage with `1f1b`. Without effect with `zero: 3`, `shares` or `stages`. The
    /// planner does not search it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub passes: bool,
}

impl Default for Overlap {
    fn default() -> Self {
        Self { tensor: true, context: true, expert: true, gradients: true, parameters: true, pipeline: true, passes: false }
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
            Operation::Compute { .. } | Operation::Traced { .. } | Operation::Save { .. } => false,
        }
    }
}

impl Plan {
    /// The number of pairs of passes that a training step weaves, over all stages.
    pub fn woven_pairs(&self) -> usize {
        let plan = Self { layout: self.layout.clone().normalised(), ..self.clone() };
        plan.micro_batches().map_or(0, |micro_batches| plan.step_orders(micro_batches).pair_count())
    }

    /// Layouts that weave passes, in words for a user whose layout weaves none.
    pub fn weaving_layouts(&self) -> String {
        format!(
            "`schedule: zb-v` with {} micro-batches or more, or `interleaved` with `virtual_stages: 2` or more, without \
             `zero: 3`, `shares` and `stages`",
            2 * self.layout.pipeline
        )
    }

    /// The tasks of every stage in a training step, and which of them are woven.
    ///
    /// No passes are woven in two cases. With ZeRO 3, the parameters of a pass are gathered during
    /// the pass before it, which fixes the order of passes. If a stage has several lists, their
    /// ranks must run collectives in the same order, but each list is woven by itself.
    pub(crate) fn step_orders(&self, micro_batches: usize) -> WovenOrders {
        let layout = &self.layout;
        let (schedule, stages, chunks) = (layout.schedule, layout.pipeline, layout.virtual_stages);
        let has_lists_of_its_own = layout.stages.is_some() || layout.shares.is_some();
        if self.overlap.passes && layout.zero < 3 && !has_lists_of_its_own {
            schedule.woven_orders(stages, micro_batches, chunks)
        } else {
            WovenOrders::unpaired(schedule.orders(stages, micro_batches, chunks))
        }
    }
}
