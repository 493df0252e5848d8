//! The fabric between nodes: which link resources it adds, and which of them a path from one node to another uses.
//!
//! It knows nodes only by number, and of a node only what its network interfaces carry together. A new fabric (torus, dragonfly,
//! rails) is a variant of [`Fabric`] with an arm in each function here; nothing else has to change.

use crate::layout::{Link, LinkClass, LinkId};
use foretell_units::{BytesPerSecond, Seconds};
use std::ops::Range;

/// The latency from the NIC of one node to that of another under the same switch where the file says none: an estimate for RDMA
/// networks with what a collective library adds, the same as in the contract's example. Ethernet with TCP takes ten times it.
pub const DEFAULT_NETWORK_LATENCY: Seconds = Seconds::new(5e-6);

/// What each further switch adds: an HDR InfiniBand switch hop (ml-engineering's network table, `link_specs.csv`: 0.6 us).
const SWITCH_HOP_LATENCY: Seconds = Seconds::new(0.6e-6);

/// The most nodes that one leaf switch takes where the file says nothing: a scalable unit of NVIDIA's DGX H100 SuperPOD.
const NODES_PER_LEAF: usize = 32;

/// The network between the nodes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Network {
    /// How the nodes are joined.
    pub fabric: Fabric,
    /// From the NIC of one node to that of another under the same switch, one way.
    pub latency: Seconds,
}

/// How nodes are joined.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fabric {
    /// Not at all.
    None,
    /// By one non-blocking switch: only the NICs limit.
    Switch,
    /// By leaf switches under a spine. Consecutive nodes share a leaf, and a leaf's uplinks carry, each way, what its nodes'
    /// NICs carry together, divided by the oversubscription.
    FatTree {
        /// Capacity of a leaf's nodes over capacity of its uplinks; 1 is non-blocking.
        oversubscription: f64,
        /// Nodes under one leaf; where the file says nothing, 32, or half of the nodes of a smaller cluster, since a tree has
        /// at least two leaves.
        nodes_per_leaf: Option<usize>,
    },
}

impl Fabric {
    /// The names of all kinds, as topology files spell them.
    pub const NAMES: [&'static str; 3] = ["none", "switch", "fat-tree"];

    /// The name used in topology files.
    pub const fn name(&self) -> &'static str {
        match self {
            Fabric::None => "none",
            Fabric::Switch => "switch",
            Fabric::FatTree { .. } => "fat-tree",
        }
    }
}

/// The numbers a path is computed from: no table, so that 10,000 nodes cost nothing to route.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FabricLayout {
    fabric: Fabric,
    first_link: usize,
    nodes_per_leaf: usize,
}

impl FabricLayout {
    /// Numbers the fabric's links after those already in `links`, and adds them. `node_bandwidth` has each node's own.
    pub(crate) fn new(fabric: Fabric, node_bandwidth: &[BytesPerSecond], links: &mut Vec<Link>) -> Self {
        let layout =
            FabricLayout { fabric, first_link: links.len(), nodes_per_leaf: nodes_per_leaf(fabric, node_bandwidth.len()) };
        if let Fabric::FatTree { oversubscription, .. } = fabric {
            for (leaf, nodes) in node_bandwidth.chunks(layout.nodes_per_leaf).enumerate() {
                let bandwidth = nodes.iter().copied().sum::<BytesPerSecond>() / oversubscription;
                for direction in ["up", "down"] {
                    let name = format!("leaf-{leaf}/{direction}");
                    links.push(Link { name, class: LinkClass::Switch, bandwidth, latency: SWITCH_HOP_LATENCY });
                }
            }
        }
        layout
    }

    /// The leaf switches, of so many nodes and with these links; none where the fabric is no tree.
    pub(crate) fn leaves(&self, node_count: usize, links: &[Link]) -> Vec<Leaf> {
        let Fabric::FatTree { .. } = self.fabric else { return Vec::new() };
        let firsts = (0..node_count).step_by(self.nodes_per_leaf);
        let ups = links.iter().skip(self.first_link).step_by(2);
        firsts
            .zip(ups)
            .map(|(first, up)| Leaf { nodes: first..(first + self.nodes_per_leaf).min(node_count), uplink: up.bandwidth })
            .collect()
    }

    /// The fabric's links on the way from one node to a different one, in order; `None` where there is no way.
    pub(crate) fn path(&self, from_node: usize, to_node: usize) -> Option<FabricPath> {
        match self.fabric {
            Fabric::None => None,
            Fabric::Switch => Some(FabricPath::OneSwitch),
            Fabric::FatTree { .. } => {
                let (from_leaf, to_leaf) = (from_node / self.nodes_per_leaf, to_node / self.nodes_per_leaf);
                if from_leaf == to_leaf {
                    return Some(FabricPath::OneSwitch);
                }
                let (up, down) = (self.first_link + 2 * from_leaf, self.first_link + 2 * to_leaf + 1);
                Some(FabricPath::OverSpine([LinkId(up), LinkId(down)]))
            }
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

/// A path through the fabric.
pub(crate) enum FabricPath {
    /// Under one non-blocking switch: no shared link beyond the NICs.
    OneSwitch,
    /// Up from one leaf and down to another.
    OverSpine([LinkId; 2]),
}

/// How many nodes share a leaf, the default worked out. At least 1, so that it can be divided by.
pub(crate) fn nodes_per_leaf(fabric: Fabric, node_count: usize) -> usize {
    match fabric {
        Fabric::FatTree { nodes_per_leaf: Some(nodes), .. } => nodes.max(1),
        _ => NODES_PER_LEAF.min(node_count.div_ceil(2)).max(1),
    }
}
