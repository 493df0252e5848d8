//! Orders of a cluster's kinds of node: which kind holds the first ranks. It must not know layouts.

use super::PlanJob;
use foretell_topologies::{NodeGroup, Topology};

/// The most node kinds at the start of a topology that other orders leave out. Each order needs its
/// own search.
const MOST_KINDS_LEFT_OUT: usize = 3;

/// A topology that begins with another node kind than the job's.
pub(super) struct NodeOrder {
    /// That kind's name.
    pub first: String,
    /// The reordered topology.
    pub topology: Topology,
    /// The number of devices without the node kinds before `first` in the job's topology; with a
    /// price limit, the number of devices within it.
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
        // Skip nodes that equal a prefix of the job's, or those of another order: a search covers
        // them already.
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
