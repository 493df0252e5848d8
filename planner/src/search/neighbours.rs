//! Layouts that differ from another one in a single choice.
//!
//! They cover choices that a plan file can state and the space does not list: other bucket sizes,
//! cuts block by block, recomputation by stage, rank orders and shard groups.

use super::timed_cuts::pipelines_cut_by_time;
use crate::bounds::Bounds;
use crate::space::inner_ranks;
use foretell_program::{Axis, CollectiveAlgorithm, Layout, Recompute, usual_cuts};
use foretell_units::Bytes;

/// The most chunks from which a block is moved: those with the most work.
const MOST_GIVERS: usize = 64;

/// Smallest and largest bucket to try.
const BUCKETS: std::ops::RangeInclusive<u64> = (1 << 20)..=(2 << 30);

/// Rank orders to try besides the usual one. Axes that are left out follow in the usual order.
const RANK_ORDERS: [&[Axis]; 2] =
    [&[Axis::Tensor, Axis::Context, Axis::Expert, Axis::Pipeline], &[Axis::Tensor, Axis::Data, Axis::Context, Axis::Expert]];

/// Returns the layouts that differ from `layout` in one choice that the user has left open.
pub(super) fn neighbours(bounds: &Bounds<'_>, layout: &Layout) -> Vec<Layout> {
    let mut found = Vec::new();
    found.extend(buckets(bounds, layout));
    found.extend(pipelines_cut_by_time(bounds, layout));
    found.extend(cuts(bounds, layout));
    found.extend(recomputations(bounds, layout));
    found.extend(shard_groups(bounds, layout));
    found.extend(rank_orders(bounds, layout));
    found.extend(collectives(bounds, layout));
    found.retain(|other| other != layout);
    found
}

/// Returns simpler layouts with no more ranks: fewer stages, no context parallelism, usual cuts and
/// rank order, a lower stage of ZeRO. Fixed fields stay.
pub(super) fn simpler(bounds: &Bounds<'_>, layout: &Layout) -> Vec<Layout> {
    let fixed = &bounds.space.fixed;
    let mut found = Vec::new();
    if layout.stages.is_some() || layout.shares.is_some() {
        return found;
    }
    let mut push = |condition: bool, layout: Layout| found.extend(condition.then_some(layout));
    let merged = |layout: &Layout, factor: usize| {
        // The ranks of dropped stages become data-parallel ranks, with smaller micro-batches if the
        // global batch requires it.
        let data = layout.data * factor;
        let micro_batch = (bounds.space.global_batch / (data * layout.expert)).min(layout.micro_batch).max(1);
        Layout { data, micro_batch, cuts: None, stage_places: None, placement: None, ..layout.clone() }
    };
    let may_merge = fixed.data.is_none()
        && fixed.micro_batch.is_none()
        && fixed.cuts.is_none()
        && fixed.stage_places.is_none()
        && fixed.rank_order.is_none();
    if layout.context > 1 {
        let without = Layout { context: 1, ..merged(layout, layout.context) };
        push(may_merge && fixed.context.is_none(), without);
    }
    let factors = (2..=layout.pipeline).rev();
    let is_tried = |factor: &usize| (*factor <= 3 || *factor == layout.pipeline) && layout.pipeline.is_multiple_of(*factor);
    for factor in factors.filter(is_tried) {
        let pipeline = layout.pipeline / factor;
        let fewer = Layout { pipeline, ..merged(layout, factor) };
        let fewer =
            if pipeline == 1 { Layout { virtual_stages: 1, schedule: bounds.space.base.schedule, ..fewer } } else { fewer };
        let is_open = fixed.pipeline.is_none() && fixed.schedule.is_none() && fixed.virtual_stages.is_none();
        push(may_merge && is_open, fewer);
    }
    push(fixed.cuts.is_none() && layout.cuts.is_some(), Layout { cuts: None, ..layout.clone() });
    push(fixed.rank_order.is_none() && layout.placement.is_some(), Layout { placement: None, ..layout.clone() });
    let zeros = (0..layout.zero).filter(|&zero| fixed.zero.is_none() && (zero > 0 || fixed.shard_group.is_none()));
    for zero in zeros {
        push(true, Layout { zero, shard_group: layout.shard_group.filter(|_| zero > 0), ..layout.clone() });
    }
    found
}

