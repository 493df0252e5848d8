//! Time and memory of stages with any number of blocks, and the cuts that minimise a sum over them.

use crate::bounds::pipeline::{InFlight, stage_memory};
use crate::bounds::truncated::{Chunk, TruncatedModel};
use crate::space::most_shards;
use foretell_program::{Layout, Recompute};
use std::sync::Arc;

/// Which of a stage's devices count if its replicas are on several kinds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum DevicesOfStage {
    /// The slowest and the smallest, for a choice that suits all replicas.
    All,
    /// The fastest and the largest, for a lower bound.
    Any,
}

/// Times of a stage with some number of blocks, in picoseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct StageCost {
    /// All passes of all micro-batches.
    pub(super) all_passes: f64,
    /// The forward and backward pass of one micro-batch.
    pub(super) round_trip: f64,
    /// Part of `round_trip` that overlaps with no pass of the stages after it.
    pub(super) serial: f64,
    /// Number of recomputed blocks.
    pub(super) recomputed: usize,
}

/// The stages of a layout whose blocks are to be chosen. Kinds of devices are numbered among the
/// kinds in use.
pub(super) struct FittedStages {
    /// Truncated model on each kind.
    pub(super) models: Vec<Arc<TruncatedModel>>,
    /// Kind of each stage, for each different replica of the pipeline.
    pub(super) pipelines: Vec<Vec<usize>>,
    /// The different kinds of each stage.
    pub(super) kinds: Vec<Vec<usize>>,
    /// Memory weight of each kind.
    pub(super) memory_weights: Vec<f64>,
    pub(super) in_flight: Arc<InFlight>,
    pub(super) layout: Layout,
    pub(super) micro_batches: usize,
    /// Blocks of all stages together.
    pub(super) blocks: usize,
    /// Memory budget of each stage, in weighted bytes. `None` takes the recomputation
    /// from the layout.
    pub(super) budgets: Option<Vec<f64>>,
}

impl FittedStages {
    fn chunk(&self, stage: usize, blocks: usize, recomputed: usize) -> Chunk {
        let (has_first, has_last) = (stage == 0, stage + 1 == self.layout.pipeline);
        let ends = usize::from(has_first) + usize::from(has_last);
        let equal_blocks = blocks.saturating_sub(ends);
        Chunk { equal_blocks, offset: 0, recomputable: equal_blocks, recomputed, has_first, has_last }
    }

    /// Returns the least weighted bytes of a stage on devices of one kind.
    pub(super) fn memory(&self, kind: usize, stage: usize, blocks: usize, recomputed: usize) -> f64 {
        let cost = self.models[kind].chunk(self.chunk(stage, blocks, recomputed));
        let ranks = most_shards(&self.layout);
        let at = |held| stage_memory(&[&cost], held, self.layout.zero, ranks, 1.0, self.layout.offload);
        let bytes = self.in_flight.of_stage(stage).iter().map(at).fold(0.0, f64::max);
        bytes * self.memory_weights[kind]
    }

