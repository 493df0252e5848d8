//! Fat trees of two and three levels (Leiserson 1985; as data centres have them, Al-Fares et al. 2008), and rail-optimised ones, whose
//! leaf switches take one rail each of many nodes.

use super::routing::{Choice, Routing};
use super::{End, Leaf, NodePorts, SWITCH_HOP_LATENCY};
use crate::link::{Junction, Link, LinkClass, LinkId, NewLinks};
use foretell_units::BytesPerSecond;

/// The most nodes that one leaf switch takes where the file says nothing: a scalable unit of NVIDIA's DGX H100 SuperPOD.
const NODES_PER_LEAF: usize = 32;

/// Leaf switches under a spine; or in pods, with aggregation switches above the leaves of a pod and core switches above all. Consecutive
/// nodes share a leaf. A level's uplinks carry, each way, what enters it from below, divided by its oversubscription.
#[derive(Debug, Clone, PartialEq)]
pub struct FatTree {
    /// What leads to one leaf switch.
    pub leaf_switches: LeafSwitches,
    /// Nodes whose interfaces lead to one leaf; where the file says nothing, 32, or half of the nodes of a smaller cluster, since a tree has
    /// at least two leaves (a rail-optimised one has them anyway: there it is all nodes).
    pub nodes_per_leaf: Option<usize>,
    /// From the leaves up.
    pub uplinks: Uplinks,
    /// The third level, if there is one.
    pub pods: Option<Pods>,
}

/// What leads to a leaf switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeafSwitches {
    /// All interfaces of its nodes.
    OfNodes,
    /// Of each of its nodes the interface of one rail, so that devices with the same place in their nodes meet in one switch.
    OfRails(CrossRail),
}

/// How data go from a device to one of another rail in another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CrossRail {
    /// Through the switches above the leaves.
    Spine,
    /// Within the sender's node to the device of the right rail, and on along that rail, as NCCL's PXN has it.
    Forward,
}

impl CrossRail {
    /// The name used in topology files.
    pub const fn name(self) -> &'static str {
        match self {
            CrossRail::Spine => "spine",
            CrossRail::Forward => "forward",
        }
    }
}

/// The links from a switch to the level above it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Uplinks {
    /// Capacity of what enters from below over capacity of the uplinks; 1 is non-blocking.
    pub oversubscription: f64,
    /// How many there are, each to another switch; `None` where the file gives their sum only.
    pub count: Option<usize>,
}

/// The third level of a tree.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pods {
    /// Leaves of one pod. A pod has as many aggregation switches as a leaf has uplinks.
    pub leaves: usize,
    /// From each aggregation switch to the core.
    pub uplinks: Uplinks,
}

impl FatTree {
    /// How many nodes lead to a leaf, the default worked out. At least 1, so that it can be divided by.
    pub(crate) fn nodes_per_leaf(&self, node_count: usize) -> usize {
        let fewest_leaves = if self.leaf_switches == LeafSwitches::OfNodes { 2 } else { 1 };
        self.nodes_per_leaf.unwrap_or_else(|| NODES_PER_LEAF.min(node_count.div_ceil(fewest_leaves))).max(1)
    }
}

/// A tree's numbers. Links go leaf by leaf, and then pod by pod, aggregation switch by aggregation switch; of each uplink first the way up,
/// then the way down.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TreeLayout {
    leaf_switches: LeafSwitches,
    nodes_per_leaf: usize,
    /// Leaves that the same nodes lead to: 1, or as many as nodes have rails.
    rails: usize,
    leaves: usize,
    first_link: usize,
    /// Uplinks of a leaf; 1 where flows are spread over all of them.
    leaf_uplinks: usize,
    pods: Option<PodLayout>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct PodLayout {
    leaves: usize,
    first_link: usize,
    /// Uplinks of an aggregation switch; 1 where flows are spread.
    uplinks: usize,
}

impl TreeLayout {
    pub(super) fn new(tree: &FatTree, routing: Routing, nodes: &[NodePorts], links: &mut NewLinks) -> Self {
        let separate = |uplinks: &Uplinks| if routing == Routing::Ecmp { uplinks.count.unwrap_or(1).max(1) } else { 1 };
        let nodes_per_leaf = tree.nodes_per_leaf(nodes.len());
        let rails = match tree.leaf_switches {
            LeafSwitches::OfNodes => 1,
            LeafSwitches::OfRails(_) => nodes.iter().map(|node| node.rails).max().unwrap_or(1).max(1),
        };
        let mut layout = TreeLayout {
            leaf_switches: tree.leaf_switches,
            nodes_per_leaf,
            rails,
            leaves: nodes.len().div_ceil(nodes_per_leaf) * rails,
            first_link: links.next(),
            leaf_uplinks: separate(&tree.uplinks),
            pods: None,
        };
        let into_leaf = |leaf: usize| -> BytesPerSecond {
            let under = nodes.iter().skip(leaf / rails * nodes_per_leaf).take(nodes_per_leaf);
            let of_node = |node: &NodePorts| match tree.leaf_switches {
                LeafSwitches::OfNodes => node.bandwidth(),
                LeafSwitches::OfRails(_) if leaf % rails < node.rails => node.rate,
                LeafSwitches::OfRails(_) => BytesPerSecond::ZERO,
            };
            under.map(of_node).sum::<BytesPerSecond>() / tree.uplinks.oversubscription
        };
        let totals: Vec<BytesPerSecond> = (0..layout.leaves).map(into_leaf).collect();
        for (leaf, &total) in totals.iter().enumerate() {
            for uplink in 0..layout.leaf_uplinks {
                let above = layout.above_leaf(tree.pods.map(|pods| leaf / pods.leaves.max(1)), uplink);
                let name = numbered(format!("leaf-{leaf}"), uplink, layout.leaf_uplinks);
                add_pair(name, total / layout.leaf_uplinks as f64, [Junction::Switch(leaf), above], links);
            }
        }
        let Some(pods) = tree.pods else { return layout };
        let (leaves, uplinks) = (pods.leaves.max(1), separate(&pods.uplinks));
        layout.pods = Some(PodLayout { leaves, first_link: links.next(), uplinks });
        for (pod, totals) in totals.chunks(leaves).enumerate() {
            let total = totals.iter().copied().sum::<BytesPerSecond>() / pods.uplinks.oversubscription;
            let each = total / (layout.leaf_uplinks * uplinks) as f64;
            for switch in 0..layout.leaf_uplinks {
                for uplink in 0..uplinks {
                    let of = if layout.leaf_uplinks > 1 { format!("pod-{pod}/switch-{switch}") } else { format!("pod-{pod}") };
                    let ends = [layout.above_leaf(Some(pod), switch), layout.core(leaves, switch * uplinks + uplink)];
                    add_pair(numbered(of, uplink, uplinks), each, ends, links);
                }
            }
        }
        layout
    }

