//! Numbers devices, nodes and one-way links, and computes routes.
//!
//! The links of nodes come first, node by node (`node_links`), then those of the fabric. A route is
//! computed from two device indices on demand, without a table of pairs.

use crate::device::DeviceKind;
use crate::error::{TopologyError, TopologyProblem};
use crate::fabric::{End, FabricLayout, Leaf, Network, NodePorts};
use crate::link::{Link, LinkId, NewLinks};
use crate::node::{NodeGroup, NodeLink, NodeLinkKind};
use crate::node_links::{NamedNode, NodeLinks};
use foretell_units::{BytesPerSecond, Seconds};
use serde::{Deserialize, Serialize};

/// A device's index, counted over all nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DeviceId(pub usize);

impl DeviceId {
    /// The device of a rank. Ranks fill `count` devices in order, from `first` on, and wrap around
    /// if there are more ranks (oversubscription).
    pub fn of_rank(rank: usize, first: DeviceId, count: usize) -> Self {
        Self(first.0 + rank % count.max(1))
    }
}

/// A node's index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub usize);

/// A route between two devices.
#[derive(Debug, Clone, PartialEq)]
pub struct Route {
    /// Links in order. Empty from a device to itself.
    pub links: Vec<LinkId>,
    /// Sum of the links' latencies.
    pub latency: Seconds,
    /// Rate limit of a single flow, if lower than the links' rate. On an `nvlink-mesh` it is the
    /// rate of one pair's wires. Collectives that use all wires together (NCCL's several rings) are
    /// limited only by the links.
    pub single_flow_limit: Option<BytesPerSecond>,
}

/// Interchangeable nodes: all are equal and joined by one switch. Any permutation of the nodes maps
/// each route to the route between the permuted devices. Node `n` has the devices from
/// `n x devices` and the links from `n x links` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InterchangeableNodes {
    /// Number of nodes.
    pub count: usize,
    /// Devices per node.
    pub devices: usize,
    /// Links per node.
    pub links: usize,
}

/// First node, device and link of a group, and the link numbering of one of its nodes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct GroupLayout {
    pub(crate) first_node: usize,
    pub(crate) first_device: usize,
    first_link: usize,
    links: NodeLinks,
}

/// The indices of nodes, devices and links, derived from a description.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Layout {
    pub(crate) groups: Vec<GroupLayout>,
    pub(crate) links: Vec<Link>,
    pub(crate) node_count: usize,
    pub(crate) device_count: usize,
    fabric: FabricLayout,
}

/// Position of a device: group, node within the group, index in the node.
#[derive(Clone, Copy)]
pub(crate) struct Position {
    pub(crate) group: usize,
    pub(crate) node_in_group: usize,
    pub(crate) device_in_node: usize,
}

impl Layout {
    /// Numbers everything. [`crate::Fabric::fits`] must hold.
    pub(crate) fn new(groups: &[NodeGroup], network: &Network) -> Self {
        let mut layouts = Vec::with_capacity(groups.len());
        let mut ports = Vec::new();
        let (mut node_count, mut device_count, mut link_count) = (0, 0, 0);
        for group in groups {
            let links = NodeLinks::new(group);
            let total = group.nics.map_or(BytesPerSecond::ZERO, |nics| nics.total_bandwidth());
            for node in 0..group.count {
                let first = device_count + node * group.devices;
                let rate = if links.rails > 0 { total / links.rails as f64 } else { BytesPerSecond::ZERO };
                ports.push(NodePorts { devices: first..first + group.devices, rails: links.rails, rate });
            }
            let of_group = group.count * links.count();
            layouts.push(GroupLayout { first_node: node_count, first_device: device_count, first_link: link_count, links });
            node_count += group.count;
            device_count += group.count * group.devices;
            link_count += of_group;
        }
        // The fabric's links are numbered after the nodes' links.
        let mut of_fabric = NewLinks::after(link_count);
        let fabric = FabricLayout::new(network, &ports, &mut of_fabric);
        let mut links = Vec::with_capacity(of_fabric.next());
        for (group, layout) in groups.iter().zip(&layouts) {
            for node in 0..group.count {
                let (number, first_device) = (layout.first_node + node, layout.first_device + node * group.devices);
                let named = NamedNode { name: node_name(group, node), number, first_device };
                layout.links.add(group, &named, network.latency, |rail| fabric.entry(number, rail), &mut links);
            }
        }
        links.extend(of_fabric.links);
        Layout { groups: layouts, links, node_count, device_count, fabric }
    }

