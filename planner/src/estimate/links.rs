//! Rates of the links between ranks, for estimates.

use foretell_topologies::{Fabric, Topology};

/// The links of a topology's slowest nodes.
#[derive(Clone, Debug)]
pub(super) struct Links {
    /// Devices of a node; unlimited on a torus, where hosts are no boundary.
    per_node: usize,
    /// Bytes per second that a device sends to other devices of its node.
    in_node: f64,
    /// Bytes per second that a node sends to other nodes.
    between_nodes: f64,
    /// Bytes per second that one device alone sends to other nodes.
    of_device: f64,
    /// Seconds of a message in a node.
    latency_in_node: f64,
    /// Seconds of a message between nodes.
    latency_between_nodes: f64,
}

/// Seconds of a message between nodes: a switch and two interfaces.
const LATENCY_BETWEEN_NODES: f64 = 10e-6;

/// Messages between one stage and the next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct StageMessages {
    /// Seconds of a message over the slowest boundary.
    pub(super) slowest: f64,
    /// Seconds of a message over all boundaries, one after the other.
    pub(super) through_all: f64,
}

impl Links {
    pub(super) fn new(topology: &Topology) -> Self {
        if let Fabric::Torus(torus) = &topology.network().fabric {
            // A ring of neighbours uses the links of its dimension in both directions.
            let rate = 2.0 * torus.bandwidth.value();
            let latency = topology.network().latency.value();
            return Self {
                per_node: usize::MAX,
                in_node: rate,
                between_nodes: rate,
                of_device: rate,
                latency_in_node: latency,
                latency_between_nodes: latency,
            };
        }
        let groups = topology.node_groups();
        let least = |value: &dyn Fn(usize) -> Option<f64>| (0..groups.len()).filter_map(value).fold(f64::INFINITY, f64::min);
        let in_node = least(&|group| groups[group].link.map(|link| link.bandwidth.value()));
        let nics = least(&|group| groups[group].nics.map(|nics| nics.total_bandwidth().value()));
        let one = least(&|group| {
            let nics = groups[group].nics?;
            // A device alone uses its share of the node's interfaces, at least one.
            Some(nics.bandwidth.value() * (nics.count as f64 / groups[group].devices.max(1) as f64).max(1.0))
        });
        let latency = least(&|group| groups[group].link.map(|link| link.latency.value()));
        // Uplinks of a tree are left out: flows between neighbouring nodes stay below a leaf
        // switch. Uplinks would matter for all-to-all exchanges, and for rings over all nodes of an
        // oversubscribed tree.
        Self {
            per_node: groups.iter().map(|group| group.devices).min().expect("invariant: a topology has nodes").max(1),
            in_node,
            between_nodes: nics,
            of_device: one,
            latency_in_node: if latency.is_finite() { latency } else { 0.0 },
            latency_between_nodes: LATENCY_BETWEEN_NODES.max(topology.network().latency.value()),
        }
    }

    /// Returns the links for a layout of `ranks` ranks. If all ranks are in one node, links between
    /// nodes do not count.
    pub(super) fn of_world(&self, ranks: usize) -> Self {
        let per_node = if ranks <= self.per_node { usize::MAX } else { self.per_node };
        Self { per_node, ..self.clone() }
    }

    /// Returns `true` if each group of `ranks` consecutive ranks is in one node. If `ranks` does
    /// not divide a node's devices, some group spans two nodes, and is as slow as the links between
    /// them.
    fn lie_in_nodes(&self, ranks: usize) -> bool {
        self.per_node == usize::MAX || ranks <= self.per_node && self.per_node.is_multiple_of(ranks)
    }

    /// Returns the bytes per second and the latency of a group of `ranks` ranks whose devices are
    /// `stride` apart, if all such groups communicate at once.
    fn rate(&self, ranks: usize, stride: usize) -> (f64, f64) {
        if self.lie_in_nodes(ranks.saturating_mul(stride)) {
            return (self.in_node, self.latency_in_node);
        }
        // A ring of neighbours leaves each node once. A node's `stride` groups share its
        // interfaces.
        let sharing = stride.clamp(1, self.per_node) as f64;
        ((self.between_nodes / sharing).min(self.in_node), self.latency_between_nodes)
    }

