//! Bounds from a layout's own Program, for layouts that truncated models do not represent.

use super::bound::{Bound, Bounded, Excluded};
use super::context::Bounds;
use super::passes::{MicroBatchMemory, PersistentMemory, TimedList};
use super::pipeline::{OptimizerUpdate, PipelineCosts};
use super::replicas::Replica;
use super::truncated::ChunkCost;
use crate::space::{Request, optimizer_shards};
use foretell_program::{Layout, Operation, Plan, PlanError, Program, Recompute, StageProgram};
use foretell_simulator::{LeastTimes, Oversubscription, least_times, least_times_on};
use foretell_units::diagnostic::Mistake;
use foretell_units::{Picoseconds, Seconds};
use std::sync::Arc;

/// The costs of a replica's chunks, with the base plan's bucket size, so that families share them.
fn replica_costs(bounds: &Bounds<'_>, layout: &Layout, micro_batches: usize) -> Replica {
    let layout = Layout { bucket: bounds.space.base.bucket, ..layout.clone() };
    bounds.replicas.of(&layout, micro_batches, |own, micro_batches| costs_of_replica(bounds, own, micro_batches))
}

/// Bounds all variants of a family by the passes of one replica. Communication among data-parallel
/// ranks does not count, nor the update, which they may shard.
///
/// Bounds that many families share come first. The first bound that reaches `enough` is returned.
pub(super) fn bound_by_passes(bounds: &Bounds<'_>, layout: &Layout, micro_batches: usize, enough: Option<Seconds>) -> Bounded {
    if !bounds.space.devices.speeds.is_empty() && layout.pipeline > 1 {
        // No bound: variants differ in their cuts, and stages in the speed of their devices.
        return Ok(Bound::TRIVIAL);
    }
    let suffices = |bound: &Bound| bound.time.is_some_and(|time| enough.is_some_and(|enough| time >= enough));
    // Recomputation only adds kernels.
    let without = Layout { recompute: Recompute::None, ..layout.clone() };
    if layout.pipeline > 1
        && let Some(kernels) = kernels_of_all_stages(bounds, &without, micro_batches)
    {
        // The busiest stage has at least the average over all stages.
        let bound = bounds.bound(micro_batches, kernels * micro_batches as f64 / layout.pipeline as f64, 0.0);
        if suffices(&bound) {
            return Ok(bound);
        }
    }
    let mut found = Bound::TRIVIAL;
    for layout in [&without, layout].into_iter().skip(usize::from(without == *layout)) {
        let costs = replica_costs(bounds, layout, micro_batches).map_err(Excluded::Indivisible)?;
        let bound = costs.map_or(Bound::TRIVIAL, |costs| {
            let pipeline = PipelineCosts::of_positions(&costs, layout.schedule, layout.pipeline, layout.virtual_stages);
            bounds.bound(micro_batches, pipeline.least_time(micro_batches, OptimizerUpdate::LeftOut), 0.0)
        });
        if suffices(&bound) {
            return Ok(bound);
        }
        found = bound;
    }
    Ok(found)
}

/// Returns the picoseconds that the kernels of one micro-batch take on all stages together, taken
/// from the layout without a pipeline. `None` if that is not known.
fn kernels_of_all_stages(bounds: &Bounds<'_>, layout: &Layout, micro_batches: usize) -> Option<f64> {
    let schedule = layout.schedule.of_one_chunk();
    let one_stage =
        Layout { pipeline: 1, virtual_stages: 1, schedule, placement: None, stage_places: None, cuts: None, ..layout.clone() };
    let costs = replica_costs(bounds, &one_stage, micro_batches).ok().flatten()?;
    Some(costs.iter().map(ChunkCost::kernel_time).sum())
}

/// Compiles one replica and reads the costs of its passes.
fn costs_of_replica(bounds: &Bounds<'_>, layout: Layout, micro_batches: usize) -> Replica {
    let Request { topology, costs, base, .. } = *bounds.request;
    let (stages, chunks, schedule, bucket) = (layout.pipeline, layout.virtual_stages, layout.schedule, layout.bucket);
    // Without a pipeline and a stated rank order, the first replica is on the same devices for any
    // number of replicas.
    let has_same_rank_distances = stages == 1 && layout.placement.is_none();
    let plan = Plan { global_batch: layout.samples_at_once() * micro_batches, layout, ..base.clone() };
    let Some(program) = unplaced(bounds, &plan).map_err(|error| Mistake::of(&error))? else { return Ok(None) };
    let Ok(mut times) = least_times(&program, topology, costs, Oversubscription::Allowed, bucket) else { return Ok(None) };
    if program.lists.len() != stages {
        return Ok(None);
    }
    if !has_same_rank_distances {
        leave_out_communication(&program.lists, &mut times);
    }
    let mut of_positions = vec![ChunkCost::default(); stages * chunks];
    for (list, times) in program.lists.iter().zip(&times) {
        let timed = TimedList { list, times, overlap: &plan.overlap };
        for chunk in 0..chunks {
            of_positions[schedule.position(stages, list.stage, chunk)] = ChunkCost::of_passes(&timed, chunk);
        }
    }
    Ok(Some(Arc::new(of_positions)))
}

