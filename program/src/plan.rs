//! The plan: how training is laid out and what the optimizer does. The form of plan files is
//! described in `docs/reference/contract.md`, section "A plan file". It must not know models or
//! devices: the compiler checks a plan against them.

mod layout;
mod layout_words;
mod learning_rate;
mod local_sgd;
mod lora;
mod mode;
mod normal_form;
mod offload;
mod operators;
mod overlap;
mod parameter_server;
mod patterns;
mod period;
mod preference;
mod recompute;
mod rollout;
mod routing;
mod servers;
mod training;
mod workload;

pub use foretell_models::Optimizer;
pub use layout::{ContextMethod, ContextOrder, Layout, StageLayout};
pub use layout_words::LayoutDimension;
pub use learning_rate::{LearningRateSchedule, WarmUp};
pub use local_sgd::{LocalSgd, OuterOptimizer, OuterRule};
pub use lora::Lora;
pub use mode::{AveragingGraph, Decentralised, Mode};
pub use offload::Offload;
pub use operators::{OperatorPatterns, ShardedPart};
pub use overlap::Overlap;
pub use parameter_server::{ParameterServer, Staleness};
pub use patterns::NamePatterns;
pub use period::{Period, RunLength};
pub use preference::Preference;
pub use recompute::{Keep, Kept, Recompute};
pub use rollout::{PolicyMethod, Reward, Rollout, RolloutOffload, RolloutPlacement, USUAL_CONCURRENCY, USUAL_MEMORY_SHARE};
pub use routing::Routing;
pub use training::{DecayExemptions, LossScale, Training};
pub use workload::{AttentionKernel, LossKernel, MomentFormat, OperandFormat, PlannedWorkload, Trained};

use crate::collective::CollectiveAlgorithm;
use crate::mesh::Mesh;
use crate::schedule::Schedule;
use foretell_units::{Bytes, DataType};
use miette::Diagnostic;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The layout of a run and its training parameters, without the model and the topology. Fields that
/// a plan file leaves out take the usual defaults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// The mesh, and the choices of placement and order.
    #[serde(default)]
    pub layout: Layout,
    /// The number of samples of one step over all ranks.
    pub global_batch: usize,
    /// The number format of activations and matrix products.
    #[serde(default = "default_precision")]
    pub precision: DataType,
    /// The optimizer.
    #[serde(default)]
    pub optimizer: Optimizer,
    /// The parameters of the optimizer.
    #[serde(default)]
    pub training: Training,
    /// The number of samples that share batch statistics; a rank's micro-batch if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_norm_group: Option<usize>,
    /// The software stack to model.
    #[serde(default)]
    pub stack: Stack,
    /// The communication that overlaps with kernels.
    #[serde(default)]
    pub overlap: Overlap,
    /// Facts about a run under another stack.
    #[serde(default, skip_serializing_if = "PlannedWorkload::is_usual")]
    pub workload: PlannedWorkload,
    /// How the replicas of the model are synchronised.
    #[serde(default)]
    pub mode: Mode,
}

/// A software stack, by name. `foretell` is our own executor. The simulator's assumptions on
/// kernels, the host and communication follow from it. The crate with the stacks' profiles checks
/// the name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Stack(String);

impl Stack {
    /// The stack with a name.
    pub fn new(name: impl Into<String>) -> Self {
        Self(name.into())
    }

    /// The name of the stack.
    pub fn name(&self) -> &str {
        &self.0
    }

    /// Whether this is our own executor.
    pub fn is_own(&self) -> bool {
        *self == Self::default()
    }

    /// Whether the stack can run all-reduces with this algorithm. Our executor has no trees.
    pub fn has(&self, algorithm: CollectiveAlgorithm) -> bool {
        !self.is_own() || algorithm != CollectiveAlgorithm::Tree
    }
}

impl Default for Stack {
    fn default() -> Self {
        Self("foretell".into())
    }
}

fn default_precision() -> DataType {
    DataType::Fp32
}

