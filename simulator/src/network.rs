//! Which links an exchange loads, and how much: the flows of ring, tree, pairwise and point-to-point algorithms over the routes
//! of a topology.
//!
//! The flows of one exchange depend on each other (a ring moves at the pace of its slowest hop), so they are one [`Shape`]: the
//! load on every link for each byte of the exchange. It must not know when exchanges happen, nor what else is on the links.

use crate::cost::LinkEfficiency;
use foretell_topologies::{DeviceId, LinkClass, Topology, TopologyError};
use foretell_units::Seconds;
use std::collections::BTreeMap;

/// The flows of an exchange.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Shape {
    /// The mean latency of a hop.
    pub(crate) hop_latency: Seconds,
    /// Links, and the bytes that pass each for every byte that a flow of the exchange carries. Links in order of number.
    pub(crate) loads: Vec<(usize, f64)>,
    /// How long a byte takes where nothing else is on the links.
    pub(crate) seconds_per_byte: f64,
    /// The same of the links between switches alone: a fabric may be narrower than the nodes that it joins, or its routes may collide.
    pub(crate) fabric_seconds_per_byte: f64,
}

/// One flow of an exchange: from, to, and its share of the exchange's bytes.
type Flow = (DeviceId, DeviceId, f64);

impl Shape {
    /// A single flow.
    pub(crate) fn point_to_point(
        topology: &Topology,
        links: &LinkEfficiency,
        from: DeviceId,
        to: DeviceId,
    ) -> Result<Self, TopologyError> {
        let mut shape = Self::of_flows(topology, links, &[(from, to, 1.0)])?;
        if let Some(limit) = topology.route(from, to)?.single_flow_limit {
            shape.seconds_per_byte = shape.seconds_per_byte.max(1.0 / limit.value());
        }
        Ok(shape)
    }

    /// A ring through the members: each sends to the next what the ring carries. Between nodes that hold several members each
    /// there are as many rings as members in a node, each leaving the node from another member, so that all network interfaces
    /// are used, as NCCL does; each ring carries its part.
    pub(crate) fn ring(topology: &Topology, links: &LinkEfficiency, members: &[DeviceId]) -> Result<Self, TopologyError> {
        let mut nodes: Vec<Vec<DeviceId>> = Vec::new();
        let mut last = None;
        for &member in members {
            let node = topology.node_of(member);
            match nodes.last_mut() {
                Some(list) if last == Some(node) => list.push(member),
                _ => nodes.push(vec![member]),
            }
            last = Some(node);
        }
        let in_node = nodes.iter().map(Vec::len).min().unwrap_or(1);
        let is_even = nodes.iter().all(|list| list.len() == in_node);
        let rings = if nodes.len() > 1 && is_even { in_node } else { 1 };
        let mut flows: Vec<Flow> = Vec::with_capacity(rings * members.len());
        for rotation in 0..rings {
            let order: Vec<DeviceId> = if rings > 1 { along_rails(&nodes, rotation) } else { nodes.concat() };
            for (position, &from) in order.iter().enumerate() {
                flows.push((from, order[(position + 1) % order.len()], 1.0 / rings as f64));
            }
        }
        Self::of_flows(topology, links, &flows)
    }

    /// Two binary trees, each of which carries half of the bytes up and down again (Sanders, Speck and Träff 2009; NCCL since
    /// 2.4). The second is the first moved on by one member, so that who has children in one is a leaf in the other.
    pub(crate) fn double_tree(topology: &Topology, links: &LinkEfficiency, members: &[DeviceId]) -> Result<Self, TopologyError> {
        let count = members.len();
        let mut flows: Vec<Flow> = Vec::with_capacity(4 * count);
        for shift in [0, 1] {
            for child in 0..count {
                if let Some(parent) = tree_parent(child, count) {
                    let (child, parent) = (members[(child + shift) % count], members[(parent + shift) % count]);
                    flows.extend([(child, parent, 0.5), (parent, child, 0.5)]);
                }
            }
        }
        Self::of_flows(topology, links, &flows)
    }

    /// Everyone sends everyone else an equal part.
    pub(crate) fn all_pairs(topology: &Topology, links: &LinkEfficiency, members: &[DeviceId]) -> Result<Self, TopologyError> {
        let part = 1.0 / members.len() as f64;
        let others = |from: DeviceId| members.iter().filter(move |&&to| to != from).map(move |&to| (from, to, part));
        let flows: Vec<Flow> = members.iter().flat_map(|&from| others(from)).collect();
        Self::of_flows(topology, links, &flows)
    }

    /// Each member sends all of it to the next, and the last to the first, in the one order that they have.
    pub(crate) fn shift(topology: &Topology, links: &LinkEfficiency, members: &[DeviceId]) -> Result<Self, TopologyError> {
        let next = members.iter().cycle().skip(1);
        let flows: Vec<Flow> = members.iter().zip(next).map(|(&from, &to)| (from, to, 1.0)).collect();
        let mut shape = Self::of_flows(topology, links, &flows)?;
        for &(from, to, _) in &flows {
            if from != to
                && let Some(limit) = topology.route(from, to)?.single_flow_limit
            {
                shape.seconds_per_byte = shape.seconds_per_byte.max(1.0 / limit.value());
            }
        }
        Ok(shape)
    }

