//! The plan: the choices that make a Program of a model and a topology. Its form in files is the contract's "A plan file".

mod layout;
mod operators;
mod overlap;
mod training;

pub use foretell_models::Optimizer;
pub use layout::{ContextMethod, Keep, Kept, Layout, Offload, Recompute, StageLayout};
pub use operators::{OperatorShares, Share};
pub use overlap::Overlap;
pub use training::{LossScale, Training};

use crate::mesh::Mesh;
use crate::schedule::Schedule;
use foretell_units::{Bytes, DataType};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// How a run is laid out, without the model and the topology that it is for. What a file leaves out takes the field's usual default.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// The mesh and what is placed on it.
    #[serde(default)]
    pub layout: Layout,
    /// Samples of one step over all ranks.
    pub global_batch: usize,
    /// The number format of activations and matrix products.
    #[serde(default = "default_precision")]
    pub precision: DataType,
    /// Who updates the parameters.
    #[serde(default)]
    pub optimizer: Optimizer,
    /// What the optimizer is told.
    #[serde(default)]
    pub training: Training,
    /// Samples that share batch statistics; a rank's micro-batch if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_norm_group: Option<usize>,
    /// Whose run it is.
    #[serde(default)]
    pub stack: Stack,
    /// What communication runs beside kernels.
    #[serde(default)]
    pub overlap: Overlap,
    /// How ranks keep in step.
    #[serde(default)]
    pub mode: Mode,
}

/// Whose run it is, by name: `foretell` is our own executor. What the simulator assumes of kernels, the host and communication follows from
/// it; whoever has the profiles knows which names there are.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Stack(String);

impl Stack {
    /// A stack of a name.
    pub fn new(name: impl Into<String>) -> Self {
        Self(name.into())
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0
    }

    /// Whether it is our own executor.
    pub fn is_own(&self) -> bool {
        *self == Self::default()
    }
}

impl Default for Stack {
    fn default() -> Self {
        Self("foretell".into())
    }
}

/// How ranks keep in step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Every step sees every gradient.
    #[default]
    Synchronous,
}

fn default_precision() -> DataType {
    DataType::Fp32
}

/// Why a plan makes no Program.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PlanError {
    /// Sizes that do not divide.
    #[error("{what} ({value}) is not divisible by {by} ({divisor}); hint: {hint}")]
    Indivisible {
        /// What should be divided.
        what: String,
        /// Its size.
        value: usize,
        /// By what.
        by: String,
        /// That size.
        divisor: usize,
        /// The mend.
        hint: String,
    },
    /// A value that cannot be, or that this version does not execute.
    #[error("`{field}`: {reason}; hint: {hint}")]
    Invalid {
        /// The plan's field.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
        /// The mend.
        hint: String,
    },
    /// The model's own sizes contradict each other.
    #[error(transparent)]
    Model(#[from] foretell_models::ModelError),
}

