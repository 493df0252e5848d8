//! Questions about a layout or a space that need no search.

use crate::bounds::{Bound, Bounds};
use crate::error::PlannerError;
use crate::operator_sharding::with_sharded_operators;
use crate::space::{Family, Objective, Request};
use foretell_program::{Layout, Plan};
use foretell_units::{Bytes, Seconds};

/// Lower bounds on what a layout needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LowerBounds {
    /// Step time. No simulation of the layout is faster, if the layout fits.
    pub step: Seconds,
    /// Memory of the fullest device, in bytes of the smallest device. Under the request's software
    /// stack it needs at least this..
    pub memory: Bytes,
}

/// Returns lower bounds on what a layout of a request's model needs, or `None` if the layout does
/// not divide the model.
///
/// # Errors
/// As [`crate::plan`], for the sizes of the model and the request.
pub fn lower_bounds(request: &Request<'_>, layout: &Layout) -> Result<Option<LowerBounds>, PlannerError> {
    let by_time = Request { objective: Objective::Time, ..request.clone() };
    let mut bounds = Bounds::new(&by_time)?;
    bounds.count_kernels();
    let Ok(micro_batches) = (Plan { layout: layout.clone(), ..request.base.clone() }).micro_batches() else { return Ok(None) };
    let family = Family { layout: Layout { zero: 0, shard_group: None, placement: None, ..layout.clone() }, micro_batches };
    // Once a bound exceeds the memory limit, no others are computed. So raise the limit until no
    // bound exceeds it.
    bounds.memory_limit = Bytes::ZERO;
    let too_large = |bounds: &Bounds<'_>| {
        let of_family = bounds.layouts(&family, std::slice::from_ref(layout), None);
        [of_family, bounds.layout(layout, micro_batches)].into_iter().find_map(|bounded| match bounded {
            Ok(Bound { time: None, memory }) => Some(memory),
            _ => None,
        })
    };
    while let Some(memory) = too_large(&bounds) {
        bounds.memory_limit = memory;
    }
    let memory = bounds.memory_limit;
    // Without a memory limit, the bounds on time are complete.
    bounds.memory_limit = Bytes::new(u64::MAX);
    let of_family = bounds.layouts(&family, std::slice::from_ref(layout), None);
    // The bound at which a search that needs little (`enough` of zero) would stop.
    let coarse = bounds.layouts(&family, std::slice::from_ref(layout), Some(Seconds::ZERO));
    let (Ok(Bound { time: Some(of_family), .. }), Ok(Bound { time: Some(coarse), .. }), Ok(Bound { time: Some(own), .. })) =
        (of_family, coarse, bounds.layout(layout, micro_batches))
    else {
        return Ok(None);
    };
    let step = own.max(of_family).max(coarse).max(bounds.arithmetic_time(layout));
    Ok(Some(LowerBounds { step, memory }))
}

/// Returns every layout of a request's space. Each is followed by its offloaded forms and by its
/// forms that recompute part of the blocks.
///
/// # Errors
/// As [`lower_bounds`].
pub fn layouts(request: &Request<'_>) -> Result<Vec<Layout>, PlannerError> {
    let bounds = Bounds::new(request)?;
    let space = &bounds.space;
    let families = with_sharded_operators(request, space.families(), &|| false);
    let of_family = |family: &Family| -> Vec<Layout> {
        let forms = |layout: Layout| {
            let offloaded: Vec<Layout> = space.offloads.iter().filter_map(|&offload| space.offloaded(&layout, offload)).collect();
            let recomputed = bounds.partly_recomputed(&layout, family.micro_batches);
            std::iter::once(layout).chain(offloaded).chain(recomputed)
        };
        bounds.variants(family).into_iter().flat_map(forms).collect()
    };
    Ok(families.iter().flat_map(of_family).collect())
}

/// Returns one layout of each family of a request's space. Together they run kernels of every shape
/// that the space has, except for updates that ZeRO shards.
///
/// # Errors
/// As [`lower_bounds`].
pub fn families(request: &Request<'_>) -> Result<Vec<Layout>, PlannerError> {
    let families = with_sharded_operators(request, Bounds::new(request)?.space.families(), &|| false);
    Ok(families.into_iter().map(|family| family.layout).collect())
}