/// The reason why a plan cannot be compiled.
#[derive(Clone, Debug, PartialEq, Eq, Error, Diagnostic)]
pub enum PlanError {
    /// A size that does not divide another.
    #[error("{what} ({value}) is not divisible by {by} ({divisor})")]
    #[diagnostic(code(plan::indivisible), help("{hint}"))]
    Indivisible {
        /// The name of the dividend.
        what: String,
        /// The dividend.
        value: usize,
        /// The name of the divisor.
        by: String,
        /// The divisor.
        divisor: usize,
        /// How to fix it.
        hint: String,
    },
    /// A value that is invalid, or that this version cannot compile.
    #[error("`{field}`: {reason}")]
    #[diagnostic(code(plan::invalid), help("{hint}"))]
    Invalid {
        /// The field of the plan.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
        /// How to fix it.
        hint: String,
    },
    /// Sizes of the model that contradict each other.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Model(#[from] foretell_models::ModelError),
    /// The caller ended the compilation.
    #[error("the compilation was stopped before its end")]
    #[diagnostic(code(plan::interrupted))]
    Interrupted,
}

impl Plan {
    /// A plan with the usual defaults for everything but the layout and the global batch.
    pub fn new(layout: Layout, global_batch: usize) -> Self {
        Self {
            layout,
            global_batch,
            precision: default_precision(),
            optimizer: Optimizer::default(),
            training: Training::default(),
            batch_norm_group: None,
            stack: Stack::default(),
            overlap: Overlap::default(),
            workload: PlannedWorkload::default(),
            mode: Mode::default(),
        }
    }

    /// The learning rate before any schedule: the stated one, or the optimizer's usual one.
    pub fn learning_rate(&self) -> f32 {
        let usual = match self.optimizer {
            Optimizer::Sgd => 0.05,
            Optimizer::Adam | Optimizer::AdamW | Optimizer::Lamb | Optimizer::Muon => 1e-3,
        };
        self.training.learning_rate.unwrap_or(usual)
    }

    /// The learning rate of a step, counted from 0.
    pub fn learning_rate_at(&self, step: usize, run: RunLength) -> f32 {
        self.training.learning_rate_at(self.learning_rate(), step, run)
    }

    /// The number format of tensors. In an eight-bit plan it is bfloat16: products quantise their
    /// operands.
    pub fn storage(&self) -> DataType {
        self.precision.tensor_format()
    }

    /// Whether the Program has kernels that make eight-bit operands. For other stacks, their
    /// profiles account for quantisation together with the products that read the operands.
    pub fn quantises(&self) -> bool {
        self.precision == DataType::Fp8 && self.stack.is_own()
    }

    /// The number format of products whose kernel does not state one: `precision`, unless the
    /// Program quantises.
    pub fn unstated_format(&self) -> DataType {
        if self.quantises() { self.storage() } else { self.precision }
    }

    /// Whether the loss is scaled, so that gradients do not vanish in the number format.
    pub fn scales_loss(&self) -> bool {
        self.precision == DataType::Fp16
    }

    /// The most values that the optimizer keeps for each element of a parameter.
    pub fn optimizer_states(&self) -> usize {
        self.optimizer_states_of(false)
    }

    /// The number of values that the optimizer keeps for each element of a parameter.
    /// `is_hidden_matrix`: whether the parameter is one of [`Graph::hidden_matrices`].
    ///
    /// [`Graph::hidden_matrices`]: foretell_models::Graph::hidden_matrices
    pub fn optimizer_states_of(&self, is_hidden_matrix: bool) -> usize {
        match self.optimizer {
            Optimizer::Sgd => usize::from(self.training.momentum != 0.0),
            Optimizer::Muon if is_hidden_matrix => 1,
            Optimizer::Adam | Optimizer::AdamW | Optimizer::Lamb | Optimizer::Muon => 2,
        }
    }

    /// Whether the optimizer keeps a single-precision copy of the parameters, since operators read
    /// a narrower format.
    pub fn has_master_copy(&self) -> bool {
        self.storage().size() < DataType::Fp32.size()
    }

