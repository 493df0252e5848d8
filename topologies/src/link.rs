//! One-way link resources: what each is part of, what it joins, and what it carries.

use foretell_units::{BytesPerSecond, Seconds};
use serde::{Deserialize, Serialize};

/// The number of a one-way link resource: an index into [`crate::Topology::links`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LinkId(pub usize);

/// What a link resource is part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkClass {
    /// A device's port into its node's NVSwitch, mesh or PCIe switch, or what lies between that and other parts of the node.
    Device,
    /// The memory of a host, through which its devices hand data over.
    HostMemory,
    /// A network interface, or a device's link to its neighbour in a torus.
    Nic,
    /// A link between switches: the uplinks or downlinks of a tree, the local and global links of a dragonfly.
    Switch,
}

/// Where links begin and end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Junction {
    /// A device, by its number.
    Device(usize),
    /// What joins the devices of a node: its NVSwitch, its mesh, its memory, its PCIe root. The NICs of a node lead to it too, except where
    /// they are under PCIe switches.
    Node(usize),
    /// A PCIe switch of a node: the node, and the switch's number there.
    PcieSwitch(usize, usize),
    /// What the PCIe switches of a processor socket meet in, where a node has several sockets: the node, and the socket's number there.
    Socket(usize, usize),
    /// A switch or router of the network. Those of a tree that flows are spread over count as one.
    Switch(usize),
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
    /// Where it begins.
    pub from: Junction,
    /// Where it ends.
    pub to: Junction,
}

/// Links that come after so many others.
pub(crate) struct NewLinks {
    before: usize,
    pub(crate) links: Vec<Link>,
}

impl NewLinks {
    pub(crate) fn after(before: usize) -> Self {
        NewLinks { before, links: Vec::new() }
    }

    /// The number that the next link will have.
    pub(crate) fn next(&self) -> usize {
        self.before + self.links.len()
    }

    pub(crate) fn push(&mut self, link: Link) {
        self.links.push(link);
    }
}
