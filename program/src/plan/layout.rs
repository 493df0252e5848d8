//! The layout of a plan: the sizes of the mesh, for all stages or for each, and the choices of
//! placement and order.

use super::{Offload, OperatorPatterns, PlanError, Recompute};
use crate::collective::CollectiveAlgorithm;
use crate::mesh::{Axis, StageMesh};
use crate::schedule::Schedule;
use foretell_units::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The sizes of the mesh, and the choices of placement and order.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Layout {
    /// The number of ranks that samples are sharded over.
    pub data: usize,
    /// The number of ranks that the weights of operators are sharded over.
    pub tensor: usize,
    /// The number of pipeline stages.
    pub pipeline: usize,
    /// The number of ranks that the positions of a sequence are sharded over.
    pub context: usize,
    /// How attention sees the keys and values of other ranks of `context`.
    pub context_method: ContextMethod,
    /// The order in which ranks of `context` hold the positions of a sequence; `zigzag` if it is
    /// left out.
    #[serde(skip_serializing_if = "ContextOrder::is_usual")]
    pub context_order: ContextOrder,
    /// The number of ranks that experts are sharded over.
    pub expert: usize,
    /// The number of ranks of `tensor` that one expert is sharded over; all of `tensor` if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert_tensor: Option<usize>,
    /// Whether norms and dropout are sharded over `tensor` along the sequence.
    pub sequence_parallel: bool,
    /// The number of model chunks on each stage.
    pub virtual_stages: usize,
    /// The order of micro-batches in the stages.
    pub schedule: Schedule,
    /// The stage of ZeRO: 0 shards nothing, 1 the optimizer's state, 2 also gradients, 3 also
    /// parameters.
    pub zero: usize,
    /// The number of ranks of `data` in a shard group; all of them if `None`. ZeRO also shards over
    /// `context` and, outside of experts, `expert`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard_group: Option<usize>,
    /// The results that the backward pass recomputes.
    pub recompute: Recompute,
    /// The tensors that are kept in the host's memory while they are not used.
    #[serde(skip_serializing_if = "Offload::is_none")]
    pub offload: Offload,
    /// The most positions of a rank's micro-batch whose logits are in memory at once: the loss is
    /// then computed in chunks, and the backward pass computes each chunk's logits again. All of
    /// them if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_chunk: Option<usize>,
    /// The most positions of a rank's micro-batch that are at once in an MLP, whose inner features
    /// the backward pass then computes again. All of them if `None`. Experts are not cut.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mlp_chunk: Option<usize>,
    /// The number of samples of a micro-batch on one rank of `data`.
    pub micro_batch: usize,
    /// The number of blocks in each chunk, in the model's order; as even as possible if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cuts: Option<Vec<usize>>,
    /// The rank order: the axes, the one that varies fastest over consecutive devices first. Axes
    /// that are left out follow in the usual order.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement: Option<Vec<Axis>>,
    /// The position of each stage along the devices; in order if `None`. So the stages with the
    /// most memory or work can be put on the devices with the most memory or the highest speed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stage_places: Option<Vec<usize>>,
    /// The share of each rank of `data`, in multiples of `micro_batch`; 1 each if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shares: Option<Vec<usize>>,
    /// The mesh of each stage, in place of `data`, `tensor`, `context`, `expert` and `shares` for
    /// all stages. `micro_batch` is then that of the first stage; the others shard the same samples
    /// over their ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stages: Option<Vec<StageLayout>>,
    /// The operators that `tensor` shards differently from the default rule.
    #[serde(skip_serializing_if = "OperatorPatterns::is_empty")]
    pub operators: OperatorPatterns,
    /// The bytes of gradients that are reduced together. The default depends on the stack: 25 MiB
    /// for our own.
    pub bucket: Bytes,
    /// The algorithm of all-reduces.
    #[serde(skip_serializing_if = "CollectiveAlgorithm::is_automatic")]
    pub collective: CollectiveAlgorithm,
}

/// The mesh of one pipeline stage.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct StageLayout {
    /// The number of ranks that samples are sharded over.
    pub data: usize,
    /// The number of ranks that the weights of operators are sharded over.
    pub tensor: usize,
    /// The number of ranks that the positions of a sequence are sharded over.
    pub context: usize,
    /// The number of ranks that experts are sharded over.
    pub expert: usize,
    /// The share of each rank of `data`, relative to the others; equal if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shares: Option<Vec<usize>>,
}

impl Default for StageLayout {
    fn default() -> Self {
        Self { data: 1, tensor: 1, context: 1, expert: 1, shares: None }
    }
}

impl StageLayout {
    /// The sum of the shares of all ranks along `data` and `expert`. `None` if it overflows.
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
            context_order: ContextOrder::Zigzag,
            expert: 1,
            expert_tensor: None,
            sequence_parallel: false,
            virtual_stages: 1,
            schedule: Schedule::default(),
            zero: 0,
            shard_group: None,
            recompute: Recompute::None,
            offload: Offload::None,
            loss_chunk: None,
            mlp_chunk: None,
            micro_batch: 1,
            cuts: None,
            placement: None,
            stage_places: None,
            shares: None,
            stages: None,
            operators: OperatorPatterns::default(),
            // PyTorch DDP's default.
            bucket: Bytes::new(25 << 20),
            collective: CollectiveAlgorithm::Automatic,
        }
    }
}

impl Layout {
    /// The mesh of a stage: its own, or that of all stages.
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

    /// Whether some stage cuts sequences among ranks.
    pub(super) fn cuts_sequences(&self) -> bool {
        (0..self.distinct_stages()).any(|stage| self.stage(stage).context > 1)
    }