    /// The mesh of the layout.
    ///
    /// # Errors
    /// [`PlanError::Invalid`] if a size is 0, an axis is named twice, or `stage_places` is no
    /// permutation of the stages.
    pub fn mesh(&self) -> Result<Mesh, PlanError> {
        let layout = &self.layout;
        layout.validate_stages()?;
        let sizes = |stage: StageLayout| [stage.data, stage.tensor, stage.context, stage.expert];
        let ranks_of = |stage| sizes(layout.stage(stage)).into_iter().try_fold(1usize, usize::checked_mul);
        let distinct = (0..layout.distinct_stages()).try_fold(0usize, |sum, stage| sum.checked_add(ranks_of(stage)?));
        let repetitions = if layout.stages.is_some() { 1 } else { layout.pipeline };
        // A server has as many ranks as a worker.
        let workers = distinct.and_then(|ranks| ranks.checked_mul(repetitions));
        let ranks = workers.and_then(|ranks| ranks.checked_add((ranks / layout.data.max(1)).checked_mul(self.mode.servers())?));
        if ranks.is_none_or(|ranks| ranks > MOST_RANKS) {
            return Err(PlanError::Invalid {
                field: "layout",
                reason: format!("its sizes multiply to more than {MOST_RANKS} ranks"),
                hint: "lower `data`, `tensor` or `pipeline`".into(),
            });
        }
        let order = layout.placement.clone().unwrap_or_default();
        let invalid = || PlanError::Invalid {
            field: "layout",
            reason: "a mesh size is 0, or `placement` names an axis twice".into(),
            hint: "use sizes of at least 1, and name every axis once".into(),
        };
        if distinct == Some(0) || layout.pipeline == 0 {
            return Err(invalid());
        }
        let mut stages = (0..layout.distinct_stages()).map(|stage| layout.stage_mesh(stage)).collect::<Result<Vec<_>, _>>()?;
        let mesh = match (&layout.stages, stages.pop()) {
            (None, Some(stage)) if self.mode.servers() > 0 => self.mesh_with_servers(stage, &order),
            (None, Some(stage)) => Mesh::uniform(stage, layout.pipeline, &order),
            (_, last) => {
                stages.extend(last);
                Mesh::of_stages(stages, &order)
            }
        };
        let mesh = mesh.ok_or_else(invalid)?;
        let Some(mut places) = layout.stage_places.clone() else { return Ok(mesh) };
        // Stages of servers come after all others.
        places.extend(layout.pipeline..mesh.stage_count());
        mesh.with_stage_places(&places).ok_or_else(|| PlanError::Invalid {
            field: "stage_places",
            reason: format!(
                "{:?} does not have each place from 0 to {} once",
                layout.stage_places.as_deref().unwrap_or_default(),
                layout.pipeline - 1
            ),
            hint: "give one place for each stage, in the stages' order, or leave `stage_places` out".into(),
        })
    }

    /// The number of micro-batches of a step.
    ///
    /// # Errors
    /// [`PlanError::Indivisible`] if the global batch is not a multiple of the samples of one
    /// micro-batch over all ranks.
    pub fn micro_batches(&self) -> Result<usize, PlanError> {
        let at_once = self.layout.samples_at_once();
        if at_once == 0 || self.global_batch == 0 || !self.global_batch.is_multiple_of(at_once) {
            let StageLayout { data, expert, shares, .. } = self.layout.stage(0);
            let data = match shares {
                Some(shares) => format!("shares {shares:?}"),
                None => format!("data {data}"),
            };
            let micro_batch = self.layout.micro_batch;
            return Err(PlanError::Indivisible {
                what: "global_batch".into(),
                value: self.global_batch,
                by: match expert {
                    1 => format!("micro_batch {micro_batch} x {data}"),
                    _ => format!("micro_batch {micro_batch} x {data} x expert {expert}"),
                },
                divisor: at_once,
                hint: "choose a global batch that is a multiple of it, or a smaller micro-batch".into(),
            });
        }
        Ok(self.global_batch / at_once)
    }

