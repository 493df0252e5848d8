//! Time of collectives by NCCL's own choice of algorithm and protocol.
//!
//! For every algorithm and protocol that a group can use, a latency and a bandwidth give a time.
//! The least time counts, as in `ncclTopoTuneModel` of NCCL's `graph/tuning.cc`. The latency
//! constants are those of that file (`baseLat`, `hwLat`), and the bandwidths are measured ones of
//! the links.
//!
//! All-gathers and reduce-scatters always use a ring. NCCL's other algorithm for them, PAT (2.23),
//! supports only one GPU per node (NVIDIA/nccl#1473) and is left out.
//!
//! A group is described by its number of members and their distribution over nodes. Groups of one
//! layout that communicate at the same time share a node's network equally.

use super::cluster::Cluster;
use foretell_program::{Collective, CollectiveAlgorithm, Group, Mesh, Rank};
use foretell_units::Seconds;
use std::collections::BTreeMap;

/// Algorithm of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Algorithm {
    /// A ring of all members.
    Ring,
    /// Two trees of nodes, with a chain inside each node.
    Tree,
    /// Reduction in the node's switch (NVLS).
    InSwitch,
}

/// Protocol: how data and flags are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protocol {
    /// A flag in every eight bytes.
    Ll,
    /// A flag in every 128 bytes.
    Ll128,
    /// Whole buffers, followed by a fence.
    Simple,
}

impl Protocol {
    const ALL: [Self; 3] = [Protocol::Ll, Protocol::Ll128, Protocol::Simple];

    const fn index(self) -> usize {
        match self {
            Protocol::Ll => 0,
            Protocol::Ll128 => 1,
            Protocol::Simple => 2,
        }
    }

    /// Returns the share of the bandwidth that carries data. Half of LL's bytes are flags, and NCCL
    /// halves the bandwidth of LL again on fast links.
    const fn bandwidth(self) -> f64 {
        match self {
            Protocol::Ll => 0.25,
            Protocol::Ll128 => 0.9375,
            Protocol::Simple => 1.0,
        }
    }
}

/// `baseLat` of a ring by protocol, in microseconds.
const BASE_RING: [f64; 3] = [6.6, 14.0, 8.4];
/// `baseLat` of a tree by protocol, in microseconds.
const BASE_TREE: [f64; 3] = [6.8, 14.0, 8.4];
/// `hwLat` of a ring per hop over NVLink or PCIe, by protocol, in microseconds.
const HOP_RING: [f64; 3] = [0.6, 1.9, 3.4];
/// `hwLat` of a tree per hop over NVLink or PCIe, by protocol, in microseconds.
const HOP_TREE: [f64; 3] = [0.6, 1.25, 4.0];
/// `hwLat` of a ring per hop over the network, by protocol, in microseconds.
const NETWORK_RING: [f64; 3] = [2.7, 4.0, 14.0];
/// `hwLat` of a tree per hop over the network, by protocol, in microseconds.
const NETWORK_TREE: [f64; 3] = [5.0, 8.5, 14.0];
/// Latency of NVLS, in microseconds. NCCL's `hwLat` is 25, but all-reduces of 2 to 64 MiB on eight
/// H100 (`collectives_measured.csv`) match 75.
const IN_SWITCH: f64 = 75.0;
/// `baseLat` of a group of sends and receives, in microseconds.
const MESSAGE: f64 = 8.4;

/// Bytes per second that one channel carries. An assumption, chosen so that the rates of NVSwitch
/// need the most channels.
const CHANNEL: f64 = 10e9;
/// Fewest and most channels of a group. FSDP's gathers run in 24 blocks on an H100
/// (forums.developer.nvidia.com/t/337991). The minimum of two is an assumption.
const LEAST_CHANNELS: f64 = 2.0;
const MOST_CHANNELS: f64 = 24.0;

/// Distribution of a group's members over nodes. The times of its collectives depend on nothing
/// else of the group.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NodeSpread {
    /// Number of ranks in the group.
    pub members: usize,
    /// Number of nodes that they are on.
    pub nodes: usize,
    /// Largest number of them on one node.
    pub most_on_node: usize,
}

