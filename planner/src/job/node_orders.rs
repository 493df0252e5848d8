//! Orders of a cluster's kinds of node: which kind holds the first ranks. It must not know layouts.

use super::PlanJob;
use foretell_topologies::{NodeGroup, Topology};

/// Most node kinds at the beginning of a file that are left out. Each needs a search of its own.
const MOST_KINDS_LEFT_OUT: usize = 3;

/// A topology that begins with another node kind than the job's.
pub(super) struct NodeOrder {
    /// That kind's name.
    pub first: String,
    /// The reordered topology.
    pub topology: Topology,
    /// The devices without the kinds that come before it in the job's topology, or those within the
    /// price limit.
    pub devices: usize,
}

/// The other orders that a job may take.
pub(super) fn other_orders(job: &PlanJob<'_>) -> Vec<NodeOrder> {
    let groups = job.topology.node_groups();
    let unnamed = |groups: &[NodeGroup]| -> Vec<NodeGroup> {
        groups.iter().map(|group| NodeGroup { name: String::new(), ..group.clone() }).collect()
    };
    let (mut seen, mut found) = (Vec::new(), Vec::new());
    for place in (1..groups.len()).filter(|_| !job.keeps_node_order && !job.oversubscribes).take(MOST_KINDS_LEFT_OUT) {
        // Skips what equals a prefix of the job's nodes: the search has seen it.
        let left = unnamed(&groups[place..]);
        let is_known = seen.contains(&left) || unnamed(&groups[..groups.len() - place]) == left;
        if let Ok(topology) = job.topology.clone().beginning_with(&groups[place].name)
            && !is_known
        {
            let rest = groups[place..].iter().map(|group| group.devices * group.count).sum();
            let devices = if job.price_limit.is_some() { job.devices_on(&topology) } else { rest };
            found.push(NodeOrder { first: groups[place].name.clone(), topology, devices });
            seen.push(left);
        }
    }
    found
}
