//! Rates of the links between ranks, as far as estimates need them.

use foretell_topologies::Topology;

/// The links of a topology's slowest nodes.
#[derive(Clone, Debug)]
pub(super) struct Links {
    /// Devices of a node.
    per_node: usize,
    /// Bytes per second that a device sends to the others of its node.
    in_node: f64,
    /// Bytes per second that a node sends to others.
    between_nodes: f64,
    /// Seconds of a message in a node.
    latency_in_node: f64,
    /// Seconds of a message between nodes.
    latency_between_nodes: f64,
}

/// Seconds of a message between nodes: a switch and two interfaces.
const LATENCY_BETWEEN_NODES: f64 = 10e-6;

impl Links {
    pub(super) fn new(topology: &Topology) -> Self {
        let groups = topology.node_groups();
        let least = |value: &dyn Fn(usize) -> Option<f64>| (0..groups.len()).filter_map(value).fold(f64::INFINITY, f64::min);
        let in_node = least(&|group| groups[group].link.map(|link| link.bandwidth.value()));
        let between_nodes = least(&|group| groups[group].nics.map(|nics| nics.total_bandwidth().value()));
        let latency = least(&|group| groups[group].link.map(|link| link.latency.value()));
        Self {
            per_node: groups.iter().map(|group| group.devices).min().unwrap_or(1).max(1),
            in_node,
            between_nodes,
            latency_in_node: if latency.is_finite() { latency } else { 0.0 },
            latency_between_nodes: LATENCY_BETWEEN_NODES,
        }
    }

    /// Returns bytes per second and the latency of `ranks` ranks whose devices are `stride` apart,
    /// if all ranks do the same.
    fn rate(&self, ranks: usize, stride: usize) -> (f64, f64) {
        if ranks.saturating_mul(stride) <= self.per_node {
            return (self.in_node, self.latency_in_node);
        }
        // Rings of neighbours cross between nodes once; each of a node's `stride` groups crosses.
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
        // Most of it leaves the node, and all ranks of the node send at once.
        let (rate, latency) = self.rate(ranks, stride);
        let rate = if ranks.saturating_mul(stride) <= self.per_node { rate } else { self.between_nodes / self.per_node as f64 };
        bytes / rate + latency
    }

    /// Returns the seconds of a message to the next stage, whose ranks are `stride` devices away.
    pub(super) fn message(&self, bytes: f64, stride: usize) -> f64 {
        if stride < self.per_node {
            return bytes / self.in_node + self.latency_in_node;
        }
        bytes * self.per_node as f64 / self.between_nodes + self.latency_between_nodes
    }
}