/// Returns the layouts with other buckets. Even one rank updates its parameters bucket by bucket.
pub(super) fn buckets(bounds: &Bounds<'_>, layout: &Layout) -> Vec<Layout> {
    if bounds.space.fixed.bucket.is_some() {
        return Vec::new();
    }
    let own = layout.bucket.count();
    let sizes = [own / 16, own / 4, own / 2, own * 2, own * 4, own * 16];
    sizes
        .into_iter()
        .filter(|size| BUCKETS.contains(size))
        .map(|size| Layout { bucket: Bytes::new(size), ..layout.clone() })
        .collect()
}

/// Moves one block from each chunk to each neighbouring chunk, to the first, to the last, and to
/// the chunk with the least work.
fn cuts(bounds: &Bounds<'_>, layout: &Layout) -> Vec<Layout> {
    let work = &bounds.space.model.work;
    let chunks = layout.pipeline * layout.virtual_stages;
    if bounds.space.fixed.cuts.is_some() || layout.pipeline == 1 || work.len() < chunks {
        return Vec::new();
    }
    let own = layout.cuts.clone().unwrap_or_else(|| usual_cuts(work, layout.pipeline, layout.virtual_stages));
    let moved = moved_blocks(&own, work);
    moved.into_iter().map(|cuts| Layout { cuts: Some(cuts), ..layout.clone() }).collect()
}

/// Returns the cuts that differ from `own` by one block moved to another chunk. `work` is the work
/// of each block.
fn moved_blocks(own: &[usize], work: &[f64]) -> Vec<Vec<usize>> {
    let mut rest = work;
    let work_of_chunk = own.iter().map(|&blocks| {
        let (chunk, after) = rest.split_at(blocks);
        rest = after;
        chunk.iter().sum::<f64>()
    });
    let work_of_chunk: Vec<f64> = work_of_chunk.collect();
    let mut givers: Vec<usize> = (0..own.len()).filter(|&chunk| own[chunk] > 1).collect();
    givers.sort_by(|&a, &b| work_of_chunk[b].total_cmp(&work_of_chunk[a]));
    let Some(least) = (0..own.len()).min_by(|&a, &b| work_of_chunk[a].total_cmp(&work_of_chunk[b])) else { return Vec::new() };
    let mut found: Vec<Vec<usize>> = Vec::new();
    for from in givers.into_iter().take(MOST_GIVERS) {
        let takers = [from.wrapping_sub(1), from + 1, 0, own.len() - 1, least];
        for to in takers.into_iter().filter(|&to| from != to && to < own.len()) {
            let mut moved = own.to_vec();
            (moved[from], moved[to]) = (moved[from] - 1, moved[to] + 1);
            if !found.contains(&moved) {
                found.push(moved);
            }
        }
    }
    found
}

/// Recomputes less: attention alone, or fewer blocks on all stages, on one stage, or on all stages
/// from one on (for at most eight stages).
fn recomputations(bounds: &Bounds<'_>, layout: &Layout) -> Vec<Layout> {
    if bounds.space.fixed.recompute.is_some() {
        return Vec::new();
    }
    let with = |recompute: Recompute| Layout { recompute, ..layout.clone() };
    let layers = bounds.space.model.blocks.div_ceil(layout.pipeline.max(1));
    let of_stages: Vec<usize> = match &layout.recompute {
        Recompute::Full => vec![layers; layout.pipeline],
        Recompute::FullLayers(layers) => vec![*layers; layout.pipeline],
        Recompute::FullLayersOfStages(layers) => layers.clone(),
        Recompute::Selective => return vec![with(Recompute::None)],
        Recompute::None | Recompute::AllBut(_) => return Vec::new(),
    };
    let fewer = |from: usize, to: usize, by: usize| {
        let reduced = of_stages.iter().enumerate().map(
            |(stage, &own)| {
                if (from..to).contains(&stage) { own.saturating_sub(by) } else { own }
            },
        );
        with(Recompute::full_layers(reduced.collect()))
    };
    let stages = layout.pipeline;
    let mut found = vec![with(Recompute::Selective), fewer(0, stages, 1), fewer(0, stages, layers.div_ceil(4))];
    if stages > 1 {
        found.extend((0..stages).step_by(stages.div_ceil(8)).map(|stage| fewer(stage, stages, 1)));
        found.extend((0..stages).step_by(stages.div_ceil(8)).map(|stage| fewer(stage, stage + 1, 1)));
    }
    found.dedup();
    found
}

