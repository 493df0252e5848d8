//! A statement of the space: each dimension with its values, and the values that are left out by
//! judgement.
//!
//! A value is left out *by judgement* if no proof says that every layout with it is worse than one
//! of the space. The bound of a search does not cover such layouts.

use super::divisors::divisors;
use super::meshes::{FEWEST_POSITIONS, MOST_NODES_OF_TENSOR, MeshSizes};
use super::schedules::{MOST_CHUNKS, chunk_counts};
use super::{Space, families};
use foretell_program::{CollectiveAlgorithm, ContextOrder, Schedule};
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeSet;

/// Number of rank orders of the five axes.
const RANK_ORDERS: usize = 120;

/// A dimension of the space.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Dimension {
    /// The layout field, as `--fix` and plan files name it.
    pub name: String,
    /// The values that are searched, for people.
    pub values: String,
    /// Number of values that the space leaves out although no proof excludes them. `None` if there
    /// are too many to count, such as numbers of bytes or lists of numbers.
    pub left_out: Option<usize>,
    /// Why values are left out of all layouts or of some. Empty if none are left out; the bound
    /// then covers the whole dimension.
    pub reason: String,
}

impl Dimension {
    /// Returns `true` if the bound covers every value.
    pub fn is_covered(&self) -> bool {
        self.reason.is_empty()
    }
}

/// The values that the layouts of a space have, and possible values.
#[derive(Default)]
struct Sizes {
    data: BTreeSet<usize>,
    tensor: BTreeSet<usize>,
    pipeline: BTreeSet<usize>,
    micro_batch: BTreeSet<usize>,
    /// Whether some meshes lack some of their possible micro-batches.
    cuts_micro_batch: bool,
    virtual_stages: BTreeSet<usize>,
    /// Whether some pipelines lack some of their possible numbers of chunks.
    cuts_virtual_stages: bool,
    shard_group: BTreeSet<usize>,
    possible_shard_groups: BTreeSet<usize>,
}

impl Sizes {
    fn of(space: &Space<'_>) -> Self {
        let mut sizes = Self::default();
        let mut ranks: BTreeSet<(usize, usize)> = BTreeSet::new();
        for context in space.context_sizes() {
            for expert in space.expert_sizes() {
                for MeshSizes { data, tensor, pipeline } in space.meshes(context, expert) {
                    let is_possible = pipeline <= space.model.blocks && space.global_batch.is_multiple_of(data * expert);
                    if !is_possible {
                        continue;
                    }
                    sizes.data.insert(data);
                    sizes.tensor.insert(tensor);
                    sizes.pipeline.insert(pipeline);
                    ranks.insert((data * expert, pipeline));
                    let in_node = space.devices.per_node / (tensor * context * expert).max(1);
                    if in_node > 1 && in_node < data && data.is_multiple_of(in_node) {
                        sizes.shard_group.insert(in_node);
                    }
                }
            }
        }
        for (ranks, pipeline) in ranks {
            let samples = space.global_batch / ranks;
            for micro_batch in divisors(samples) {
                if families::considers(micro_batch, samples / micro_batch, pipeline) {
                    sizes.micro_batch.insert(micro_batch);
                } else {
                    sizes.cuts_micro_batch = true;
                }
            }
        }
        for &pipeline in sizes.pipeline.iter().filter(|&&pipeline| pipeline > 1) {
            let most = space.model.blocks / pipeline;
            let fitting: Vec<usize> =
                chunk_counts(space.model.blocks, pipeline).into_iter().filter(|&chunks| chunks <= most).collect();
            sizes.cuts_virtual_stages |= (2..=most).count() > fitting.len();
            sizes.virtual_stages.extend(fitting);
        }
        sizes.virtual_stages.insert(1);
        for &data in &sizes.data {
            sizes.possible_shard_groups.extend(divisors(data).into_iter().filter(|&size| size > 1 && size < data));
        }
        sizes
    }
}