    fn of_flows(topology: &Topology, links: &LinkEfficiency, flows: &[Flow]) -> Result<Self, TopologyError> {
        let mut loads: BTreeMap<usize, f64> = BTreeMap::new();
        let mut latency = Seconds::ZERO;
        for &(from, to, part) in flows {
            if from == to {
                continue;
            }
            let route = topology.route(from, to)?;
            latency += route.latency;
            for link in route.links {
                *loads.entry(link.0).or_default() += part;
            }
        }
        let is_fabric = |link: usize| topology.links()[link].class == LinkClass::Switch;
        let (mut seconds_per_byte, mut fabric_seconds_per_byte) = (0.0f64, 0.0f64);
        for (&link, load) in &loads {
            let seconds = load / capacity(topology, links, link);
            seconds_per_byte = seconds_per_byte.max(seconds);
            if is_fabric(link) {
                fabric_seconds_per_byte = fabric_seconds_per_byte.max(seconds);
            }
        }
        let hop_latency = latency / flows.len().max(1) as f64;
        Ok(Self { hop_latency, loads: loads.into_iter().collect(), seconds_per_byte, fabric_seconds_per_byte })
    }
}

/// A ring through nodes of as many members each, which begins at this member of the first. It leaves a node from the member that has the same
/// place as the one by which it enters the next: on a rail-optimised network the two are under one switch. Whatever the fabric, all rotations
/// together load every member's links alike.
fn along_rails(nodes: &[Vec<DeviceId>], rotation: usize) -> Vec<DeviceId> {
    let size = nodes.first().map_or(0, Vec::len);
    let mut order = Vec::with_capacity(nodes.len() * size);
    for (node, members) in nodes.iter().enumerate() {
        // One that is entered at a member is left from the one before it.
        let entry = (rotation + size - node % size) % size;
        let mut places: Vec<usize> = (0..size).map(|step| (entry + step) % size).collect();
        // The last leads back to where the ring began, if it does not begin there itself.
        if node + 1 == nodes.len() && entry != rotation {
            places.retain(|&place| place != rotation);
            places.push(rotation);
        }
        order.extend(places.into_iter().filter_map(|place| members.get(place)));
    }
    order
}

/// What exchanges get of a link, in bytes a second.
pub(crate) fn capacity(topology: &Topology, links: &LinkEfficiency, link: usize) -> f64 {
    let link = &topology.links()[link];
    link.bandwidth.value() * links.of(link.class)
}

/// A node's parent in the in-order binary tree over `0..count` whose root is 0: a node is as high as its number has zeros at
/// the end (NCCL's `trees.cc`).
fn tree_parent(node: usize, count: usize) -> Option<usize> {
    if node == 0 {
        return None;
    }
    let bit = node & node.wrapping_neg();
    let up = (node ^ bit) | (bit << 1);
    Some(if up >= count { node ^ bit } else { up })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_of_the_tree_reaches_the_root_in_logarithmically_many_steps() {
        for count in 2usize..70 {
            for node in 0..count {
                let mut steps = 0;
                let mut at = node;
                while let Some(parent) = tree_parent(at, count) {
                    at = parent;
                    steps += 1;
                }
                assert!(steps <= count.ilog2() + 1, "node {node} of {count}: {steps}");
            }
            for parent in 0..count {
                let children = (0..count).filter(|&node| tree_parent(node, count) == Some(parent)).count();
                assert!(children <= 2, "node {parent} of {count} has {children} children");
            }
        }
    }

    #[test]
    fn rings_keep_to_their_rails() {
        let cluster = Topology::library("dgx-h100-rails").expect("in the library").with_nodes(6).expect("six nodes");
        let members: Vec<DeviceId> = cluster.devices().collect();
        let ring = Shape::ring(&cluster, &LinkEfficiency::IDEAL, &members).expect("joined");
        let is_between_switches = |&(link, _): &(usize, f64)| cluster.links()[link].class == LinkClass::Switch;
        assert!(!ring.loads.iter().any(is_between_switches), "a hop changes rails");
        let nodes: Vec<Vec<DeviceId>> = members.chunks(8).map(<[_]>::to_vec).collect();
        for count in 2..=6 {
            let mut exits = vec![0; 8];
            for rotation in 0..8 {
                let order = along_rails(&nodes[..count], rotation);
                let mut sorted = order.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, members[..8 * count], "a ring passes everyone once");
                exits[order[8 * count - 1].0 % 8] += 1;
            }
            assert_eq!(exits, [1; 8], "each of the last node's members leads back once");
        }
    }

    #[test]
    fn rings_between_nodes_use_every_network_interface() {
        let cluster = Topology::library("dgx-a100-80g").expect("in the library").with_nodes(2).expect("two nodes");
        let members: Vec<DeviceId> = cluster.devices().collect();
        let ring = Shape::ring(&cluster, &LinkEfficiency::IDEAL, &members).expect("joined");
        // Eight rings leave each node by its eight interfaces of 25 GB/s; inside, each device sends in seven of them.
        assert!((ring.seconds_per_byte - 1.0 / (8.0 * 25e9)).abs() < 1e-18, "{}", ring.seconds_per_byte);
        let single = Shape::ring(&cluster, &LinkEfficiency::IDEAL, &members[..8]).expect("joined");
        assert!((single.seconds_per_byte - 1.0 / 300e9).abs() < 1e-18);
    }
}
