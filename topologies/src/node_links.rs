//! The links inside a node: device ports, host memory or PCIe switches, and network interfaces.
//!
//! A node's links are numbered in this order: device ports (egress, then ingress) or the host's
//! memory; uplinks of PCIe switches (up, then down); links between sockets (egress, then ingress);
//! network interfaces (egress, then ingress).

use crate::link::{Junction, Link, LinkClass, LinkId};
use crate::node::{NodeGroup, NodeLinkKind, PcieTree};
use foretell_units::{BytesPerSecond, Seconds};

/// Latency of a PCIe switch or of the link between sockets: an estimate from data sheets of PCIe
/// switches (100 to 150 ns). Calibration replaces it.
const PCIE_SWITCH_LATENCY: Seconds = Seconds::new(0.15e-6);

/// The links of a node in one group: how many there are, and their order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NodeLinks {
    pub(crate) devices: usize,
    kind: Option<NodeLinkKind>,
    /// Number of links that are device ports or host memory.
    ports: usize,
    tree: Option<PcieTree>,
    /// Number of PCIe switches, and of sockets (0 unless there are several).
    switches: usize,
    sockets: usize,
    /// Number of separately shared NIC resources. If there are more NICs than devices, the NICs of
    /// one device are bonded into one resource of their total rate, since NCCL uses them together.
    pub(crate) rails: usize,
}

impl NodeLinks {
    pub(crate) fn new(group: &NodeGroup) -> Self {
        let ports = match group.link {
            None => 0,
            Some(link) if link.kind == NodeLinkKind::SharedMemory => 1,
            Some(_) => 2 * group.devices,
        };
        let tree = group.link.and_then(|link| link.tree);
        let switches = tree.map_or(0, |tree| group.devices.div_ceil(tree.devices_per_switch));
        let sockets = tree.and_then(|tree| tree.sockets).map_or(0, |sockets| switches.div_ceil(sockets.switches));
        NodeLinks {
            devices: group.devices,
            kind: group.link.map(|link| link.kind),
            ports,
            tree,
            switches,
            sockets: if sockets > 1 { sockets } else { 0 },
            rails: group.nics.map_or(0, |nics| nics.count.min(group.devices)),
        }
    }

    /// Number of links of a node.
    pub(crate) fn count(&self) -> usize {
        self.ports + 2 * self.switches + 2 * self.sockets + 2 * self.rails
    }

    /// The rail of a device. Neighbouring devices share a rail if there are fewer NICs than
    /// devices. `None` without NICs.
    pub(crate) fn rail(&self, device: usize) -> Option<usize> {
        (self.rails > 0).then(|| device * self.rails / self.devices)
    }

    /// First device of a rail.
    pub(crate) fn first_of_rail(&self, rail: usize) -> usize {
        (rail * self.devices).div_ceil(self.rails.max(1))
    }

    /// Appends the links between two devices of a node. `None` if nothing joins them.
    pub(crate) fn between(&self, first: usize, from: usize, to: usize, links: &mut Vec<LinkId>) -> Option<()> {
        if self.kind? == NodeLinkKind::SharedMemory {
            links.push(LinkId(first));
        } else {
            links.push(LinkId(first + 2 * from));
            self.across(first, self.switch_of(from), self.switch_of(to), links);
            links.push(LinkId(first + 2 * to + 1));
        }
        Some(())
    }

    /// Appends the links from a device over a rail into the network, including the network
    /// interface.
    ///
    /// In NVLink machines, the NIC reads device memory through PCIe lanes that NVLink traffic does
    /// not use and that are as fast as the NIC, so they are left out. If PCIe joins the devices,
    /// traffic between devices and to the NIC shares the same lanes.
    pub(crate) fn out(&self, first: usize, device: usize, rail: usize, links: &mut Vec<LinkId>) {
        if self.kind == Some(NodeLinkKind::Pcie) {
            links.push(LinkId(first + 2 * device));
            self.across(first, self.switch_of(device), self.switch_of(self.first_of_rail(rail)), links);
        }
        links.push(LinkId(self.interface(first, rail)));
    }

    /// Appends the links from the network over a rail to a device.
    pub(crate) fn into(&self, first: usize, device: usize, rail: usize, links: &mut Vec<LinkId>) {
        links.push(LinkId(self.interface(first, rail) + 1));
        if self.kind == Some(NodeLinkKind::Pcie) {
            self.across(first, self.switch_of(self.first_of_rail(rail)), self.switch_of(device), links);
            links.push(LinkId(first + 2 * device + 1));
        }
    }