    /// Group of a node.
    pub(crate) fn group_of_node(&self, node: usize) -> usize {
        self.groups.partition_point(|group| group.first_node <= node).saturating_sub(1)
    }

    /// Group of a device.
    pub(crate) fn group_of_device(&self, device: usize) -> usize {
        // The common case. This function is on a hot path.
        if self.groups.len() == 1 {
            return 0;
        }
        self.groups.partition_point(|group| group.first_device <= device).saturating_sub(1)
    }

    pub(crate) fn position(&self, groups: &[NodeGroup], device: DeviceId) -> Position {
        assert!(device.0 < self.device_count, "device {} of {}", device.0, self.device_count);
        let group = self.group_of_device(device.0);
        let offset = device.0 - self.groups[group].first_device;
        let devices = groups[group].devices;
        Position { group, node_in_group: offset / devices, device_in_node: offset % devices }
    }

    /// Computes a route. The error says what is missing between the devices.
    pub(crate) fn route(&self, groups: &[NodeGroup], from: Position, to: Position) -> Result<Route, NoRoute> {
        let mut links = Vec::with_capacity(8);
        let mut single_flow_limit = None;
        let (from_node, to_node) = (self.node(from), self.node(to));
        if from_node == to_node && !self.fabric.joins_devices() {
            if from.device_in_node != to.device_in_node {
                single_flow_limit = self.within(groups, from, to.device_in_node, &mut links).ok_or(NO_NODE_LINK)?;
            }
        } else if self.fabric.joins_devices() {
            let ends = [from, to].map(|position| self.end(position, 0));
            self.fabric.path(ends[0], ends[1], &mut links).ok_or(NO_NETWORK)?;
        } else {
            let (from_links, to_links) = (&self.groups[from.group].links, &self.groups[to.group].links);
            let mut rail = from_links.rail(from.device_in_node).ok_or(NO_NIC)?;
            let to_rail = to_links.rail(to.device_in_node).ok_or(NO_NIC)?;
            let mut exit = from;
            if self.fabric.forwards_between_rails() && rail != to_rail && to_rail < from_links.rails {
                let device = from_links.first_of_rail(to_rail);
                single_flow_limit = self.within(groups, from, device, &mut links).ok_or(NO_NODE_LINK)?;
                (rail, exit.device_in_node) = (to_rail, device);
            }
            from_links.out(self.first_link_of_node(exit), exit.device_in_node, rail, &mut links);
            self.fabric.path(self.end(from, rail), self.end(to, to_rail), &mut links).ok_or(NO_NETWORK)?;
            to_links.into(self.first_link_of_node(to), to.device_in_node, to_rail, &mut links);
        }
        let latency = links.iter().map(|link| self.links[link.0].latency).sum();
        Ok(Route { links, latency, single_flow_limit })
    }

    /// Returns the nodes if all are interchangeable.
    pub(crate) fn interchangeable_nodes(&self) -> Option<InterchangeableNodes> {
        let [group] = self.groups.as_slice() else { return None };
        let nodes = InterchangeableNodes { count: self.node_count, devices: group.links.devices, links: group.links.count() };
        (self.fabric.treats_nodes_alike() && nodes.links > 0).then_some(nodes)
    }