impl NodeSpread {
    /// Returns the spread of a rank's group on a cluster whose nodes are filled in rank order.
    pub fn of(group: &Group, mesh: &Mesh, rank: Rank, cluster: &Cluster) -> Self {
        Self::of_devices(group.members(mesh, rank).iter().map(|member| member.0), cluster)
    }

    /// Returns the spread of devices by their indices. The devices of a node have consecutive
    /// indices.
    pub fn of_devices(devices: impl IntoIterator<Item = usize>, cluster: &Cluster) -> Self {
        let mut on_node: BTreeMap<usize, usize> = BTreeMap::new();
        for device in devices {
            *on_node.entry(device / cluster.devices_per_node).or_default() += 1;
        }
        let most_on_node = on_node.values().copied().max().unwrap_or(1);
        Self { members: on_node.values().sum(), nodes: on_node.len(), most_on_node }
    }

    /// Returns the bus bandwidth of a long ring among the members on one node, in bytes per second.
    fn rate_within_node(&self, cluster: &Cluster) -> f64 {
        let ring = &cluster.link.ring;
        let entry = ring.range(..=self.most_on_node.max(2)).next_back().or_else(|| ring.iter().next());
        entry.expect("invariant: a link's profile has a ring").1.value()
    }

    /// Returns the channels of a collective of the group: blocks of its kernel, each of which
    /// occupies a multiprocessor.
    pub fn channels(&self, cluster: &Cluster) -> f64 {
        let within = self.rate_within_node(cluster);
        let rate = if self.nodes > 1 { within.min(self.rate_between_nodes(cluster)) } else { within };
        if self.members < 2 { 0.0 } else { (rate / CHANNEL).round().clamp(LEAST_CHANNELS, MOST_CHANNELS) }
    }

    /// Returns the rate at which the members on one node send to other nodes, in bytes per second.
    /// The groups of the node's other devices are assumed to send at the same time.
    fn rate_between_nodes(&self, cluster: &Cluster) -> f64 {
        let share = self.most_on_node as f64 / cluster.devices_per_node as f64;
        cluster.reached_node_rate().value() * share
    }

    /// Returns the time of a collective, with the algorithm and protocol that NCCL chooses. `asked`
    /// restricts the choice to one algorithm, as `NCCL_ALGO` does, if the collective supports it.
    /// All-to-alls and shifts consist of messages and have neither algorithm nor protocol.
    pub fn choose(
        &self,
        kind: Collective,
        bytes: f64,
        asked: CollectiveAlgorithm,
        cluster: &Cluster,
    ) -> (Seconds, Option<(Algorithm, Protocol)>) {
        let launch = cluster.link.launch.value();
        if self.members < 2 {
            return (Seconds::ZERO, None);
        }
        match kind {
            Collective::AllToAll => (Seconds::new(launch + self.all_to_all(bytes, [1.0; 2], cluster)), None),
            Collective::Shift => (Seconds::new(launch + self.shift(bytes, cluster)), None),
            Collective::AllReduce | Collective::AllGather | Collective::ReduceScatter => {
                let mut best = (f64::INFINITY, (Algorithm::Ring, Protocol::Simple));
                for protocol in Protocol::ALL {
                    let ring = self.ring(kind, bytes, protocol, cluster);
                    if ring < best.0 && !(asked == CollectiveAlgorithm::Tree && kind == Collective::AllReduce) {
                        best = (ring, (Algorithm::Ring, protocol));
                    }
                    if kind == Collective::AllReduce && asked != CollectiveAlgorithm::Ring {
                        let tree = self.tree(bytes, protocol, cluster);
                        if tree < best.0 {
                            best = (tree, (Algorithm::Tree, protocol));
                        }
                    }
                }
                if kind == Collective::AllReduce
                    && asked == CollectiveAlgorithm::Automatic
                    && let Some(time) = self.in_switch(bytes, cluster)
                    && time < best.0
                {
                    best = (time, (Algorithm::InSwitch, Protocol::Simple));
                }
                (Seconds::new(launch + best.0), Some(best.1))
            }
        }
    }

    /// Returns the time of a collective with the algorithm that NCCL chooses.
    pub fn time(&self, kind: Collective, bytes: f64, cluster: &Cluster) -> Seconds {
        self.choose(kind, bytes, CollectiveAlgorithm::Automatic, cluster).0
    }

