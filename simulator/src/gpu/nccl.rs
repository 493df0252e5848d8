//! Collectives as NCCL does them: for every algorithm and protocol that a group can use, latency and bandwidth; the cheapest is taken, as
//! `ncclTopoTuneModel` in NCCL's `graph/tuning.cc` does.
//!
//! The latency constants are that file's (`baseLat`, `hwLat`); the bandwidths are the links' measured ones. A group is described by how many
//! members it has and how they spread over nodes: groups of one layout that run at the same time share the nodes' network evenly.

use super::profile::Cluster;
use foretell_program::{Collective, CollectiveAlgorithm, Group, Mesh, Rank};
use foretell_units::Seconds;
use std::collections::BTreeMap;

/// How data travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Algorithm {
    /// Around all members.
    Ring,
    /// Up and down two trees of nodes, along a chain within each.
    Tree,
    /// Reduced in the node's switch.
    InSwitch,
}

/// How data and flags are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protocol {
    /// A flag in every eight bytes.
    Ll,
    /// A flag in every 128 bytes.
    Ll128,
    /// Whole buffers and a fence.
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

    /// The share of the bandwidth that is not flags; NCCL halves LL again on fast links, where it also is capped.
    const fn bandwidth(self) -> f64 {
        match self {
            Protocol::Ll => 0.25,
            Protocol::Ll128 => 0.9375,
            Protocol::Simple => 1.0,
        }
    }
}

/// `baseLat`, microseconds, by protocol.
const BASE_RING: [f64; 3] = [6.6, 14.0, 8.4];
const BASE_TREE: [f64; 3] = [6.8, 14.0, 8.4];
/// `hwLat` over NVLink or PCIe, microseconds a hop.
const HOP_RING: [f64; 3] = [0.6, 1.9, 3.4];
const HOP_TREE: [f64; 3] = [0.6, 1.25, 4.0];
/// `hwLat` over the network.
const NETWORK_RING: [f64; 3] = [2.7, 4.0, 14.0];
const NETWORK_TREE: [f64; 3] = [5.0, 8.5, 14.0];
/// Of NVLS: NCCL's `hwLat` is 25, but 2 to 64 MiB on eight H100 (collectives_measured.csv) take as much as 75 do.
const IN_SWITCH: f64 = 75.0;
/// `baseLat` of a group of sends and receives.
const MESSAGE: f64 = 8.4;

/// A group of ranks, by what its collectives' times depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reachable {
    /// How many ranks it has.
    pub members: usize,
    /// On how many nodes.
    pub nodes: usize,
    /// The most of them on one node.
    pub together: usize,
}

impl Reachable {
    /// The group of a rank on a cluster whose nodes are filled in order.
    pub fn of(group: &Group, mesh: &Mesh, rank: Rank, cluster: &Cluster) -> Self {
        Self::of_devices(group.members(mesh, rank).iter().map(|member| member.0), cluster)
    }

    /// A group of devices by their numbers on a cluster, where those of a node follow each other.
    pub fn of_devices(devices: impl IntoIterator<Item = usize>, cluster: &Cluster) -> Self {
        let mut on_node: BTreeMap<usize, usize> = BTreeMap::new();
        for device in devices {
            *on_node.entry(device / cluster.devices_per_node).or_default() += 1;
        }
        let together = on_node.values().copied().max().unwrap_or(1);
        Self { members: on_node.values().sum(), nodes: on_node.len(), together }
    }

    /// Bus bandwidth of a long ring among the members on one node, bytes a second.
    fn within(&self, cluster: &Cluster) -> f64 {
        let ring = &cluster.link.ring;
        let entry = ring.range(..=self.together.max(2)).next_back().or_else(|| ring.iter().next());
        entry.map_or(1e9, |(_, rate)| rate.value())
    }

    /// What the group's members on one node may send to others, while the same groups of the other devices do the same.
    fn between(&self, cluster: &Cluster) -> f64 {
        let share = self.together as f64 / cluster.devices_per_node as f64;
        cluster.node_rate.value() * cluster.network.efficiency * share
    }

    /// A collective's time, with the algorithm and the protocol that NCCL's rule takes for it; `None` for what is only messages.
    pub fn choose(&self, kind: Collective, bytes: f64, cluster: &Cluster) -> (Seconds, Option<(Algorithm, Protocol)>) {
        self.choose_of(CollectiveAlgorithm::Automatic, kind, bytes, cluster)
    }

