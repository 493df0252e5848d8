//! Fat trees of two and three levels (Leiserson 1985; Al-Fares et al. 2008), and rail-optimised
//! trees, in which a leaf switch joins one rail of many nodes.

use super::routing::{Choice, Routing};
use super::{End, Leaf, MOST_LINKS, NodePorts, SWITCH_HOP_LATENCY};
use crate::link::{Junction, Link, LinkClass, LinkId, NewLinks};
use foretell_units::BytesPerSecond;

/// Default maximum of nodes per leaf switch: a scalable unit of NVIDIA's DGX H100 SuperPOD.
const NODES_PER_LEAF: usize = 32;

/// Leaf switches under a spine; or leaf switches in pods, with aggregation switches above the
/// leaves of a pod and core switches above all pods. Consecutive nodes share a leaf. In each
/// direction, a level's uplinks carry the rate that enters the level from below, divided by its
/// oversubscription.
#[derive(Debug, Clone, PartialEq)]
pub struct FatTree {
    /// Which network interfaces connect to one leaf switch.
    pub leaf_switches: LeafSwitches,
    /// Nodes per leaf. By default 32, or half of the nodes in a smaller cluster, since a tree has
    /// at least two leaves. A rail-optimised tree has a leaf per rail anyway, so its default is all
    /// nodes, at most 32.
    pub nodes_per_leaf: Option<usize>,
    /// Uplinks of a leaf.
    pub uplinks: Uplinks,
    /// The third level, if any.
    pub pods: Option<Pods>,
}

/// Which network interfaces connect to a leaf switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeafSwitches {
    /// All interfaces of its nodes.
    OfNodes,
    /// The interface of one rail of each node, so that devices with the same index in their nodes
    /// are under one switch.
    OfRails(CrossRail),
}

/// How data reaches a device of another rail in another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CrossRail {
    /// Through the switches above the leaves.
    Spine,
    /// Inside the sender's node to the device of the right rail, then along that rail, as NCCL's
    /// PXN does.
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
    /// Rate that enters from below over the rate of the uplinks; 1 is non-blocking.
    pub oversubscription: f64,
    /// Number of uplinks, each to a different switch. `None` if only their total rate is known.
    pub count: Option<usize>,
}

/// The third level of a tree.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pods {
    /// Leaves per pod. A pod has as many aggregation switches as a leaf has uplinks.
    pub leaves: usize,
    /// Uplinks of each aggregation switch.
    pub uplinks: Uplinks,
}

impl FatTree {
    /// Nodes per leaf, with the default applied; at least 1.
    pub(crate) fn nodes_per_leaf(&self, node_count: usize) -> usize {
        let fewest_leaves = if self.leaf_switches == LeafSwitches::OfNodes { 2 } else { 1 };
        self.nodes_per_leaf.unwrap_or_else(|| NODES_PER_LEAF.min(node_count.div_ceil(fewest_leaves))).max(1)
    }

    pub(super) fn fits(&self, nodes: usize, devices: usize) -> Result<(), (String, String)> {
        let leaves = match self.leaf_switches {
            LeafSwitches::OfNodes => nodes.div_ceil(self.nodes_per_leaf(nodes)),
            // There is at most one rail per device.
            LeafSwitches::OfRails(_) => devices,
        };
        let of_leaf = self.uplinks.count.unwrap_or(1);
        let of_pods = self.pods.map_or(0, |pods| {
            let aggregation = leaves.div_ceil(pods.leaves.max(1)).saturating_mul(of_leaf);
            aggregation.saturating_mul(pods.uplinks.count.unwrap_or(1))
        });
        let links = leaves.saturating_mul(of_leaf).saturating_add(of_pods);
        if links <= MOST_LINKS {
            return Ok(());
        }
        Err((format!("a tree of {leaves} leaf switches has {links} uplinks"), format!("describe one of at most {MOST_LINKS}")))
    }
}

/// A tree with numbered links: leaf by leaf, then pod by pod and aggregation switch by aggregation
/// switch. For each uplink, the upward direction comes first.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TreeLayout {
    leaf_switches: LeafSwitches,
    nodes_per_leaf: usize,
    /// Number of leaves that the same nodes share: 1, or the number of rails.
    rails: usize,
    leaves: usize,
    first_link: usize,
    /// Uplinks of a leaf. 1 if flows spread over all uplinks.
    leaf_uplinks: usize,
    pods: Option<PodLayout>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct PodLayout {
    leaves: usize,
    first_link: usize,
    /// Uplinks of an aggregation switch. 1 if flows spread over all uplinks.
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

    /// The index of the leaf that a node's rail connects to.
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

    /// The spine switch, or the pod's aggregation switch, at the end of a leaf's uplink number
    /// `uplink`. Switches are numbered level by level.
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

/// The parts of an uplink's name before and after its direction, as in `leaf-3/up`, or
/// `leaf-3/up-1` if there are several uplinks.
fn numbered(of: String, uplink: usize, count: usize) -> (String, String) {
    if count > 1 { (of, format!("-{uplink}")) } else { (of, String::new()) }
}

/// Adds an uplink's two directions, each with the latency of the switch at its end.
fn add_pair((of, number): (String, String), bandwidth: BytesPerSecond, [low, high]: [Junction; 2], links: &mut NewLinks) {
    for (direction, from, to) in [("up", low, high), ("down", high, low)] {
        let name = format!("{of}/{direction}{number}");
        links.push(Link { name, class: LinkClass::Switch, bandwidth, latency: SWITCH_HOP_LATENCY, from, to });
    }
}
