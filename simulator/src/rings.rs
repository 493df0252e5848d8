//! Collectives that go round a ring, step by step: who sends to whom, over which links.
//!
//! Every step each member sends a part to the next and takes one from the member before it. It must not know when.

use crate::cost::CostModel;
use crate::network::{Shape, ring_orders};
use crate::pairing::GroupSet;
use foretell_program::Collective;
use foretell_topologies::{DeviceId, Topology, TopologyError};

/// How collectives are simulated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Collectives {
    /// As one flow over all links of the algorithm, from when the last member has reached it: a few events, however many members there are.
    #[default]
    Flow,
    /// All-reduce, reduce-scatter and all-gather around rings, every step of every member a message, which waits for the step before and for
    /// the message from the neighbour. Others as flows.
    Steps,
}

/// A member of a ring that sends to the next.
#[derive(Clone, Debug)]
pub(crate) struct Hop {
    /// Whose, by its place in [`crate::lowering::Lowered::groups`].
    pub(crate) group: u32,
    /// The ranks that are simulated for both ends.
    pub(crate) sender: u32,
    pub(crate) receiver: u32,
    /// The hop that ends where this one begins, and the one that begins where it ends.
    pub(crate) before: u32,
    pub(crate) after: u32,
    pub(crate) shape: Shape,
    /// How many hops it stands for at its sender and at its receiver.
    pub(crate) weights: [f64; 2],
}

/// Whether a collective is one that goes round a ring.
pub(crate) fn goes_round(collective: Collective) -> bool {
    matches!(collective, Collective::AllReduce | Collective::ReduceScatter | Collective::AllGather)
}

/// How many steps it takes among so many members.
pub(crate) fn steps(collective: Collective, members: usize) -> u32 {
    let once = members as u32 - 1;
    if collective == Collective::AllReduce { 2 * once } else { once }
}

/// The hops of a group's rings; `ranks` are the members, `first` is the number of the first hop.
pub(crate) fn hops(
    topology: &Topology,
    costs: &CostModel,
    group: u32,
    ranks: &[u32],
    devices: &[DeviceId],
    first: u32,
) -> Result<Vec<Hop>, TopologyError> {
    let mut hops = Vec::new();
    for order in ring_orders(topology, devices) {
        let begin = first + hops.len() as u32;
        let length = order.len() as u32;
        for (position, &from) in (0..).zip(&order) {
            let to = order[(position as usize + 1) % order.len()];
            hops.push(Hop {
                group,
                sender: ranks[from],
                receiver: ranks[to],
                before: begin + (position + length - 1) % length,
                after: begin + (position + 1) % length,
                shape: Shape::point_to_point(topology, &costs.links, devices[from], devices[to])?,
                weights: [1.0; 2],
            });
        }
    }
    Ok(hops)
}

impl GroupSet {
    /// Whether its collective that is the `which`-th different one is run step by step.
    pub(crate) fn is_stepped(&self, which: usize) -> bool {
        !self.hops.is_empty() && goes_round(self.collectives.distinct()[which].kind)
    }
}
