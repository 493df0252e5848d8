//! Node groups: the number of nodes, the link between a node's devices, and its network interfaces.

use crate::wires::Wires;
use foretell_units::{Bytes, BytesPerSecond, Seconds};
use serde::{Deserialize, Serialize};

/// How the devices of one node are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeLinkKind {
    /// NVLink ports into a non-blocking NVSwitch: each device sends at its full rate to any other.
    #[serde(rename = "nvswitch")]
    NvSwitch,
    /// NVLink wires between all pairs of devices, evenly spread. A device's wires together carry
    /// its rate, which collectives use with several rings. A flow between two devices uses only the
    /// wires of that pair.
    #[serde(rename = "nvlink-mesh")]
    NvLinkMesh,
    /// PCIe lanes into a non-blocking root, or into a tree of switches ([`PcieTree`]). The same
    /// lanes lead to the NICs.
    Pcie,
    /// Copies through host memory. All devices of the node share the rate.
    SharedMemory,
}

impl NodeLinkKind {
    /// All kinds.
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

    /// Default latency between two devices of a node.
    ///
    /// NVSwitch: 936.25 ns, fitted for an HGX-H100 by astra-sim (`HGX-H100-validated.yml`). The
    /// others are estimates, which calibration replaces. A mesh has no switch, PCIe has a root
    /// complex, and a message through shared memory costs a fence and a few cache misses of another
    /// core.
    pub const fn default_latency(self) -> Seconds {
        Seconds::new(match self {
            NodeLinkKind::NvSwitch => 936.25e-9,
            NodeLinkKind::NvLinkMesh => 700e-9,
            NodeLinkKind::Pcie => 1.5e-6,
            NodeLinkKind::SharedMemory => 1e-6,
        })
    }
}

/// The link between the devices of a node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NodeLink {
    /// How they are joined.
    pub kind: NodeLinkKind,
    /// Rate at which one device sends to all others together, one way. For
    /// [`NodeLinkKind::SharedMemory`], the total rate of the node.
    pub bandwidth: BytesPerSecond,
    /// Latency between two devices, without that of PCIe switches.
    pub latency: Seconds,
    /// PCIe switches between the devices. `None` if they are not described.
    pub tree: Option<PcieTree>,
}

/// PCIe switches. Consecutive devices share a switch, and share its uplink to devices under other
/// switches. A NIC is under the switch of the first device that it serves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PcieTree {
    /// Devices per switch.
    pub devices_per_switch: usize,
    /// Rate of a switch's uplink, one way.
    pub uplink: BytesPerSecond,
    /// CPU sockets to whose roots the uplinks lead. `None` if there is only one.
    pub sockets: Option<Sockets>,
}

/// CPU sockets, each with some of the PCIe switches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sockets {
    /// Switches per socket.
    pub switches: usize,
    /// Rate from a socket to the others, one way.
    pub link: BytesPerSecond,
}

/// The network interfaces of one node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Nics {
    /// Number of interfaces.
    pub count: usize,
    /// Rate of one interface, one way.
    pub bandwidth: BytesPerSecond,
}

impl Nics {
    /// Rate of all interfaces together, one way.
    pub fn total_bandwidth(self) -> BytesPerSecond {
        self.bandwidth * self.count as f64
    }
}

/// A group of equal nodes.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeGroup {
    /// Name of the group. Its nodes are called `name-0`, `name-1` and so on, or `name` if there is
    /// only one.
    pub name: String,
    /// Number of nodes.
    pub count: usize,
    /// Kind of its devices: an index into [`crate::Topology::device_kinds`].
    pub kind: usize,
    /// Devices per node.
    pub devices: usize,
    /// Link between the devices of a node; `None` for a single device.
    pub link: Option<NodeLink>,
    /// Number of links between each two devices. `None` unless pairs have different numbers.
    pub wires: Option<Wires>,
    /// Network interfaces of a node; `None` if it has none.
    pub nics: Option<Nics>,
    /// Host memory of a node, which its devices share. `None` if unknown. It includes the memory of
    /// CPU devices.
    pub host_memory: Option<Bytes>,
    /// Price of one node per hour, in the file's currency.
    pub price_per_hour: Option<f64>,
    /// Mean time between failures of one node, counting failures that end a run.
    pub mean_time_between_failures: Option<Seconds>,
}
