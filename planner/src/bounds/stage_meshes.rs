//! Bounds of layouts whose stages have their own meshes.
//!
//! A stage runs the same passes as in a pipeline whose stages all have its mesh. Only messages
//! differ: between unequal meshes they have other sizes, and not every rank sends one. So each mesh
//! has its own truncated model, without messages.

use super::bound::{Bound, Bounded, Excluded};
use super::context::Bounds;
use super::pipeline::{OptimizerUpdate, PipelineCosts};
use crate::space::{most_shards, most_shards_of_stage};
use foretell_program::{Layout, Plan, StageLayout};

/// Returns one bound for several layouts that have the same stage meshes. The layouts may differ
/// only in their cuts and in ZeRO. Communication between data-parallel ranks is left out, as is the
/// optimizer update, which they may shard.
pub(super) fn bound(bounds: &Bounds<'_>, layouts: &[Layout], stages: &[StageLayout], micro_batches: usize) -> Bounded {
    let Bounds { request, kinds, hosts, .. } = bounds;
    let Some(layout) = layouts.first() else { return Ok(Bound::TRIVIAL) };
    if bounds.space.model.pattern.is_none() || !kinds.kinds.iter().all(|&kind| request.costs.knows_collectives(kind)) {
        return Ok(Bound::TRIVIAL);
    }
    let Ok(mesh) = (Plan { layout: layout.clone(), ..request.base.clone() }).mesh() else { return Ok(Bound::TRIVIAL) };
    // The different pairs of a mesh and a kind of device, and the pair of each stage.
    let mut different: Vec<(&StageLayout, Option<usize>)> = Vec::new();
    let mut pair_of_stage = Vec::with_capacity(stages.len());
    for (stage, own) in stages.iter().enumerate() {
        let kind = mesh.stage_ranks(stage).first().and_then(|rank| kinds.kind_of(rank.0));
        let pair = different.iter().position(|other| *other == (own, kind)).unwrap_or_else(|| {
            different.push((own, kind));
            different.len() - 1
        });
        pair_of_stage.push(pair);
    }
    let samples = layout.samples_at_once();
    let mut models = Vec::new();
    let (mut weights, mut copy_times) = (Vec::new(), Vec::new());
    for (own, kind) in different {
        let one_replica = Layout {
            stages: None,
            tensor: own.tensor,
            context: own.context,
            expert: own.expert,
            micro_batch: samples / own.data / own.expert,
            zero: 0,
            shard_group: None,
            ..layout.clone()
        };
        let model = bounds.truncated.without_messages(&one_replica, micro_batches, kind);
        models.push(model.map_err(Excluded::Indivisible)?);
        weights.push(kinds.weight_of(kind));
        copy_times.push(hosts.copy_time_of(kinds, kind));
    }
    let in_flight = bounds.pipelines.in_flight(layout, micro_batches);
    let (mut time, mut bytes) = (f64::INFINITY, f64::INFINITY);
    for variant in layouts {
        let cuts = bounds.cuts(variant);
        let costs = PipelineCosts::new(&models, &pair_of_stage, &weights, &cuts, layout.schedule, 1).offloading(hosts.offload(
            layout,
            &copy_times,
            most_shards(variant),
        ));
        time = time.min(costs.least_time(micro_batches, OptimizerUpdate::LeftOut));
        bytes =
            bytes.min(costs.least_memory(&in_flight, variant.zero, |stage| most_shards_of_stage(variant, &stages[stage]), 1.0));
    }
    Ok(bounds.bound(micro_batches, time, bytes))
}
