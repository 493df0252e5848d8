//! The fabric between nodes: the links that it adds, and which of them a path uses.
//!
//! A fabric knows only a node's devices and the rate of its network interfaces. Each kind of fabric
//! is a variant of [`Fabric`] and a file in `fabric/`, which computes link indices arithmetically
//! and paths on demand. So no table of pairs is needed.

mod dragonfly;
mod routing;
mod torus;
mod transport;
mod tree;

pub use dragonfly::Dragonfly;
pub use routing::{Routing, StatedRoute};
pub use torus::{Dimensions, Torus};
pub use transport::Transport;
pub use tree::{CrossRail, FatTree, LeafSwitches, Pods, Uplinks};

use crate::link::{Junction, Link, LinkId, NewLinks};
use dragonfly::DragonflyLayout;
use foretell_units::{BytesPerSecond, Seconds};
use routing::{Choice, choice};
use std::ops::Range;
use torus::TorusLayout;
use tree::TreeLayout;

/// Default latency between NICs under the same switch: an estimate for RDMA networks, including the
/// overhead of a collective library. Ethernet with TCP takes ten times as long.
pub const DEFAULT_NETWORK_LATENCY: Seconds = Seconds::new(5e-6);

/// Default latency of a hop in a torus: about 1 us on a TPU ("How to Scale Your Model", Austin et
/// al. 2025).
pub(crate) const DEFAULT_TORUS_LATENCY: Seconds = Seconds::new(1e-6);

/// Largest number of links between switches: they need about 3 GB.
const MOST_LINKS: usize = 1 << 24;

/// Latency of each further switch: one HDR InfiniBand hop (`link_specs.csv`: 0.6 us).
const SWITCH_HOP_LATENCY: Seconds = Seconds::new(0.6e-6);

/// The network between the nodes.
#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    /// How the nodes are joined.
    pub fabric: Fabric,
    /// What carries messages between nodes.
    pub transport: Transport,
    /// Latency from a node's NIC to another's under the same switch, one way; in a torus, from a
    /// device to its neighbour.
    pub latency: Seconds,
    /// How a flow's path is chosen if the fabric has several.
    pub routing: Routing,
    /// Seed of the hash that chooses paths. The hash also depends on the flow's two ends.
    pub seed: u64,
    /// Routes stated in the file, which override `routing`.
    pub stated: Vec<StatedRoute>,
}

/// How nodes are joined.
#[derive(Debug, Clone, PartialEq)]
pub enum Fabric {
    /// Not joined.
    None,
    /// One non-blocking switch: only the NICs limit flows.
    Switch,
    /// Leaf switches under a spine, or pods of leaf switches under a core.
    FatTree(FatTree),
    /// Devices in a grid, each with links to its neighbours.
    Torus(Torus),
    /// Groups of routers. All routers of a group are joined, and all groups.
    Dragonfly(Dragonfly),
}

impl Network {
    /// Makes a network whose fabric has one path per pair.
    pub(crate) fn plain(fabric: Fabric) -> Self {
        Network {
            fabric,
            transport: Transport::default(),
            latency: DEFAULT_NETWORK_LATENCY,
            routing: Routing::Spread,
            seed: 0,
            stated: Vec::new(),
        }
    }
}

impl Fabric {
    /// Names of all kinds in topology files.
    pub const NAMES: [&'static str; 6] = ["none", "switch", "fat-tree", "rail-optimised", "torus", "dragonfly"];

    /// The name used in topology files.
    pub const fn name(&self) -> &'static str {
        match self {
            Fabric::None => "none",
            Fabric::Switch => "switch",
            Fabric::FatTree(FatTree { leaf_switches: LeafSwitches::OfNodes, .. }) => "fat-tree",
            Fabric::FatTree(FatTree { leaf_switches: LeafSwitches::OfRails(_), .. }) => "rail-optimised",
            Fabric::Torus(_) => "torus",
            Fabric::Dragonfly(_) => "dragonfly",
        }
    }

