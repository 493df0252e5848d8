//! The plan: the choices that make a Program of a model and a topology. Its form in files is the contract's "A plan file".

use crate::mesh::{Axis, Mesh, StageMesh};
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
    /// How ranks keep in step.
    #[serde(default)]
    pub mode: Mode,
}

/// The mesh and the choices of placement and order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Layout {
    /// Ranks that share out samples.
    pub data: usize,
    /// Ranks that share out operators' weights.
    pub tensor: usize,
    /// Stages that share out the layers.
    pub pipeline: usize,
    /// Ranks that share out positions.
    pub context: usize,
    /// How attention sees the keys and values of other ranks of `context`.
    pub context_method: ContextMethod,
    /// Ranks that share out experts.
    pub expert: usize,
    /// How far `tensor` splits one expert.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert_tensor: Option<usize>,
    /// Whether norms are shared out over `tensor` along the sequence.
    pub sequence_parallel: bool,
    /// Model chunks a rank; one but in schedules that order more.
    pub virtual_stages: usize,
    /// The order of micro-batches in the stages.
    pub schedule: Schedule,
    /// ZeRO's stage: 0 none, 1 optimizer state, 2 + gradients, 3 + parameters.
    pub zero: usize,
    /// Ranks of a shard group; all of `data` if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard_group: Option<usize>,
    /// What is computed again in the backward pass instead of kept.
    pub recompute: Recompute,
    /// Samples of one micro-batch on one rank of `data`.
    pub micro_batch: usize,
    /// Blocks of the model in each chunk, in the model's order; as even as can be if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cuts: Option<Vec<usize>>,
    /// Which axis varies fastest over the devices; then the rest in the usual order.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement: Option<Vec<Axis>>,
    /// How many times `micro_batch` each rank of `data` takes, where some take more than others; once each if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shares: Option<Vec<usize>>,
    /// Meshes of their own for the pipeline's stages, in order, in place of `data`, `tensor`, `context`, `expert` and `shares` for all of
    /// them. `micro_batch` is then that of the first stage; the others share out the same samples among their own ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stages: Option<Vec<StageLayout>>,
    /// Bytes of gradients that are reduced together.
    pub bucket: Bytes,
}

/// The mesh of one pipeline stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StageLayout {
    /// Ranks that share out samples.
    pub data: usize,
    /// Ranks that share out operators' weights.
    pub tensor: usize,
    /// Ranks that share out positions.
    pub context: usize,
    /// Ranks that share out experts.
    pub expert: usize,
    /// How much of a micro-batch each rank of `data` takes, relative to the others; as much as they if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shares: Option<Vec<usize>>,
}

impl Default for StageLayout {
    fn default() -> Self {
        Self { data: 1, tensor: 1, context: 1, expert: 1, shares: None }
    }
}

impl StageLayout {
    /// Equal parts in which samples are counted: what the ranks of `data` take together, over all ranks of `expert`. `None` where it is beyond any
    /// machine.
    fn parts(&self) -> Option<usize> {
        let along_data = match &self.shares {
            Some(shares) => shares.iter().try_fold(0usize, |sum, &share| sum.checked_add(share))?,
            None => self.data,
        };
        along_data.checked_mul(self.expert)
    }
}

impl Default for Layout {
    fn default() -> Self {
        Self {
            data: 1,
            tensor: 1,
            pipeline: 1,
            context: 1,
            context_method: ContextMethod::Gather,
            expert: 1,
            expert_tensor: None,
            sequence_parallel: false,
            virtual_stages: 1,
            schedule: Schedule::OneForwardOneBackward,
            zero: 0,
            shard_group: None,
            recompute: Recompute::None,
            micro_batch: 1,
            cuts: None,
            placement: None,
            shares: None,
            stages: None,
            // PyTorch DDP's default.
            bucket: Bytes::new(25 << 20),
        }
    }
}

impl Layout {
    /// The mesh of a stage: its own, or that of all.
    pub fn stage(&self, stage: usize) -> StageLayout {
        let own = self.stages.as_ref().and_then(|stages| stages.get(stage)).cloned();
        own.unwrap_or_else(|| StageLayout {
            data: self.data,
            tensor: self.tensor,
            context: self.context,
            expert: self.expert,
            shares: self.shares.clone(),
        })
    }

    /// Samples of one micro-batch over all ranks of a stage; the largest number where that is beyond any machine.
    pub fn samples_at_once(&self) -> usize {
        self.stage(0).parts().and_then(|parts| parts.checked_mul(self.micro_batch)).unwrap_or(usize::MAX)
    }

    /// Stages whose meshes must be looked at one by one.
    fn different_stages(&self) -> usize {
        self.stages.as_ref().map_or(1, Vec::len)
    }

