//! Pipelines whose cuts even out the time of the stages instead of their arithmetic.
//!
//! If blocks differ in kind, arithmetic is a poor measure of time: the steps of a recurrent layer
//! are many small kernels, and a classifier is one large product.

use crate::bounds::Bounds;
use crate::estimate::kernel_seconds;
use crate::space::{Request, inner_ranks, world_size};
use foretell_models::{GraphOptions, Kernel, differentiate};
use foretell_program::{Layout, Schedule, usual_cuts};
use foretell_simulator::gpu::StackLimits;
use std::collections::HashMap;

/// The most stages of a pipeline that is tried.
const MOST_STAGES: usize = 16;

/// Returns pipelines of this layout's length and of other lengths with cuts by time, if these
/// differ from cuts by arithmetic. Fixed fields stay.
pub(super) fn pipelines_cut_by_time(bounds: &Bounds<'_>, layout: &Layout) -> Vec<Layout> {
    let (space, fixed) = (&bounds.space, &bounds.space.fixed);
    let is_open = fixed.cuts.is_none() && layout.stages.is_none() && layout.shares.is_none() && layout.stage_places.is_none();
    if !is_open {
        return Vec::new();
    }
    let Some(times) = block_times(bounds.request, layout.micro_batch) else { return Vec::new() };
    let (ranks, inner) = (world_size(layout), inner_ranks(layout));
    let may_change = fixed.pipeline.is_none() && fixed.virtual_stages.is_none() && fixed.schedule.is_none();
    let lengths = (2..=times.len().min(MOST_STAGES)).filter(|&stages| stages == layout.pipeline || may_change);
    let mut found = Vec::new();
    for stages in lengths {
        let keeps_chunks = stages == layout.pipeline && layout.virtual_stages > 1;
        if keeps_chunks {
            // With several chunks on each stage, the stages are balanced without this.
            continue;
        }
        let beside = layout.data * stages * inner <= space.devices.count;
        let data = match (beside, fixed.data) {
            (true, _) => layout.data,
            (false, None) if ranks.is_multiple_of(stages * inner) => ranks / (stages * inner),
            _ => continue,
        };
        let cuts = usual_cuts(&times, stages, 1);
        if cuts == usual_cuts(&space.model.work, stages, 1) {
            continue;
        }
        let schedules = match layout.schedule {
            own if layout.pipeline > 1 && layout.virtual_stages == 1 => vec![own],
            _ => of_one_chunk(StackLimits::of(&bounds.request.base.stack)),
        };
        // Keep the size of a micro-batch, or the number of micro-batches.
        let mut sizes = vec![layout.micro_batch];
        if fixed.micro_batch.is_none() && data != layout.data {
            sizes.push(layout.micro_batch * layout.data / data);
        }
        for (&schedule, &micro_batch) in schedules.iter().flat_map(|schedule| sizes.iter().map(move |size| (schedule, size))) {
            let cut = Layout { pipeline: stages, data, schedule, micro_batch, cuts: Some(cuts.clone()), ..layout.clone() };
            found.push(Layout { virtual_stages: 1, placement: None, ..cut });
        }
    }
    found
}

/// The schedules that the stack runs with one chunk on each stage: those with the least memory for
/// their kinds of passes or, if the stack runs none of these, all others.
fn of_one_chunk(limits: Option<&StackLimits>) -> Vec<Schedule> {
    let runs = |schedule: &Schedule| limits.is_none_or(|limits| limits.has(*schedule));
    let usual = Schedule::ALL.into_iter().filter(|schedule| schedule.of_one_chunk() == *schedule && runs(schedule));
    let usual: Vec<Schedule> = usual.collect();
    if usual.is_empty() {
        Schedule::ALL.into_iter().filter(|schedule| schedule.allows(1) && runs(schedule)).collect()
    } else {
        usual
    }
}

/// Returns the forward and backward time of each block over `samples` samples, in seconds. `None`
/// if the model has no such batch.
fn block_times(request: &Request<'_>, samples: usize) -> Option<Vec<f64>> {
    let options = GraphOptions { batch: samples, ..GraphOptions::ONE };
    let graph = request.base.training.graph(request.model, request.name, &options).ok()?;
    let mut known: HashMap<Kernel, f64> = HashMap::new();
    let mut times = vec![0.0; graph.blocks.len()];
    for operator in &differentiate(&graph, 1, |name| request.base.training.is_frozen(name)).operators {
        let kernel = operator.kernel(&operator.extents());
        times[operator.block] += *known.entry(kernel).or_insert_with(|| kernel_seconds(request, &kernel));
    }
    Some(times)
}