    /// Multiplies the rates of links that the fabric itself states. The rates of other links follow
    /// from the network interfaces.
    pub(crate) fn scale(&mut self, factor: f64) {
        let rates: &mut [&mut BytesPerSecond] = match self {
            Fabric::None | Fabric::Switch | Fabric::FatTree(_) => &mut [],
            Fabric::Torus(torus) => &mut [&mut torus.bandwidth],
            Fabric::Dragonfly(dragonfly) => &mut [&mut dragonfly.local_bandwidth, &mut dragonfly.global_bandwidth],
        };
        for rate in rates {
            **rate = **rate * factor;
        }
    }

    /// Checks that this fabric can join `nodes` nodes with `devices` devices in total. The error
    /// has the problem and a hint.
    pub(crate) fn fits(&self, nodes: usize, devices: usize) -> Result<(), (String, String)> {
        match self {
            Fabric::None | Fabric::Switch => Ok(()),
            Fabric::FatTree(tree) => tree.fits(nodes, devices),
            Fabric::Torus(torus) => torus.fits(devices),
            Fabric::Dragonfly(dragonfly) => dragonfly.fits(nodes),
        }
    }

    /// Whether node groups of these sizes may be listed in a rotated order without changing the
    /// paths within or between groups.
    pub(crate) fn groups_may_rotate(&self, counts: &[usize]) -> bool {
        match self {
            Fabric::None | Fabric::Switch => true,
            Fabric::FatTree(tree) => {
                let leaf = tree.nodes_per_leaf(counts.iter().sum());
                tree.pods.is_none() && counts.iter().all(|count| count.is_multiple_of(leaf))
            }
            Fabric::Torus(_) | Fabric::Dragonfly(_) => false,
        }
    }

    /// Returns a note on a size that was derived from the number of nodes or devices, such as the
    /// nodes per leaf. `None` if all sizes are stated.
    pub(crate) fn worked_out(&self, nodes: usize, devices: usize) -> Option<String> {
        match self {
            Fabric::None | Fabric::Switch => None,
            Fabric::FatTree(tree) => (tree.nodes_per_leaf.is_none() && nodes > 1).then(|| {
                let per_leaf = tree.nodes_per_leaf(nodes);
                format!("network: {per_leaf} nodes under each leaf switch, since the file does not say `nodes_per_leaf`")
            }),
            Fabric::Torus(torus) => matches!(torus.dimensions, Dimensions::Count(_)).then(|| {
                let sizes: Vec<String> = torus.sizes(devices).iter().map(usize::to_string).collect();
                format!("network: a torus of {}, since the file says only how many dimensions", sizes.join(" x "))
            }),
            Fabric::Dragonfly(_) => None,
        }
    }
}

/// The fabric's view of a node.
pub(crate) struct NodePorts {
    /// Device numbers of the node.
    pub(crate) devices: Range<usize>,
    /// Number of separate ports into the network.
    pub(crate) rails: usize,
    /// Rate of each port.
    pub(crate) rate: BytesPerSecond,
}

impl NodePorts {
    /// Total rate of all rails.
    fn bandwidth(&self) -> BytesPerSecond {
        self.rate * self.rails as f64
    }
}

/// The point at which a flow enters or leaves the fabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) device: usize,
    pub(crate) node: usize,
    pub(crate) rail: usize,
}

/// A fabric with numbered links, ready to compute paths.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FabricLayout {
    kind: FabricKind,
    routing: Routing,
    seed: u64,
    /// Stated routes, sorted by the nodes at their ends.
    stated: Vec<StatedRoute>,
}

#[derive(Debug, Clone, PartialEq)]
enum FabricKind {
    None,
    Switch,
    Tree(TreeLayout),
    Torus(TorusLayout),
    Dragonfly(DragonflyLayout),
}

