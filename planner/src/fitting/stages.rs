//! What stages with so many blocks take and hold on their devices, by probes, and the least that all of them come to: nothing here knows of a search.

use crate::pipeline::{InFlight, stage_needs};
use crate::probe::Probe;
use foretell_program::{Layout, Recompute};
use std::sync::Arc;

/// What a stage's devices are, where there are several: for a choice all of them matter, for a bound any.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kinds {
    All,
    Any,
}

/// What a stage with so many blocks takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    /// All of its micro-batches' passes, in picoseconds.
    pub(super) all: f64,
    /// What a micro-batch takes through it, there and back.
    pub(super) through: f64,
    /// What of that all passes of the stages after it come before or after.
    pub(super) passed: f64,
    /// How many of its blocks are computed again.
    pub(super) again: usize,
}

/// The stages of a layout whose blocks are to be chosen.
pub(super) struct Stages {
    pub(super) probes: Vec<Arc<Probe>>,
    /// For different pipelines, the kind of each stage's devices.
    pub(super) pipelines: Vec<Vec<usize>>,
    /// Of each stage, these kinds.
    pub(super) kinds: Vec<Vec<usize>>,
    /// By kind, what a byte counts.
    pub(super) weights: Vec<f64>,
    pub(super) in_flight: Arc<InFlight>,
    pub(super) layout: Layout,
    pub(super) micro_batches: usize,
    /// Of all stages.
    pub(super) blocks: usize,
    /// By stage, bytes that there is room for, weighed, where that is to be kept.
    pub(super) rooms: Option<Vec<f64>>,
}

impl Stages {
    /// How many of so many blocks of a stage are equal ones, and whether the model's first and last are among them.
    fn chunk(&self, stage: usize, blocks: usize) -> (usize, bool, bool) {
        let (has_first, has_last) = (stage == 0, stage + 1 == self.layout.pipeline);
        let ends = usize::from(has_first) + usize::from(has_last);
        (blocks.saturating_sub(ends), has_first, has_last)
    }

    /// Bytes, weighed, that a stage holds at least on devices of a kind.
    pub(super) fn needs(&self, kind: usize, stage: usize, blocks: usize, again: usize) -> f64 {
        let (layers, has_first, has_last) = self.chunk(stage, blocks);
        let piece = self.probes[kind].chunk(layers, again, has_first, has_last);
        let ranks = self.layout.shard_group.unwrap_or(self.layout.data);
        let at = |holding| stage_needs(&[&piece], holding, self.layout.zero, ranks, 1.0, self.layout.offload);
        self.in_flight.of_stage(stage).iter().map(at).fold(0.0, f64::max) * self.weights.get(kind).copied().unwrap_or(1.0)
    }

    /// The fewest blocks that are computed again so that a stage fits on devices of a kind.
    fn again(&self, kind: usize, stage: usize, blocks: usize) -> Option<usize> {
        let Some(&room) = self.rooms.as_ref().and_then(|rooms| rooms.get(stage)) else {
            return Some(match self.layout.recompute.of_stage(stage) {
                Recompute::FullLayers(layers) => layers,
                _ => 0,
            });
        };
        let fits = |again: usize| self.needs(kind, stage, blocks, again) <= room;
        let (layers, ..) = self.chunk(stage, blocks);
        if fits(0) {
            return Some(0);
        }
        if !fits(layers) {
            return None;
        }
        let (mut too_few, mut enough) = (0, layers);
        while enough - too_few > 1 {
            let middle = too_few.midpoint(enough);
            if fits(middle) {
                enough = middle;
            } else {
                too_few = middle;
            }
        }
        Some(enough)
    }

