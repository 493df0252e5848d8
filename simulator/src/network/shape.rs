//! Link loads of a communication: the flows of ring, tree, pairwise and point-to-point algorithms
//! over a topology's routes.
//!
//! The flows of one communication depend on each other: a ring moves at the pace of its slowest
//! hop. They form one [`Shape`], which has the load on every link per byte. This module must not
//! know when communication happens or what else uses the links.

use super::orders::{ring_orders, tree_parent};
use super::rotation::MeshRotation;
use crate::cost::LinkEfficiency;
use foretell_program::Rank;
use foretell_topologies::{DeviceId, LinkClass, Topology, TopologyError};
use foretell_units::{BytesPerSecond, Seconds};

/// The combined flows of a communication.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Shape {
    /// The mean latency of a hop.
    pub(crate) hop_latency: Seconds,
    /// Links in ascending order, each with the bytes that cross it per byte of a flow.
    pub(crate) loads: Vec<(usize, f64)>,
    /// Seconds per byte without contention.
    pub(crate) seconds_per_byte: f64,
    /// Seconds per byte due to limits that the profiles of a node's links do not cover. A fabric
    /// may be narrower than the nodes that it joins, its routes may collide, and some pairs in a
    /// node may have fewer wires than others.
    pub(crate) fabric_seconds_per_byte: f64,
    /// Pairs of consecutive links on its routes, without duplicates. [`super::saturation`] uses
    /// them; then they are dropped.
    pub(crate) link_pairs: Vec<LinkPair>,
}

/// Two consecutive links of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LinkPair {
    pub(crate) from: usize,
    pub(crate) to: usize,
}

/// Stands for the neighbour before the first link of a route and after the last.
pub(crate) const ROUTE_END: usize = usize::MAX;

impl LinkPair {
    /// Returns the pairs of consecutive links of a route, including its two ends ([`ROUTE_END`]).
    pub(crate) fn of_route(links: impl Iterator<Item = usize>) -> impl Iterator<Item = Self> {
        let mut from = ROUTE_END;
        links
            .chain([ROUTE_END])
            .map(move |to| Self { from: std::mem::replace(&mut from, to), to })
            .filter(|turn| turn.from != turn.to)
    }
}

/// One flow: source, destination, and its share of the bytes.
type Flow = (DeviceId, DeviceId, f64);

impl Shape {
    /// Returns the loaded links.
    pub(crate) fn links(&self) -> impl Iterator<Item = usize> {
        self.loads.iter().map(|&(link, _)| link)
    }

    /// A single flow. With a rotation it loads the representative links. `None` if two of its links
    /// have the same representative.
    pub(crate) fn point_to_point(context: FlowContext<'_>, from: DeviceId, to: DeviceId) -> Result<Option<Self>, TopologyError> {
        let FlowContext { topology, links, rotation } = context;
        let mut parts = LinkLoads::default();
        let limit = if from == to { None } else { parts.add(topology, (from, to, 1.0))? };
        if !parts.fold(rotation)
            || parts.parts.iter().any(|&(link, _)| parts.parts.iter().filter(|&&(other, _)| other == link).count() > 1)
        {
            return Ok(None);
        }
        let mut shape = parts.into_shape(topology, links, 1);
        if let Some(limit) = limit {
            shape.seconds_per_byte = shape.seconds_per_byte.max(1.0 / limit.value());
        }
        Ok(Some(shape.within_pairs(topology, &[(from, to, 1.0)])))
    }

    /// A ring through the members, in which each sends its data to the next.
    ///
    /// Between nodes with several members there are as many rings as members in a node, as in NCCL.
    /// Each ring leaves a node from a different member, so all network interfaces are in use. The
    /// rings carry equal parts.
    pub(crate) fn ring(context: FlowContext<'_>, members: &[DeviceId]) -> Result<Option<Self>, TopologyError> {
        let orders = ring_orders(context.topology, members);
        let mut flows: Vec<Flow> = Vec::with_capacity(orders.len() * members.len());
        for order in &orders {
            for (position, &from) in order.iter().enumerate() {
                let to = order[(position + 1) % order.len()];
                flows.push((members[from], members[to], 1.0 / orders.len() as f64));
            }
        }
        Ok(Self::of_flows(context, &flows)?.map(|shape| shape.within_wires(context.topology, members)))
    }

    /// Two binary trees, each of which carries half of the bytes up and down again (Sanders, Speck
    /// and Träff 2009; NCCL since 2.4). The second tree is the first shifted by one member, so
    /// inner nodes of one are leaves of the other.
    pub(crate) fn double_tree(context: FlowContext<'_>, members: &[DeviceId]) -> Result<Option<Self>, TopologyError> {
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
        Ok(Self::of_flows(context, &flows)?.map(|shape| shape.within_wires(context.topology, members)))
    }

