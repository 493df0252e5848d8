//! Fitted layouts: pipelines on devices of several kinds, whose cuts and recomputation follow from
//! truncated models.
//!
//! A layout that fits without recomputation is cut by time alone. For one that does not fit there
//! is a *fitted* layout, which recomputes in each stage as few blocks as its memory budget demands.
//! Cuts come from dynamic programming over the stages (`stages.rs`), and are improved block by
//! block with the bound that goes pass by pass. The compiler may find that a fitted layout needs
//! more than its bound says. Then it is refitted with its memory budgets reduced by the overshoot.
//! It must not know in which order the search asks for layouts.

mod stages;
#[cfg(test)]
mod tests;

use super::bound::{Bound, Bounded};
use super::context::Bounds;
use super::layouts::have_same_devices;
use super::pipeline::{BUCKET_ROUNDING, PipelineCosts, PipelineCuts};
use super::truncated::stages_sharing_nodes;
use crate::space::Family;
use foretell_program::{Axis, Layout, Plan, Rank, Recompute, usual_cuts};
use foretell_units::{Bytes, Picoseconds, Seconds};
use stages::{DevicesOfStage, FittedStages, StageCost, cuts_with_one_block_moved, least_cuts};
use std::collections::BTreeMap;

/// The most devices for which stages are fitted. With more, stages have so few blocks that fitting
/// gains little.
const MOST_DEVICES: usize = 256;

/// The most refits of a layout before it counts as too large.
pub(crate) const MOST_REFITS: usize = 8;

/// Factors by which the slowest stage may exceed the optimum. For each, the cuts are tried through
/// which one micro-batch passes fastest.
const SLOWEST_STAGE_FACTORS: [f64; 12] = [1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 1.7, 2.0, 3.0, f64::INFINITY];

/// The most stages for which single blocks are moved between any two stages.
const MOST_STAGES_WITH_MOVES: usize = 8;

/// The blocks of each stage.
#[derive(Clone, Debug)]
struct StageBlocks {
    /// Blocks of each stage.
    cuts: Vec<usize>,
    /// Recomputed blocks of each stage.
    recomputed: Vec<usize>,
}

