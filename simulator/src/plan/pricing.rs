//! The inputs of a plan's costs: the number format of its products, its workload, its state.
//!
//! This is the only place where costs depend on plans. The costs of a Program whose workload is
//! known do not need its plan.

use crate::cost::CostModel;
use crate::gpu::{Fp8Scaling, ProductFormat, ProfileError, RoutingSkew, StateKind, TrainedParameters, Workload};
use foretell_models::Model;
use foretell_program::{LossKernel, OperandFormat, Plan, Trained, Training};
use foretell_topologies::Topology;

/// Number of tokens whose loss is computed together if the loss is computed in parts: TRL's
/// default.
const CHUNK_OF_LOSS: f64 = 1024.0;

impl CostModel {
    /// Adds a plan's software stack, and what the plan states about the run, to the device kinds
    /// that have a GPU profile and were not calibrated.
    ///
    /// # Errors
    /// As [`CostModel::with_stack`].
    pub fn with_plan(self, topology: &Topology, plan: &Plan, model: &Model) -> Result<Self, ProfileError> {
        self.with_workload(topology, plan.stack.name(), ProductFormat::of_plan(plan), Workload::of(plan, model))
    }
}

impl Workload {
    /// Returns the workload of a plan's run.
    pub fn of(plan: &Plan, model: &Model) -> Self {
        let stated = &plan.workload;
        Self {
            experts_per_token: model.experts_per_token(),
            nodes_per_token: stated.nodes_per_token,
            trained: match stated.trains {
                Trained::All => TrainedParameters::All,
                Trained::Adapters => TrainedParameters::Adapters { beside_shards: plan.layout.zero == 3 },
            },
            fp8_scaling: match stated.products {
                Some(OperandFormat::Fp8ByRow) => Fp8Scaling::Row,
                None | Some(OperandFormat::Fp8 | OperandFormat::Mxfp8 | OperandFormat::Nvfp4) => Fp8Scaling::Tensor,
            },
            has_eager_loss: stated.eager_loss,
            logits_at_a_time: match (stated.loss, model.sample().tokens()) {
                (LossKernel::Plain, _) | (_, None) => 1.0,
                (_, Some((sequence, _))) => {
                    let tokens = sequence * plan.layout.micro_batch / plan.layout.context.max(1);
                    (CHUNK_OF_LOSS / tokens.max(1) as f64).min(1.0)
                }
            },
            has_no_master_copy: stated.no_master_copy,
            moments: stated.moments,
            attended: match (stated.packed, model.sample().tokens()) {
                (Some(document), Some((sequence, _))) => (document as f64 / sequence.max(1) as f64).min(1.0),
                _ => 1.0,
            },
            has_adapters: plan.training.lora.is_some(),
            routing: RoutingSkew::of(&stated.routing, model),
            has_unknown_stack: stated.unknown_stack,
        }
    }
}

impl ProductFormat {
    /// Returns the format of a plan's matrix products.
    pub fn of_plan(plan: &Plan) -> Self {
        match plan.workload.products {
            Some(OperandFormat::Fp8 | OperandFormat::Fp8ByRow) => ProductFormat::Fp8,
            Some(OperandFormat::Mxfp8) => ProductFormat::Mxfp8,
            Some(OperandFormat::Nvfp4) => ProductFormat::Nvfp4,
            None => ProductFormat::of(plan.unstated_format()),
        }
    }
}

impl StateKind {
    /// Returns what [`MemoryRates`](crate::gpu::MemoryRates) need to know about the state of a
    /// plan's run.
    pub fn of_plan(plan: &Plan) -> Self {
        let has_frozen = plan.training.frozen != Training::default().frozen || plan.training.lora.is_some();
        Self { storage: plan.storage(), may_be_frozen: has_frozen, moments: plan.optimizer_states() }
    }
}