    /// Every member sends an equal part to every other member.
    pub(crate) fn all_pairs(context: FlowContext<'_>, members: &[DeviceId]) -> Result<Option<Self>, TopologyError> {
        let part = 1.0 / members.len() as f64;
        let others = |from: DeviceId| members.iter().filter(move |&&to| to != from).map(move |&to| (from, to, part));
        let flows: Vec<Flow> = members.iter().flat_map(|&from| others(from)).collect();
        Ok(Self::of_flows(context, &flows)?.map(|shape| shape.within_pairs(context.topology, &flows)))
    }

    /// Every member sends all of its data to the next, and the last to the first, in the order of
    /// `members`.
    pub(crate) fn shift(context: FlowContext<'_>, members: &[DeviceId]) -> Result<Option<Self>, TopologyError> {
        let next = members.iter().cycle().skip(1);
        let flows: Vec<Flow> = members.iter().zip(next).map(|(&from, &to)| (from, to, 1.0)).collect();
        let Some(mut shape) = Self::of_flows(context, &flows)? else { return Ok(None) };
        for &(from, to, _) in flows.iter().filter(|&&(from, ..)| context.is_first(from)) {
            if from != to
                && let Some(limit) = context.topology.route(from, to)?.single_flow_limit
            {
                shape.seconds_per_byte = shape.seconds_per_byte.max(1.0 / limit.value());
            }
        }
        Ok(Some(shape.within_pairs(context.topology, &flows)))
    }

    /// The shape, limited by the rate of the wires between the pairs of devices of its flows.
    fn within_pairs(self, topology: &Topology, flows: &[Flow]) -> Self {
        let of_flow = |&(from, to, part): &Flow| topology.rate_of_wires(from, &[to]).map(|rate| part / rate.value());
        self.no_faster_than(flows.iter().filter_map(of_flow).reduce(f64::max))
    }

    /// The shape of rings or trees, limited by the rate of the wires of each member to the others:
    /// NCCL makes as many rings as there are wires, in orders that follow the wires.
    fn within_wires(self, topology: &Topology, members: &[DeviceId]) -> Self {
        let of_member = |&member: &DeviceId| topology.rate_of_wires(member, members).map(|rate| 1.0 / rate.value());
        self.no_faster_than(members.iter().filter_map(of_member).reduce(f64::max))
    }

    fn no_faster_than(mut self, seconds_per_byte: Option<f64>) -> Self {
        if let Some(seconds) = seconds_per_byte {
            self.seconds_per_byte = self.seconds_per_byte.max(seconds);
            self.fabric_seconds_per_byte = self.fabric_seconds_per_byte.max(seconds);
        }
        self
    }

    /// Combines flows into a shape. With a rotation, only flows from representative ranks count.
    /// Returns `None` if the rotation does not map the set of flows onto itself.
    fn of_flows(context: FlowContext<'_>, flows: &[Flow]) -> Result<Option<Self>, TopologyError> {
        let FlowContext { topology, links, rotation } = context;
        if rotation.is_some_and(|rotation| !maps_flows(rotation, flows)) {
            return Ok(None);
        }
        let mut parts = LinkLoads::default();
        let mut count = 0;
        for &flow in flows.iter().filter(|&&(from, ..)| context.is_first(from)) {
            count += 1;
            if flow.0 != flow.1 {
                parts.add(topology, flow)?;
            }
        }
        Ok(if parts.fold(rotation) { Some(parts.into_shape(topology, links, count)) } else { None })
    }
}

/// The topology, its links' efficiency and the mesh rotation that flows are built for. With a
/// rotation ([`super::rotation`]), rank `r` runs on device `r`.
#[derive(Clone, Copy)]
pub(crate) struct FlowContext<'a> {
    pub(crate) topology: &'a Topology,
    pub(crate) links: &'a LinkEfficiency,
    pub(crate) rotation: Option<&'a MeshRotation>,
}

impl FlowContext<'_> {
    fn is_first(&self, device: DeviceId) -> bool {
        self.rotation.is_none_or(|rotation| rotation.representative(device.0) == device.0)
    }
}

/// Returns whether a rotation maps the set of flows onto itself.
fn maps_flows(rotation: &MeshRotation, flows: &[Flow]) -> bool {
    // Each flow, rotated back so that its sender is a representative, and the number of rotations.
    let seen = |&(from, to, part): &Flow| {
        let turns = rotation.rotations_to(from.0);
        ((rotation.representative(from.0), rotation.rotate_back(Rank(to.0), turns), part.to_bits()), turns)
    };
    let mut seen: Vec<_> = flows.iter().map(seen).collect();
    seen.sort_unstable();
    // Every distinct flow must occur equally often for every number of rotations.
    seen.chunk_by(|left, right| left.0 == right.0).all(|alike| {
        let each = alike.len() / rotation.period();
        alike.len() == each * rotation.period() && alike.iter().enumerate().all(|(place, &(_, turns))| place / each == turns)
    })
}

/// Link loads, collected flow by flow.
#[derive(Default)]
struct LinkLoads {
    parts: Vec<(usize, f64)>,
    latency: Seconds,
    link_pairs: Vec<LinkPair>,
}

