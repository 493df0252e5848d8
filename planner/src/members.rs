//! The layouts of a family: what ranks of `data` share, how ranks lie on the devices, and how gradients are bundled.

use crate::space::{Family, Space};
use foretell_program::{Axis, Layout, Offload, Recompute, StageLayout, cuts_by_speed};
use foretell_units::Bytes;
use std::ops::Range;

/// Buckets that are considered beside the plan's own (25 MiB unless it says otherwise, PyTorch DDP's default): fuller ones spend less on latency where many
/// ranks reduce, and leave more to be reduced and updated after the last pass. Megatron's have 40 million elements at least.
const FULLER_BUCKETS: [Bytes; 1] = [Bytes::new(160 << 20)];

/// The same where all gradients go into at most [`FEW_BUCKETS`] of them: of more none is enough of a step for its size to be worth a search. The largest
/// leaves all of a small model's to be reduced when no kernel is slowed by it any more.
const OF_FEW_BUCKETS: [Bytes; 3] = [Bytes::new(5 << 20), Bytes::new(50 << 20), Bytes::new(400 << 20)];
const FEW_BUCKETS: u64 = 128;

/// Into how many parts the blocks of the stage that holds the most are divided, of which some are computed again and the others not: so the best that
/// fits recomputes at most such a part more than it must.
const PARTS_RECOMPUTED: usize = 8;

/// Kinds of devices along a pipeline of which all orders are considered.
const MOST_KINDS: usize = 3;

/// Stages up to which the order of kinds matters for its own sake: with more, what the first and the last do beside their blocks is next
/// to nothing. Where kinds differ in memory it matters for any number, since the first stages hold the most micro-batches.
const MOST_ORDERED_STAGES: usize = 8;