    /// Number of paths between two devices, 0 if there is none. In a fabric that joins devices (a
    /// torus), this includes pairs within a node. With any other fabric, such pairs have 1 path.
    pub(crate) fn equal_paths(&self, from: Position, to: Position) -> u64 {
        let rail = |position: Position| self.groups[position.group].links.rail(position.device_in_node);
        if self.fabric.joins_devices() {
            return self.fabric.equal_paths(self.end(from, 0), self.end(to, 0));
        }
        match (rail(from), rail(to)) {
            _ if self.node(from) == self.node(to) => 1,
            (Some(from_rail), Some(to_rail)) => {
                let forwards = self.fabric.forwards_between_rails() && to_rail < self.groups[from.group].links.rails;
                let from_rail = if forwards { to_rail } else { from_rail };
                self.fabric.equal_paths(self.end(from, from_rail), self.end(to, to_rail))
            }
            _ => 0,
        }
    }

    /// Leaf switches of a fat tree. Empty for rail-optimised trees and other fabrics.
    pub(crate) fn leaves(&self) -> Vec<Leaf> {
        self.fabric.leaves(self.node_count, &self.links)
    }

    /// Appends the links between two devices of a node and returns the limit of a single flow.
    /// `None` if nothing joins them.
    fn within(&self, groups: &[NodeGroup], from: Position, to: usize, links: &mut Vec<LinkId>) -> Option<Option<BytesPerSecond>> {
        let group = &groups[from.group];
        self.groups[from.group].links.between(self.first_link_of_node(from), from.device_in_node, to, links)?;
        let mesh = group.link.filter(|link| link.kind == NodeLinkKind::NvLinkMesh && group.devices > 2);
        let of_pair = |link: NodeLink| match &group.wires {
            Some(wires) => wires.rate(from.device_in_node, &[to], link.bandwidth),
            None => link.bandwidth / (group.devices - 1) as f64,
        };
        Some(mesh.map(of_pair))
    }

    fn end(&self, position: Position, rail: usize) -> End {
        let node = self.node(position);
        let group = &self.groups[position.group];
        let first = group.first_device + position.node_in_group * group.links.devices;
        End { device: first + position.device_in_node, node, rail }
    }

    fn node(&self, position: Position) -> usize {
        self.groups[position.group].first_node + position.node_in_group
    }

    fn first_link_of_node(&self, position: Position) -> usize {
        let group = &self.groups[position.group];
        group.first_link + position.node_in_group * group.links.count()
    }
}

/// What is missing between two devices, and how to add it.
#[derive(Clone, Copy)]
pub(crate) struct NoRoute {
    reason: &'static str,
    hint: &'static str,
}

const NO_NODE_LINK: NoRoute =
    NoRoute { reason: "nothing joins the devices of that node", hint: "give the node a `link`, such as `nvswitch-300GB/s`" };
const NO_NIC: NoRoute = NoRoute {
    reason: "a node without network interfaces is on the way",
    hint: "give it `nics`, such as `{count: 1, bandwidth: 25Gbit/s}`",
};
const NO_NETWORK: NoRoute = NoRoute { reason: "the nodes have no network", hint: "write `network: {kind: switch}`" };

/// Makes the error of two devices without a route.
pub(crate) fn unreachable(from: String, to: String, missing: NoRoute) -> TopologyError {
    let NoRoute { reason, hint } = missing;
    TopologyProblem::Unreachable { from, to, reason, hint }.into()
}

/// Returns a node's name: its group's, numbered if the group has several.
pub(crate) fn node_name(group: &NodeGroup, node_in_group: usize) -> String {
    if group.count == 1 { group.name.clone() } else { format!("{}-{node_in_group}", group.name) }
}

/// Describes a device for messages.
pub(crate) fn device_in_words(device: DeviceId, group: &NodeGroup, kinds: &[DeviceKind], position: Position) -> String {
    let kind = &kinds[group.kind].name;
    format!("device {} ({kind} {} of node `{}`)", device.0, position.device_in_node, node_name(group, position.node_in_group))
}
