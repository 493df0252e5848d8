//! The layout of a plan: the sizes of the mesh, of all stages or of each, and the choices of placement and order.

use super::{OperatorShares, PlanError};
use crate::collective::CollectiveAlgorithm;
use crate::mesh::{Axis, StageMesh};
use crate::schedule::Schedule;
use foretell_units::Bytes;
use serde::{Deserialize, Serialize};

/// The mesh and the choices of placement and order.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    /// What lies in the host's memory while it is not used.
    #[serde(skip_serializing_if = "Offload::is_none")]
    pub offload: Offload,
    /// Samples of one micro-batch on one rank of `data`.
    pub micro_batch: usize,
    /// Blocks of the model in each chunk, in the model's order; as even as can be if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cuts: Option<Vec<usize>>,
    /// Which axis varies fastest over the devices; then the rest in the usual order.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement: Option<Vec<Axis>>,
    /// Of each stage its place along the devices, where they are not in order: so may the stages that hold or compute the most lie on the
    /// devices that can.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stage_places: Option<Vec<usize>>,
    /// How many times `micro_batch` each rank of `data` takes, where some take more than others; once each if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shares: Option<Vec<usize>>,
    /// Meshes of their own for the pipeline's stages, in order, in place of `data`, `tensor`, `context`, `expert` and `shares` for all of
    /// them. `micro_batch` is then that of the first stage; the others share out the same samples among their own ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stages: Option<Vec<StageLayout>>,
    /// Operators that `tensor` shares out otherwise than by the rule.
    #[serde(skip_serializing_if = "OperatorShares::is_empty")]
    pub operators: OperatorShares,
    /// Bytes of gradients that are reduced together.
    pub bucket: Bytes,
    /// How all-reduces are made.
    #[serde(skip_serializing_if = "CollectiveAlgorithm::is_automatic")]
    pub collective: CollectiveAlgorithm,
}

/// The mesh of one pipeline stage.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
            offload: Offload::None,
            micro_batch: 1,
            cuts: None,
            placement: None,
            stage_places: None,
            shares: None,
            stages: None,
            operators: OperatorShares::default(),
            // PyTorch DDP's default.
            bucket: Bytes::new(25 << 20),
            collective: CollectiveAlgorithm::Automatic,
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

    /// Whether the schedule changes anything: of one stage only such a schedule does as splits the backward pass.
    pub fn follows_schedule(&self) -> bool {
        self.pipeline > 1 || self.schedule.splits_backward()
    }

    /// Samples of one micro-batch over all ranks of a stage; the largest number where that is beyond any machine.
    pub fn samples_at_once(&self) -> usize {
        self.stage(0).parts().and_then(|parts| parts.checked_mul(self.micro_batch)).unwrap_or(usize::MAX)
    }

    /// Stages whose meshes must be looked at one by one.
    pub(super) fn different_stages(&self) -> usize {
        self.stages.as_ref().map_or(1, Vec::len)
    }

    /// The mesh of one stage, with what its ranks take of the samples of a micro-batch.
    pub(super) fn stage_mesh(&self, stage: usize) -> Result<StageMesh, PlanError> {
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

    /// Refuses to say of more or fewer stages than there are how many blocks they compute again.
    pub(super) fn validate_recompute(&self) -> Result<(), PlanError> {
        match &self.recompute {
            Recompute::FullLayersOfStages(layers) if layers.len() != self.pipeline => Err(PlanError::Invalid {
                field: "recompute",
                reason: format!("numbers of layers for {} stages, and there are {}", layers.len(), self.pipeline),
                hint: "give as many as `pipeline` says, in the stages' order".into(),
            }),
            _ => Ok(()),
        }
    }

    /// Refuses to say how `tensor` shares out operators where there is no `tensor`.
    pub(super) fn validate_operators(&self) -> Result<(), PlanError> {
        if self.operators.is_empty() || (0..self.different_stages()).any(|stage| self.stage(stage).tensor > 1) {
            return Ok(());
        }
        Err(PlanError::Invalid {
            field: "operators",
            reason: "they say how `tensor` shares out operators, and `tensor` is 1".into(),
            hint: "give `tensor` ranks, or leave `operators` out".into(),
        })
    }

    /// Refuses meshes that contradict each other.
    pub(super) fn validate_stages(&self) -> Result<(), PlanError> {
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

impl ContextMethod {
    /// Every method there is.
    pub const ALL: [Self; 2] = [Self::Gather, Self::Ring];

    /// The name used in plan files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gather => "gather",
            Self::Ring => "ring",
        }
    }
}

/// What is computed again in the backward pass.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
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
    /// The same, of each stage its own number: the first stages hold the most micro-batches (AdaPipe, Sun et al. 2024).
    FullLayersOfStages(Vec<usize>),
    /// Every repeated block from its input, but for what operators of these kinds made: a policy as PyTorch's selective checkpoints and JAX's
    /// `remat` have it.
    AllBut(Kept),
}