/// Compiles a plan without a memory plan. `None` if the search gave up meanwhile; the plan then has
/// the trivial bound.
fn unplaced(bounds: &Bounds<'_>, plan: &Plan) -> Result<Option<Program>, PlanError> {
    match bounds.compiler.unplaced_until(plan, &|| bounds.request.give_up.is_raised()) {
        Err(PlanError::Interrupted) => Ok(None),
        program => program.map(Some),
    }
}

/// Sets the time of collectives and messages to zero, since groups may be on other devices in the
/// layout.
fn leave_out_communication(lists: &[StageProgram], times: &mut [LeastTimes]) {
    for (list, times) in lists.iter().zip(times) {
        for (index, instruction) in list.instructions.iter().enumerate() {
            if matches!(*instruction.operation, Operation::Collective { .. } | Operation::Send { .. }) {
                let of_each = [&mut times.durations, &mut times.in_full_buckets, &mut times.processor];
                of_each.into_iter().for_each(|times| times[index] = Picoseconds::ZERO);
            }
        }
    }
}

/// Returns the picoseconds that the busiest stage's kernels of one micro-batch take, without the
/// update, on devices of `kind`, or of the fastest kind if `kind` is `None`. Returns `None` if the
/// Program cannot be timed.
///
/// # Errors
/// [`Excluded::Indivisible`] if the layout does not divide the model.
pub(super) fn kernel_time_per_micro_batch(
    bounds: &Bounds<'_>,
    layout: &Layout,
    kind: Option<usize>,
) -> Result<Option<f64>, Excluded> {
    let Request { topology, costs, base, .. } = *bounds.request;
    let plan = Plan { layout: layout.clone(), global_batch: layout.samples_at_once(), ..base.clone() };
    let program = unplaced(bounds, &plan).map_err(|error| Excluded::Indivisible(Mistake::of(&error)))?;
    let Some(program) = program else { return Ok(None) };
    let times = match kind {
        Some(kind) => least_times_on(&program, costs, layout.bucket, |_| kind),
        None => least_times(&program, topology, costs, Oversubscription::Allowed, layout.bucket),
    };
    let Ok(times) = times else { return Ok(None) };
    let of_list = |(list, times): (&StageProgram, &LeastTimes)| {
        // Count the passes only: gradient reductions, which are part of the update, may begin
        // before the last pass ends.
        let end = list.passes.last().map_or(0, |pass| pass.instructions.end as usize);
        TimedList { list, times, overlap: &plan.overlap }.kernel_time(0..end)
    };
    Ok(Some(program.lists.iter().zip(&times).map(of_list).fold(0.0, f64::max)))
}

/// Bounds one layout by the longest chain of any list, and by the list's persistent memory.
pub(super) fn bound_by_chain(bounds: &Bounds<'_>, layout: &Layout, micro_batches: usize) -> Bounded {
    let plan = Plan { layout: layout.clone(), ..bounds.request.base.clone() };
    let Request { topology, costs, oversubscription, .. } = *bounds.request;
    let program = unplaced(bounds, &plan).map_err(|error| Excluded::Indivisible(Mistake::of(&error)))?;
    let Some(program) = program else { return Ok(Bound::TRIVIAL) };
    let Ok(times) = least_times(&program, topology, costs, oversubscription, plan.layout.bucket) else {
        return Ok(Bound::TRIVIAL);
    };
    // With more ranks than devices, ranks start over at the first device. A group that seems to
    // span two nodes may then be in one, where its collectives are faster. So only kernels count.
    let has_own_devices = program.mesh.world_size() <= topology.device_count();
    let of_list = |(list, times): (&StageProgram, &LeastTimes)| {
        let timed = TimedList { list, times, overlap: &plan.overlap };
        if has_own_devices { longest_chain(&timed) } else { timed.kernel_time(0..list.instructions.len()) }
    };
    let longest = program.lists.iter().zip(&times).map(of_list).fold(0.0, f64::max);
    let weights = bounds.kinds.weights_of_lists(&program);
    let rates = bounds.memory_rates;
    let rates = if optimizer_shards(layout) > 1 { rates.of_gathered_parameters() } else { rates };
    let held = |(list, weight): (&StageProgram, f64)| {
        (PersistentMemory::of(list, &rates).total() + MicroBatchMemory::of(list, rates.transient).peak()) * weight
    };
    let bytes = program.lists.iter().zip(weights).map(held).fold(0.0, f64::max);
    Ok(bounds.bound(micro_batches, longest, bytes))
}

fn longest_chain(timed: &TimedList<'_>) -> f64 {
    let time = timed.pass_time(&(0..timed.list.instructions.len() as u32));
    time.from_compute.compute.max(time.from_compute.end).max(time.launch)
}
