//! Deadlines for simulations: when a layout is certain to be too slow, its simulation can stop.
//!
//! A deadline gives the least time from each pass to the end of the step. A simulation stops at the
//! first pass after which the step must be longer than the best known step.

use crate::bounds::{Bounds, ROUNDING};
use crate::error::PlannerError;
use crate::space::Request;
use foretell_program::{Layout, Program, StageProgram, Stream, Task};
use foretell_simulator::Deadline;
use foretell_units::{Picoseconds, Seconds};

/// Returns the deadline of a simulation of `program`, compiled from `layout`, if steps longer than
/// `step` do not matter. `None` if nothing is known about the time left in its step.
///
/// # Errors
/// As [`crate::lower_bounds`].
pub fn deadline(
    request: &Request<'_>,
    layout: &Layout,
    program: &Program,
    step: Seconds,
) -> Result<Option<Deadline>, PlannerError> {
    Ok(deadline_of(&Bounds::new(request)?, layout, program, step))
}

/// As [`deadline`], with prepared bounds.
pub(super) fn deadline_of(bounds: &Bounds<'_>, layout: &Layout, program: &Program, step: Seconds) -> Option<Deadline> {
    // Woven passes share instructions, so no pass has a last kernel.
    if bounds.request.base.overlap.passes {
        return None;
    }
    let time_left = bounds.time_left(layout)?;
    let outside_of_passes = Picoseconds::from(time_left.overhead).0 as f64;
    let of_list = |list: &StageProgram| {
        let (order, left) = (&time_left.timetable.orders[list.stage], &time_left.after_passes[list.stage]);
        after_last_kernels(list, order, left, outside_of_passes)
    };
    Some(Deadline { step: step.into(), remaining: program.lists.iter().map(of_list).collect() })
}

/// Returns, for the last kernel of each pass of a list, the least time from its end to the end of
/// the step: `left[pass]` plus `overhead` picoseconds. Empty if the list's passes differ from
/// `order`.
fn after_last_kernels(list: &StageProgram, order: &[Task], left: &[f64], overhead: f64) -> Vec<(u32, Picoseconds)> {
    if !list.passes.iter().map(|pass| &pass.task).eq(order) {
        return Vec::new();
    }
    let is_kernel = |&index: &u32| list.streams[list.instructions[index as usize].stream.0 as usize] == Stream::Compute;
    let of_passes = list.passes.iter().zip(left).filter_map(|(pass, left)| {
        let last = pass.instructions.clone().rev().find(is_kernel)?;
        Some((last, Picoseconds(((left + overhead) * ROUNDING).max(0.0) as u64)))
    });
    let mut found: Vec<(u32, Picoseconds)> = of_passes.collect();
    found.sort_unstable();
    found
}
