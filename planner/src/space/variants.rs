//! Variants of a family: layouts that differ in ZeRO, in the assignment of ranks and blocks to
//! devices, and in the bucket size.

use super::sizes::{inner_ranks, most_shards, ranks_of_stage};
use super::{Family, Space};
use foretell_program::{Axis, Layout, Offload, Recompute, StageLayout, cuts_by_speed};
use foretell_units::Bytes;
use std::ops::Range;

/// Larger buckets to consider besides the plan's (25 MiB by default, as in PyTorch DDP). They spend
/// less on latency if many ranks reduce, and leave more to reduce and update after the last pass.
/// Megatron's buckets have at least 40 million elements.
const LARGER_BUCKETS: [Bytes; 1] = [Bytes::new(160 << 20)];

/// Further buckets to consider if all gradients fill at most [`FEW_BUCKETS`] of them. With more
/// buckets, one bucket is too small a part of the step to matter. The largest size reduces all
/// gradients of a small model after the last pass, where no kernel competes.
const BUCKETS_OF_SMALL_MODELS: [Bytes; 3] = [Bytes::new(5 << 20), Bytes::new(50 << 20), Bytes::new(400 << 20)];
const FEW_BUCKETS: u64 = 128;

/// Number of steps from no recomputed block to all. The first step that fits recomputes at most one
/// step more than necessary.
const RECOMPUTATION_STEPS: usize = 8;

/// The most kinds of devices along a pipeline whose orders are all considered.
const MOST_KINDS: usize = 3;

/// The most stages for which the order of kinds matters for time. With more, the extra work of the
/// first and the last stage is a small part. If kinds differ in memory, the order always matters,
/// since the first stages hold the most micro-batches.
const MOST_ORDERED_STAGES: usize = 8;