    fn cost(&self, stage: usize, blocks: usize, kinds: Kinds) -> Option<Cost> {
        let (layers, has_first, has_last) = self.chunk(stage, blocks);
        let mut again = self.kinds[stage].iter().map(|&kind| self.again(kind, stage, blocks));
        let again = match kinds {
            Kinds::All => again.try_fold(0, |most, own| Some(most.max(own?)))?,
            Kinds::Any => again.flatten().min()?,
        };
        let splits = self.layout.schedule.splits_backward();
        let of = |kind: usize, again: usize| {
            let piece = self.probes[kind].chunk(layers, again, has_first, has_last);
            let there = if stage == 0 { piece.forward.free.passed } else { piece.forward.arrival.passed };
            let through = there + piece.backward.arrival.passed;
            // Where gradients of parameters are a pass of their own, it comes after no other stage's way back.
            let passed = if splits { there } else { through };
            let busy = piece.forward.free.busy + piece.backward.free.busy + piece.weights.free.busy;
            [busy * self.micro_batches as f64, through, passed]
        };
        let of_kind = |&kind: &usize| match kinds {
            Kinds::All => of(kind, again),
            // What is done again before a gradient has arrived is in no chain: with all blocks these may be shorter than with some.
            Kinds::Any => {
                let (few, all) = (of(kind, again), of(kind, layers));
                [0, 1, 2].map(|value| f64::min(few[value], all[value]))
            }
        };
        let choose = if kinds == Kinds::All { f64::max } else { f64::min };
        let of_kinds = self.kinds[stage].iter().map(of_kind);
        let [all, through, passed] = of_kinds.reduce(|one, other| [0, 1, 2].map(|value| choose(one[value], other[value])))?;
        Some(Cost { all, through, passed, again })
    }

    /// By stage and its number of blocks, from none on: what it takes, where it fits, and if blocks are given, with as many.
    pub(super) fn costs(&self, given: &Option<Vec<usize>>, kinds: Kinds) -> Vec<Vec<Option<Cost>>> {
        let count = self.layout.pipeline;
        let of_stage = |stage: usize| {
            let is_open = |blocks: usize| blocks > 0 && given.as_ref().is_none_or(|cuts| cuts[stage] == blocks);
            (0..=self.blocks - (count - 1)).map(|blocks| is_open(blocks).then(|| self.cost(stage, blocks, kinds))?).collect()
        };
        (0..count).map(of_stage).collect()
    }
}

/// The same cuts with one block moved from a stage to another.
pub(super) fn moves(cuts: &[usize]) -> Vec<Vec<usize>> {
    let pairs = (0..cuts.len()).flat_map(|from| (0..cuts.len()).map(move |to| (from, to)));
    let moved = pairs.filter(|&(from, to)| from != to && cuts[from] > 1).map(|(from, to)| {
        let mut moved = cuts.to_vec();
        (moved[from], moved[to]) = (moved[from] - 1, moved[to] + 1);
        moved
    });
    moved.collect()
}

/// The least that stages of such costs come to over so many blocks, and the blocks of each: `with` says what a stage comes to with those after it, which
/// is `none` where there are none, and is no less the more these come to; nothing where it may not.
pub(super) fn least_of_all(
    costs: &[Vec<Option<Cost>>],
    blocks: usize,
    none: f64,
    with: impl Fn(usize, &Cost, f64) -> Option<f64>,
) -> Option<(f64, Vec<usize>)> {
    // By the first block of those that are left.
    let mut after: Vec<Option<f64>> = vec![None; blocks + 1];
    after[blocks] = Some(none);
    let mut choices = Vec::new();
    for (stage, costs) in costs.iter().enumerate().rev() {
        let mut own = vec![None; blocks + 1];
        let mut choice = vec![0; blocks + 1];
        for start in stage..blocks {
            let possible = costs.iter().enumerate().take(blocks - start + 1);
            for (taken, cost) in possible.filter_map(|(taken, cost)| Some((taken, cost.as_ref()?))) {
                let all = after[start + taken].and_then(|rest| with(stage, cost, rest));
                if let Some(all) = all.filter(|all| own[start].is_none_or(|best| *all < best)) {
                    (own[start], choice[start]) = (Some(all), taken);
                }
            }
        }
        after = own;
        choices.push(choice);
    }
    let mut start = 0;
    let cuts = choices.iter().rev().map(|choice| {
        let taken = choice[start];
        start += taken;
        taken
    });
    Some((after[0]?, cuts.collect()))
}