    /// The number of ranks over which positions have a zigzag order, where the model allows one; 1
    /// if the order is contiguous. Stages with different `context` exchange contiguous parts, and
    /// all-to-all attention sees whole sequences, so its work is equal in any order.
    pub(crate) fn zigzag_ranks(&self) -> usize {
        let ranks = self.stage(0).context;
        let is_same = (0..self.distinct_stages()).all(|stage| self.stage(stage).context == ranks);
        let cuts_attention = self.context_method != ContextMethod::AllToAll;
        if self.context_order == ContextOrder::Zigzag && is_same && cuts_attention { ranks } else { 1 }
    }

    /// Whether the schedule matters. On a single stage it does only if it splits the backward pass.
    pub fn follows_schedule(&self) -> bool {
        self.pipeline > 1 || self.schedule.splits_backward()
    }

    /// The number of samples of one micro-batch over all ranks of a stage; `usize::MAX` if it
    /// overflows.
    pub fn samples_at_once(&self) -> usize {
        self.stage(0).parts().and_then(|parts| parts.checked_mul(self.micro_batch)).unwrap_or(usize::MAX)
    }

    /// The number of stages whose layouts may differ: all of them if the plan states `stages`, else
    /// one.
    pub(super) fn distinct_stages(&self) -> usize {
        self.stages.as_ref().map_or(1, Vec::len)
    }

    /// The mesh of one stage, with its ranks' samples of a micro-batch.
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
            let (by, hint) = (format!("the shares of stage {stage}"), "choose a larger `micro_batch`");
            return Err(indivisible("the first stage's samples of a micro-batch", at_once, &by, parts, hint));
        }
        let unit = at_once / parts;
        let mismatch = |shares: usize| PlanError::Invalid {
            field: "shares",
            reason: format!("{shares} shares for {} ranks of `data` in stage {stage}, or a share of 0", layout.data),
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

    /// Refuses a list of recomputed blocks by stage whose length is not the number of stages.
    pub(super) fn validate_recompute(&self) -> Result<(), PlanError> {
        match &self.recompute {
            Recompute::FullLayersOfStages(layers) if layers.len() != self.pipeline => Err(PlanError::Invalid {
                field: "recompute",
                reason: format!("{} numbers of layers for {} stages", layers.len(), self.pipeline),
                hint: "give one number for each stage, in the stages' order".into(),
            }),
            _ => Ok(()),
        }
    }

    /// Refuses choices for single operators if no stage has a `tensor` axis.
    pub(super) fn validate_operators(&self) -> Result<(), PlanError> {
        if self.operators.is_empty() || (0..self.distinct_stages()).any(|stage| self.stage(stage).tensor > 1) {
            return Ok(());
        }
        Err(PlanError::Invalid {
            field: "operators",
            reason: "it says how `tensor` shards operators, but `tensor` is 1".into(),
            hint: "use a larger `tensor`, or leave `operators` out".into(),
        })
    }

    /// Refuses stage meshes that contradict the number of stages or the mesh of all stages.
    pub(super) fn validate_stages(&self) -> Result<(), PlanError> {
        let refuse = |reason: String, hint: &str| Err(PlanError::Invalid { field: "stages", reason, hint: hint.into() });
        let Some(stages) = &self.stages else { return Ok(()) };
        if stages.len() != self.pipeline {
            let reason = format!("{} meshes for {} stages", stages.len(), self.pipeline);
            return refuse(reason, "give one mesh for each stage, in the stages' order");
        }
        if [self.data, self.tensor, self.context, self.expert] != [1; 4] || self.shares.is_some() {
            return refuse(
                "there are both a mesh for each stage and a mesh for all stages".into(),
                "give `data`, `tensor`, `context`, `expert` and `shares` in the stages only",
            );
        }
        Ok(())
    }
}

/// How attention sees all keys and values when positions are sharded over `context`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ContextMethod {
    /// Every rank gathers all keys and values, and their gradients are reduced and scattered.
    #[default]
    Gather,
    /// Parts travel around the ranks while these compute (ring attention, Liu et al. 2023), so that
    /// no rank ever holds more than three parts. Cross-attention over a sequence of another length
    /// and attention with relative positions still gather.
    Ring,
    /// Ranks exchange parts of the sequence for whole heads and back, so that each attends with
    /// some heads over the whole sequence (DeepSpeed-Ulysses, Jacobs et al. 2023). `context`
    /// divides the key heads, and `tensor` is 1. Attention with relative positions still gathers.
    AllToAll,
}

impl ContextMethod {
    /// Every method.
    pub const ALL: [Self; 3] = [Self::Gather, Self::Ring, Self::AllToAll];

    /// The name in plan files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gather => "gather",
            Self::Ring => "ring",
            Self::AllToAll => "all_to_all",
        }
    }
}

/// The order in which ranks of `context` hold the positions of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ContextOrder {
    /// Each rank has a chunk from the beginning and one from the end, so that all have equal work
    /// in causal attention. Where a model's attention is not causal, where another operator depends
    /// on the order (scans, recurrences, convolutions, relative positions), where a sequence does
    /// not divide into two chunks for each rank, where stages differ in `context`, and with
    /// `context_method: all_to_all`, parts are contiguous.
    #[default]
    Zigzag,
    /// Each rank has one part, in the order of positions. In causal attention the last rank has the
    /// most work.
    Contiguous,
}

impl ContextOrder {
    /// Every order.
    pub const ALL: [Self; 2] = [Self::Zigzag, Self::Contiguous];

    /// The name in plan files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Zigzag => "zigzag",
            Self::Contiguous => "contiguous",
        }
    }

    /// Whether plan files leave it out.
    pub(crate) fn is_usual(&self) -> bool {
        *self == Self::default()
    }
}
