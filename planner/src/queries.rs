//! What one may ask of a layout or a space without a search.

use crate::answer::PlannerError;
use crate::bounds::{Bounds, Verdict};
use crate::objective::Objective;
use crate::placements::with_placed_operators;
use crate::request::Request;
use crate::space::Family;
use foretell_program::{Layout, Plan};
use foretell_units::{Bytes, Seconds};

/// What a layout takes and needs at least.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Least {
    /// No simulation of it is faster, if it fits.
    pub step: Seconds,
    /// No stage's arena is smaller than the largest must be.
    pub memory: Bytes,
}

/// What a layout of a request's model takes and needs at least; `None` where it does not divide the model.
///
/// # Errors
/// As [`crate::plan`] of the request's model and sizes.
pub fn least(request: &Request<'_>, layout: &Layout) -> Result<Option<Least>, PlannerError> {
    let unlimited = Request { objective: Objective::Time, ..request.clone() };
    let mut bounds = Bounds::new(&unlimited)?;
    let Ok(micro_batches) = (Plan { layout: layout.clone(), ..request.base.clone() }).micro_batches() else { return Ok(None) };
    let family = Family { layout: Layout { zero: 0, shard_group: None, placement: None, ..layout.clone() }, micro_batches };
    // Whatever it needs is more than nothing.
    bounds.memory_limit = Bytes::ZERO;
    let memory = match bounds.of_member(layout, micro_batches) {
        Verdict::OutOfMemory(bytes) => bytes,
        _ => Bytes::ZERO,
    };
    bounds.memory_limit = Bytes::new(u64::MAX);
    let step = match (bounds.of_members(&family, std::slice::from_ref(layout)), bounds.of_member(layout, micro_batches)) {
        (Verdict::Least(of_family), Verdict::Least(own)) => {
            let of_arithmetic = bounds.of_arithmetic(&Family { layout: layout.clone(), micro_batches });
            Seconds::new(own.max(of_family).max(of_arithmetic))
        }
        _ => return Ok(None),
    };
    Ok(Some(Least { step, memory }))
}

/// Every layout of a request's space: each with everything on the devices, and then in the ways in which it may have something on the hosts.
///
/// # Errors
/// As [`least`].
pub fn layouts(request: &Request<'_>) -> Result<Vec<Layout>, PlannerError> {
    let bounds = Bounds::new(request)?;
    let space = &bounds.space;
    let families = with_placed_operators(request, space.families());
    let members =
        families.iter().flat_map(|family| bounds.members(family).into_iter().map(|layout| (layout, family.micro_batches)));
    let forms = |(layout, micro_batches): (Layout, usize)| {
        let on_hosts: Vec<Layout> = space.offloads.iter().filter_map(|&offload| space.offloaded(&layout, offload)).collect();
        let some_recomputed = bounds.partly_recomputed(&layout, micro_batches);
        std::iter::once(layout).chain(on_hosts).chain(some_recomputed)
    };
    Ok(members.flat_map(forms).collect())
}

/// One layout of each family of a request's space: between them they have all shapes of kernels but those of updates that ZeRO shares out.
///
/// # Errors
/// As [`least`].
pub fn families(request: &Request<'_>) -> Result<Vec<Layout>, PlannerError> {
    let families = with_placed_operators(request, Bounds::new(request)?.space.families());
    Ok(families.into_iter().map(|family| family.layout).collect())
}