    /// The same of the algorithm that is asked for (`NCCL_ALGO`), where it makes collectives of that kind.
    pub fn choose_of(
        &self,
        asked: CollectiveAlgorithm,
        kind: Collective,
        bytes: f64,
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

    /// A collective's time.
    pub fn time(&self, kind: Collective, bytes: f64, cluster: &Cluster) -> Seconds {
        self.choose(kind, bytes, cluster).0
    }

    /// The time of an exchange of tokens of which each goes to `copies` experts, and crosses to a node or a device of several of them once
    /// (DeepEP, HybridEP; 1 where every copy travels). Choices are spread evenly.
    pub fn exchange(&self, bytes: f64, copies: usize, cluster: &Cluster) -> Seconds {
        if self.members < 2 {
            return Seconds::ZERO;
        }
        // Of so many places those that get any of the copies, over the copies.
        let share = |places: usize| {
            let (places, copies) = (places as f64, copies as f64);
            places * (1.0 - (1.0 - 1.0 / places).powf(copies)) / copies
        };
        let shares = if copies > 1 { [share(self.members), share(self.nodes)] } else { [1.0; 2] };
        Seconds::new(cluster.link.launch.value() + self.all_to_all(bytes, shares, cluster))
    }

    /// The time of a message between two ranks of this group's, of which the first is on another node or not.
    pub fn message(&self, bytes: f64, cluster: &Cluster) -> Seconds {
        Seconds::new(cluster.link.launch.value() + self.shift(bytes, cluster))
    }

    fn ring(&self, kind: Collective, bytes: f64, protocol: Protocol, cluster: &Cluster) -> f64 {
        let members = self.members as f64;
        let passes = if kind == Collective::AllReduce { 2.0 } else { 1.0 };
        let steps = passes * (members - 1.0);
        let between = if self.nodes > 1 { passes * (self.nodes as f64 - if passes > 1.0 { 0.0 } else { 1.0 }) } else { 0.0 };
        let within = (steps - between).max(0.0);
        let index = protocol.index();
        let latency = BASE_RING[index]
            + within * HOP_RING[index] * cluster.link.latency_scale
            + between * NETWORK_RING[index] * cluster.network.latency();
        let bus = protocol.bandwidth()
            * if self.nodes > 1 { self.within_or_all(cluster).min(self.between(cluster)) } else { self.within(cluster) };
        latency * 1e-6 + passes * (members - 1.0) / members * bytes / bus
    }

    fn tree(&self, bytes: f64, protocol: Protocol, cluster: &Cluster) -> f64 {
        let (members, nodes) = (self.members as f64, self.nodes as f64);
        let index = protocol.index();
        let hops = 2.0 * (members / nodes - 1.0);
        let latency = BASE_TREE[index]
            + hops * HOP_TREE[index] * cluster.link.latency_scale
            + 2.0 * nodes.log2() * NETWORK_TREE[index] * cluster.network.latency();
        // Within a node a chain up and down; NCCL counts 92 % of a ring's bandwidth for it.
        let mut seconds = 2.0 * (members - 1.0) / members * bytes / (0.92 * self.within_or_all(cluster));
        if self.nodes > 1 {
            // Two trees, each with half of the bytes: a node is a leaf in one and inside in the other.
            let crossed = 2.0 * (nodes - 1.0) / nodes * bytes;
            seconds = seconds.max(crossed / self.between(cluster) / 0.92);
        }
        latency * 1e-6 + seconds / protocol.bandwidth()
    }

    /// The switch adds up what all devices of a node send it; nodes are joined by a tree.
    fn in_switch(&self, bytes: f64, cluster: &Cluster) -> Option<f64> {
        let rate = cluster.link.in_switch?.value();
        if self.together < cluster.devices_per_node.min(8) || self.together < 4 {
            return None;
        }
        let (members, nodes) = (self.members as f64, self.nodes as f64);
        let mut seconds = 2.0 * (members - 1.0) / members * bytes / rate;
        let mut latency = IN_SWITCH * cluster.link.latency_scale;
        if self.nodes > 1 {
            seconds = seconds.max(2.0 * (nodes - 1.0) / nodes * bytes / self.between(cluster));
            latency += 2.0 * nodes.log2() * NETWORK_TREE[2] * cluster.network.latency();
        }
        Some(latency * 1e-6 + seconds)
    }

    /// Every member sends a part to every other, those on other nodes through its share of the network.
    fn all_to_all(&self, bytes: f64, [near_share, far_share]: [f64; 2], cluster: &Cluster) -> f64 {
        let (members, together) = (self.members as f64, self.together as f64);
        let near = (together - 1.0) / members * bytes * near_share / cluster.link.all_to_all.value();
        let far = if self.nodes > 1 {
            let device = cluster.node_rate.value() * cluster.network.efficiency / cluster.devices_per_node as f64;
            (members - together) / members * bytes * far_share / device
        } else {
            0.0
        };
        let hop = if self.nodes > 1 { NETWORK_RING[2] * cluster.network.latency() } else { HOP_RING[2] };
        (MESSAGE + hop * 2.0) * 1e-6 + near.max(far)
    }

    fn shift(&self, bytes: f64, cluster: &Cluster) -> f64 {
        if self.nodes > 1 {
            let device = cluster.node_rate.value() * cluster.network.efficiency / cluster.devices_per_node as f64;
            let share = if self.together > 1 { device * self.together as f64 } else { device };
            (MESSAGE + NETWORK_RING[2] * cluster.network.latency()) * 1e-6
                + bytes / share.min(cluster.link.point_to_point.value())
        } else {
            (MESSAGE + HOP_RING[2] * cluster.link.latency_scale) * 1e-6 + bytes / cluster.link.point_to_point.value()
        }
    }

    /// Within a node of a group that spans several: a ring enters and leaves, so two members at least; one alone has no link to pass.
    fn within_or_all(&self, cluster: &Cluster) -> f64 {
        if self.together < 2 { f64::INFINITY } else { self.within(cluster) }
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

    /// Microseconds as measured; `collectives_measured.csv` names the sources.
    fn check(device: &str, gigabits: f64, group: (usize, usize), bytes: f64, measured: f64, tolerance: f64) {
        let reachable = Reachable { members: group.0, nodes: group.1, together: group.0 / group.1 };
        let predicted = reachable.time(Collective::AllReduce, bytes, &cluster(device, gigabits)).value() * 1e6;
        let error = predicted / measured - 1.0;
        assert!(error.abs() < tolerance, "{device} {group:?} {bytes}: {predicted} beside {measured}, {error}");
    }

    #[test]
    fn long_all_reduces_take_what_was_measured() {
        let mebibyte = 1048576.0;
        check("a100-sxm-80g", 1600.0, (8, 1), 832.0 * mebibyte, 6715.5, 0.1);
        check("a100-sxm-80g", 1600.0, (4, 1), 448.0 * mebibyte, 3288.7, 0.1);
        check("a100-sxm-80g", 1600.0, (2, 1), 208.0 * mebibyte, 1206.0, 0.1);
        check("v100-sxm-32g", 100.0, (8, 1), 448.0 * mebibyte, 6139.1, 0.1);
        check("h100-sxm-80g", 3200.0, (8, 1), 1024.0 * mebibyte, 4029.4, 0.1);
        check("h100-sxm-80g", 3200.0, (16, 2), 4096.0 * mebibyte, 17286.0, 0.15);
        check("a100-sxm-80g", 400.0, (16, 2), 1024.0 * mebibyte, 26217.0, 0.15);
    }

    #[test]
    fn short_all_reduces_are_latency() {
        check("a100-sxm-80g", 1600.0, (8, 1), 1048576.0, 92.79, 0.35);
        check("h100-sxm-80g", 3200.0, (8, 1), 1048576.0, 27.37, 0.6);
    }

    /// The smallest all-reduce of two nodes (`collectives_measured.csv`).
    #[test]
    fn a_hop_over_efa_takes_what_was_measured() {
        let profiles = Profiles::library().expect("the library is sound");
        for (device, gigabits, network, measured) in
            [("h100-sxm-80g", 3200.0, "efa-2", 69.12), ("a100-sxm-80g", 400.0, "efa-1", 164.3)]
        {
            let group = Reachable { members: 16, nodes: 2, together: 8 };
            let usual = cluster(device, gigabits);
            let efa = Cluster { network: profiles.network(network).expect("known"), ..usual.clone() };
            let microseconds = |cluster| group.time(Collective::AllReduce, 8.0, cluster).value() * 1e6;
            assert!((microseconds(&efa) / measured - 1.0).abs() < 0.3, "{device}: {}", microseconds(&efa));
            assert!(microseconds(&usual) < 0.5 * measured, "{device}: {}", microseconds(&usual));
        }
    }

    #[test]
    fn the_rule_takes_low_latency_for_little_and_bandwidth_for_much() {
        let cluster = cluster("a100-sxm-80g", 1600.0);
        let node = Reachable { members: 8, nodes: 1, together: 8 };
        let choice = |bytes| node.choose(Collective::AllReduce, bytes, &cluster).1.expect("a collective");
        assert_eq!(choice(1024.0).1, Protocol::Ll);
        assert_eq!(choice(1e9), (Algorithm::Ring, Protocol::Simple));
        // Over many nodes a short all-reduce climbs a tree.
        let many = Reachable { members: 512, nodes: 64, together: 8 };
        assert_eq!(many.choose(Collective::AllReduce, 65536.0, &cluster).1.expect("a collective").0, Algorithm::Tree);
    }

    #[test]
    fn tokens_that_cross_once_for_several_experts_take_less_time() {
        let cluster = cluster("h100-sxm-80g", 3200.0);
        let group = Reachable { members: 32, nodes: 4, together: 8 };
        let [all, once] = [1, 8].map(|copies| group.exchange(1e9, copies, &cluster).value());
        // Of eight copies over four nodes 3.6 of the nodes get one.
        assert!((once / all - 3.6 / 8.0).abs() < 0.02, "{once} beside {all}");
        assert_eq!(group.exchange(1e9, 1, &cluster), group.time(Collective::AllToAll, 1e9, &cluster));
    }

    #[test]
    fn more_bytes_never_take_less_time() {
        let cluster = cluster("h100-sxm-80g", 3200.0);
        for group in [(2, 1), (8, 1), (16, 2), (64, 64), (512, 64)] {
            let reachable = Reachable { members: group.0, nodes: group.1, together: group.0 / group.1 };
            for kind in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter, Collective::AllToAll] {
                let times: Vec<f64> =
                    (10..34).map(|power| reachable.time(kind, f64::from(power).exp2(), &cluster).value()).collect();
                assert!(times.windows(2).all(|pair| pair[0] <= pair[1]), "{kind:?} {group:?} {times:?}");
            }
        }
    }
}
