//! The numbering of devices, nodes and one-way link resources, and routes over them.
//!
//! Links are numbered by arithmetic: node by node, within a node first the devices' ports (egress, then ingress) or the host's
//! memory, then the network interfaces (egress, then ingress), and after all nodes the fabric. So a route is computed from two
//! device numbers on demand, without a table of pairs.

use crate::device::DeviceKind;
use crate::error::{TopologyError, TopologyProblem};
use crate::fabric::{FabricLayout, FabricPath, Leaf, Network};
use crate::node::{NodeGroup, NodeLinkKind};
use foretell_units::{BytesPerSecond, Seconds};
use serde::{Deserialize, Serialize};

/// The number of a device: ranks are placed on these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DeviceId(pub usize);

/// The number of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub usize);

/// The number of a one-way link resource: an index into [`crate::Topology::links`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LinkId(pub usize);

/// What a link resource is part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkClass {
    /// A device's port into its node's NVSwitch, mesh or PCIe root.
    Device,
    /// The memory of a host, through which its devices hand data over.
    HostMemory,
    /// A network interface.
    Nic,
    /// The uplinks or downlinks of a switch.
    Switch,
}

/// A one-way link resource, which the flows that use it share.
#[derive(Debug, Clone, PartialEq)]
pub struct Link {
    /// What it is, for people: `node-0/device-1/egress`.
    pub name: String,
    /// What it is part of.
    pub class: LinkClass,
    /// What it carries.
    pub bandwidth: BytesPerSecond,
    /// What passing it costs in time.
    pub latency: Seconds,
}

/// The way from one device to another.
#[derive(Debug, Clone, PartialEq)]
pub struct Route {
    /// The link resources used, in order; none from a device to itself.
    pub links: Vec<LinkId>,
    /// The sum of their latencies.
    pub latency: Seconds,
    /// The most that a single flow between these two gets where that is less than the links carry: on an `nvlink-mesh` the wires
    /// between one pair. Collectives that use all wires at once (NCCL's several rings) are bounded by the links alone.
    pub single_flow_limit: Option<BytesPerSecond>,
}

/// Where one group's nodes, devices and links begin.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct GroupLayout {
    pub(crate) first_node: usize,
    pub(crate) first_device: usize,
    first_link: usize,
    links_per_node: usize,
    /// Links of the devices' ports, or of the host's memory, which come first in a node.
    port_links: usize,
    /// Network rails of a node: see [`rails`].
    rails: usize,
}

/// Everything that follows from the description.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Layout {
    pub(crate) groups: Vec<GroupLayout>,
    pub(crate) links: Vec<Link>,
    pub(crate) node_count: usize,
    pub(crate) device_count: usize,
    fabric: FabricLayout,
}

/// A device found: its group, its node within the group, and its place in the node.
#[derive(Clone, Copy)]
pub(crate) struct Position {
    pub(crate) group: usize,
    pub(crate) node_in_group: usize,
    pub(crate) device_in_node: usize,
}

impl Layout {
    pub(crate) fn new(groups: &[NodeGroup], network: &Network) -> Self {
        let mut layouts = Vec::with_capacity(groups.len());
        let (mut links, mut node_bandwidth) = (Vec::new(), Vec::new());
        let (mut node_count, mut device_count) = (0, 0);
        for group in groups {
            let port_links = match group.link {
                None => 0,
                Some(link) if link.kind == NodeLinkKind::SharedMemory => 1,
                Some(_) => 2 * group.devices,
            };
            let rails = rails(group);
            layouts.push(GroupLayout {
                first_node: node_count,
                first_device: device_count,
                first_link: links.len(),
                links_per_node: port_links + 2 * rails,
                port_links,
                rails,
            });
            for node in 0..group.count {
                add_links_of_node(group, node, rails, network.latency, &mut links);
                node_bandwidth.push(group.nics.map_or(BytesPerSecond::ZERO, |nics| nics.total_bandwidth()));
            }
            node_count += group.count;
            device_count += group.count * group.devices;
        }
        let fabric = FabricLayout::new(network.fabric, &node_bandwidth, &mut links);
        Layout { groups: layouts, links, node_count, device_count, fabric }
    }

    /// The group that holds node `node`.
    pub(crate) fn group_of_node(&self, node: usize) -> usize {
        self.groups.partition_point(|group| group.first_node <= node).saturating_sub(1)
    }

    /// The group that holds device `device`.
    pub(crate) fn group_of_device(&self, device: usize) -> usize {
        self.groups.partition_point(|group| group.first_device <= device).saturating_sub(1)
    }

    pub(crate) fn position(&self, groups: &[NodeGroup], device: DeviceId) -> Position {
        assert!(device.0 < self.device_count, "device {} of {}", device.0, self.device_count);
        let group = self.group_of_device(device.0);
        let offset = device.0 - self.groups[group].first_device;
        let devices = groups[group].devices;
        Position { group, node_in_group: offset / devices, device_in_node: offset % devices }
    }