impl Space<'_> {
    /// States every dimension of the space.
    pub(crate) fn statement(&self) -> Vec<Dimension> {
        let sizes = Sizes::of(self);
        [self.stated_mesh(&sizes), self.stated_passes(&sizes), self.stated_rest(&sizes)].concat()
    }

    /// States the sizes of the axes.
    fn stated_mesh(&self, sizes: &Sizes) -> Vec<Dimension> {
        let (fixed, devices) = (self.fixed, self.devices.count);
        let divides_heads = |&size: &usize| self.model.heads.is_none_or(|heads| heads.is_multiple_of(size));
        let tensor = (1..=devices).filter(divides_heads);
        let data = divisors(self.global_batch).into_iter().filter(|&size| size <= devices);
        let divides_sequence = |&size: &usize| match self.model.sequence {
            Some(sequence) => size == 1 || sequence.is_multiple_of(2 * size),
            None => size == 1,
        };
        let context: BTreeSet<usize> = self.context_sizes().into_iter().collect();
        let expert: BTreeSet<usize> = self.expert_sizes().into_iter().collect();
        let experts = divisors(self.model.experts.unwrap_or(1)).into_iter().filter(|&size| size <= devices);
        let others = "other sizes leave devices idle, or divide nodes unevenly";
        let mut stated = vec![
            of_sizes("data", &sizes.data, data, false, others, fixed.data.is_some()),
            of_sizes(
                "tensor",
                &sizes.tensor,
                tensor,
                false,
                &format!(
                    "others span more than {MOST_NODES_OF_TENSOR} nodes, neither fill nor divide nodes, or leave devices idle"
                ),
                fixed.tensor.is_some(),
            ),
            of_sizes("pipeline", &sizes.pipeline, 1..=devices.min(self.model.blocks), false, others, fixed.pipeline.is_some()),
            of_sizes(
                "context",
                &context,
                (1..=devices).filter(divides_sequence),
                false,
                &format!("others leave devices idle, or fewer than {FEWEST_POSITIONS} positions on a rank"),
                fixed.context.is_some(),
            ),
            of_sizes("expert", &expert, experts, false, others, fixed.expert.is_some()),
        ];
        if self.model.experts.is_some() && sizes.tensor.iter().any(|&size| size > 1) {
            let reason = "others split each expert into fewer parts than the rest of the layer";
            stated.push(dimension("expert_tensor", "1, tensor".into(), None, reason.into(), false));
        }
        if context.iter().any(|&size| size > 1) {
            stated.push(dimension(
                "context_order",
                self.base.context_order.name().into(),
                Some(ContextOrder::ALL.len() - 1),
                "of contiguous parts of a causal sequence the last has the most work".into(),
                fixed.context_order.is_some(),
            ));
        }
        stated
    }

    /// States the dimensions in which families differ besides their meshes.
    fn stated_passes(&self, sizes: &Sizes) -> Vec<Dimension> {
        let fixed = self.fixed;
        let blocks = self.model.blocks;
        let has_pipeline = sizes.pipeline.iter().any(|&size| size > 1);
        let partly = |reason: &str, applies: bool| if applies { reason.to_owned() } else { String::new() };
        let recompute = ["selective", "full"].into_iter().zip([self.model.has_attention, self.model.is_recomputable]);
        let recompute: Vec<&str> =
            ["none"].into_iter().chain(recompute.filter(|(_, applies)| *applies).map(|(name, _)| name)).collect();
        let has = |schedule: &Schedule| self.limits.is_none_or(|limits| limits.has(*schedule));
        let schedules: Vec<&str> =
            Schedule::ALL.iter().filter(|schedule| has(schedule)).map(|schedule| schedule.name()).collect();
        let steps = if self.model.is_plain_stack() { "; eighths of the blocks where it does not fit without" } else { "" };
        vec![
            of_sizes(
                "micro_batch",
                &sizes.micro_batch,
                divisors(self.global_batch),
                sizes.cuts_micro_batch,
                &format!(
                    "more than {} micro-batches, or {} a stage, of more than {} samples: fewer samples at once hardly save \
                     memory there; and more than {} at all",
                    families::MOST_MICRO_BATCHES,
                    families::MICRO_BATCHES_PER_STAGE,
                    families::ALWAYS_CONSIDERED,
                    families::MOST_SMALL_MICRO_BATCHES
                ),
                fixed.micro_batch.is_some(),
            ),
            dimension(
                "schedule",
                schedules.join(", "),
                Some(0),
                match self.limits {
                    Some(limits) if schedules.len() < Schedule::ALL.len() => limits.reason.clone(),
                    _ => partly("all micro-batches at once, with more than four for each stage, only take memory", has_pipeline),
                },
                fixed.schedule.is_some(),
            ),
            of_sizes(
                "virtual_stages",
                &sizes.virtual_stages,
                1..=if has_pipeline { (blocks / 2).max(1) } else { 1 },
                sizes.cuts_virtual_stages,
                &format!(
                    "others do not divide the blocks, or are more than {MOST_CHUNKS}, whose messages cost more than they save"
                ),
                fixed.virtual_stages.is_some(),
            ),
            dimension(
                "zero",
                if has_pipeline { "0 to 3; 0 and 1 with a pipeline" } else { "0 to 3" }.into(),
                Some(if sizes.pipeline.contains(&1) { 0 } else { 2 }),
                partly("2 and 3 would reduce and gather in each pass of a pipeline", has_pipeline),
                fixed.zero.is_some(),
            ),
            dimension(
                "recompute",
                format!("{}{steps}", recompute.join(", ")),
                None,
                "policies by operator are left to the plan file, and other numbers of blocks are tried around the answer only"
                    .into(),
                fixed.recompute.is_some(),
            ),
            dimension(
                "offload",
                if self.offloads.is_empty() { "none" } else { "none; others where it does not fit without" }.into(),
                Some(0),
                partly("copies to the hosts beside the same work hardly ever save time", !self.offloads.is_empty()),
                fixed.offload.is_some(),
            ),
            chunk("loss_chunk", self.base.loss_chunk, fixed.loss_chunk),
            chunk("mlp_chunk", self.base.mlp_chunk, fixed.mlp_chunk),
        ]
    }

    /// States the dimensions of ranks, blocks, samples and gradients, in which variants differ.
    fn stated_rest(&self, sizes: &Sizes) -> Vec<Dimension> {
        let fixed = self.fixed;
        let buckets: Vec<String> = self.bucket_sizes.iter().map(ToString::to_string).collect();
        let has_pipeline = sizes.pipeline.iter().any(|&size| size > 1);
        let has_data = sizes.data.iter().any(|&size| size > 1);
        let applies = |applies: bool, left_out: Option<usize>| if applies { left_out } else { Some(0) };
        let because = |applies: bool, reason: &str| if applies { reason.to_owned() } else { String::new() };
        let around = "others are tried around the answer only";
        let groups = sizes.possible_shard_groups.difference(&sizes.shard_group).count();
        vec![
            dimension(
                "bucket",
                format!("{} without a pipeline, else the usual one", buckets.join(", ")),
                applies(has_data, None),
                because(has_data, "other sizes are tried around the answer only"),
                fixed.bucket.is_some(),
            ),
            dimension(
                "cuts",
                "even by work; by speed on several kinds of devices".into(),
                applies(has_pipeline, None),
                because(has_pipeline, "other cuts are tried block by block around the answer only"),
                fixed.cuts.is_some(),
            ),
            dimension(
                "placement",
                "the usual rank order, and the pipeline inside nodes".into(),
                applies(has_pipeline, Some(RANK_ORDERS - 2)),
                because(has_pipeline, around),
                fixed.rank_order.is_some(),
            ),
            dimension(
                "stage_places",
                "along the devices; every order of a few kinds of devices".into(),
                applies(has_pipeline, None),
                because(has_pipeline, "stages on equal devices are interchangeable but for the network's distances"),
                fixed.stage_places.is_some(),
            ),
            dimension(
                "stages",
                if self.devices.runs.is_empty() {
                    "one mesh for all"
                } else {
                    "one mesh for all, or one for each kind of device"
                }
                .into(),
                applies(has_pipeline, None),
                because(has_pipeline, "stages of unequal meshes pay where devices differ"),
                fixed.stages.is_some(),
            ),
            dimension(
                "shares",
                if self.devices.speeds.is_empty() { "equal" } else { "equal, and a few by the devices' speeds" }.into(),
                applies(has_data, None),
                because(has_data, "the rank with the largest share is the last"),
                fixed.shares.is_some(),
            ),
            dimension(
                "shard_group",
                "all of data, and a node".into(),
                Some(groups),
                because(groups > 0 || has_pipeline && has_data, around),
                fixed.shard_group.is_some(),
            ),
            dimension(
                "collective",
                "the faster algorithm for each size".into(),
                Some(CollectiveAlgorithm::ALL.len() - 1),
                around.into(),
                fixed.collective.is_some(),
            ),
            dimension(
                "operators",
                "the usual rule; for models that are no stack of equal blocks the cheapest combination by prices".into(),
                None,
                "other combinations are priced, not simulated".into(),
                false,
            ),
        ]
    }
}