    /// Returns the time of an all-to-all in which each token goes to `copies` experts. A token is
    /// sent once to each node, and once to each device, that has several of its experts (DeepEP,
    /// HybridEP). With `copies` 1 every copy is sent. The experts of a token are assumed to be on
    /// random ranks of the group, or of as many of its nodes as `most_nodes` allows.
    pub fn expert_all_to_all(&self, bytes: f64, (copies, most_nodes): (usize, Option<usize>), cluster: &Cluster) -> Seconds {
        if self.members < 2 {
            return Seconds::ZERO;
        }
        // Expected number of `places` (ranks or nodes) that receive at least one of the copies,
        // over the number of copies.
        let share = |places: usize| {
            let (places, copies) = (places as f64, copies as f64);
            places * (1.0 - (1.0 - 1.0 / places).powf(copies)) / copies
        };
        let nodes = most_nodes.map_or(self.nodes, |most| self.nodes.min(most));
        let members = self.members.min(nodes.saturating_mul(self.most_on_node));
        let shares = if copies > 1 { [share(members), share(nodes)] } else { [1.0; 2] };
        Seconds::new(cluster.link.launch.value() + self.all_to_all(bytes, shares, cluster))
    }

    /// Returns the time of a message between the two ranks of this group.
    pub fn message(&self, bytes: f64, cluster: &Cluster) -> Seconds {
        Seconds::new(cluster.link.launch.value() + self.shift(bytes, cluster))
    }

    /// Returns the time of a collective with a ring, in seconds.
    fn ring(&self, kind: Collective, bytes: f64, protocol: Protocol, cluster: &Cluster) -> f64 {
        let members = self.members as f64;
        let passes = if kind == Collective::AllReduce { 2.0 } else { 1.0 };
        let steps = passes * (members - 1.0);
        // Steps that cross from one node to the next, as NCCL counts them.
        let between = if self.nodes > 1 { passes * (self.nodes as f64 - if passes > 1.0 { 0.0 } else { 1.0 }) } else { 0.0 };
        let within = (steps - between).max(0.0);
        let index = protocol.index();
        let latency = BASE_RING[index]
            + within * HOP_RING[index] * cluster.link.latency_scale
            + between * NETWORK_RING[index] * cluster.network.latency();
        let rate = if self.nodes > 1 {
            self.ring_rate_within_node(cluster).min(self.rate_between_nodes(cluster))
        } else {
            self.rate_within_node(cluster)
        };
        let bus = protocol.bandwidth() * rate;
        latency * 1e-6 + passes * (members - 1.0) / members * bytes / bus
    }

    /// Returns the time of an all-reduce with trees, in seconds.
    fn tree(&self, bytes: f64, protocol: Protocol, cluster: &Cluster) -> f64 {
        let (members, nodes) = (self.members as f64, self.nodes as f64);
        let index = protocol.index();
        let hops = 2.0 * (members / nodes - 1.0);
        let latency = BASE_TREE[index]
            + hops * HOP_TREE[index] * cluster.link.latency_scale
            + 2.0 * nodes.log2() * NETWORK_TREE[index] * cluster.network.latency();
        // Data go up and down a chain inside each node. NCCL counts 92 % of a ring's bandwidth for
        // that.
        let mut seconds = 2.0 * (members - 1.0) / members * bytes / (0.92 * self.ring_rate_within_node(cluster));
        if self.nodes > 1 {
            // Each of the two trees carries half of the bytes. A node is a leaf of one and an inner
            // node of the other.
            let crossed = 2.0 * (nodes - 1.0) / nodes * bytes;
            seconds = seconds.max(crossed / self.rate_between_nodes(cluster) / 0.92);
        }
        latency * 1e-6 + seconds / protocol.bandwidth()
    }