    /// The route from one device to another, or what is missing between them.
    pub(crate) fn route(&self, groups: &[NodeGroup], from: Position, to: Position) -> Result<Route, &'static str> {
        let mut links = Vec::with_capacity(6);
        let mut single_flow_limit = None;
        let (from_node, to_node) = (self.node(from), self.node(to));
        if from_node == to_node {
            if from.device_in_node != to.device_in_node {
                let link = groups[from.group].link.ok_or(NO_NODE_LINK)?;
                if link.kind == NodeLinkKind::SharedMemory {
                    links.push(self.first_link_of_node(from));
                } else {
                    links.extend([self.egress_port(from), self.ingress_port(to)]);
                }
                if link.kind == NodeLinkKind::NvLinkMesh && groups[from.group].devices > 2 {
                    single_flow_limit = Some(link.bandwidth / (groups[from.group].devices - 1) as f64);
                }
            }
        } else {
            let from_rail = self.rail(groups, from).ok_or(NO_NIC)?;
            let to_rail = self.rail(groups, to).ok_or(NO_NIC)?;
            // Over NVLink machines the NIC reads a device's memory through PCIe lanes that NVLink traffic does not use and that
            // are no narrower than the NIC. Where PCIe joins the devices, the lanes are the same, and so they are shared.
            if is_pcie(&groups[from.group]) {
                links.push(self.egress_port(from));
            }
            links.push(LinkId(from_rail));
            match self.fabric.path(from_node, to_node).ok_or(NO_NETWORK)? {
                FabricPath::OneSwitch => {}
                FabricPath::OverSpine(spine) => links.extend(spine),
            }
            links.push(LinkId(to_rail + 1));
            if is_pcie(&groups[to.group]) {
                links.push(self.ingress_port(to));
            }
        }
        let latency = links.iter().map(|link| self.links[link.0].latency).sum();
        Ok(Route { links, latency, single_flow_limit })
    }

    /// The leaf switches of a fat tree.
    pub(crate) fn leaves(&self) -> Vec<Leaf> {
        self.fabric.leaves(self.node_count, &self.links)
    }

    fn node(&self, position: Position) -> usize {
        self.groups[position.group].first_node + position.node_in_group
    }

    fn first_link_of_node(&self, position: Position) -> LinkId {
        let group = &self.groups[position.group];
        LinkId(group.first_link + position.node_in_group * group.links_per_node)
    }

    fn egress_port(&self, position: Position) -> LinkId {
        LinkId(self.first_link_of_node(position).0 + 2 * position.device_in_node)
    }

    fn ingress_port(&self, position: Position) -> LinkId {
        LinkId(self.egress_port(position).0 + 1)
    }

    /// The egress link of the NIC that serves a device: neighbours share one where there are fewer NICs than devices.
    fn rail(&self, groups: &[NodeGroup], position: Position) -> Option<usize> {
        let group = &self.groups[position.group];
        let rail = (group.rails > 0).then(|| position.device_in_node * group.rails / groups[position.group].devices)?;
        Some(self.first_link_of_node(position).0 + group.port_links + 2 * rail)
    }
}

const NO_NODE_LINK: &str = "nothing joins the devices of that node; hint: give the node a `link`, such as `nvswitch-300GB/s`";
const NO_NIC: &str =
    "a node without network interfaces is on the way; hint: give it `nics`, such as `{count: 1, bandwidth: 25Gbit/s}`";
const NO_NETWORK: &str = "the nodes have no network; hint: write `network: {kind: switch}`";

/// What two devices that nothing joins are told.
pub(crate) fn unreachable(from: String, to: String, reason: &'static str) -> TopologyError {
    TopologyProblem::Unreachable { from, to, reason }.into()
}

/// How many separately shared NIC resources a node has. Where there are more NICs than devices, those of one device are bonded
/// into one resource of their summed rate, as NCCL drives them together.
fn rails(group: &NodeGroup) -> usize {
    group.nics.map_or(0, |nics| nics.count.min(group.devices))
}

fn is_pcie(group: &NodeGroup) -> bool {
    group.link.is_some_and(|link| link.kind == NodeLinkKind::Pcie)
}

/// A node's name: the group's, numbered where the group has several.
pub(crate) fn node_name(group: &NodeGroup, node_in_group: usize) -> String {
    if group.count == 1 { group.name.clone() } else { format!("{}-{node_in_group}", group.name) }
}

/// A device in words, for messages.
pub(crate) fn device_in_words(device: DeviceId, group: &NodeGroup, kinds: &[DeviceKind], position: Position) -> String {
    let kind = kinds.get(group.kind).map_or("", |kind| kind.name.as_str());
    format!("device {} ({kind} {} of node `{}`)", device.0, position.device_in_node, node_name(group, position.node_in_group))
}

/// Adds a node's links in their order. A latency is split between the two ends, so that a route's sum gives it back.
fn add_links_of_node(group: &NodeGroup, node: usize, rails: usize, network_latency: Seconds, links: &mut Vec<Link>) {
    let node = node_name(group, node);
    if let Some(link) = group.link {
        if link.kind == NodeLinkKind::SharedMemory {
            let name = format!("{node}/memory");
            links.push(Link { name, class: LinkClass::HostMemory, bandwidth: link.bandwidth, latency: link.latency });
        } else {
            for device in 0..group.devices {
                for direction in ["egress", "ingress"] {
                    let name = format!("{node}/device-{device}/{direction}");
                    let latency = link.latency / 2.0;
                    links.push(Link { name, class: LinkClass::Device, bandwidth: link.bandwidth, latency });
                }
            }
        }
    }
    if let Some(nics) = group.nics {
        for rail in 0..rails {
            for direction in ["egress", "ingress"] {
                let name = format!("{node}/nic-{rail}/{direction}");
                let bandwidth = nics.total_bandwidth() / rails as f64;
                links.push(Link { name, class: LinkClass::Nic, bandwidth, latency: network_latency / 2.0 });
            }
        }
    }
}