impl LinkLoads {
    /// Adds a flow between two devices. Returns the topology's limit for a single flow, if any.
    fn add(&mut self, topology: &Topology, (from, to, part): Flow) -> Result<Option<BytesPerSecond>, TopologyError> {
        let route = topology.route(from, to)?;
        self.latency += route.latency;
        self.link_pairs.extend(LinkPair::of_route(route.links.iter().map(|link| link.0)));
        self.parts.extend(route.links.iter().map(|link| (link.0, part)));
        Ok(route.single_flow_limit)
    }

    /// Replaces links by their representatives. Returns `false` if a link has no representative.
    fn fold(&mut self, rotation: Option<&MeshRotation>) -> bool {
        let Some(rotation) = rotation else { return true };
        self.parts.iter_mut().all(|(link, _)| rotation.representative_link(*link).map(|first| *link = first).is_some())
    }

    /// Combines the loads into the shape of `flows` flows, which include those from a device to
    /// itself.
    fn into_shape(self, topology: &Topology, links: &LinkEfficiency, flows: usize) -> Shape {
        let Self { mut parts, latency, mut link_pairs } = self;
        link_pairs.sort_unstable();
        link_pairs.dedup();
        // A stable sort, so that parts are summed in the order of flows.
        parts.sort_by_key(|&(link, _)| link);
        let loads: Vec<(usize, f64)> = parts
            .chunk_by(|part, other| part.0 == other.0)
            .filter_map(|parts| Some((parts.first()?.0, parts.iter().map(|&(_, part)| part).sum())))
            .collect();
        let is_fabric = |link: usize| topology.links()[link].class == LinkClass::Switch;
        let (mut seconds_per_byte, mut fabric_seconds_per_byte) = (0.0f64, 0.0f64);
        for &(link, load) in &loads {
            let seconds = load / capacity(topology, links, link);
            seconds_per_byte = seconds_per_byte.max(seconds);
            if is_fabric(link) {
                fabric_seconds_per_byte = fabric_seconds_per_byte.max(seconds);
            }
        }
        let hop_latency = latency / flows.max(1) as f64;
        Shape { hop_latency, loads, seconds_per_byte, fabric_seconds_per_byte, link_pairs }
    }
}

/// Returns the bandwidth that communication gets on a link, in bytes per second.
pub(crate) fn capacity(topology: &Topology, links: &LinkEfficiency, link: usize) -> f64 {
    let link = &topology.links()[link];
    link.bandwidth.value() * links.of(link.class)
}

/// Returns whether a link belongs to a network. Its queue forwards the head of a message at once
/// and can still be busy after the tail has arrived.
pub(crate) fn has_queue(topology: &Topology, link: usize) -> bool {
    matches!(topology.links()[link].class, LinkClass::Nic | LinkClass::Switch)
}

#[cfg(test)]
mod tests {
    use super::super::orders::along_rails;
    use super::*;

    fn ring_of(topology: &Topology, members: &[DeviceId]) -> Shape {
        let context = FlowContext { topology, links: &LinkEfficiency::IDEAL, rotation: None };
        Shape::ring(context, members).expect("joined").expect("nothing is rotated")
    }

    #[test]
    fn rings_keep_to_their_rails() {
        for count in 2..=17 {
            let cluster = Topology::library("dgx-h100-rails").expect("in the library").with_nodes(count).expect("nodes");
            let members: Vec<DeviceId> = cluster.devices().collect();
            let ring = ring_of(&cluster, &members);
            let is_between_switches = |&(link, _): &(usize, f64)| cluster.links()[link].class == LinkClass::Switch;
            assert!(!ring.loads.iter().any(is_between_switches), "a hop changes rails among {count} nodes");
            let (mut exits, mut entries) = (vec![0; 8 * count], vec![0; 8 * count]);
            for rotation in 0..8 {
                let order: Vec<usize> = along_rails(&members, 8, rotation).into_iter().map(|device| device.0).collect();
                let mut sorted = order.clone();
                sorted.sort_unstable();
                assert!(sorted.into_iter().eq(0..8 * count), "a ring passes everyone once");
                for node in order.chunks(8) {
                    entries[node[0]] += 1;
                    exits[node[7]] += 1;
                }
            }
            assert!(entries.iter().chain(&exits).all(|&count| count == 1), "each member's interface is used once each way");
        }
    }

    #[test]
    fn rings_between_nodes_use_every_network_interface() {
        let cluster = Topology::library("dgx-a100-80g").expect("in the library").with_nodes(2).expect("two nodes");
        let members: Vec<DeviceId> = cluster.devices().collect();
        let ring = ring_of(&cluster, &members);
        // Eight rings leave each node by its eight interfaces of 25 GB/s. Inside a node, each
        // device sends in seven of them.
        assert!((ring.seconds_per_byte - 1.0 / (8.0 * 25e9)).abs() < 1e-18, "{}", ring.seconds_per_byte);
        let single = ring_of(&cluster, &members[..8]);
        assert!((single.seconds_per_byte - 1.0 / 300e9).abs() < 1e-18);
    }
}
