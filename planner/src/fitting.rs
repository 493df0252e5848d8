//! Stages on devices of several kinds: how many blocks each has, and how many of these it computes again, chosen together by what probes say that they
//! take and hold there: by dynamic programming over the stages, and then block by block, by the bound that goes pass by pass. A family's bound is of the
//! best of all cuts, by the bound's closed form.
//!
//! A layout that fits with what it has is cut by time alone. One that does not has a *fitted* layout beside it: in each stage as few blocks are computed
//! again as must, by the least that it holds. The compiler may find that it holds more; then it is fitted anew, into as much less.

mod stages;
#[cfg(test)]
mod tests;

use crate::bounds::{Bounds, Verdict, lie_alike};
use crate::pipeline::{Cutting, Pieces, UNEVEN};
use crate::probe::share_nodes;
use crate::space::Family;
use foretell_program::{Axis, Layout, Plan, Rank, Recompute, usual_cuts};
use foretell_units::{Bytes, Picoseconds, Seconds};
use stages::{Cost, Kinds, Stages, least_of_all, moves};
use std::collections::BTreeMap;

/// Devices up to which stages are fitted: with more each has so few blocks that there is little to choose.
const MOST_DEVICES: usize = 256;

/// How many times a layout is fitted anew before it counts as too large.
pub(crate) const MOST_TRIES: usize = 8;

/// How much longer than the stage that takes longest must a pipeline may take a micro-batch, for a micro-batch to be through all of them sooner.
const LONGER: [f64; 12] = [1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 1.7, 2.0, 3.0, f64::INFINITY];

/// Stages up to which blocks are moved between any two of them.
const MOST_STAGES: usize = 8;

/// Blocks of each stage, and how many of them it computes again.
#[derive(Clone, Debug)]
pub(crate) struct Fit {
    cuts: Vec<usize>,
    again: Vec<usize>,
}