    /// Refuses values that are invalid or that this version cannot compile.
    ///
    /// # Errors
    /// [`PlanError::Invalid`] with the field and a hint.
    pub fn validate(&self) -> Result<(), PlanError> {
        let Layout { tensor, expert_tensor, zero, shard_group, .. } = self.layout;
        let refuse =
            |field, reason: &str, hint: &str| Err(PlanError::Invalid { field, reason: reason.into(), hint: hint.into() });
        if expert_tensor.is_some_and(|split| split != tensor && split != 1) {
            return refuse(
                "expert_tensor",
                "an expert can be sharded over all of `tensor` or not at all",
                "leave it out, or use 1 or the value of `tensor`",
            );
        }
        self.layout.validate_stages()?;
        self.validate_chunks()?;
        self.layout.validate_operators()?;
        self.layout.validate_recompute()?;
        if zero > 3 {
            return refuse("zero", "ZeRO has no such stage", "use 0, 1, 2 or 3");
        }
        if zero == 0 && shard_group.is_some() {
            return refuse("shard_group", "without ZeRO nothing is sharded", "leave it out, or set `zero` to 1, 2 or 3");
        }
        if self.layout.bucket < Bytes::new(1) {
            return refuse("bucket", "a bucket has at least one byte", "leave it out for the stack's own");
        }
        if matches!(self.precision, DataType::Int8 | DataType::Int32 | DataType::Fp64) {
            return refuse("precision", "not a number format for training", "use fp32, tf32, bf16, fp16 or fp8");
        }
        if self.optimizer == Optimizer::Adam && self.training.weight_decay != 0.0 {
            return refuse("training.weight_decay", "`optimizer: adam` has no weight decay", "use `optimizer: adamw`");
        }
        if self.global_batch > MOST_SAMPLES {
            return refuse("global_batch", "more than 4,294,967,296 samples in a step", "use a smaller global batch");
        }
        if self.batch_norm_group == Some(0) {
            return refuse("batch_norm_group", "no sample shares statistics with others", "use 1 or more, or leave it out");
        }
        if let Some(method) = self.workload.method_of_others().filter(|_| self.stack.is_own()) {
            return refuse(
                method,
                "our executor has no such method: it trains all parameters (`full`), or adapters beside weights of the plan's \
                 precision (`lora`)",
                "use `--stack hf-trainer`, whose trainers `execute` starts on processors, or `--method full` or `--method lora`",
            );
        }
        if self.stack.is_own() && !self.workload.is_usual() {
            return refuse(
                "workload",
                "it states facts about runs of other software, and our executor trains as the plan says",
                "leave it out, or name another `stack`",
            );
        }
        if self.optimizer == Optimizer::Muon && self.storage() == DataType::Fp16 {
            return refuse(
                "optimizer",
                "directions of `muon` are stored as the parameters are, and small ones are zero in fp16",
                "use `precision: bf16` or `fp32`, or `optimizer: adamw`",
            );
        }
        if self.workload.precomputed_reference && !self.workload.preference.is_some_and(Preference::has_reference) {
            return refuse(
                "workload.precomputed_reference",
                "the job has no reference that it compares preferences with",
                "leave it out, or use `method: dpo` or `method: kto`",
            );
        }
        if self.workload.no_master_copy && !self.has_master_copy() {
            return refuse(
                "workload.no_master_copy",
                "parameters in single precision have no copy",
                "leave it out, or use `precision: bf16`",
            );
        }
        if self.workload.unpadded.is_some_and(|share| !(share > 0.0 && share <= 1.0)) {
            return refuse("workload.unpadded", "not a share of a sequence's tokens", "use a number above 0 and up to 1");
        }
        if self.workload.nodes_per_token == Some(0) {
            return refuse("workload.nodes_per_token", "a token's experts lie on no node", "use 1 or more, or leave it out");
        }
        if self.workload.packed == Some(0) {
            return refuse("workload.packed", "a document has no token", "use the tokens of a document, at least 1");
        }
        if self.stack.is_own() && !self.overlap.pipeline {
            return refuse(
                "overlap.pipeline",
                "our executor's sends wait for the receiver, so kernels that wait for sends can deadlock",
                "leave it out, or name another `stack`",
            );
        }
        self.training.validate()?;
        self.validate_mode()?;
        self.micro_batches()?;
        Ok(())
    }

    /// Refuses a number of chunks per stage that the schedule does not support.
    fn validate_chunks(&self) -> Result<(), PlanError> {
        let Layout { schedule, virtual_stages: chunks, .. } = self.layout;
        if schedule.allows(chunks) {
            return Ok(());
        }
        let allowed = schedule.chunks();
        let ordered = match (*allowed.start(), *allowed.end()) {
            (least, usize::MAX) => format!("{least} or more"),
            (least, _) => least.to_string(),
        };
        let others: Vec<String> =
            Schedule::ALL.into_iter().filter(|other| other.allows(chunks)).map(|other| format!("`schedule: {other}`")).collect();
        let others = if others.is_empty() { String::new() } else { format!(", or {}", others.join(" or ")) };
        Err(PlanError::Invalid {
            field: "virtual_stages",
            reason: format!("`{chunks}` chunks on each stage, but schedule `{schedule}` orders {ordered}"),
            hint: format!("use `virtual_stages: {}`{others}", allowed.start()),
        })
    }
}

/// The most samples of a step. It is larger than any step so far, and bounds hostile plan files.
pub const MOST_SAMPLES: usize = 1 << 32;

/// The most ranks. It is larger than any machine so far, and bounds hostile plan files.
pub const MOST_RANKS: usize = 1 << 20;