fn shard_groups(bounds: &Bounds<'_>, layout: &Layout) -> Vec<Layout> {
    let is_open =
        bounds.space.fixed.shard_group.is_none() && layout.zero > 0 && layout.shares.is_none() && layout.stages.is_none();
    if !is_open {
        return Vec::new();
    }
    let in_node = (bounds.space.devices.per_node / inner_ranks(layout).max(1)).max(1);
    let sizes = [in_node, 2 * in_node, 4 * in_node].into_iter();
    let sizes = sizes.filter(|&size| size > 1 && size < layout.data && layout.data.is_multiple_of(size));
    sizes.map(Some).chain([None]).map(|shard_group| Layout { shard_group, ..layout.clone() }).collect()
}

fn rank_orders(bounds: &Bounds<'_>, layout: &Layout) -> Vec<Layout> {
    let is_open = bounds.space.fixed.rank_order.is_none() && layout.stage_places.is_none() && layout.stages.is_none();
    if !is_open || layout.pipeline == 1 || layout.data == 1 {
        return Vec::new();
    }
    let orders = RANK_ORDERS.iter().map(|order| Some(order.to_vec())).chain([None]);
    orders.map(|placement| Layout { placement, ..layout.clone() }).collect()
}

fn collectives(bounds: &Bounds<'_>, layout: &Layout) -> Vec<Layout> {
    if bounds.space.fixed.collective.is_some() {
        return Vec::new();
    }
    // Leave out algorithms that the stack cannot run.
    let known = CollectiveAlgorithm::ALL.into_iter().filter(|&algorithm| bounds.request.base.stack.has(algorithm));
    known.map(|collective| Layout { collective, ..layout.clone() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::Request;
    use foretell_models::Model;
    use foretell_program::{Plan, Stack};
    use foretell_simulator::CostModel;
    use foretell_topologies::Topology;

    #[test]
    fn blocks_move_between_any_number_of_chunks() {
        let moved = moved_blocks(&[1, 2, 1], &[1.0, 1.0, 1.0, 0.5]);
        assert_eq!(moved, [[2, 1, 1], [1, 1, 2]]);
        let (own, mut work) = (vec![2; 100], vec![1.0; 200]);
        (work[140], work[7]) = (9.0, 0.1);
        let moved = moved_blocks(&own, &work);
        assert!(moved.iter().all(|cuts| cuts.len() == 100 && cuts.iter().sum::<usize>() == 200 && !cuts.contains(&0)));
        assert_eq!((moved[0][70], moved[0][69]), (1, 3), "the chunk with the most work gives first");
        assert!(moved.iter().any(|cuts| cuts[70] == 1 && cuts[3] == 3), "and also to the one with the least");
    }

    #[test]
    fn no_neighbour_has_an_algorithm_that_the_stack_lacks() {
        let topology = Topology::library("lab-4x1g-200m").expect("in the library");
        let (model, costs) = (Model::named("mlp").expect("in the zoo"), CostModel::new(None, &topology));
        for (stack, has_trees) in [("foretell", false), ("ddp", true)] {
            let base = Plan { stack: Stack::new(stack), ..Plan::new(Layout { data: 4, ..Layout::default() }, 16) };
            let request = Request::new(&model, "mlp", &topology, &costs, &base);
            let bounds = Bounds::new(&request).expect("a sound request");
            let found = neighbours(&bounds, &base.layout);
            assert!(found.iter().any(|neighbour| neighbour.collective == CollectiveAlgorithm::Ring), "{found:?}");
            assert_eq!(found.iter().any(|neighbour| neighbour.collective == CollectiveAlgorithm::Tree), has_trees, "{found:?}");
        }
    }
}