/// States a dimension of sizes: those of `searched`, of all that are `possible`. `is_cut_in_part`
/// is true if some meshes lack sizes that others have, so that the bound does not cover them all.
fn of_sizes(
    name: &str,
    searched: &BTreeSet<usize>,
    possible: impl IntoIterator<Item = usize>,
    is_cut_in_part: bool,
    reason: &str,
    is_fixed: bool,
) -> Dimension {
    let left_out = possible.into_iter().filter(|size| !searched.contains(size)).count();
    let values = searched.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    let reason = if left_out > 0 || is_cut_in_part { reason.to_owned() } else { String::new() };
    dimension(name, values, Some(left_out), reason, is_fixed)
}

/// States a size of chunks, which no family varies.
fn chunk(name: &str, base: Option<usize>, fixed: Option<usize>) -> Dimension {
    let reason = "chunks need less memory and compute some work twice; `--fix` states their size".into();
    let value = base.map_or_else(|| "whole".into(), |size| size.to_string());
    dimension(name, value, None, reason, fixed.is_some())
}

fn dimension(name: &str, values: String, left_out: Option<usize>, reason: String, is_fixed: bool) -> Dimension {
    Dimension {
        name: name.into(),
        values: if is_fixed { "fixed".into() } else { values },
        left_out: if is_fixed { Some(0) } else { left_out },
        reason: if is_fixed { String::new() } else { reason },
    }
}