/// What of a block is kept though the rest of it is computed again. A plan file lists the kinds: `{all_but: [attention, odd_products]}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "Vec<Keep>", into = "Vec<Keep>")]
pub struct Kept {
    /// What attention made.
    pub attention: bool,
    /// What matrix products and convolutions made.
    pub products: bool,
    /// What the matrix products before a block's attention made: queries, keys and values (MaxText's `save_qkv_proj`).
    pub projections: bool,
    /// What the first of every two matrix products of a block made, in the order in which the block computes them (torchtitan).
    pub odd_products: bool,
    /// What is summed over ranks once it is made, so that no sum is made twice.
    pub sums: bool,
}

/// A kind of operator whose results are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// [`Kept::attention`].
    Attention,
    /// [`Kept::products`].
    Products,
    /// [`Kept::projections`].
    Projections,
    /// [`Kept::odd_products`].
    OddProducts,
    /// [`Kept::sums`].
    Sums,
}

impl From<Vec<Keep>> for Kept {
    fn from(kinds: Vec<Keep>) -> Self {
        let has = |kind| kinds.contains(&kind);
        Self {
            attention: has(Keep::Attention),
            products: has(Keep::Products),
            projections: has(Keep::Projections),
            odd_products: has(Keep::OddProducts),
            sums: has(Keep::Sums),
        }
    }
}

impl From<Kept> for Vec<Keep> {
    fn from(kept: Kept) -> Self {
        let all = [
            (kept.attention, Keep::Attention),
            (kept.products, Keep::Products),
            (kept.projections, Keep::Projections),
            (kept.odd_products, Keep::OddProducts),
            (kept.sums, Keep::Sums),
        ];
        all.into_iter().filter_map(|(is_kept, kind)| is_kept.then_some(kind)).collect()
    }
}

impl Recompute {
    /// What a stage computes again.
    pub fn of_stage(&self, stage: usize) -> Self {
        match self {
            Recompute::FullLayersOfStages(layers) => match layers.get(stage) {
                None | Some(0) => Recompute::None,
                Some(&layers) => Recompute::FullLayers(layers),
            },
            other => other.clone(),
        }
    }
}

impl std::fmt::Display for Recompute {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Recompute::None => formatter.write_str("none"),
            Recompute::Selective => formatter.write_str("selective"),
            Recompute::Full => formatter.write_str("full"),
            Recompute::FullLayers(layers) => write!(formatter, "full, {layers} layers"),
            Recompute::FullLayersOfStages(layers) => {
                let runs = layers.chunk_by(|one, other| one == other).map(|run| match run {
                    [one] => one.to_string(),
                    _ => format!("{}x{}", run.len(), run[0]),
                });
                write!(formatter, "full, {} layers", runs.collect::<Vec<_>>().join("+"))
            }
            Recompute::AllBut(kept) => write!(formatter, "all but {kept}"),
        }
    }
}

impl std::fmt::Display for Kept {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = Vec::from(*self).into_iter().map(|kind| match kind {
            Keep::Attention => "attention",
            Keep::Products => "products",
            Keep::Projections => "projections",
            Keep::OddProducts => "odd products",
            Keep::Sums => "sums",
        });
        formatter.write_str(&names.collect::<Vec<_>>().join(", "))
    }
}

/// What lies in the memory of the device's host, and is copied to the device when it is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// Nothing.
    #[default]
    None,
    /// What the optimizer keeps of each parameter, single-precision copies among it: the rank's share of a bucket is copied in before its
    /// update and out after it, beside the updates of others (Calculon's `optimizer_offload`, Isaev et al. 2023). Unlike ZeRO-Offload (Ren et al.
    /// 2021) the device computes the update.
    Optimizer,
    /// What forward passes leave for the gradients: it goes out when no operator of the pass reads it any more, and comes in a block before
    /// the gradients that read it.
    Activations,
    /// Both.
    Both,
}

impl Offload {
    /// Every choice there is.
    pub const ALL: [Self; 4] = [Self::None, Self::Optimizer, Self::Activations, Self::Both];

    /// Whether everything stays on the device.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }

    /// The name in plans.
    pub const fn name(self) -> &'static str {
        match self {
            Offload::None => "none",
            Offload::Optimizer => "optimizer",
            Offload::Activations => "activations",
            Offload::Both => "both",
        }
    }

    /// Whether the optimizer's state lies on the host.
    pub const fn is_of_optimizer(self) -> bool {
        matches!(self, Offload::Optimizer | Offload::Both)
    }

    /// Whether activations do.
    pub const fn is_of_activations(self) -> bool {
        matches!(self, Offload::Activations | Offload::Both)
    }
}
