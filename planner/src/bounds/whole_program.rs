//! Bounds from a layout's own Program, where truncated models do not hold.

use super::bound::{Bound, Bounded, Excluded};
use super::context::Bounds;
use super::passes::{MicroBatchMemory, PersistentMemory, TimedList};
use crate::space::Request;
use foretell_program::{Layout, Phase, Plan, StageProgram};
use foretell_simulator::{LeastTimes, Oversubscription, least_times, least_times_on};

/// Bounds all variants of a family by the kernels of the busiest stage. The update does not count:
/// data-parallel ranks may shard it.
pub(super) fn bound_by_kernels(bounds: &Bounds<'_>, layout: &Layout, micro_batches: usize) -> Bounded {
    if !bounds.space.devices.speeds.is_empty() && layout.pipeline > 1 {
        // Variants differ in their cuts, and stages in the speed of their devices.
        return Ok(Bound::TRIVIAL);
    }
    let one_replica = Layout { data: 1, ..layout.clone() };
    let kernels = kernel_time_per_micro_batch(bounds, &one_replica, None)?;
    Ok(kernels.map_or(Bound::TRIVIAL, |kernels| bounds.bound(micro_batches, kernels * micro_batches as f64, 0.0)))
}

/// Returns the picoseconds that the busiest stage's kernels of one micro-batch take, without the
/// update, on one kind of device or on the fastest (`None`). `None` if the Program cannot be timed.
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
    let program = bounds.compiler.unplaced(&plan).map_err(|error| Excluded::Indivisible(error.to_string()))?;
    let times = match kind {
        Some(kind) => least_times_on(&program, costs, layout.bucket, |_| kind),
        None => least_times(&program, topology, costs, Oversubscription::Allowed, layout.bucket),
    };
    let Ok(times) = times else { return Ok(None) };
    let of_list = |(list, times): (&StageProgram, &LeastTimes)| {
        let end = list.instructions.iter().position(|one| one.phase == Phase::Update).unwrap_or(list.instructions.len());
        TimedList { list, times, overlap: &plan.overlap }.kernel_time(0..end)
    };
    Ok(Some(program.lists.iter().zip(&times).map(of_list).fold(0.0, f64::max)))
}

/// Bounds one layout by the longest chain of any list, and by what the list keeps from step to
/// step.
pub(super) fn bound_by_chain(bounds: &Bounds<'_>, layout: &Layout, micro_batches: usize) -> Bounded {
    let plan = Plan { layout: layout.clone(), ..bounds.request.base.clone() };
    let Request { topology, costs, oversubscription, .. } = *bounds.request;
    let program = bounds.compiler.unplaced(&plan).map_err(|error| Excluded::Indivisible(error.to_string()))?;
    let Ok(times) = least_times(&program, topology, costs, oversubscription, plan.layout.bucket) else {
        return Ok(Bound::TRIVIAL);
    };
    // With more ranks than devices, ranks start over at the first device. A group that seems to
    // span two nodes may then lie in one, where its collectives are faster. So only kernels count.
    let has_own_devices = program.mesh.world_size() <= topology.device_count();
    let of_list = |(list, times): (&StageProgram, &LeastTimes)| {
        let timed = TimedList { list, times, overlap: &plan.overlap };
        if has_own_devices { longest_chain(&timed) } else { timed.kernel_time(0..list.instructions.len()) }
    };
    let longest = program.lists.iter().zip(&times).map(of_list).fold(0.0, f64::max);
    let weights = bounds.kinds.weights_of_lists(&program);
    let held =
        |(list, weight): (&StageProgram, f64)| (PersistentMemory::of(list).total() + MicroBatchMemory::of(list).peak()) * weight;
    let arena = program.lists.iter().zip(weights).map(held).fold(0.0, f64::max);
    Ok(bounds.bound(micro_batches, longest, arena))
}

fn longest_chain(timed: &TimedList<'_>) -> f64 {
    let time = timed.pass_time(&(0..timed.list.instructions.len() as u32));
    time.from_compute.compute.max(time.from_compute.end).max(time.launch)
}