    /// Returns the time of an all-reduce in the switches, with a tree between nodes, in seconds.
    /// `None` if the group does not fill a node or the switch cannot reduce.
    fn in_switch(&self, bytes: f64, cluster: &Cluster) -> Option<f64> {
        let rate = cluster.link.in_switch?.value();
        if self.most_on_node < cluster.devices_per_node.min(8) || self.most_on_node < 4 {
            return None;
        }
        let (members, nodes) = (self.members as f64, self.nodes as f64);
        let mut seconds = 2.0 * (members - 1.0) / members * bytes / rate;
        let mut latency = IN_SWITCH * cluster.link.latency_scale;
        if self.nodes > 1 {
            seconds = seconds.max(2.0 * (nodes - 1.0) / nodes * bytes / self.rate_between_nodes(cluster));
            latency += 2.0 * nodes.log2() * NETWORK_TREE[2] * cluster.network.latency();
        }
        Some(latency * 1e-6 + seconds)
    }

    /// Returns the time in which every member sends a part to every other, in seconds. `near_share`
    /// and `far_share` scale the bytes to members on the same node and on other nodes.
    fn all_to_all(&self, bytes: f64, [near_share, far_share]: [f64; 2], cluster: &Cluster) -> f64 {
        let (members, on_node) = (self.members as f64, self.most_on_node as f64);
        let near = (on_node - 1.0) / members * bytes * near_share / cluster.link.all_to_all.value();
        let far = if self.nodes > 1 {
            (members - on_node) / members * bytes * far_share / cluster.network_rate_of_device()
        } else {
            0.0
        };
        let hop = if self.nodes > 1 { NETWORK_RING[2] * cluster.network.latency() } else { HOP_RING[2] };
        (MESSAGE + hop * 2.0) * 1e-6 + near.max(far)
    }

    /// Returns the time in which every member sends to the next, in seconds.
    fn shift(&self, bytes: f64, cluster: &Cluster) -> f64 {
        if self.nodes > 1 {
            let device = cluster.network_rate_of_device();
            let share = if self.most_on_node > 1 { device * self.most_on_node as f64 } else { device };
            (MESSAGE + NETWORK_RING[2] * cluster.network.latency()) * 1e-6
                + bytes / share.min(cluster.link.point_to_point.value())
        } else {
            (MESSAGE + HOP_RING[2] * cluster.link.latency_scale) * 1e-6 + bytes / cluster.link.point_to_point.value()
        }
    }