impl FabricLayout {
    /// Numbers the fabric's links and adds them. [`Fabric::fits`] must hold.
    pub(crate) fn new(network: &Network, nodes: &[NodePorts], links: &mut NewLinks) -> Self {
        let kind = match &network.fabric {
            Fabric::None => FabricKind::None,
            Fabric::Switch => FabricKind::Switch,
            Fabric::FatTree(tree) => FabricKind::Tree(TreeLayout::new(tree, network.routing, nodes, links)),
            Fabric::Torus(torus) => FabricKind::Torus(TorusLayout::new(torus, network.latency, nodes, links)),
            Fabric::Dragonfly(dragonfly) => FabricKind::Dragonfly(DragonflyLayout::new(dragonfly, nodes, links)),
        };
        let mut stated = network.stated.clone();
        stated.sort_by_key(|route| (route.from, route.to));
        FabricLayout { kind, routing: network.routing, seed: network.seed, stated }
    }

    /// Whether devices of one node reach each other over the fabric.
    pub(crate) fn joins_devices(&self) -> bool {
        matches!(self.kind, FabricKind::Torus(_))
    }

    /// The switch at the end of a node's rail.
    pub(crate) fn entry(&self, node: usize, rail: usize) -> Junction {
        match &self.kind {
            FabricKind::Tree(tree) => Junction::Switch(tree.leaf(node, rail)),
            FabricKind::Dragonfly(dragonfly) => Junction::Switch(dragonfly.router(node)),
            FabricKind::None | FabricKind::Switch | FabricKind::Torus(_) => Junction::Switch(0),
        }
    }

    /// Appends the fabric's links on the path between two different ends, in order. `None` if there
    /// is no path.
    pub(crate) fn path(&self, from: End, to: End, links: &mut Vec<LinkId>) -> Option<()> {
        let choice = || self.choice(from, to);
        match &self.kind {
            FabricKind::None => return None,
            FabricKind::Switch => {}
            FabricKind::Tree(tree) => tree.path(from, to, choice(), links),
            FabricKind::Torus(torus) => torus.path(from, to, self.routing, choice(), links),
            FabricKind::Dragonfly(dragonfly) => dragonfly.path(from, to, self.routing, choice(), links),
        }
        Some(())
    }

    /// Whether every path between nodes crosses only one switch, so that equal nodes are
    /// interchangeable.
    pub(crate) fn treats_nodes_alike(&self) -> bool {
        match &self.kind {
            FabricKind::Switch => true,
            FabricKind::Tree(tree) => tree.is_single_switch(),
            FabricKind::None | FabricKind::Torus(_) | FabricKind::Dragonfly(_) => false,
        }
    }

    /// Number of shortest paths among which the routing may choose for a flow; at most `u64::MAX`.
    pub(crate) fn equal_paths(&self, from: End, to: End) -> u64 {
        match &self.kind {
            FabricKind::None => 0,
            FabricKind::Switch => 1,
            FabricKind::Tree(tree) => tree.equal_paths(from, to) as u64,
            FabricKind::Torus(torus) => torus.equal_paths(from, to, self.routing),
            FabricKind::Dragonfly(dragonfly) => dragonfly.equal_paths(from, to) as u64,
        }
    }

    /// Leaf switches. Empty if the fabric is not a tree, or a rail-optimised one.
    pub(crate) fn leaves(&self, node_count: usize, links: &[Link]) -> Vec<Leaf> {
        match &self.kind {
            FabricKind::Tree(tree) => tree.leaves(node_count, links),
            _ => Vec::new(),
        }
    }

    /// Whether data for another rail first go through the sender's node to that rail's device.
    pub(crate) fn forwards_between_rails(&self) -> bool {
        matches!(&self.kind, FabricKind::Tree(tree) if tree.forwards_between_rails())
    }

    fn choice(&self, from: End, to: End) -> Choice {
        let stated = self.stated.binary_search_by_key(&(from.node, to.node), |route| (route.from, route.to));
        match stated.ok().and_then(|position| self.stated.get(position)) {
            Some(route) => Choice::Stated(route.path),
            None => choice(self.seed, from.device, to.device),
        }
    }
}

/// A leaf switch of a fat tree.
#[derive(Debug, Clone, PartialEq)]
pub struct Leaf {
    /// Numbers of the nodes under it.
    pub nodes: Range<usize>,
    /// Total rate of its uplinks, each way.
    pub uplink: BytesPerSecond,
}