    /// The leaf that a node's rail leads to.
    pub(super) fn leaf(&self, node: usize, rail: usize) -> usize {
        let first = node / self.nodes_per_leaf * self.rails;
        if self.leaf_switches == LeafSwitches::OfNodes { first } else { first + rail }
    }

    /// Whether all nodes are under one leaf.
    pub(super) fn is_single_switch(&self) -> bool {
        self.leaf_switches == LeafSwitches::OfNodes && self.leaves == 1
    }

    pub(super) fn forwards_between_rails(&self) -> bool {
        self.leaf_switches == LeafSwitches::OfRails(CrossRail::Forward)
    }

    /// The spine, or a pod's aggregation switch, that the uplink of this number leads to. Switches are numbered level by level.
    fn above_leaf(&self, pod: Option<usize>, uplink: usize) -> Junction {
        Junction::Switch(self.leaves + pod.unwrap_or(0) * self.leaf_uplinks + uplink)
    }

    fn core(&self, leaves_of_pod: usize, number: usize) -> Junction {
        Junction::Switch(self.leaves + self.leaves.div_ceil(leaves_of_pod) * self.leaf_uplinks + number)
    }

    pub(super) fn path(&self, from: End, to: End, choice: Choice, links: &mut Vec<LinkId>) {
        let (from_leaf, to_leaf) = (self.leaf(from.node, from.rail), self.leaf(to.node, to.rail));
        if from_leaf == to_leaf {
            return;
        }
        let path = choice.among(self.paths_between(from_leaf, to_leaf));
        let switch = path % self.leaf_uplinks;
        let leaf_link = |leaf: usize, way: usize| LinkId(self.first_link + 2 * (leaf * self.leaf_uplinks + switch) + way);
        links.push(leaf_link(from_leaf, UP));
        if let Some(pods) = &self.pods
            && from_leaf / pods.leaves != to_leaf / pods.leaves
        {
            let uplink = path / self.leaf_uplinks;
            let pod_link = |leaf: usize, way: usize| {
                let number = (leaf / pods.leaves * self.leaf_uplinks + switch) * pods.uplinks + uplink;
                LinkId(pods.first_link + 2 * number + way)
            };
            links.extend([pod_link(from_leaf, UP), pod_link(to_leaf, DOWN)]);
        }
        links.push(leaf_link(to_leaf, DOWN));
    }

    pub(super) fn equal_paths(&self, from: End, to: End) -> usize {
        self.paths_between(self.leaf(from.node, from.rail), self.leaf(to.node, to.rail))
    }

    fn paths_between(&self, from_leaf: usize, to_leaf: usize) -> usize {
        match &self.pods {
            _ if from_leaf == to_leaf => 1,
            Some(pods) if from_leaf / pods.leaves != to_leaf / pods.leaves => self.leaf_uplinks * pods.uplinks,
            _ => self.leaf_uplinks,
        }
    }

    pub(super) fn leaves(&self, node_count: usize, links: &[Link]) -> Vec<Leaf> {
        if self.leaf_switches != LeafSwitches::OfNodes {
            return Vec::new();
        }
        let uplinks = |leaf: usize| {
            let first = self.first_link + 2 * leaf * self.leaf_uplinks;
            links.iter().skip(first).step_by(2).take(self.leaf_uplinks).map(|link| link.bandwidth).sum()
        };
        let firsts = (0..node_count).step_by(self.nodes_per_leaf).enumerate();
        firsts
            .map(|(leaf, first)| Leaf { nodes: first..(first + self.nodes_per_leaf).min(node_count), uplink: uplinks(leaf) })
            .collect()
    }
}

const UP: usize = 0;
const DOWN: usize = 1;

/// What a switch's uplink is called: `leaf-3/up`, or `leaf-3/up-1` where it has several.
fn numbered(of: String, uplink: usize, count: usize) -> (String, String) {
    if count > 1 { (of, format!("-{uplink}")) } else { (of, String::new()) }
}

/// An uplink's two ways, each with what passing the switch at its end costs.
fn add_pair((of, number): (String, String), bandwidth: BytesPerSecond, [low, high]: [Junction; 2], links: &mut NewLinks) {
    for (direction, from, to) in [("up", low, high), ("down", high, low)] {
        let name = format!("{of}/{direction}{number}");
        links.push(Link { name, class: LinkClass::Switch, bandwidth, latency: SWITCH_HOP_LATENCY, from, to });
    }
}