    /// Returns the rate of a ring inside the nodes of a group that spans several nodes. It is
    /// infinite if each node has one member, which uses no link inside its node.
    fn ring_rate_within_node(&self, cluster: &Cluster) -> f64 {
        if self.most_on_node < 2 { f64::INFINITY } else { self.rate_within_node(cluster) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Profiles;
    use foretell_units::BytesPerSecond;

    fn cluster(device: &str, gigabits: f64) -> Cluster {
        let profiles = Profiles::library().expect("the library is sound");
        let rate = BytesPerSecond::new(gigabits * 1e9 / 8.0);
        profiles.cluster(device, None, 8, 64, Some(rate)).expect("is in the library")
    }

    /// Checks a predicted all-reduce against measured microseconds. `collectives_measured.csv` has
    /// the sources.
    fn check(device: &str, gigabits: f64, group: (usize, usize), bytes: f64, measured: f64, tolerance: f64) {
        let spread = NodeSpread { members: group.0, nodes: group.1, most_on_node: group.0 / group.1 };
        let predicted = spread.time(Collective::AllReduce, bytes, &cluster(device, gigabits)).value() * 1e6;
        let error = predicted / measured - 1.0;
        assert!(error.abs() < tolerance, "{device} {group:?} {bytes}: predicted {predicted}, measured {measured}, error {error}");
    }

    #[test]
    fn long_all_reduces_match_the_measurements() {
        let mebibyte = 1048576.0;
        check("a100-sxm-80g", 1600.0, (8, 1), 832.0 * mebibyte, 6715.5, 0.1);
        check("a100-sxm-80g", 1600.0, (4, 1), 448.0 * mebibyte, 3288.7, 0.1);
        check("a100-sxm-80g", 1600.0, (2, 1), 208.0 * mebibyte, 1206.0, 0.1);
        check("v100-sxm-32g", 100.0, (8, 1), 448.0 * mebibyte, 6139.1, 0.1);
        check("h100-sxm-80g", 3200.0, (8, 1), 1024.0 * mebibyte, 4029.4, 0.1);
        check("h100-sxm-80g", 3200.0, (16, 2), 4096.0 * mebibyte, 17286.0, 0.15);
        check("a100-sxm-80g", 400.0, (16, 2), 1024.0 * mebibyte, 26217.0, 0.17);
    }

    #[test]
    fn short_all_reduces_match_the_measurements() {
        check("a100-sxm-80g", 1600.0, (8, 1), 1048576.0, 92.79, 0.35);
        check("h100-sxm-80g", 3200.0, (8, 1), 1048576.0, 27.37, 0.6);
    }

    /// The smallest all-reduce of two nodes in `collectives_measured.csv`.
    #[test]
    fn a_hop_over_efa_matches_the_measurements() {
        let profiles = Profiles::library().expect("the library is sound");
        for (device, gigabits, network, measured) in
            [("h100-sxm-80g", 3200.0, "efa-2", 69.12), ("a100-sxm-80g", 400.0, "efa-1", 164.3)]
        {
            let group = NodeSpread { members: 16, nodes: 2, most_on_node: 8 };
            let usual = cluster(device, gigabits);
            let efa = Cluster { network: profiles.network(network).expect("known"), ..usual.clone() };
            let microseconds = |cluster| group.time(Collective::AllReduce, 8.0, cluster).value() * 1e6;
            assert!((microseconds(&efa) / measured - 1.0).abs() < 0.3, "{device}: {}", microseconds(&efa));
            assert!(microseconds(&usual) < 0.5 * measured, "{device}: {}", microseconds(&usual));
        }
    }

    #[test]
    fn short_messages_use_low_latency_and_long_ones_bandwidth() {
        let cluster = cluster("a100-sxm-80g", 1600.0);
        let node = NodeSpread { members: 8, nodes: 1, most_on_node: 8 };
        let choice =
            |bytes| node.choose(Collective::AllReduce, bytes, CollectiveAlgorithm::Automatic, &cluster).1.expect("a collective");
        assert_eq!(choice(1024.0).1, Protocol::Ll);
        assert_eq!(choice(1e9), (Algorithm::Ring, Protocol::Simple));
        // A short all-reduce over many nodes uses a tree.
        let many = NodeSpread { members: 512, nodes: 64, most_on_node: 8 };
        assert_eq!(
            many.choose(Collective::AllReduce, 65536.0, CollectiveAlgorithm::Automatic, &cluster).1.expect("a collective").0,
            Algorithm::Tree
        );
    }

    #[test]
    fn tokens_that_cross_once_per_node_take_less_time() {
        let cluster = cluster("h100-sxm-80g", 3200.0);
        let group = NodeSpread { members: 32, nodes: 4, most_on_node: 8 };
        let [all, once] = [1, 8].map(|copies| group.expert_all_to_all(1e9, (copies, None), &cluster).value());
        // Eight copies reach 3.6 of four nodes on average.
        assert!((once / all - 3.6 / 8.0).abs() < 0.02, "{once} beside {all}");
        assert_eq!(group.expert_all_to_all(1e9, (1, None), &cluster), group.time(Collective::AllToAll, 1e9, &cluster));
        // On two of the nodes the eight copies are on both, but for one token in 128.
        let limited = group.expert_all_to_all(1e9, (8, Some(2)), &cluster).value();
        assert!((limited / all - 2.0 / 8.0).abs() < 0.02, "{limited} beside {all}");
        assert_eq!(group.expert_all_to_all(1e9, (8, Some(4)), &cluster).value(), once);
    }

    #[test]
    fn more_bytes_never_take_less_time() {
        let cluster = cluster("h100-sxm-80g", 3200.0);
        for group in [(2, 1), (8, 1), (16, 2), (64, 64), (512, 64)] {
            let spread = NodeSpread { members: group.0, nodes: group.1, most_on_node: group.0 / group.1 };
            for kind in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter, Collective::AllToAll] {
                let times: Vec<f64> =
                    (10..34).map(|power| spread.time(kind, f64::from(power).exp2(), &cluster).value()).collect();
                assert!(times.windows(2).all(|pair| pair[0] <= pair[1]), "{kind:?} {group:?} {times:?}");
            }
        }
    }
}
