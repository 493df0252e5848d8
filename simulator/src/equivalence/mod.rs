//! Decides which ranks are equivalent, so that one representative is simulated for each class.
//!
//! [`lower`] is the entry point. It works in two stages, and both are exact:
//!
//! 1. Before lowering, [`mesh_rotation`] looks for a cyclic shift of one mesh axis that leaves the
//!    Program, the topology and the paces of ranks unchanged. Only one rank of each orbit is
//!    lowered, so neither time nor memory grows with the ranks that it stands for.
//! 2. After lowering, [`folding`] builds a graph of ranks, communicators, links and processors.
//!    [`colour_refinement`] finds the nodes that no simulation can tell apart, and one node of each
//!    class is kept.
//!
//! [`one_rank_per_stage`] assumes equivalence instead: it lowers one rank of each stage, for
//! callers that know the cluster to be uniform.

mod colour_refinement;
mod folding;
mod mesh_rotation;
pub(crate) mod one_rank_per_stage;

pub(crate) use folding::fold;

use crate::cost::CostModel;
use crate::error::SimulationError;
use crate::lowering::{Draft, JobOffset, Lowered, Oversubscription, Threads};
use crate::network::{Collectives, MeshRotation};
use foretell_program::Program;
use foretell_topologies::Topology;

/// Whether equivalent ranks are simulated once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Folding {
    /// Simulate one representative of each class of equivalent ranks. The answer equals that of
    /// [`Self::Off`], up to rounding.
    #[default]
    On,
    /// Simulate every rank.
    Off,
}

/// Lowers a Program and, with folding, keeps one representative of each class of equivalent ranks.
/// `paces` has the factor by which each rank is slower than the cost model says. It is empty if
/// every factor is 1.
pub(crate) fn lower<'a>(
    program: &'a Program,
    topology: &'a Topology,
    costs: &'a CostModel,
    (oversubscription, collectives): (Oversubscription, Collectives),
    folding: Folding,
    paces: &[f64],
) -> Result<Lowered<'a>, SimulationError> {
    let draft = Draft::new(program, topology, costs, oversubscription, JobOffset::default(), Threads::All)?;
    if folding == Folding::Off {
        return Ok(draft.lower(None, collectives)?.with_resources_numbered(topology));
    }
    let rotation = rotation_of(&draft, paces);
    Ok(fold(draft.lower(rotation, collectives)?.with_resources_numbered(topology), paces))
}

/// Lowers a Program so that all links keep their indices in the topology. If the mesh has a
/// rotation, one rank of each orbit stands for all. The result cannot be simulated.
pub(crate) fn lower_by_topology<'a>(
    program: &'a Program,
    topology: &'a Topology,
    costs: &'a CostModel,
    oversubscription: Oversubscription,
    paces: &[f64],
) -> Result<Lowered<'a>, SimulationError> {
    let draft = Draft::new(program, topology, costs, oversubscription, JobOffset::default(), Threads::All)?;
    let rotation = rotation_of(&draft, paces);
    draft.lower(rotation, Collectives::Flow)
}

fn rotation_of(draft: &Draft<'_>, paces: &[f64]) -> Option<MeshRotation> {
    let find = || mesh_rotation::find_rotation(draft.program, draft.topology, paces, draft.uneven_groups());
    if draft.has_own_processors() { find() } else { None }
}
