//! The transfer of new weights from the actor to the engines.
//!
//! The ranks that together hold one copy of the model gather it, and keep what their engine needs.
//! Engines on other devices receive the weights from a rank. So the weights cross the slowest link
//! of the ranks once. This module must not know how long an engine generates.

use crate::gpu::{Cluster, NodeSpread};
use foretell_program::{Collective, Layout, RolloutPlacement};
use foretell_units::{Bytes, Seconds};

/// Number of ranks that together hold one copy of the parameters.
fn ranks_of_copy(layout: &Layout) -> usize {
    let shards = if layout.zero == 3 { layout.shard_group.unwrap_or(layout.data) } else { 1 };
    layout.tensor * layout.pipeline * layout.expert * shards
}

/// Time until all engines have the actor's weights. The ranks of a copy are assumed to be
/// neighbours.
pub fn transfer(weights: Bytes, layout: &Layout, ranks: usize, placement: RolloutPlacement, cluster: &Cluster) -> Seconds {
    let passed = |devices: usize| {
        let spread = NodeSpread::of_devices(0..devices, cluster);
        spread.time(Collective::AllGather, weights.value(), cluster)
    };
    let gathered = passed(ranks_of_copy(layout).min(ranks));
    match placement {
        RolloutPlacement::Colocated => gathered,
        RolloutPlacement::Split(devices) => gathered + passed(ranks + devices),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Profiles;

    #[test]
    fn weights_pass_the_slowest_link_once() {
        let cluster = Profiles::library().expect("sound").cluster("h100-sxm-80g", None, 8, 16, None).expect("known");
        let weights = Bytes::new(16_000_000_000);
        let time = |layout: &Layout, ranks, placement| transfer(weights, layout, ranks, placement, &cluster).value();
        let replicated = Layout { data: 8, ..Layout::default() };
        assert_eq!(time(&replicated, 8, RolloutPlacement::Colocated), 0.0);
        let sharded = Layout { data: 8, zero: 3, ..Layout::default() };
        let in_node = time(&sharded, 8, RolloutPlacement::Colocated);
        let rate = cluster.link.ring.range(..=8).next_back().expect("a ring").1.value();
        assert!((in_node / (7.0 / 8.0 * 16e9 / rate) - 1.0).abs() < 0.05, "{in_node}");
        let over_nodes = time(&Layout { data: 16, ..sharded.clone() }, 16, RolloutPlacement::Colocated);
        // Eight network cards together are about as fast as a device's NVLink.
        assert!(over_nodes > in_node && over_nodes < 2.0 * in_node, "{over_nodes} beside {in_node}");
        assert!(time(&sharded, 8, RolloutPlacement::Split(8)) > in_node);
    }
}