    /// The mesh of one stage, with what its ranks take of the samples of a micro-batch.
    fn stage_mesh(&self, stage: usize) -> Result<StageMesh, PlanError> {
        let layout = self.stage(stage);
        let shard = if self.zero == 0 { 1 } else { self.shard_group.unwrap_or(layout.data) };
        let indivisible = |what: &str, value: usize, by: &str, divisor: usize, hint: &str| PlanError::Indivisible {
            what: what.into(),
            value,
            by: by.into(),
            divisor,
            hint: hint.into(),
        };
        if shard == 0 || !layout.data.is_multiple_of(shard) {
            let hint = "choose a shard group that divides `data`, or leave it out";
            return Err(indivisible("data", layout.data, "shard_group", shard, hint));
        }
        let parts = layout.parts().unwrap_or(0);
        let at_once = self.samples_at_once();
        if parts == 0 || !at_once.is_multiple_of(parts) {
            let (by, hint) = (format!("the parts that stage {stage} cuts them into"), "choose a larger `micro_batch`");
            return Err(indivisible("the first stage's samples at once", at_once, &by, parts, hint));
        }
        let unit = at_once / parts;
        let mismatch = |shares: usize| PlanError::Invalid {
            field: "shares",
            reason: format!("{shares} shares for {} ranks of `data` in stage {stage}, or one that is 0", layout.data),
            hint: "give each rank of `data` a share of at least 1, or leave `shares` out".into(),
        };
        let samples = match &layout.shares {
            Some(shares) if shares.len() != layout.data => return Err(mismatch(shares.len())),
            Some(shares) => shares.iter().map(|share| share * unit).collect(),
            None => vec![unit],
        };
        let size = |axis| match axis {
            Axis::Tensor => layout.tensor,
            Axis::Context => layout.context,
            Axis::Expert => layout.expert,
            Axis::Shard => shard,
            Axis::Data => layout.data / shard,
            Axis::Pipeline => 1,
        };
        StageMesh::new(size, &samples).ok_or_else(|| mismatch(samples.len()))
    }

    /// Refuses meshes that contradict each other.
    fn validate_stages(&self) -> Result<(), PlanError> {
        let refuse = |reason: String, hint: &str| Err(PlanError::Invalid { field: "stages", reason, hint: hint.into() });
        let Some(stages) = &self.stages else { return Ok(()) };
        if stages.len() != self.pipeline {
            let reason = format!("{} meshes for {} stages", stages.len(), self.pipeline);
            return refuse(reason, "give as many as `pipeline` says, in the stages' order");
        }
        if [self.data, self.tensor, self.context, self.expert] != [1; 4] || self.shares.is_some() {
            return refuse(
                "every stage has a mesh of its own, and there is one for all as well".into(),
                "leave `data`, `tensor`, `context`, `expert` and `shares` to the stages",
            );
        }
        Ok(())
    }
}

/// How attention whose positions are shared out over `context` sees all keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContextMethod {
    /// Every rank gathers all of them, and scatters the sums of their gradients.
    #[default]
    Gather,
    /// They go round the ranks part by part while these compute, so that no rank ever has more than three parts at a time (ring attention, Liu et
    /// al. 2023). Attention over a sequence of another length, and with relative positions, gathers all the same.
    Ring,
}

/// What is computed again in the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing: every activation that the backward pass needs is kept.
    #[default]
    None,
    /// Attention's own operators: what they make is large, and quickly made again (Korthikanti et al. 2022).
    Selective,
    /// Every repeated block, from its input.
    Full,
    /// The first so many repeated blocks of each stage, from their input.
    FullLayers(usize),
}

/// Who updates the parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// Stochastic gradient descent, with a velocity when the momentum is not zero.
    #[default]
    Sgd,
    /// Adam (Kingma and Ba 2015).
    Adam,
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2019).
    AdamW,
}

/// What the optimizer is told. What is left out takes PyTorch's default.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Training {
    /// The step size; 0.05 for SGD and 0.001 for Adam(W) if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f32>,
    /// SGD: the share of the last step's direction.
    pub momentum: f32,
    /// SGD: whether the step looks ahead (Nesterov).
    pub nesterov: bool,
    /// The pull of every parameter towards zero.
    pub weight_decay: f32,
    /// Adam: the decay of the first moment.
    pub beta1: f32,
    /// Adam: the decay of the second moment.
    pub beta2: f32,
    /// Adam: what keeps the division finite.
    pub epsilon: f32,
    /// The largest norm of the whole gradient; a longer one is shortened to it. Not clipped if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f32>,
    /// How the loss is scaled in `fp16`, whose smallest numbers gradients fall below.
    pub loss_scale: LossScale,
}

/// Dynamic loss scaling (Micikevicius et al. 2018), with PyTorch's defaults of `GradScaler`: a step whose gradient overflows is skipped and
/// halves the scale, a streak of good ones doubles it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LossScale {
    /// The scale of the first step.
    pub initial: f32,
    /// Steps without an overflow after which the scale is doubled.
    pub growth_interval: u32,
}