    /// Returns the seconds of an all-reduce.
    pub(super) fn all_reduce(&self, bytes: f64, ranks: usize, stride: usize) -> f64 {
        if ranks <= 1 {
            return 0.0;
        }
        let (rate, latency) = self.rate(ranks, stride);
        let size = ranks as f64;
        2.0 * (size - 1.0) / size * bytes / rate + 2.0 * size.log2().ceil() * latency
    }

    /// Returns the seconds of an exchange of `bytes` among all ranks.
    pub(super) fn all_to_all(&self, bytes: f64, ranks: usize, stride: usize) -> f64 {
        if ranks <= 1 {
            return 0.0;
        }
        let reach = ranks.saturating_mul(stride);
        if self.lie_in_nodes(reach) {
            return bytes / self.in_node + self.latency_in_node;
        }
        // Bytes for ranks of other nodes leave the node, and all its ranks send at once. In a group
        // that spans two nodes, half of the bytes may leave.
        let leaving = (1.0 - self.per_node as f64 / reach as f64).max(0.5);
        let rate = self.between_nodes / self.per_node as f64;
        (bytes * leaving / rate).max(bytes / self.in_node) + self.latency_between_nodes
    }

    /// Returns the seconds of messages between stages of `ranks` consecutive ranks each. All ranks
    /// of a stage send `bytes` each at once.
    pub(super) fn messages(&self, bytes: f64, ranks: usize, stages: usize) -> StageMessages {
        let boundaries = stages.saturating_sub(1);
        let inside = bytes / self.in_node + self.latency_in_node;
        if boundaries == 0 || ranks.saturating_mul(stages) <= self.per_node {
            return StageMessages { slowest: inside, through_all: inside * boundaries as f64 };
        }
        // Ranks of a stage that cross to another node at once share its interfaces.
        let sending = ranks.clamp(1, self.per_node) as f64;
        let crossing = bytes / (self.between_nodes / sending).min(self.of_device) + self.latency_between_nodes;
        // Stages fill nodes in order, so only messages over a node's end cross to another node.
        let nodes = ranks.saturating_mul(stages).div_ceil(self.per_node);
        let crossings = boundaries.min(nodes.saturating_sub(1));
        let through_all = crossing * crossings as f64 + inside * (boundaries - crossings) as f64;
        StageMessages { slowest: crossing.max(inside), through_all }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_narrower_than_a_node_cross_between_nodes() {
        let text = "name: slow\nnodes:\n  - {name: n, count: 5, devices: {kind: a100-sxm-40g, count: 8}, \
                    link: nvswitch-300GB/s, nics: {count: 1, bandwidth: 10Gbit/s}}\nnetwork: {kind: switch}\n";
        let links = Links::new(&Topology::from_yaml(text, "slow.yaml").expect("it is sound"));
        let bytes = 8e6;
        let (inside, across) = (links.messages(bytes, 4, 2), links.messages(bytes, 4, 10));
        assert!(inside.slowest < 1e-4, "{inside:?}");
        // Four ranks share 1.25 GB/s.
        assert!((across.slowest - 4.0 * bytes / 1.25e9).abs() < 1e-4, "{across:?}");
        // Four of nine boundaries cross.
        assert!((across.through_all - 4.0 * across.slowest - 5.0 * inside.slowest).abs() < 1e-9, "{across:?}");
    }

    #[test]
    fn groups_that_do_not_divide_a_node_are_as_slow_as_the_network() {
        let text = "name: racks\nnodes:\n  - {name: n, count: 4, devices: {kind: a100-sxm-40g, count: 12}, \
                    link: nvswitch-300GB/s, nics: {count: 1, bandwidth: 10Gbit/s}}\nnetwork: {kind: switch}\n";
        let links = Links::new(&Topology::from_yaml(text, "racks.yaml").expect("it is sound"));
        let time = |ranks: usize| links.of_world(48).all_reduce(1e9, ranks, 1);
        assert!(time(8) > 10.0 * time(6), "{} beside {}", time(8), time(6));
        assert!(links.of_world(8).all_reduce(1e9, 8, 1) < 2.0 * time(6), "eight ranks alone lie in one node");
    }
}