    fn interface(&self, first: usize, rail: usize) -> usize {
        first + self.ports + 2 * self.switches + 2 * self.sockets + 2 * rail
    }

    fn switch_of(&self, device: usize) -> usize {
        self.tree.map_or(0, |tree| device / tree.devices_per_switch)
    }

    fn socket_of(&self, switch: usize) -> usize {
        self.tree.and_then(|tree| tree.sockets).map_or(0, |sockets| switch / sockets.switches)
    }

    /// Appends the links between two PCIe switches: up, to the other socket if needed, and down.
    fn across(&self, first: usize, from: usize, to: usize, links: &mut Vec<LinkId>) {
        if from == to {
            return;
        }
        let first_uplink = first + self.ports;
        links.push(LinkId(first_uplink + 2 * from));
        let (from_socket, to_socket) = (self.socket_of(from), self.socket_of(to));
        if from_socket != to_socket {
            let first_socket = first_uplink + 2 * self.switches;
            links.extend([LinkId(first_socket + 2 * from_socket), LinkId(first_socket + 2 * to_socket + 1)]);
        }
        links.push(LinkId(first_uplink + 2 * to + 1));
    }

    /// Adds the links of a node. Each latency is divided over the links at both ends, so that the
    /// sum over a route is right. `entry` returns the switch that a rail connects to.
    pub(crate) fn add(
        &self,
        group: &NodeGroup,
        node: &NamedNode,
        network_latency: Seconds,
        entry: impl Fn(usize) -> Junction,
        links: &mut Vec<Link>,
    ) {
        let NamedNode { name, number, first_device } = node;
        let middle = Junction::Node(*number);
        let above =
            |device: usize| if self.switches > 0 { Junction::PcieSwitch(*number, self.switch_of(device)) } else { middle };
        match group.link {
            Some(link) if link.kind == NodeLinkKind::SharedMemory => {
                let (name, class) = (format!("{name}/memory"), LinkClass::HostMemory);
                links.push(Link { name, class, bandwidth: link.bandwidth, latency: link.latency, from: middle, to: middle });
            }
            Some(link) => {
                for device in 0..group.devices {
                    let of = format!("{name}/device-{device}");
                    let pair = Pair { class: LinkClass::Device, bandwidth: link.bandwidth, latency: link.latency / 2.0 };
                    pair.add(&of, ["egress", "ingress"], [Junction::Device(first_device + device), above(device)], links);
                }
            }
            None => {}
        }
        if let Some(tree) = self.tree {
            let root = |switch: usize| if self.sockets > 0 { Junction::Socket(*number, self.socket_of(switch)) } else { middle };
            let pair = Pair { class: LinkClass::Device, bandwidth: tree.uplink, latency: PCIE_SWITCH_LATENCY };
            for switch in 0..self.switches {
                let ends = [Junction::PcieSwitch(*number, switch), root(switch)];
                pair.add(&format!("{name}/pcie-switch-{switch}"), ["up", "down"], ends, links);
            }
            let between = tree.sockets.map_or(BytesPerSecond::ZERO, |sockets| sockets.link);
            let pair = Pair { class: LinkClass::Device, bandwidth: between, latency: PCIE_SWITCH_LATENCY };
            for socket in 0..self.sockets {
                let ends = [Junction::Socket(*number, socket), middle];
                pair.add(&format!("{name}/socket-{socket}"), ["egress", "ingress"], ends, links);
            }
        }
        let Some(nics) = group.nics else { return };
        let bandwidth = nics.total_bandwidth() / self.rails as f64;
        let pair = Pair { class: LinkClass::Nic, bandwidth, latency: network_latency / 2.0 };
        for rail in 0..self.rails {
            let ends = [above(self.first_of_rail(rail)), entry(rail)];
            pair.add(&format!("{name}/nic-{rail}"), ["egress", "ingress"], ends, links);
        }
    }
}

/// The node whose links are added.
pub(crate) struct NamedNode {
    pub(crate) name: String,
    pub(crate) number: usize,
    pub(crate) first_device: usize,
}

/// The two directions of a link.
struct Pair {
    class: LinkClass,
    bandwidth: BytesPerSecond,
    latency: Seconds,
}

impl Pair {
    fn add(&self, of: &str, [there, back]: [&str; 2], [low, high]: [Junction; 2], links: &mut Vec<Link>) {
        let &Pair { class, bandwidth, latency } = self;
        links.push(Link { name: format!("{of}/{there}"), class, bandwidth, latency, from: low, to: high });
        links.push(Link { name: format!("{of}/{back}"), class, bandwidth, latency, from: high, to: low });
    }
}
