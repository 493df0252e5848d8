//! One-way link resources: class, ends, rate and latency.

use foretell_units::{BytesPerSecond, Seconds};
use serde::{Deserialize, Serialize};

/// The index of a one-way link resource in [`crate::Topology::links`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LinkId(pub usize);

/// The part of a cluster that a link belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkClass {
    /// A device's port into its node's NVSwitch, mesh or PCIe switch, or a link between such
    /// switches or sockets.
    Device,
    /// Host memory, through which devices exchange data.
    HostMemory,
    /// A network interface, or a device's link to its neighbour in a torus.
    Nic,
    /// A link between switches: an uplink or downlink of a tree, or a local or global link of a
    /// dragonfly.
    Switch,
}

/// The end of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Junction {
    /// A device, by its index.
    Device(usize),
    /// The centre of a node: its NVSwitch, mesh, memory or PCIe root. NICs connect to it, too,
    /// unless they are under PCIe switches.
    Node(usize),
    /// A PCIe switch of a node: the index of the node, and the index of the switch in it.
    PcieSwitch(usize, usize),
    /// The PCIe root of a CPU socket, in nodes with several sockets: the index of the node, and the
    /// index of the socket in it.
    Socket(usize, usize),
    /// A switch or router of the network. All switches over which flows spread count as one.
    Switch(usize),
}

/// A one-way link, shared by the flows that use it.
#[derive(Debug, Clone, PartialEq)]
pub struct Link {
    /// Readable name, such as `node-0/device-1/egress`.
    pub name: String,
    /// The part of the cluster that it belongs to.
    pub class: LinkClass,
    /// Rate.
    pub bandwidth: BytesPerSecond,
    /// Latency.
    pub latency: Seconds,
    /// Start.
    pub from: Junction,
    /// End.
    pub to: Junction,
}

/// New links, whose indices follow those of existing links.
pub(crate) struct NewLinks {
    before: usize,
    pub(crate) links: Vec<Link>,
}

impl NewLinks {
    pub(crate) fn after(before: usize) -> Self {
        NewLinks { before, links: Vec::new() }
    }

    /// Index of the next link.
    pub(crate) fn next(&self) -> usize {
        self.before + self.links.len()
    }

    pub(crate) fn push(&mut self, link: Link) {
        self.links.push(link);
    }
}
