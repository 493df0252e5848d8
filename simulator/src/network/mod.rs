//! Links that communication loads, its duration when alone on them, and max-min fair sharing among
//! flows. It must not know Programs: a flow has a size and a route.

mod algorithm_terms;
mod fair_share;
mod orders;
mod ring_steps;
mod rotation;
mod saturation;
mod shape;

pub(crate) use algorithm_terms::AlgorithmTerms;
pub use fair_share::{ActivityId, FairShare, ResourceId};
pub use ring_steps::Collectives;
pub(crate) use ring_steps::{Hop, hops, is_ring_collective, set_step_costs, steps};
pub(crate) use rotation::MeshRotation;
pub(crate) use saturation::{LoadedLinks, links_that_can_saturate};
pub(crate) use shape::{FlowContext, Shape, capacity, has_queue};
