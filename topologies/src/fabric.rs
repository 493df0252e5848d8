//! The fabric between nodes: which link resources it adds, and which of them a path from one place to another uses.
//!
//! It knows of a node only which devices it has and what its network interfaces carry. Each fabric is a variant of [`Fabric`] and a file
//! in `fabric/`, which numbers its links by arithmetic and computes paths on demand: no table of pairs, however many devices there are.

mod dragonfly;
mod routing;
mod torus;
mod tree;

pub use dragonfly::Dragonfly;
pub use routing::{Routing, StatedRoute};
pub use torus::{Dimensions, Torus};
pub use tree::{CrossRail, FatTree, LeafSwitches, Pods, Uplinks};

use crate::link::{Junction, Link, LinkId, NewLinks};
use dragonfly::DragonflyLayout;
use foretell_units::{BytesPerSecond, Seconds};
use routing::{Choice, choice};
use std::ops::Range;
use torus::TorusLayout;
use tree::TreeLayout;

/// The latency from the NIC of one node to that of another under the same switch where the file says none: an estimate for RDMA
/// networks with what a collective library adds, the same as in the contract's example. Ethernet with TCP takes ten times it.
pub const DEFAULT_NETWORK_LATENCY: Seconds = Seconds::new(5e-6);

/// The latency of a hop in a torus where the file says none: about 1 us on a TPU ("How to Scale Your Model", Austin et al. 2025).
pub(crate) const DEFAULT_TORUS_LATENCY: Seconds = Seconds::new(1e-6);

/// What each further switch adds: an HDR InfiniBand switch hop (ml-engineering's network table, `link_specs.csv`: 0.6 us).
const SWITCH_HOP_LATENCY: Seconds = Seconds::new(0.6e-6);

/// The network between the nodes.
#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    /// How the nodes are joined.
    pub fabric: Fabric,
    /// From the NIC of one node to that of another under the same switch, one way; in a torus, from a device to its neighbour.
    pub latency: Seconds,
    /// How a flow's way is chosen where the fabric has several.
    pub routing: Routing,
    /// What the choices by hash depend on, beside the two ends of a flow.
    pub seed: u64,
    /// Choices that the file states, over those of `routing`.
    pub stated: Vec<StatedRoute>,
}

/// How nodes are joined.
#[derive(Debug, Clone, PartialEq)]
pub enum Fabric {
    /// Not at all.
    None,
    /// By one non-blocking switch: only the NICs limit.
    Switch,
    /// By leaf switches under a spine, or under pods of them under a core.
    FatTree(FatTree),
    /// Devices in a grid, each with links to its neighbours.
    Torus(Torus),
    /// Groups of routers, all joined within a group, and the groups to each other.
    Dragonfly(Dragonfly),
}

impl Network {
    /// A network of a fabric that leaves nothing to choose.
    pub(crate) fn plain(fabric: Fabric) -> Self {
        Network { fabric, latency: DEFAULT_NETWORK_LATENCY, routing: Routing::Spread, seed: 0, stated: Vec::new() }
    }
}

impl Fabric {
    /// The names of all kinds, as topology files spell them.
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

    /// Makes links that state rates of their own so many times as fast; those that follow the network interfaces do so anyway.
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

    /// Whether so many nodes and devices can be joined so; if not, what is wrong, and the mend.
    pub(crate) fn fits(&self, nodes: usize, devices: usize) -> Result<(), (String, String)> {
        match self {
            Fabric::None | Fabric::Switch | Fabric::FatTree(_) => Ok(()),
            Fabric::Torus(torus) => torus.fits(devices),
            Fabric::Dragonfly(dragonfly) => dragonfly.fits(nodes),
        }
    }

    /// A leaf or a group of so many nodes as follow from the number of them all: what is to be said of it to the reader.
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

/// What the fabric sees of a node.
pub(crate) struct NodePorts {
    /// Its devices.
    pub(crate) devices: Range<usize>,
    /// How many separate ways it has into the network.
    pub(crate) rails: usize,
    /// What each of them carries.
    pub(crate) rate: BytesPerSecond,
}

impl NodePorts {
    /// All its rails together.
    fn bandwidth(&self) -> BytesPerSecond {
        self.rate * self.rails as f64
    }
}

/// Where a flow enters or leaves the fabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) device: usize,
    pub(crate) node: usize,
    pub(crate) rail: usize,
}

/// The numbers that paths are computed from.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FabricLayout {
    kind: FabricKind,
    routing: Routing,
    seed: u64,
    /// By the nodes at the ends.
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
    /// Numbers the fabric's links and adds them. The network must fit the nodes.
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

    /// Whether devices of one node that nothing else joins reach each other over it.
    pub(crate) fn joins_devices(&self) -> bool {
        matches!(self.kind, FabricKind::Torus(_))
    }

    /// The switch that a node's rail leads to.
    pub(crate) fn entry(&self, node: usize, rail: usize) -> Junction {
        match &self.kind {
            FabricKind::Tree(tree) => Junction::Switch(tree.leaf(node, rail)),
            FabricKind::Dragonfly(dragonfly) => Junction::Switch(dragonfly.router(node)),
            FabricKind::None | FabricKind::Switch | FabricKind::Torus(_) => Junction::Switch(0),
        }
    }

    /// Appends the fabric's links on the way from one place to a different one, in order; `None` where there is no way.
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

    /// Whether every way from a node to another is that of a single switch, so that nodes that have the same in them may change places.
    pub(crate) fn treats_nodes_alike(&self) -> bool {
        match &self.kind {
            FabricKind::Switch => true,
            FabricKind::Tree(tree) => tree.is_single_switch(),
            FabricKind::None | FabricKind::Torus(_) | FabricKind::Dragonfly(_) => false,
        }
    }

    /// How many different ways of the fewest hops there are among which the routing may choose for a flow; at most `u64::MAX`.
    pub(crate) fn equal_paths(&self, from: End, to: End) -> u64 {
        match &self.kind {
            FabricKind::None => 0,
            FabricKind::Switch => 1,
            FabricKind::Tree(tree) => tree.equal_paths(from, to) as u64,
            FabricKind::Torus(torus) => torus.equal_paths(from, to, self.routing),
            FabricKind::Dragonfly(dragonfly) => dragonfly.equal_paths(from, to) as u64,
        }
    }

    /// The leaf switches, of so many nodes and with these links; none where the fabric is no tree over nodes.
    pub(crate) fn leaves(&self, node_count: usize, links: &[Link]) -> Vec<Leaf> {
        match &self.kind {
            FabricKind::Tree(tree) => tree.leaves(node_count, links),
            _ => Vec::new(),
        }
    }

    /// The rail over which data for this rail should leave a node that can hand them over inside.
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
    /// The nodes under it.
    pub nodes: Range<usize>,
    /// What its uplinks carry together, each way.
    pub uplink: BytesPerSecond,
}
