//! Nodes: how many of a kind there are, what joins the devices of one, and how it reaches the network.

use foretell_units::{Bytes, BytesPerSecond, Seconds};
use serde::{Deserialize, Serialize};

/// How the devices of one node are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeLinkKind {
    /// NVLink ports into a non-blocking NVSwitch: any device sends at its full rate to any other.
    #[serde(rename = "nvswitch")]
    NvSwitch,
    /// NVLink wires straight between the devices, spread evenly over the pairs. All of a device's wires together carry its rate
    /// (collectives use several rings to fill them); one flow between two devices gets only the wires between those two.
    #[serde(rename = "nvlink-mesh")]
    NvLinkMesh,
    /// PCIe lanes into a non-blocking root, or into a tree of switches ([`PcieTree`]). The same lanes lead to the NICs.
    Pcie,
    /// Copies through the memory of the host. The rate is what all devices of the node share.
    SharedMemory,
}

impl NodeLinkKind {
    /// Every kind there is.
    pub const ALL: [NodeLinkKind; 4] =
        [NodeLinkKind::NvSwitch, NodeLinkKind::NvLinkMesh, NodeLinkKind::Pcie, NodeLinkKind::SharedMemory];

    /// The name used in topology files.
    pub const fn name(self) -> &'static str {
        match self {
            NodeLinkKind::NvSwitch => "nvswitch",
            NodeLinkKind::NvLinkMesh => "nvlink-mesh",
            NodeLinkKind::Pcie => "pcie",
            NodeLinkKind::SharedMemory => "shared-memory",
        }
    }

    /// The time from one device of a node to another where the file says none.
    ///
    /// NVSwitch: 936.25 ns, fitted for an HGX-H100 by astra-sim (`HGX-H100-validated.yml`). The others are estimates for want of
    /// a measurement, to be replaced by calibration: a mesh has no switch to cross, PCIe has a root complex, and a message
    /// through shared memory costs a fence and a few cache misses of another core.
    pub const fn default_latency(self) -> Seconds {
        Seconds::new(match self {
            NodeLinkKind::NvSwitch => 936.25e-9,
            NodeLinkKind::NvLinkMesh => 700e-9,
            NodeLinkKind::Pcie => 1.5e-6,
            NodeLinkKind::SharedMemory => 1e-6,
        })
    }
}

/// What joins the devices of one node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NodeLink {
    /// How they are joined.
    pub kind: NodeLinkKind,
    /// What one device can send, to all others together, one way; for [`NodeLinkKind::SharedMemory`] what the node has in all.
    pub bandwidth: BytesPerSecond,
    /// The time from one device to another; switches that are crossed on the way add to it.
    pub latency: Seconds,
    /// The switches between the devices, where the link is PCIe and the file describes them.
    pub tree: Option<PcieTree>,
}

/// PCIe switches: consecutive devices share one, and its uplink to the root is what they share to reach the others. A NIC is under the
/// switch of the first device that it serves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PcieTree {
    /// Devices under one switch.
    pub devices_per_switch: usize,
    /// What a switch's uplink carries, one way.
    pub uplink: BytesPerSecond,
    /// The processor sockets whose roots the uplinks lead to, where there are several.
    pub sockets: Option<Sockets>,
}

/// Processor sockets, each with some of the PCIe switches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sockets {
    /// Switches of one socket.
    pub switches: usize,
    /// What a socket sends to the others, one way.
    pub link: BytesPerSecond,
}

/// The network interfaces of one node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Nics {
    /// How many.
    pub count: usize,
    /// What one of them carries, one way.
    pub bandwidth: BytesPerSecond,
}

impl Nics {
    /// What all of them carry together, one way.
    pub fn total_bandwidth(self) -> BytesPerSecond {
        self.bandwidth * self.count as f64
    }
}

/// Some nodes that are all alike.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeGroup {
    /// The name; its nodes are `name-0`, `name-1` and so on, or just `name` where there is one.
    pub name: String,
    /// How many nodes.
    pub count: usize,
    /// The kind of their devices: an index into [`crate::Topology::device_kinds`].
    pub kind: usize,
    /// How many devices each node has.
    pub devices: usize,
    /// What joins the devices of a node; `None` where a lone device needs nothing.
    pub link: Option<NodeLink>,
    /// How a node reaches the network; `None` where it does not.
    pub nics: Option<Nics>,
    /// The memory of a node's host, which its devices share; `None` where the file does not say. A processor's own memory is part of it.
    pub host_memory: Option<Bytes>,
    /// What one node costs an hour, in the currency of the file.
    pub price_per_hour: Option<f64>,
    /// From one failure of a node that ends a run to the next of the same node, on average.
    pub mean_time_between_failures: Option<Seconds>,
}
