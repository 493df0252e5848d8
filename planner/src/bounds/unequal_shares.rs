//! Bounds of layouts whose data-parallel ranks have unequal shares of the samples.

use super::bound::{Bound, Bounded, Excluded};
use super::context::Bounds;
use super::pipeline::{OptimizerUpdate, PipelineCosts};
use super::truncated::TruncatedModel;
use super::whole_program::kernel_time_per_micro_batch;
use crate::space::{inner_ranks, most_shards};
use foretell_program::Layout;
use std::sync::Arc;

/// Bounds all variants of a family without a pipeline: the time by the slowest rank, the memory by
/// the fullest rank. Families with a pipeline get the trivial bound.
pub(super) fn bound(bounds: &Bounds<'_>, layout: &Layout, shares: &[usize], micro_batches: usize) -> Bounded {
    let Bounds { request, kinds, hosts, .. } = bounds;
    if layout.pipeline != 1 {
        return Ok(Bound::TRIVIAL);
    }
    let inner = inner_ranks(layout);
    let mut different: Vec<(usize, Option<usize>)> = Vec::new();
    for (data, &share) in shares.iter().enumerate() {
        let kind = kinds.kind_of(data * inner).filter(|&kind| request.costs.knows_collectives(kind));
        if !different.contains(&(share, kind)) {
            different.push((share, kind));
        }
    }
    let one_sample = Layout { data: 1, shares: None, zero: 0, shard_group: None, micro_batch: 1, ..layout.clone() };
    let in_flight = bounds.pipelines.in_flight(&one_sample, micro_batches);
    // Optimizer state may be sharded over all ranks.
    let memory_of = |model: Arc<TruncatedModel>, samples: usize, kind: Option<usize>| {
        let weights = [kinds.weight_of(kind)];
        let copy_times = [hosts.copy_time_of(kinds, kind)];
        let cuts = bounds.cuts(&one_sample);
        let costs = PipelineCosts::new(&[model], &[0], &weights, &cuts, layout.schedule, layout.virtual_stages)
            .offloading(hosts.offload(layout, &copy_times, most_shards(layout)));
        costs.least_memory(&in_flight, 1, |_| most_shards(layout), samples as f64)
    };
    let is_truncated = bounds.truncated.represent(&one_sample);
    let (mut time, mut bytes) = (0.0f64, 0.0f64);
    for (share, kind) in different {
        let samples = layout.micro_batch * share;
        // As for other families, the truncated model of one sample shows most layouts that are too
        // large.
        if is_truncated
            && bounds.space.model.experts.is_none()
            && let Ok(model) = bounds.truncated.on_kind(&one_sample, micro_batches, kind)
        {
            let memory = bounds.needed_memory(memory_of(model, samples, kind));
            if memory > bounds.memory_limit {
                return Ok(Bound::too_large(memory));
            }
        }
        let one_rank = Layout { micro_batch: samples, ..one_sample.clone() };
        if !is_truncated {
            let Some(kernels) = kernel_time_per_micro_batch(bounds, &one_rank, kind)? else { return Ok(Bound::TRIVIAL) };
            time = time.max(kernels * micro_batches as f64);
            continue;
        }
        let model = bounds.truncated.on_kind(&one_rank, micro_batches, kind).map_err(Excluded::Indivisible)?;
        let (cuts, models) = (bounds.cuts(&one_rank), [Arc::clone(&model)]);
        let costs = PipelineCosts::new(&models, &[0], &[1.0], &cuts, one_rank.schedule, one_rank.virtual_stages);
        time = time.max(costs.least_time(micro_batches, OptimizerUpdate::LeftOut));
        bytes = bytes.max(memory_of(model, 1, kind));
    }
    Ok(bounds.bound(micro_batches, time, bytes))
}