impl Default for LossScale {
    fn default() -> Self {
        Self { initial: 65536.0, growth_interval: 2000 }
    }
}

impl Default for Training {
    fn default() -> Self {
        Self {
            learning_rate: None,
            momentum: 0.9,
            nesterov: false,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            clip_norm: None,
            loss_scale: LossScale::default(),
        }
    }
}

/// Whose run it is: host overheads, fusions and overlap follow from it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stack {
    /// Our own executor.
    #[default]
    Foretell,
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
        mesh.ok_or_else(invalid)
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
        if expert_tensor.is_some_and(|split| split != tensor) {
            return refuse(
                "expert_tensor",
                "experts are split by `tensor` as the other operators are",
                "leave it out, or give it the value of `tensor`",
            );
        }
        self.layout.validate_stages()?;
        self.validate_chunks()?;
        if zero > 3 {
            return refuse("zero", "there is no such stage of ZeRO", "use 0, 1, 2 or 3");
        }
        if zero == 0 && shard_group.is_some() {
            return refuse("shard_group", "nothing is sharded without ZeRO", "leave it out, or set `zero` to 1, 2 or 3");
        }
        if self.layout.bucket < Bytes::new(1) {
            return refuse("bucket", "a bucket holds at least one byte", "leave it out for 25 MiB");
        }
        if matches!(self.precision, DataType::Int32 | DataType::Fp8 | DataType::Fp64) {
            return refuse("precision", "not a precision to train in", "use fp32, tf32, bf16 or fp16");
        }
        if self.optimizer == Optimizer::Adam && self.training.weight_decay != 0.0 {
            return refuse("training.weight_decay", "Adam has no weight decay of its own here", "use `optimizer: adamw`");
        }
        if self.global_batch > MOST_SAMPLES {
            return refuse("global_batch", "more than 4,294,967,296 samples a step", "use a smaller global batch");
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
        let (ordered, hint) = match (1..=2).find(|&chunks| schedule.allows(chunks)) {
            Some(2) => ("two chunks", "use `virtual_stages: 2`"),
            _ if schedule.allows(usize::MAX) => ("one chunk or more", "use `virtual_stages: 1` or more"),
            _ => ("one chunk", "use `schedule: interleaved`, or `virtual_stages: 1`"),
        };
        Err(PlanError::Invalid {
            field: "virtual_stages",
            reason: format!("{chunks}, but schedule `{schedule}` orders {ordered} of the model a stage"),
            hint: hint.into(),
        })
    }
}

impl Training {
    /// Refuses values with which no optimizer makes a step that means anything.
    fn validate(&self) -> Result<(), PlanError> {
        let refuse = |field, value: f32, what: &str, hint: &str| {
            Err(PlanError::Invalid { field, reason: format!("{value} is not {what}"), hint: hint.into() })
        };
        let amounts = [
            ("training.learning_rate", self.learning_rate.unwrap_or(0.0), "leave it out for the usual one"),
            ("training.momentum", self.momentum, "leave it out for 0.9"),
            ("training.weight_decay", self.weight_decay, "leave it out for 0"),
        ];
        for (field, value, hint) in amounts {
            if !value.is_finite() || value < 0.0 {
                return refuse(field, value, "a finite number of at least 0", hint);
            }
        }
        let decays =
            [("training.beta1", self.beta1, "leave it out for 0.9"), ("training.beta2", self.beta2, "leave it out for 0.999")];
        for (field, value, hint) in decays {
            if !(0.0..1.0).contains(&value) {
                return refuse(field, value, "from 0 up to but not 1", hint);
            }
        }
        if !self.epsilon.is_finite() || self.epsilon <= 0.0 {
            return refuse("training.epsilon", self.epsilon, "a finite number above 0", "leave it out for 1e-8");
        }
        if let Some(clip) = self.clip_norm
            && (!clip.is_finite() || clip <= 0.0)
        {
            return refuse("training.clip_norm", clip, "a finite number above 0", "leave it out for no clipping");
        }
        let LossScale { initial, growth_interval } = self.loss_scale;
        if !initial.is_normal() || initial < 1.0 {
            return refuse("training.loss_scale.initial", initial, "a finite number of at least 1", "leave it out for 65536");
        }
        if growth_interval == 0 {
            return refuse("training.loss_scale.growth_interval", 0.0, "at least 1", "leave it out for 2000");
        }
        Ok(())
    }
}

/// More samples than any step has had; a bound on what a hostile file may ask for.
pub const MOST_SAMPLES: usize = 1 << 32;

/// More ranks than any machine there is; a bound on what a hostile file may ask for.
pub const MOST_RANKS: usize = 1 << 20;