/// Returns the bucket sizes that a search considers, ascending: the fixed one alone, or the plan's
/// own and, if `are_open`, others that suit `gradients` bytes.
pub(super) fn bucket_sizes(own: Bytes, gradients: Bytes, are_open: bool, fixed: Option<Bytes>) -> Vec<Bytes> {
    if let Some(fixed) = fixed {
        return vec![fixed];
    }
    let larger = LARGER_BUCKETS.into_iter().filter(|&bucket| bucket > own);
    let of_small = BUCKETS_OF_SMALL_MODELS.into_iter().filter(|bucket| gradients.count().div_ceil(bucket.count()) <= FEW_BUCKETS);
    let mut sizes: Vec<Bytes> = larger.chain(of_small).filter(|_| are_open).chain([own]).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Returns `true` if the bucket size matters. With a pipeline, reductions overlap with other
/// micro-batches: another size would save 0.08 % of a step of Turing-NLG and 0.01 % of GPT-3.
fn bucket_size_matters(layout: &Layout) -> bool {
    layout.pipeline == 1
}

impl Space<'_> {
    /// Returns the layouts of a family.
    pub(crate) fn variants(&self, family: &Family) -> Vec<Layout> {
        let mut variants = Vec::new();
        // With a pipeline or a split backward pass, ZeRO 2 and 3 reduce or gather again in each
        // pass. DeepSpeed refuses them with pipelines; the search considers them only if fixed.
        let usual: &[usize] = match most_shards(&family.layout) {
            1 => &[0],
            _ if family.layout.follows_schedule() || family.layout.shares.is_some() => &[0, 1],
            _ => &[0, 1, 2, 3],
        };
        let zeros = self.fixed.zero.as_ref().map_or(usual, std::slice::from_ref);
        let arrangements = self.arrangements(&family.layout);
        for &zero in zeros {
            for shard_group in self.shard_groups(&family.layout, zero) {
                for &bucket in self.different_buckets(&family.layout) {
                    variants.extend(arrangements.iter().map(|arrangement| Layout {
                        zero,
                        shard_group,
                        bucket,
                        ..arrangement.clone()
                    }));
                }
            }
        }
        variants
    }

    /// Returns a layout with every rank order, every order of its stages along the devices, and
    /// with the usual cuts and the cuts by device speed.
    fn arrangements(&self, layout: &Layout) -> Vec<Layout> {
        let mut found = Vec::new();
        for placement in self.rank_orders(layout) {
            let ordered = Layout { placement, ..layout.clone() };
            for stage_places in self.stage_orders(&ordered) {
                let arranged = Layout { stage_places, ..ordered.clone() };
                if let Some(cuts) = &self.fixed.cuts {
                    found.push(Layout { cuts: Some(cuts.clone()), ..arranged });
                    continue;
                }
                let cuts = self.cuts_by_speed(&arranged);
                found.extend(cuts.map(|cuts| Layout { cuts: Some(cuts), ..arranged.clone() }));
                found.push(arranged);
            }
        }
        found
    }

    /// Returns `layout` with `offload`, if that offload is in the space.
    pub(crate) fn offloaded(&self, layout: &Layout, offload: Offload) -> Option<Layout> {
        self.offloads.contains(&offload).then(|| Layout { offload, ..layout.clone() })
    }

    /// Returns `family` with `offload`, if that offload is in the space.
    pub(crate) fn offloaded_family(&self, family: &Family, offload: Offload) -> Option<Family> {
        self.offloaded(&family.layout, offload).map(|layout| Family { layout, ..family.clone() })
    }

    /// Returns the layouts that recompute more and more of the blocks of `layout`, which recomputes
    /// none or a few. Each stage recomputes at least as many as in the layout before. Empty if the
    /// space has none.
    pub(crate) fn partly_recomputed(&self, layout: &Layout) -> Vec<Layout> {
        let least = match &layout.recompute {
            Recompute::None => 0,
            Recompute::FullLayers(layers) => *layers,
            Recompute::FullLayersOfStages(layers) => layers.iter().copied().max().unwrap_or(0),
            Recompute::Selective | Recompute::Full | Recompute::AllBut(_) => return Vec::new(),
        };
        if !self.recomputation_is_open(layout) {
            return Vec::new();
        }
        let most = self.model.blocks.saturating_sub(2).div_ceil(layout.pipeline.max(1));
        let mut counts: Vec<usize> = (1..RECOMPUTATION_STEPS).map(|step| (step * most).div_ceil(RECOMPUTATION_STEPS)).collect();
        counts.retain(|&layers| least < layers && layers < most);
        counts.dedup();
        let recomputing = |layers: usize| Layout { recompute: self.recompute(layout, layers, most), ..layout.clone() };
        counts.into_iter().map(recomputing).collect()
    }

    /// Returns `true` if the search chooses how many blocks of a layout are recomputed.
    pub(crate) fn recomputation_is_open(&self, layout: &Layout) -> bool {
        let has_equal_meshes = layout.stages.is_none() && layout.operators.is_empty();
        self.model.is_plain_stack() && has_equal_meshes && self.fixed.recompute.is_none() && layout.offload.is_none()
    }

    /// Returns the recomputation of `layers` of the `most` blocks of the stage that holds the most
    /// micro-batches. Every other stage recomputes the fewest blocks with which it holds no more
    /// than that stage.
    fn recompute(&self, layout: &Layout, layers: usize, most: usize) -> Recompute {
        let micro_batches = self.global_batch / layout.samples_at_once().max(1);
        let held = |stage| layout.schedule.in_flight_bound(layout.pipeline, micro_batches, layout.virtual_stages, stage);
        let held: Vec<usize> = (0..layout.pipeline).map(held).collect();
        let kept = held.iter().copied().max().unwrap_or(0) * (most - layers);
        let of_stages: Vec<usize> = held.iter().map(|&held| most.saturating_sub(kept / held.max(1))).collect();
        if of_stages.iter().all(|&own| own == layers) {
            Recompute::FullLayers(layers)
        } else {
            Recompute::FullLayersOfStages(of_stages)
        }
    }

    /// Returns `true` if a layout is in the space only because it may not fit with fewer recomputed
    /// blocks.
    pub(crate) fn is_partly_recomputed(&self, layout: &Layout) -> bool {
        let recomputes_some = matches!(layout.recompute, Recompute::FullLayers(_) | Recompute::FullLayersOfStages(_));
        recomputes_some && self.fixed.recompute.is_none()
    }

    /// Returns how many layouts of the space a layout represents: itself, its `partly_recomputed`
    /// forms and its offloaded forms, which are needless if it fits. The form that offloads both
    /// counts with the one that offloads the optimizer state.
    pub(crate) fn forms(&self, layout: &Layout, partly_recomputed: usize) -> usize {
        match layout.offload {
            Offload::None => {
                let offloaded = if self.is_partly_recomputed(layout) { 0 } else { self.offloads.len() };
                1 + offloaded + partly_recomputed
            }
            Offload::Optimizer => 1 + usize::from(self.offloads.contains(&Offload::Both)),
            Offload::Activations | Offload::Both | Offload::State => 1,
        }
    }

    /// Returns how many further layouts have the same Program as one of a family's `variants`
    /// layouts, because they differ only in bucket sizes that hold all gradients.
    pub(crate) fn duplicates(&self, family: &Family, variants: usize) -> usize {
        let different = self.different_buckets(&family.layout).len();
        let all = if bucket_size_matters(&family.layout) { self.bucket_sizes.len() } else { different };
        variants / different * (all - different)
    }

    /// Returns the bucket sizes that give different Programs. All sizes that hold all gradients
    /// give the same Program, so only the smallest of these is returned.
    pub(crate) fn different_buckets(&self, layout: &Layout) -> &[Bytes] {
        let sizes = &self.bucket_sizes;
        if bucket_size_matters(layout) {
            let holds_all = sizes.iter().position(|&bucket| bucket >= self.model.bucketed_gradients);
            return &sizes[..holds_all.map_or(sizes.len(), |last| last + 1)];
        }
        let own = sizes.iter().position(|&bucket| bucket == self.base.bucket).unwrap_or(0);
        &sizes[own..=own]
    }

    /// Returns the cuts whose slowest stage is fastest by the devices' peak rates, or `None` if all
    /// stages are on equal devices. If truncated models know the times of stages,
    /// [`Bounds::variants`](crate::bounds::Bounds::variants) replaces these cuts.
    fn cuts_by_speed(&self, layout: &Layout) -> Option<Vec<usize>> {
        let speeds = &self.devices.speeds;
        if let Some(stages) = layout.stages.as_ref().filter(|_| layout.cuts.is_none() && layout.virtual_stages == 1) {
            let mut end = 0;
            let mut speed_of = |stage: &StageLayout| {
                let ranks = stage.data * stage.tensor * stage.context * stage.expert;
                end += ranks;
                let devices = speeds.get(end - ranks..end)?;
                Some(devices.iter().copied().fold(f64::INFINITY, f64::min) * ranks as f64)
            };
            let speeds = stages.iter().map(&mut speed_of).collect::<Option<Vec<f64>>>()?;
            return Some(cuts_by_speed(&self.model.work, &speeds));
        }
        if !self.stages_lie_in_sequence(layout) || speeds.len() < ranks_of_stage(layout) * layout.pipeline {
            return None;
        }
        let speeds: Vec<f64> = (0..layout.pipeline)
            .map(|stage| speeds[self.devices_of_stage(layout, stage)].iter().copied().fold(f64::INFINITY, f64::min))
            .collect();
        let is_mixed = speeds.iter().any(|&speed| speed != speeds[0]);
        // The list of kinds is empty if all devices in use are of one kind.
        let kinds = self.devices.kinds.get(..ranks_of_stage(layout) * layout.pipeline).unwrap_or_default();
        let memory_may_differ = self.devices.memory_differs && kinds.iter().any(|&kind| kind != kinds[0]);
        (is_mixed || memory_may_differ).then(|| cuts_by_speed(&self.model.work, &speeds))
    }

    /// Returns the orders of the stages along the devices: the usual one (`None`) and, on a few
    /// kinds of devices, every order of the kinds. The first stages hold the most micro-batches,
    /// and the first and the last stage have more work than the others.
    fn stage_orders(&self, layout: &Layout) -> Vec<Option<Vec<usize>>> {
        if let Some(fixed) = self.fixed.stage_places.as_ref().or(self.base.stage_places.as_ref()) {
            let mut places = fixed.clone();
            places.sort_unstable();
            // A fixed order applies only to pipelines of its own length.
            let is_order = places.into_iter().eq(0..layout.pipeline);
            return if is_order { vec![Some(fixed.clone()).filter(|places| !places.is_sorted())] } else { Vec::new() };
        }
        let order_matters = self.devices.memory_differs || layout.pipeline <= MOST_ORDERED_STAGES;
        let covers_pipeline = self.devices.kinds.len() >= ranks_of_stage(layout) * layout.pipeline;
        if !order_matters || !self.stages_lie_in_sequence(layout) || !covers_pipeline {
            return vec![None];
        }
        // A position that spans several kinds counts as its first device's kind.
        let kind_of_place: Vec<usize> =
            (0..layout.pipeline).map(|place| self.devices.kinds[self.devices_of_stage(layout, place).start]).collect();
        let mut kinds: Vec<usize> = Vec::new();
        for &kind in &kind_of_place {
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        if kinds.len() > MOST_KINDS {
            return vec![None];
        }
        let places_of = |kind: &usize| (0..layout.pipeline).filter(|&place| kind_of_place[place] == *kind).collect::<Vec<_>>();
        let stages_in = |kinds: Vec<usize>| kinds.iter().flat_map(places_of).collect::<Vec<usize>>();
        let others = permutations(&kinds).into_iter().map(stages_in).filter(|order| !order.is_sorted()).map(Some);
        [None].into_iter().chain(others).collect()
    }

    /// Returns `true` if each stage has one chunk and its own consecutive devices, and neither cuts
    /// nor meshes of stages are given.
    fn stages_lie_in_sequence(&self, layout: &Layout) -> bool {
        let is_cut_otherwise = layout.cuts.is_some() || layout.stages.is_some();
        layout.pipeline > 1 && layout.virtual_stages == 1 && layout.placement.is_none() && !is_cut_otherwise
    }

    /// Returns the devices of a stage, for layouts whose stages have consecutive devices.
    fn devices_of_stage(&self, layout: &Layout, stage: usize) -> Range<usize> {
        let place = layout.stage_places.as_ref().map_or(stage, |places| places[stage]);
        let ranks = ranks_of_stage(layout);
        place * ranks..(place + 1) * ranks
    }

    /// Returns the sizes of shard groups: all of `data` (`None`) and, if parameters are gathered
    /// often, its ranks inside one node (HSDP).
    fn shard_groups(&self, layout: &Layout, zero: usize) -> Vec<Option<usize>> {
        if zero == 0 {
            return vec![None];
        }
        if let Some(fixed) = self.fixed.shard_group.or(self.base.shard_group) {
            return vec![Some(fixed)];
        }
        // One gather a step overlaps with other micro-batches of the pipeline.
        if zero < 3 && layout.follows_schedule() {
            return vec![None];
        }
        let in_node = self.devices.per_node / inner_ranks(layout).max(1);
        let is_part = in_node > 1 && in_node < layout.data && layout.data.is_multiple_of(in_node);
        [None].into_iter().chain(is_part.then_some(Some(in_node))).collect()
    }

    /// Returns the rank orders: the usual one (`None`) and, if a replica's stage does not fill a
    /// node, one with the pipeline inside the node instead of `data`.
    fn rank_orders(&self, layout: &Layout) -> Vec<Option<Vec<Axis>>> {
        if let Some(fixed) = self.fixed.rank_order.as_ref().or(self.base.placement.as_ref()) {
            return vec![Some(fixed.clone())];
        }
        let may_help = layout.pipeline >= 4 && layout.data > 1 && inner_ranks(layout) < self.devices.per_node;
        let pipeline_inside = vec![Axis::Tensor, Axis::Context, Axis::Expert, Axis::Pipeline];
        [None].into_iter().chain(may_help.then_some(Some(pipeline_inside))).collect()
    }
}

/// Returns every order of `items`, the given one first.
fn permutations(items: &[usize]) -> Vec<Vec<usize>> {
    if items.is_empty() {
        return vec![Vec::new()];
    }
    let with_first = |(place, &first): (usize, &usize)| {
        let rest = [&items[..place], &items[place + 1..]].concat();
        permutations(&rest).into_iter().map(move |rest| [vec![first], rest].concat())
    };
    items.iter().enumerate().flat_map(with_first).collect()
}