impl Bounds<'_> {
    /// Returns `true` if truncated models decide the cuts of a layout: its pipeline runs on several
    /// kinds of devices, and neither the user nor the plan states cuts.
    pub(crate) fn has_fitted_cuts(&self, layout: &Layout) -> bool {
        let are_open = self.space.fixed.cuts.is_none() && self.request.base.layout.cuts.is_none();
        let has_one_chunk = layout.pipeline > 1 && layout.virtual_stages == 1;
        let is_small = self.request.devices <= MOST_DEVICES;
        let is_plain = self.space.model.is_plain_stack();
        self.kinds.are_mixed() && is_small && are_open && has_one_chunk && is_plain && self.truncated.represent(layout)
    }

    /// Returns `true` if a layout with fitted cuts has a counterpart that is fitted with
    /// recomputation.
    pub(super) fn has_fitted_layout(&self, layout: &Layout) -> bool {
        layout.recompute == Recompute::None && self.space.recomputation_is_open(layout)
    }

    /// Returns the cuts that minimise the time of a layout with fitted cuts, whatever its memory.
    /// `None` if none are found.
    pub(super) fn cuts_by_time(&self, layout: &Layout, micro_batches: usize) -> Option<Vec<usize>> {
        let key = Layout { zero: 0, shard_group: None, cuts: Some(Vec::new()), ..layout.clone() };
        self.cuts_by_time.get((key, micro_batches), || Some(self.fit_blocks(layout, micro_batches, None)?.cuts))
    }

    /// Returns the fitted counterpart of a layout without recomputation; if none fits, the layout
    /// that recomputes all blocks.
    pub(super) fn fitted_or_smallest(&self, layout: &Layout, micro_batches: usize) -> Layout {
        let fitted = self.fitted(layout, micro_batches, &self.full_budgets(layout));
        fitted.unwrap_or_else(|| {
            let recompute = Recompute::FullLayersOfStages(vec![self.space.model.blocks; layout.pipeline]);
            Layout { recompute, ..layout.clone() }
        })
    }

    /// Bounds the fitted counterparts of a family with fitted cuts, whose own layouts need at least
    /// `needed` bytes. `None` if there are no fitted layouts.
    pub(crate) fn fitted_family(&self, family: &Family, needed: Bytes) -> Option<(Bounded, Family)> {
        if !self.has_fitted_layout(&family.layout) {
            return None;
        }
        let mut variants = self.space.variants(family);
        // Among variants with the same devices and ZeRO stage, one is enough: the one with open
        // cuts if there is one, with the largest shard group, which needs the least memory.
        variants.sort_by_key(|variant| variant.cuts.is_none());
        let mut seen: Vec<&Layout> = Vec::new();
        let mut least: Option<f64> = None;
        for variant in &variants {
            if !seen.iter().any(|other| have_same_devices(other, variant) && other.zero == variant.zero) {
                seen.push(variant);
                let smallest = Layout { shard_group: None, ..variant.clone() };
                let own = self.least_time_over_cuts(&smallest, family.micro_batches);
                least = least.into_iter().chain(own).reduce(f64::min);
            }
        }
        // Each layout of the family has its own recomputed blocks in place of the empty list.
        let layout = Layout { recompute: Recompute::FullLayersOfStages(Vec::new()), ..family.layout.clone() };
        let bound = match least {
            Some(picoseconds) => self.bound(family.micro_batches, picoseconds, 0.0),
            None => Bound::too_large(needed),
        };
        Some((Ok(bound), Family { layout, ..family.clone() }))
    }

    /// Bounds a layout. A fitted layout is refitted while its bound exceeds the memory limit. Also
    /// returns the layout that was bounded last.
    pub(crate) fn layout_refitted(&self, mut layout: Layout, micro_batches: usize) -> (Bounded, Layout) {
        let mut budgets = self.full_budgets(&layout);
        for _ in 0..MOST_REFITS {
            let bounded = self.layout(&layout, micro_batches);
            let Ok(Bound { time: None, memory: needed }) = bounded else { return (bounded, layout) };
            let share = self.memory_limit.value() / needed.value();
            budgets.iter_mut().for_each(|budget| *budget *= share);
            match self.refitted(&layout, micro_batches, &budgets) {
                Some(next) => layout = next,
                None => return (bounded, layout),
            }
        }
        (self.layout(&layout, micro_batches), layout)
    }

    /// Returns memory budgets, in weighted bytes, for refitting a layout after the compiler found
    /// that the fullest devices of its stages hold `held` weighted bytes. Each stage's budget
    /// shrinks by how far `held` exceeds the bound. `None` if the layout is not fitted.
    pub(crate) fn budgets_after_overshoot(&self, layout: &Layout, micro_batches: usize, held: &[f64]) -> Option<Vec<f64>> {
        let Recompute::FullLayersOfStages(recomputed) = &layout.recompute else { return None };
        if !self.is_fitted(layout) {
            return None;
        }
        let stages = self.fitted_stages(layout, micro_batches, None)?;
        let cuts = layout.cuts.clone().unwrap_or_else(|| usual_cuts(&self.space.model.work, layout.pipeline, 1));
        let budget = |(stage, held): (usize, &f64)| {
            let on_kind = |kind: &usize| stages.memory(*kind, stage, cuts[stage], recomputed[stage]);
            let bound = stages.kinds[stage].iter().map(on_kind).fold(0.0, f64::max);
            self.full_budget() - (held - self.fixed_memory() - bound).max(0.0)
        };
        Some(held.iter().enumerate().take(layout.pipeline.min(recomputed.len())).map(budget).collect())
    }

    /// Returns a fitted layout refitted to other memory budgets of its stages. `None` if the layout
    /// is not fitted or does not change.
    pub(crate) fn refitted(&self, layout: &Layout, micro_batches: usize, budgets: &[f64]) -> Option<Layout> {
        if !self.is_fitted(layout) {
            return None;
        }
        let base = Layout { recompute: Recompute::None, ..layout.clone() };
        self.fitted(&base, micro_batches, budgets).filter(|next| next != layout)
    }

    fn is_fitted(&self, layout: &Layout) -> bool {
        self.has_fitted_cuts(layout) && self.space.is_partly_recomputed(layout)
    }

    /// Returns the weighted bytes that buffers may take on a device.
    fn full_budget(&self) -> f64 {
        self.memory_limit.value() + BUCKET_ROUNDING - self.fixed_memory()
    }

    fn full_budgets(&self, layout: &Layout) -> Vec<f64> {
        vec![self.full_budget(); layout.pipeline]
    }

    /// Fits `layout`, which has no recomputation, to memory budgets of its stages. A layout with
    /// the usual cuts keeps them. `None` if nothing fits.
    fn fitted(&self, layout: &Layout, micro_batches: usize, budgets: &[f64]) -> Option<Layout> {
        let blocks = self.fit_blocks(layout, micro_batches, Some(budgets))?;
        let cuts = layout.cuts.as_ref().map(|_| blocks.cuts);
        Some(Layout { cuts, recompute: Recompute::FullLayersOfStages(blocks.recomputed), ..layout.clone() })
    }

    /// Returns the blocks of each stage with the least bound pass by pass. Candidates are the cuts
    /// with the fastest slowest stage, and cuts with a slower one through which a micro-batch
    /// passes sooner. With `budgets`, each stage fits into its memory budget; `None` if nothing
    /// fits.
    fn fit_blocks(&self, layout: &Layout, micro_batches: usize, budgets: Option<&[f64]>) -> Option<StageBlocks> {
        let pattern = self.space.model.pattern.as_ref()?;
        let stages = self.fitted_stages(layout, micro_batches, budgets)?;
        let costs = stages.costs(&self.usual_cuts_if_kept(layout), DevicesOfStage::All);
        let extra_messages = self.message_times_between_nodes(layout, &stages);
        let timetable = self.pipelines.timetable(layout, micro_batches);
        let weights = self.kinds.weights();
        let time = |cuts: &[usize]| -> Option<(f64, StageBlocks)> {
            let recomputed: Option<Vec<usize>> =
                cuts.iter().zip(&costs).map(|(&blocks, costs)| Some((*costs.get(blocks)?)?.recomputed)).collect();
            let recomputed = recomputed?;
            let blocks = PipelineCuts::new(cuts, pattern).recomputing(recomputed.clone(), layout.schedule);
            let of_replica = |kind_of_stage: &Vec<usize>| {
                let costs = PipelineCosts::new(&stages.models, kind_of_stage, weights, &blocks, layout.schedule, 1);
                costs.least_time_by_pass(&timetable, &extra_messages)
            };
            let time = stages.pipelines.iter().map(of_replica).fold(0.0, f64::max);
            Some((time, StageBlocks { cuts: cuts.to_vec(), recomputed }))
        };
        let faster = |left: (f64, StageBlocks), right: (f64, StageBlocks)| if right.0 < left.0 { right } else { left };
        let candidates = self.candidate_cuts(&stages, &costs, &extra_messages)?;
        let mut best = candidates.iter().filter_map(|cuts| time(cuts)).reduce(faster)?;
        while layout.cuts.is_some() && layout.pipeline <= MOST_STAGES_WITH_MOVES {
            let moved = cuts_with_one_block_moved(&best.1.cuts);
            match moved.iter().filter_map(|cuts| time(cuts)).reduce(faster).filter(|next| next.0 < best.0) {
                Some(next) => best = next,
                None => break,
            }
        }
        Some(best.1)
    }

    /// Returns, for each of [`SLOWEST_STAGE_FACTORS`], the cuts through which one micro-batch
    /// passes fastest if no stage is slower than the factor allows. `None` if no cuts fit.
    fn candidate_cuts(
        &self,
        stages: &FittedStages,
        costs: &[Vec<Option<StageCost>>],
        extra_messages: &[f64],
    ) -> Option<Vec<Vec<usize>>> {
        let blocks = self.space.model.blocks;
        let slowest = |_, cost: &StageCost, rest: f64| Some(cost.all_passes.max(rest));
        let (optimum, _) = least_cuts(costs, blocks, f64::NEG_INFINITY, slowest)?;
        let micro_batches = stages.micro_batches;
        let for_factor = |factor: &f64| {
            let limit = optimum * factor;
            let limit_per_micro_batch = limit / micro_batches as f64;
            let round_trip = |stage: usize, cost: &StageCost, rest: f64| {
                let round_trip = cost.round_trip + 2.0 * extra_messages[stage] + rest;
                // A stage that holds at most `most` micro-batches starts no further one before the
                // first has returned. So a round trip longer than `most` micro-batches' time would
                // slow the stage down.
                let most = stages.in_flight.most_saved(stage);
                let is_in_time = most >= micro_batches || round_trip <= limit_per_micro_batch * most as f64;
                (cost.all_passes <= limit && is_in_time).then_some(round_trip)
            };
            Some(least_cuts(costs, blocks, 0.0, round_trip)?.1)
        };
        let mut candidates: Vec<Vec<usize>> = SLOWEST_STAGE_FACTORS.iter().filter_map(for_factor).collect();
        candidates.dedup();
        Some(candidates)
    }

    /// Returns how long a message takes from each stage to the next, in picoseconds, if all ranks
    /// of the stage send at once and no two of the stages' ranks share a node; else 0, since
    /// truncated models count messages inside a node.
    fn message_times_between_nodes(&self, layout: &Layout, stages: &FittedStages) -> Vec<f64> {
        let mut times = vec![0.0; layout.pipeline];
        let Ok(mesh) = self.plan_with_usual_cuts(layout).mesh() else { return times };
        let topology = self.request.topology;
        let share = stages_sharing_nodes(&mesh, topology);
        let bytes = stages.models.iter().map(|model| model.message_bytes).fold(0.0, f64::max);
        let device = |rank: Rank| topology.device_of_rank(rank.0);
        for (stage, time) in times.iter_mut().enumerate().take(layout.pipeline - 1).filter(|(stage, _)| !share[*stage]) {
            let mut bytes_of_link: BTreeMap<usize, f64> = BTreeMap::new();
            let mut latency: f64 = 0.0;
            for rank in mesh.stage_ranks(stage) {
                let next = mesh.rank(mesh.coordinates(rank).with(Axis::Pipeline, stage + 1));
                let Ok(route) = topology.route(device(rank), device(next)) else { continue };
                latency = latency.max(route.latency.value());
                route.links.iter().for_each(|link| *bytes_of_link.entry(link.0).or_default() += bytes);
            }
            let seconds = |(&link, bytes): (&usize, &f64)| bytes / topology.links()[link].bandwidth.value();
            let slowest = bytes_of_link.iter().map(seconds).fold(0.0, f64::max);
            *time = Picoseconds::from(Seconds::new(latency + slowest)).0 as f64;
        }
        times
    }

    /// Returns the least step time of a layout over all cuts that fit, by the bound in closed form,
    /// in picoseconds. `None` if none fits.
    fn least_time_over_cuts(&self, layout: &Layout, micro_batches: usize) -> Option<f64> {
        let stages = self.fitted_stages(layout, micro_batches, Some(&self.full_budgets(layout)))?;
        let costs = stages.costs(&self.usual_cuts_if_kept(layout), DevicesOfStage::Any);
        let in_sequence = |_, cost: &StageCost, rest: f64| Some(cost.all_passes.max(cost.serial + rest));
        let (least, _) = least_cuts(&costs, self.space.model.blocks, f64::NEG_INFINITY, in_sequence)?;
        Some(least)
    }

    /// Returns the usual cuts if a layout keeps them.
    fn usual_cuts_if_kept(&self, layout: &Layout) -> Option<Vec<usize>> {
        layout.cuts.is_none().then(|| usual_cuts(&self.space.model.work, layout.pipeline, 1))
    }

    /// Returns a layout's plan with the usual cuts, without ZeRO and recomputation: its ranks are
    /// on the same devices.
    fn plan_with_usual_cuts(&self, layout: &Layout) -> Plan {
        let layout = Layout { zero: 0, shard_group: None, cuts: None, recompute: Recompute::None, ..layout.clone() };
        Plan { layout, ..self.request.base.clone() }
    }

    /// Collects the stages of a layout for fitting. `None` if the layout does not divide the model.
    fn fitted_stages(&self, layout: &Layout, micro_batches: usize, budgets: Option<&[f64]>) -> Option<FittedStages> {
        let recomputes_some = budgets.is_some() || matches!(layout.recompute, Recompute::FullLayersOfStages(_));
        let recompute = if recomputes_some { Recompute::FullLayersOfStages(Vec::new()) } else { layout.recompute.clone() };
        let one_replica = Layout { data: 1, zero: 0, shard_group: None, placement: None, recompute, ..layout.clone() };
        let models = self.truncated.on_each_kind(&one_replica, micro_batches).ok()?;
        let pipelines = self.kinds.pipelines(&self.plan_with_usual_cuts(layout).mesh().ok()?);
        let kinds_of_stage = |stage: usize| {
            let mut kinds: Vec<usize> = pipelines.iter().map(|pipeline| pipeline[stage]).collect();
            kinds.sort_unstable();
            kinds.dedup();
            kinds
        };
        Some(FittedStages {
            models,
            kinds: (0..layout.pipeline).map(kinds_of_stage).collect(),
            pipelines,
            memory_weights: self.kinds.weights().to_vec(),
            in_flight: self.pipelines.in_flight(layout, micro_batches),
            layout: layout.clone(),
            micro_batches,
            blocks: self.space.model.blocks,
            budgets: budgets.map(<[f64]>::to_vec),
        })
    }
}