    /// Returns the fewest recomputed blocks with which a stage fits on devices of one kind, or
    /// `None` if it does not fit.
    fn fewest_recomputed(&self, kind: usize, stage: usize, blocks: usize) -> Option<usize> {
        let Some(&budget) = self.budgets.as_ref().and_then(|budgets| budgets.get(stage)) else {
            return Some(match self.layout.recompute.of_stage(stage) {
                Recompute::FullLayers(layers) => layers,
                Recompute::None | Recompute::Selective | Recompute::Full | Recompute::AllBut(_) => 0,
                Recompute::FullLayersOfStages(_) => unreachable!("invariant: it is that of one stage"),
            });
        };
        let fits = |recomputed: usize| self.memory(kind, stage, blocks, recomputed) <= budget;
        let all = self.chunk(stage, blocks, 0).equal_blocks;
        if fits(0) {
            return Some(0);
        }
        if !fits(all) {
            return None;
        }
        let (mut too_few, mut enough) = (0, all);
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

    /// Returns the cost of a stage with `blocks` blocks, or `None` if it does not fit.
    fn cost(&self, stage: usize, blocks: usize, devices: DevicesOfStage) -> Option<StageCost> {
        let mut fewest = self.kinds[stage].iter().map(|&kind| self.fewest_recomputed(kind, stage, blocks));
        let recomputed = match devices {
            DevicesOfStage::All => fewest.try_fold(0, |most, own| Some(most.max(own?)))?,
            DevicesOfStage::Any => fewest.flatten().min()?,
        };
        let splits_backward = self.layout.schedule.splits_backward();
        let times = |kind: usize, recomputed: usize| {
            let cost = self.models[kind].chunk(self.chunk(stage, blocks, recomputed));
            let forward = if stage == 0 { cost.forward.from_compute.message } else { cost.forward.from_arrival.message };
            let round_trip = forward + cost.backward.from_arrival.message;
            // Weight-gradient passes of the stages after it may come after this stage's backward
            // pass.
            let serial = if splits_backward { forward } else { round_trip };
            let per_micro_batch =
                cost.forward.from_compute.compute + cost.backward.from_compute.compute + cost.weights.from_compute.compute;
            [per_micro_batch * self.micro_batches as f64, round_trip, serial]
        };
        let on_kind = |&kind: &usize| match devices {
            DevicesOfStage::All => times(kind, recomputed),
            // Recomputation that runs before the gradient arrives is in no chain. So chains may be
            // shorter with all blocks recomputed than with some, and the smaller of both counts.
            DevicesOfStage::Any => {
                let all = self.chunk(stage, blocks, 0).equal_blocks;
                let (few, all) = (times(kind, recomputed), times(kind, all));
                [0, 1, 2].map(|index| f64::min(few[index], all[index]))
            }
        };
        let choose = if devices == DevicesOfStage::All { f64::max } else { f64::min };
        let of_kinds = self.kinds[stage].iter().map(on_kind);
        let [all_passes, round_trip, serial] =
            of_kinds.reduce(|left, right| [0, 1, 2].map(|index| choose(left[index], right[index])))?;
        Some(StageCost { all_passes, round_trip, serial, recomputed })
    }

    /// Returns the cost of each stage by its number of blocks, from 0 on. `None` where the stage
    /// does not fit, or where `cuts` are given and have another number of blocks.
    pub(super) fn costs(&self, cuts: &Option<Vec<usize>>, devices: DevicesOfStage) -> Vec<Vec<Option<StageCost>>> {
        let stages = self.layout.pipeline;
        let of_stage = |stage: usize| {
            let is_open = |blocks: usize| blocks > 0 && cuts.as_ref().is_none_or(|cuts| cuts[stage] == blocks);
            (0..=self.blocks - (stages - 1)).map(|blocks| is_open(blocks).then(|| self.cost(stage, blocks, devices))?).collect()
        };
        (0..stages).map(of_stage).collect()
    }
}

/// Returns all cuts that differ from `cuts` by one block moved from one stage to another.
pub(super) fn cuts_with_one_block_moved(cuts: &[usize]) -> Vec<Vec<usize>> {
    let pairs = (0..cuts.len()).flat_map(|from| (0..cuts.len()).map(move |to| (from, to)));
    let moved = pairs.filter(|&(from, to)| from != to && cuts[from] > 1).map(|(from, to)| {
        let mut moved = cuts.to_vec();
        (moved[from], moved[to]) = (moved[from] - 1, moved[to] + 1);
        moved
    });
    moved.collect()
}

/// Finds the cuts of `blocks` blocks with the least total, by dynamic programming from the last
/// stage to the first. Returns the total and the blocks of each stage, or `None` if no cuts are
/// allowed.
///
/// `add` returns the total of a stage and of those after it, given its cost and the total of those
/// after it; `None` forbids the combination. The total must not decrease as that of the later
/// stages grows. `none` is the total after the last stage.
pub(super) fn least_cuts(
    costs: &[Vec<Option<StageCost>>],
    blocks: usize,
    none: f64,
    add: impl Fn(usize, &StageCost, f64) -> Option<f64>,
) -> Option<(f64, Vec<usize>)> {
    // The total of the stages after the current one, by their first block.
    let mut after: Vec<Option<f64>> = vec![None; blocks + 1];
    after[blocks] = Some(none);
    let mut choices = Vec::new();
    for (stage, costs) in costs.iter().enumerate().rev() {
        let mut totals = vec![None; blocks + 1];
        let mut choice = vec![0; blocks + 1];
        for start in stage..blocks {
            let possible = costs.iter().enumerate().take(blocks - start + 1);
            for (taken, cost) in possible.filter_map(|(taken, cost)| Some((taken, cost.as_ref()?))) {
                let total = after[start + taken].and_then(|rest| add(stage, cost, rest));
                if let Some(total) = total.filter(|total| totals[start].is_none_or(|best| *total < best)) {
                    (totals[start], choice[start]) = (Some(total), taken);
                }
            }
        }
        after = totals;
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