/// Sizes of buckets that a search considers, ascending, where all gradients take so much room: the user's alone; or the plan's own and, where the plan's
/// stack leaves them open, others.
pub(crate) fn bucket_sizes(own: Bytes, gradients: Bytes, are_open: bool, fixed: Option<Bytes>) -> Vec<Bytes> {
    if let Some(fixed) = fixed {
        return vec![fixed];
    }
    let fuller = FULLER_BUCKETS.into_iter().filter(|&bucket| bucket > own);
    let others = OF_FEW_BUCKETS.into_iter().filter(|bucket| gradients.count().div_ceil(bucket.count()) <= FEW_BUCKETS);
    let mut sizes: Vec<Bytes> = fuller.chain(others).filter(|_| are_open).chain([own]).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Whether the size of buckets is open: with a pipeline reductions go on beside other micro-batches, and what others would save is next to nothing:
/// 0.08 % of a step of Turing-NLG's, 0.01 % of GPT-3's (docs/performance.md).
fn matters(layout: &Layout) -> bool {
    layout.pipeline == 1
}

impl Space<'_> {
    /// The layouts of a family.
    pub fn members(&self, family: &Family) -> Vec<Layout> {
        let mut members = Vec::new();
        let stages = family.layout.stages.iter().flatten().map(|stage| stage.data);
        let data = stages.fold(family.layout.data, usize::max);
        // With a pipeline ZeRO's later stages gather and reduce for each micro-batch anew: DeepSpeed refuses them, and we leave them to `fixed`. So they
        // do for each half of the way back, where it is split.
        let usual: &[usize] = match data {
            1 => &[0],
            _ if family.layout.follows_schedule() || family.layout.shares.is_some() => &[0, 1],
            _ => &[0, 1, 2, 3],
        };
        let zeros = self.fixed.zero.as_ref().map_or(usual, std::slice::from_ref);
        let lying = self.lying(&family.layout);
        for &zero in zeros {
            for shard_group in self.shard_groups(&family.layout, zero) {
                for &bucket in self.different_buckets(&family.layout) {
                    members.extend(lying.iter().map(|lying| Layout { zero, shard_group, bucket, ..lying.clone() }));
                }
            }
        }
        members
    }

    /// A layout in all ways in which its ranks and blocks may lie on the devices.
    fn lying(&self, layout: &Layout) -> Vec<Layout> {
        let mut found = Vec::new();
        for placement in self.placements(layout) {
            let placed = Layout { placement, ..layout.clone() };
            for stage_places in self.orders(&placed) {
                let member = Layout { stage_places, ..placed.clone() };
                if let Some(cuts) = &self.fixed.cuts {
                    found.push(Layout { cuts: Some(cuts.clone()), ..member });
                    continue;
                }
                let cuts = self.cuts_by_speed(&member);
                found.extend(cuts.map(|cuts| Layout { cuts: Some(cuts), ..member.clone() }));
                found.push(member);
            }
        }
        found
    }

    /// A layout that has nothing on the hosts, with some of what it keeps there, where that is considered beside it.
    pub fn offloaded(&self, layout: &Layout, offload: Offload) -> Option<Layout> {
        self.offloads.contains(&offload).then(|| Layout { offload, ..layout.clone() })
    }

    /// The same of a family.
    pub fn offloaded_family(&self, family: &Family, offload: Offload) -> Option<Family> {
        self.offloaded(&family.layout, offload).map(|layout| Family { layout, ..family.clone() })
    }

    /// A layout that computes none of its blocks again, or some of each stage's, with more and more of them, where that is considered beside it: no stage
    /// of one computes fewer again than in those before.
    pub fn partly_recomputed(&self, layout: &Layout) -> Vec<Layout> {
        let least = match &layout.recompute {
            Recompute::None => 0,
            Recompute::FullLayers(layers) => *layers,
            Recompute::FullLayersOfStages(layers) => layers.iter().copied().max().unwrap_or(0),
            Recompute::Selective | Recompute::Full | Recompute::AllBut(_) => return Vec::new(),
        };
        if !self.recomputes_some(layout) {
            return Vec::new();
        }
        let most = self.blocks.saturating_sub(2).div_ceil(layout.pipeline.max(1));
        let mut some: Vec<usize> = (1..PARTS_RECOMPUTED).map(|part| (part * most).div_ceil(PARTS_RECOMPUTED)).collect();
        some.retain(|&layers| least < layers && layers < most);
        some.dedup();
        let of = |layers: usize| Layout { recompute: self.recomputing(layout, layers, most), ..layout.clone() };
        some.into_iter().map(of).collect()
    }

    /// Whether it is open how many of a layout's blocks are computed again.
    pub fn recomputes_some(&self, layout: &Layout) -> bool {
        let is_even = layout.stages.is_none() && layout.operators.is_empty();
        self.is_stack && is_even && self.fixed.recompute.is_none() && layout.offload.is_none()
    }

    /// So many of the `most` blocks of the stage that holds the most micro-batches computed again, and of each other as few as have it hold no more.
    fn recomputing(&self, layout: &Layout, layers: usize, most: usize) -> Recompute {
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

    /// Whether a layout is looked at because the same does not fit with fewer of its blocks computed again.
    pub fn is_partly_recomputed(&self, layout: &Layout) -> bool {
        let is_of_some = matches!(layout.recompute, Recompute::FullLayers(_) | Recompute::FullLayersOfStages(_));
        is_of_some && self.fixed.recompute.is_none()
    }

    /// How many layouts a layout of the space stands for: itself, and those that need not be looked at where it fits, of which so many compute some blocks
    /// again. With both on the hosts it is counted with the optimizer's state alone there.
    pub fn forms(&self, layout: &Layout, some_recomputed: usize) -> usize {
        match layout.offload {
            Offload::None => {
                let on_hosts = if self.is_partly_recomputed(layout) { 0 } else { self.offloads.len() };
                1 + on_hosts + some_recomputed
            }
            Offload::Optimizer => 1 + usize::from(self.offloads.contains(&Offload::Both)),
            Offload::Activations | Offload::Both => 1,
        }
    }

    /// How many layouts there are beside so many members of a family whose Programs are those of some of these.
    pub fn alike(&self, family: &Family, members: usize) -> usize {
        let different = self.different_buckets(&family.layout).len();
        let all = if matters(&family.layout) { self.buckets.len() } else { different };
        members / different * (all - different)
    }

    /// Sizes of buckets by which Programs differ: all that are larger than one into which all gradients go are like it.
    fn different_buckets(&self, layout: &Layout) -> &[Bytes] {
        let enough = self.buckets.iter().position(|&bucket| bucket >= self.gradients).map_or(self.buckets.len(), |last| last + 1);
        if matters(layout) {
            return &self.buckets[..enough];
        }
        let own = self.buckets.iter().position(|&bucket| bucket == self.base.bucket).unwrap_or(0);
        &self.buckets[own..=own]
    }

    /// Cuts such that the stage that takes longest takes as little as can be by its devices' peaks, where stages lie on devices of several speeds. Where
    /// probes tell what stages take, they are cut by that ([`Bounds::members`](crate::bounds::Bounds::members)).
    fn cuts_by_speed(&self, layout: &Layout) -> Option<Vec<usize>> {
        if let Some(stages) = layout.stages.as_ref().filter(|_| layout.cuts.is_none() && layout.virtual_stages == 1) {
            let mut end = 0;
            let mut speed_of = |stage: &StageLayout| {
                let ranks = stage.data * stage.tensor * stage.context * stage.expert;
                end += ranks;
                let devices = self.speeds.get(end - ranks..end)?;
                Some(devices.iter().copied().fold(f64::INFINITY, f64::min) * ranks as f64)
            };
            let speeds = stages.iter().map(&mut speed_of).collect::<Option<Vec<f64>>>()?;
            return Some(cuts_by_speed(&self.work, &speeds));
        }
        if !self.is_plain(layout) || self.speeds.len() < stage_ranks(layout) * layout.pipeline {
            return None;
        }
        let speeds: Vec<f64> = (0..layout.pipeline)
            .map(|stage| self.speeds[self.devices_of(layout, stage)].iter().copied().fold(f64::INFINITY, f64::min))
            .collect();
        let is_mixed = speeds.iter().any(|&speed| speed != speeds[0]);
        // Of kinds nothing is known where all devices that may be used are of one.
        let kinds = self.kinds.get(..stage_ranks(layout) * layout.pipeline).unwrap_or_default();
        let may_hold_less = self.memory_differs && kinds.iter().any(|&kind| kind != kinds[0]);
        (is_mixed || may_hold_less).then(|| cuts_by_speed(&self.work, &speeds))
    }

    /// Orders of the stages along the devices: the usual one, and where they lie on a few kinds of devices all orders of these, since the
    /// first stages hold the most micro-batches, and the ends have more to do than the blocks between them.
    fn orders(&self, layout: &Layout) -> Vec<Option<Vec<usize>>> {
        if let Some(fixed) = self.fixed.stage_places.as_ref().or(self.base.stage_places.as_ref()) {
            let mut places = fixed.clone();
            places.sort_unstable();
            // Those of other pipelines are of no layout of this one.
            let is_order = places.into_iter().eq(0..layout.pipeline);
            return if is_order { vec![Some(fixed.clone()).filter(|places| !places.is_sorted())] } else { Vec::new() };
        }
        let matters = self.memory_differs || layout.pipeline <= MOST_ORDERED_STAGES;
        if !matters || !self.is_plain(layout) || self.kinds.len() < stage_ranks(layout) * layout.pipeline {
            return vec![None];
        }
        // A place on devices of several kinds is as the first of them.
        let of_place: Vec<usize> = (0..layout.pipeline).map(|place| self.kinds[self.devices_of(layout, place).start]).collect();
        let mut kinds: Vec<usize> = Vec::new();
        for &kind in &of_place {
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        if kinds.len() > MOST_KINDS {
            return vec![None];
        }
        let places_of = |kind: &usize| (0..layout.pipeline).filter(|&place| of_place[place] == *kind).collect::<Vec<_>>();
        let in_order = |kinds: Vec<usize>| kinds.iter().flat_map(places_of).collect::<Vec<usize>>();
        let others = permutations(&kinds).into_iter().map(in_order).filter(|order| !order.is_sorted()).map(Some);
        [None].into_iter().chain(others).collect()
    }

    /// Whether each stage has one chunk, and they lie along the devices one after the other.
    fn is_plain(&self, layout: &Layout) -> bool {
        let is_cut_otherwise = layout.cuts.is_some() || layout.stages.is_some();
        layout.pipeline > 1 && layout.virtual_stages == 1 && layout.placement.is_none() && !is_cut_otherwise
    }

    /// The devices of a stage of a plain layout.
    fn devices_of(&self, layout: &Layout, stage: usize) -> Range<usize> {
        let place = layout.stage_places.as_ref().map_or(stage, |places| places[stage]);
        let ranks = stage_ranks(layout);
        place * ranks..(place + 1) * ranks
    }

    /// Shard groups: all of `data`, or, where parameters are gathered again and again, the ranks of it that are in one node (HSDP).
    fn shard_groups(&self, layout: &Layout, zero: usize) -> Vec<Option<usize>> {
        if zero == 0 {
            return vec![None];
        }
        if let Some(fixed) = self.fixed.shard_group.or(self.base.shard_group) {
            return vec![Some(fixed)];
        }
        // With a pipeline what is gathered once a step hides beside other micro-batches.
        if zero < 3 && layout.follows_schedule() {
            return vec![None];
        }
        let in_node = self.node / (layout.tensor * layout.context * layout.expert).max(1);
        let is_part = in_node > 1 && in_node < layout.data && layout.data.is_multiple_of(in_node);
        [None].into_iter().chain(is_part.then_some(Some(in_node))).collect()
    }

    /// Orders of the axes over the devices: the usual one; and where a stage's `tensor` leaves room in a node, its pipeline there in place of `data`.
    fn placements(&self, layout: &Layout) -> Vec<Option<Vec<Axis>>> {
        if let Some(fixed) = self.fixed.placement.as_ref().or(self.base.placement.as_ref()) {
            return vec![Some(fixed.clone())];
        }
        let inner = layout.tensor * layout.context * layout.expert;
        let is_worth_it = layout.pipeline >= 4 && layout.data > 1 && inner < self.node;
        let inside = vec![Axis::Tensor, Axis::Context, Axis::Expert, Axis::Pipeline];
        [None].into_iter().chain(is_worth_it.then_some(Some(inside))).collect()
    }
}

/// Ranks of each stage.
fn stage_ranks(layout: &Layout) -> usize {
    layout.data * layout.tensor * layout.context * layout.expert
}

/// All orders of some things, the given one first.
fn permutations(things: &[usize]) -> Vec<Vec<usize>> {
    if things.is_empty() {
        return vec![Vec::new()];
    }
    let with_first = |(place, &first): (usize, &usize)| {
        let rest = [&things[..place], &things[place + 1..]].concat();
        permutations(&rest).into_iter().map(move |rest| [vec![first], rest].concat())
    };
    things.iter().enumerate().flat_map(with_first).collect()
}