impl Plan {
    /// A plan with the usual defaults for all but the layout and the global batch.
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
            mode: Mode::default(),
        }
    }

    /// The step size.
    pub fn learning_rate(&self) -> f32 {
        self.training.learning_rate.unwrap_or(match self.optimizer {
            Optimizer::Sgd => 0.05,
            Optimizer::Adam | Optimizer::AdamW => 1e-3,
        })
    }

    /// The number format of what operators read and write, of which products of eight bits are made: bfloat16 in a plan of eight bits.
    pub fn storage(&self) -> DataType {
        self.precision.of_tensors()
    }

    /// Whether the Program has kernels that make operands of eight bits. Other stacks' are in their profiles, with the products that read them.
    pub fn quantises(&self) -> bool {
        self.precision == DataType::Fp8 && self.stack.is_own()
    }

    /// The number format of products of which the Program does not say one: as `precision`, but for a Program that quantises.
    pub fn unstated_format(&self) -> DataType {
        if self.quantises() { self.storage() } else { self.precision }
    }

    /// Whether the loss is multiplied, so that its gradients do not vanish in the run's number format.
    pub fn scales_loss(&self) -> bool {
        self.precision == DataType::Fp16
    }

    /// State values that the optimizer keeps for each parameter.
    pub fn optimizer_states(&self) -> usize {
        match self.optimizer {
            Optimizer::Sgd => usize::from(self.training.momentum != 0.0),
            Optimizer::Adam | Optimizer::AdamW => 2,
        }
    }

    /// The mesh of the layout.
    ///
    /// # Errors
    /// [`PlanError::Invalid`] where a size is 0 or an axis is named twice.
    pub fn mesh(&self) -> Result<Mesh, PlanError> {
        let layout = &self.layout;
        layout.validate_stages()?;
        let sizes = |stage: StageLayout| [stage.data, stage.tensor, stage.context, stage.expert];
        let ranks_of = |stage| sizes(layout.stage(stage)).into_iter().try_fold(1usize, usize::checked_mul);
        let different = (0..layout.different_stages()).try_fold(0usize, |sum, stage| sum.checked_add(ranks_of(stage)?));
        let alike = if layout.stages.is_some() { 1 } else { layout.pipeline };
        if different.and_then(|ranks| ranks.checked_mul(alike)).is_none_or(|ranks| ranks > MOST_RANKS) {
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
            hint: "every size is at least 1, and every axis stands once".into(),
        };
        if different == Some(0) || layout.pipeline == 0 {
            return Err(invalid());
        }
        let mut stages = (0..layout.different_stages()).map(|stage| layout.stage_mesh(stage)).collect::<Result<Vec<_>, _>>()?;
        let mesh = match (&layout.stages, stages.pop()) {
            (None, Some(stage)) => Mesh::alike(stage, layout.pipeline, &order),
            (_, last) => {
                stages.extend(last);
                Mesh::of_stages(stages, &order)
            }
        };
        let mesh = mesh.ok_or_else(invalid)?;
        let Some(places) = &layout.stage_places else { return Ok(mesh) };
        mesh.with_stage_places(places).ok_or_else(|| PlanError::Invalid {
            field: "stage_places",
            reason: format!("{places:?} are not the places 0 to {} of {} stages", layout.pipeline - 1, layout.pipeline),
            hint: "name each place once, that of the first stage first, or leave them out".into(),
        })
    }

    /// Micro-batches of a step.
    ///
    /// # Errors
    /// [`PlanError::Indivisible`] where the global batch is not a multiple of what the ranks of `data` take at once.
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

    /// Refuses what this version does not lay out yet, and values that mean nothing.
    ///
    /// # Errors
    /// [`PlanError::Invalid`], naming the field and what can be used instead.
    pub fn validate(&self) -> Result<(), PlanError> {
        let Layout { tensor, expert_tensor, zero, shard_group, .. } = self.layout;
        let refuse =
            |field, reason: &str, hint: &str| Err(PlanError::Invalid { field, reason: reason.into(), hint: hint.into() });
        if expert_tensor.is_some_and(|split| split != tensor && split != 1) {
            return refuse(
                "expert_tensor",
                "an expert is split by all of `tensor`, or by nothing",
                "leave it out, or give it 1 or the value of `tensor`",
            );
        }
        self.layout.validate_stages()?;
        self.validate_chunks()?;
        self.layout.validate_operators()?;
        self.layout.validate_recompute()?;
        if zero > 3 {
            return refuse("zero", "there is no such stage of ZeRO", "use 0, 1, 2 or 3");
        }
        if zero == 0 && shard_group.is_some() {
            return refuse("shard_group", "nothing is sharded without ZeRO", "leave it out, or set `zero` to 1, 2 or 3");
        }
        if self.layout.bucket < Bytes::new(1) {
            return refuse("bucket", "a bucket holds at least one byte", "leave it out for 25 MiB");
        }
        if matches!(self.precision, DataType::Int32 | DataType::Fp64) {
            return refuse("precision", "not a precision to train in", "use fp32, tf32, bf16, fp16 or fp8");
        }
        if self.optimizer == Optimizer::Adam && self.training.weight_decay != 0.0 {
            return refuse("training.weight_decay", "Adam has no weight decay of its own here", "use `optimizer: adamw`");
        }
        if self.global_batch > MOST_SAMPLES {
            return refuse("global_batch", "more than 4,294,967,296 samples a step", "use a smaller global batch");
        }
        if self.stack.is_own() && !self.overlap.pipeline {
            return refuse(
                "overlap.pipeline",
                "where messages wait for their receivers, kernels that wait for messages may wait forever",
                "leave it out, or name the `stack` whose run it is",
            );
        }
        self.training.validate()?;
        self.micro_batches()?;
        Ok(())
    }

    /// Refuses numbers of chunks that the schedule does not order.
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

/// More samples than any step has had; a bound on what a hostile file may ask for.
pub const MOST_SAMPLES: usize = 1 << 32;

/// More ranks than any machine there is; a bound on what a hostile file may ask for.
pub const MOST_RANKS: usize = 1 << 20;