impl Bounds<'_> {
    /// Whether the stages of a layout's pipeline, on devices of several kinds, are cut by what probes say they take.
    pub(crate) fn is_fitted(&self, layout: &Layout) -> bool {
        let are_open = self.space.fixed.cuts.is_none() && self.request.base.layout.cuts.is_none();
        let is_plain = layout.pipeline > 1 && layout.virtual_stages == 1;
        self.devices.are_mixed() && self.request.devices <= MOST_DEVICES && are_open && is_plain && self.has_probe(layout)
    }

    /// The layouts of a family, cut as they are looked at.
    pub(crate) fn members(&self, family: &Family) -> Vec<Layout> {
        let mut members = self.space.members(family);
        if !self.is_fitted(&family.layout) {
            return members;
        }
        let mut cut: Vec<Layout> = Vec::new();
        for member in members.iter_mut().filter(|member| member.cuts.is_some()) {
            let place = cut.iter().position(|other| lie_alike(other, member)).unwrap_or_else(|| {
                let alike = Layout { zero: 0, shard_group: None, cuts: Some(Vec::new()), ..member.clone() };
                let fit = self.fits.get((alike, family.micro_batches), || self.fit(member, family.micro_batches, None));
                cut.push(Layout { cuts: fit.map(|fit| fit.cuts).or_else(|| member.cuts.clone()), ..member.clone() });
                cut.len() - 1
            });
            member.cuts.clone_from(&cut[place].cuts);
        }
        if self.space.is_partly_recomputed(&family.layout) {
            for member in &mut members {
                let base = Layout { recompute: Recompute::None, ..member.clone() };
                *member = self.fitted(&base, family.micro_batches, &self.rooms(&base)).unwrap_or_else(|| self.least(member));
            }
        }
        members
    }

    /// Layouts that are looked at where a layout does not fit: the one fitted to the devices' memory, where stages are fitted; else with more and more
    /// blocks computed again.
    pub(crate) fn partly_recomputed(&self, layout: &Layout, micro_batches: usize) -> Vec<Layout> {
        if !self.is_fitted(layout) {
            return self.space.partly_recomputed(layout);
        }
        if !self.has_fitted(layout) {
            return Vec::new();
        }
        vec![self.fitted(layout, micro_batches, &self.rooms(layout)).unwrap_or_else(|| self.least(layout))]
    }

    /// How many layouts a layout of the space stands for ([`Space::forms`](crate::space::Space::forms)).
    pub(crate) fn forms(&self, layout: &Layout) -> usize {
        let some = if self.is_fitted(layout) {
            usize::from(self.has_fitted(layout))
        } else {
            self.space.partly_recomputed(layout).len()
        };
        self.space.forms(layout, some)
    }

    /// Whether a layout whose stages may be fitted has one that is fitted to memory beside it.
    fn has_fitted(&self, layout: &Layout) -> bool {
        layout.recompute == Recompute::None && self.space.recomputes_some(layout)
    }

    /// The fitted layouts of a family none of whose layouts fits, which needs so much at least, and what is known of them.
    pub(crate) fn fitted_family(&self, family: &Family, needed: Bytes) -> Option<(Verdict, Family)> {
        if !self.has_fitted(&family.layout) {
            return None;
        }
        let mut members = self.space.members(family);
        // Of those that lie alike and share out the same one is enough, cut by time if any is; none is smaller than with all ranks of `data` together.
        members.sort_by_key(|member| member.cuts.is_none());
        let mut seen: Vec<&Layout> = Vec::new();
        let mut least: Option<f64> = None;
        for member in &members {
            if !seen.iter().any(|other| lie_alike(other, member) && other.zero == member.zero) {
                seen.push(member);
                let smallest = Layout { shard_group: None, ..member.clone() };
                let own = self.least_however_cut(&smallest, family.micro_batches);
                least = least.into_iter().chain(own).reduce(f64::min);
            }
        }
        // Which blocks of which stages is each layout's own.
        let layout = Layout { recompute: Recompute::FullLayersOfStages(Vec::new()), ..family.layout.clone() };
        let verdict = match least {
            Some(picoseconds) => self.verdict(&layout, family.micro_batches, picoseconds, 0.0),
            None => Verdict::OutOfMemory(needed),
        };
        Some((verdict, Family { layout, ..family.clone() }))
    }

    /// What is known of a layout, fitted anew as long as it is certain not to fit.
    pub(crate) fn of_fitted(&self, mut layout: Layout, micro_batches: usize) -> (Verdict, Layout) {
        let mut rooms = self.rooms(&layout);
        for _ in 0..MOST_TRIES {
            let verdict = self.of_member(&layout, micro_batches);
            let Verdict::OutOfMemory(needed) = verdict else { return (verdict, layout) };
            let share = self.memory_limit.value() / needed.value();
            rooms.iter_mut().for_each(|room| *room *= share);
            match self.fitted_anew(&layout, micro_batches, &rooms) {
                Some(next) => layout = next,
                None => return (verdict, layout),
            }
        }
        (self.of_member(&layout, micro_batches), layout)
    }

    /// The rooms of a fitted layout's stages whose fullest devices were found to hold so many bytes, each weighed: as much less than there is as each holds
    /// more than the least. `None` for a layout that is not fitted.
    pub(crate) fn rooms_beside(&self, layout: &Layout, micro_batches: usize, held: &[f64]) -> Option<Vec<f64>> {
        let Recompute::FullLayersOfStages(again) = &layout.recompute else { return None };
        if !self.is_fitted(layout) || !self.space.is_partly_recomputed(layout) {
            return None;
        }
        let stages = self.stages(layout, micro_batches, None)?;
        let cuts = layout.cuts.clone().unwrap_or_else(|| usual_cuts(&self.space.work, layout.pipeline, 1));
        let room = |(stage, held): (usize, &f64)| {
            let of_kind = |kind: &usize| stages.needs(*kind, stage, cuts[stage], again[stage]);
            let least = stages.kinds[stage].iter().map(of_kind).fold(0.0, f64::max);
            self.room() - (held / self.share_of_arena() - least).max(0.0)
        };
        Some(held.iter().enumerate().take(layout.pipeline.min(again.len())).map(room).collect())
    }

    /// The layout that a fitted one becomes with so much room for each of its stages. `None` for a layout that is not fitted, or if there is no other.
    pub(crate) fn fitted_anew(&self, layout: &Layout, micro_batches: usize, rooms: &[f64]) -> Option<Layout> {
        if !self.is_fitted(layout) || !self.space.is_partly_recomputed(layout) {
            return None;
        }
        let base = Layout { recompute: Recompute::None, ..layout.clone() };
        self.fitted(&base, micro_batches, rooms).filter(|next| next != layout)
    }

    /// Bytes that the devices with the least memory have room for, and others as many times more as they weigh less.
    fn room(&self) -> f64 {
        (self.memory_limit.value() + UNEVEN) / self.share_of_arena()
    }

    fn rooms(&self, layout: &Layout) -> Vec<f64> {
        vec![self.room(); layout.pipeline]
    }

    /// The layout that computes everything again: none is smaller.
    fn least(&self, layout: &Layout) -> Layout {
        Layout { recompute: Recompute::FullLayersOfStages(vec![self.space.blocks; layout.pipeline]), ..layout.clone() }
    }

    /// A layout that computes nothing again fitted to so much room for each stage; its cuts stay the usual ones if they are.
    fn fitted(&self, layout: &Layout, micro_batches: usize, rooms: &[f64]) -> Option<Layout> {
        let fit = self.fit(layout, micro_batches, Some(rooms))?;
        let cuts = layout.cuts.as_ref().map(|_| fit.cuts);
        Some(Layout { cuts, recompute: Recompute::FullLayersOfStages(fit.again), ..layout.clone() })
    }

    /// The blocks of each stage, and how many of them are computed again, by which a layout takes the least pass by pass, of some ways to cut it: that in
    /// which its pipeline comes to the least a micro-batch, and those in which it comes to more and a micro-batch is through all stages sooner. Fitted to
    /// so much room for each stage, if that is said; `None` where nothing fits.
    fn fit(&self, layout: &Layout, micro_batches: usize, rooms: Option<&[f64]>) -> Option<Fit> {
        let stages = self.stages(layout, micro_batches, rooms)?;
        let costs = stages.costs(&self.given(layout), Kinds::All);
        let blocks = self.space.blocks;
        let (least, _) = least_of_all(&costs, blocks, f64::NEG_INFINITY, |_, cost, rest| Some(cost.all.max(rest)))?;
        let longer_messages = self.messages(layout, &stages);
        let (timetable, weights) = (self.timetable(layout, micro_batches), self.devices.weights());
        let time = |cuts: &[usize]| -> Option<(f64, Fit)> {
            let again: Option<Vec<usize>> =
                cuts.iter().zip(&costs).map(|(&blocks, costs)| Some((*costs.get(blocks)?)?.again)).collect();
            let again = again?;
            let cutting = Cutting::new(cuts).recomputing(again.clone(), layout.schedule);
            let of_pipeline = |of_stage: &Vec<usize>| {
                let pieces = Pieces::new(&stages.probes, of_stage, weights, &cutting, layout.schedule, 1);
                pieces.least_time_by_pass(&timetable, &longer_messages)
            };
            let time = stages.pipelines.iter().map(of_pipeline).fold(0.0, f64::max);
            Some((time, Fit { cuts: cuts.to_vec(), again }))
        };
        let sooner = |one: (f64, Fit), other: (f64, Fit)| if other.0 < one.0 { other } else { one };
        let mut candidates: Vec<Vec<usize>> = LONGER
            .iter()
            .filter_map(|longer| {
                let cap = least * longer;
                let a_micro_batch = cap / micro_batches as f64;
                let through = |stage: usize, cost: &Cost, rest: f64| {
                    let through = cost.through + 2.0 * longer_messages[stage] + rest;
                    // No stage begins more micro-batches than it may hold before the first of them is back.
                    let most = stages.in_flight.most(stage);
                    let is_in_time = most >= micro_batches || through <= a_micro_batch * most as f64;
                    (cost.all <= cap && is_in_time).then_some(through)
                };
                Some(least_of_all(&costs, blocks, 0.0, through)?.1)
            })
            .collect();
        candidates.dedup();
        let mut best = candidates.iter().filter_map(|cuts| time(cuts)).reduce(sooner)?;
        // One block after the other moved from a stage to another, as long as that is better.
        while layout.cuts.is_some() && layout.pipeline <= MOST_STAGES {
            let moved = moves(&best.1.cuts);
            match moved.iter().filter_map(|cuts| time(cuts)).reduce(sooner).filter(|next| next.0 < best.0) {
                Some(next) => best = next,
                None => break,
            }
        }
        Some(best.1)
    }

    /// How long a message from each stage to the next takes where all ranks of the two send at once and no two of them share a node; in a node it takes what
    /// probes say.
    fn messages(&self, layout: &Layout, stages: &Stages) -> Vec<f64> {
        let mut longer = vec![0.0; layout.pipeline];
        let whole = Layout { zero: 0, shard_group: None, cuts: None, recompute: Recompute::None, ..layout.clone() };
        let Ok(mesh) = (Plan { layout: whole, ..self.request.base.clone() }).mesh() else { return longer };
        let topology = self.request.topology;
        let share = share_nodes(&mesh, topology);
        let bytes = stages.probes.iter().map(|probe| probe.message).fold(0.0, f64::max);
        let device = |rank: Rank| topology.device_of_rank(rank.0);
        for (stage, longer) in longer.iter_mut().enumerate().take(layout.pipeline - 1).filter(|(stage, _)| !share[*stage]) {
            let mut flows: BTreeMap<usize, f64> = BTreeMap::new();
            let mut latency: f64 = 0.0;
            for rank in mesh.stage_ranks(stage) {
                let next = mesh.rank(mesh.coordinates(rank).with(Axis::Pipeline, stage + 1));
                let Ok(route) = topology.route(device(rank), device(next)) else { continue };
                latency = latency.max(route.latency.value());
                route.links.iter().for_each(|link| *flows.entry(link.0).or_default() += bytes);
            }
            let slowest = flows.iter().map(|(&link, bytes)| bytes / topology.links()[link].bandwidth.value()).fold(0.0, f64::max);
            *longer = Picoseconds::from(Seconds::new(latency + slowest)).0 as f64;
        }
        longer
    }

    /// What a layout takes at least however its stages are cut, if they fit: by the closed form of its bound, in picoseconds.
    fn least_however_cut(&self, layout: &Layout, micro_batches: usize) -> Option<f64> {
        let stages = self.stages(layout, micro_batches, Some(&self.rooms(layout)))?;
        let costs = stages.costs(&self.given(layout), Kinds::Any);
        let one_after_the_other = |_, cost: &Cost, rest: f64| Some(cost.all.max(cost.passed + rest));
        let least = least_of_all(&costs, self.space.blocks, f64::NEG_INFINITY, one_after_the_other)?;
        Some(least.0)
    }

    /// A layout's cuts, where they are the usual ones.
    fn given(&self, layout: &Layout) -> Option<Vec<usize>> {
        layout.cuts.is_none().then(|| usual_cuts(&self.space.work, layout.pipeline, 1))
    }

    fn stages(&self, layout: &Layout, micro_batches: usize, rooms: Option<&[f64]>) -> Option<Stages> {
        let is_of_some = rooms.is_some() || matches!(layout.recompute, Recompute::FullLayersOfStages(_));
        let recompute = if is_of_some { Recompute::FullLayersOfStages(Vec::new()) } else { layout.recompute.clone() };
        let alone = Layout { data: 1, zero: 0, shard_group: None, placement: None, recompute, ..layout.clone() };
        let probes = self.probes(&alone, micro_batches.min(2)).ok()?;
        let whole = Layout { zero: 0, shard_group: None, cuts: None, recompute: Recompute::None, ..layout.clone() };
        let pipelines = self.devices.pipelines(&Plan { layout: whole, ..self.request.base.clone() }.mesh().ok()?);
        let kinds: Vec<Vec<usize>> = (0..layout.pipeline)
            .map(|stage| {
                let mut kinds: Vec<usize> = pipelines.iter().map(|pipeline| pipeline[stage]).collect();
                kinds.sort_unstable();
                kinds.dedup();
                kinds
            })
            .collect();
        Some(Stages {
            probes,
            pipelines,
            kinds,
            weights: self.devices.weights().to_vec(),
            in_flight: self.in_flight(layout, micro_batches),
            layout: layout.clone(),
            micro_batches,
            blocks: self.space.blocks,
            rooms: rooms.map(<[f64]>::to_vec),
        })
    }
}
