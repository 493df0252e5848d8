//! Folds a lowered Program: keeps one representative of each class of equivalent ranks, and of each
//! class of groups, channels, hops, links and processors.
//!
//! All ranks of a class of [`super::colour_refinement`] have the same events at the same times,
//! because what happens to a rank depends only on how many nodes of each class it communicates and
//! shares resources with. A kept communication loads a kept link as much as all communications of
//! its class did before. So the answer equals that of simulating every rank, up to the rounding of
//! sums.
//!
//! Programs whose ranks share processors are not folded: there the order of ranks decides which of
//! several simultaneous events comes first.

use super::colour_refinement::Graph;
use crate::lowering::{CostKey, Lowered, ShapeBits, shape_bits};
use crate::network::Shape;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// The kind of a node, with which refinement starts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum NodeKind {
    /// A rank: its list, its kind of device, the index of its durations and the bits of its pace.
    Rank(usize, usize, usize, u64),
    /// A group or a channel.
    Communicator(CostKey),
    /// A hop: the cost of its messages and the number of rings of its group.
    Hop(ShapeBits, u32),
    /// A link: the bits of its capacity, and whether it has a queue.
    Link(u64, bool),
    Processor,
}

/// The kind of an edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum EdgeKind {
    /// From a rank to a group of which it is a member. The number is the group's index in the
    /// rank's list.
    Member(u32),
    /// From a rank to a channel on which it sends. The number is the peer's index in the rank's
    /// list.
    Sends(u32),
    /// From a rank to a channel on which it receives. The number is the peer's index in the rank's
    /// list.
    Receives(u32),
    /// From a hop to its group.
    HopOf,
    /// From a rank to a hop on which it sends.
    HopFrom,
    /// From a rank to a hop on which it receives.
    HopTo,
    /// From a hop to the next hop of its ring.
    After,
    /// From a hop to the previous hop of its ring.
    Before,
    /// From a rank to its processor.
    RunsOn,
    /// From a communicator or hop to a link that it loads: the index of the shape, and the bits of
    /// the load.
    Loads(usize, u64),
}

/// Numbers keys in the order of first use.
struct Numbers<Key>(FxHashMap<Key, u64>);

impl<Key: std::hash::Hash + Eq> Numbers<Key> {
    fn of(&mut self, key: Key) -> u64 {
        let next = self.0.len() as u64;
        *self.0.entry(key).or_insert(next)
    }
}

/// The index of the first node of each sort. Ranks start at 0.
struct FirstNodes {
    groups: usize,
    channels: usize,
    hops: usize,
    /// Links, then processors.
    resources: usize,
}

/// The representatives of the classes of one sort of nodes.
struct Representatives {
    /// For each node, the index of its representative.
    index_of: Vec<u32>,
    /// For each representative, its former index: that of the first node of its class.
    nodes: Vec<usize>,
}

impl Representatives {
    fn new(classes: &[u32]) -> Self {
        let mut known: FxHashMap<u32, u32> = FxHashMap::default();
        let mut nodes = Vec::new();
        let index_of = classes.iter().enumerate().map(|(node, class)| {
            *known.entry(*class).or_insert_with(|| {
                nodes.push(node);
                nodes.len() as u32 - 1
            })
        });
        Self { index_of: index_of.collect(), nodes }
    }

    /// Whether a node represents its class.
    fn is_representative(&self, node: usize) -> bool {
        self.nodes[self.index_of[node] as usize] == node
    }
}

/// Keeps one representative of each class of equivalent ranks of a lowered Program. `paces` has the
/// factor by which each rank is slower than the cost model says. It is empty if every factor is 1.
pub(crate) fn fold<'a>(mut lowered: Lowered<'a>, paces: &[f64]) -> Lowered<'a> {
    if lowered.shares_processors() {
        return lowered;
    }
    let (classes, first) = classes(&lowered, paces);
    let ranks = Representatives::new(&classes[..first.groups]);
    if ranks.nodes.len() == lowered.ranks.len() {
        return lowered;
    }
    let groups = Representatives::new(&classes[first.groups..first.channels]);
    let channels = Representatives::new(&classes[first.channels..first.hops]);
    let hops = Representatives::new(&classes[first.hops..first.resources]);
    let resources = Representatives::new(&classes[first.resources..]);
    fold_groups(&mut lowered, &ranks, &groups, &resources);
    fold_channels(&mut lowered, &ranks, &channels, &resources);
    fold_hops(&mut lowered, &ranks, &groups, &hops, &resources);
    let first_processor = lowered.first_processor();
    lowered.ranks = ranks
        .nodes
        .iter()
        .map(|&node| {
            let mut rank = lowered.ranks[node].clone();
            rank.processor = resources.index_of[rank.processor as usize];
            rank.groups.iter_mut().for_each(|group| *group = groups.index_of[*group as usize]);
            rank.sends.iter_mut().for_each(|channel| *channel = channels.index_of[*channel as usize]);
            rank.receives.iter_mut().for_each(|channel| *channel = channels.index_of[*channel as usize]);
            rank
        })
        .collect();
    lowered.representative_of.iter_mut().for_each(|rank| *rank = ranks.index_of[*rank as usize]);
    lowered.processors = resources.nodes.iter().filter(|&&resource| resource >= first_processor).count();
    lowered.has_queue = resources.nodes.iter().filter_map(|&resource| lowered.has_queue.get(resource).copied()).collect();
    lowered.capacities = resources.nodes.iter().map(|&resource| lowered.capacities[resource]).collect();
    lowered.number_communications();
    lowered
}

/// The class of each rank, group, channel, hop, link and processor, in this order.
fn classes(lowered: &Lowered<'_>, paces: &[f64]) -> (Vec<u32>, FirstNodes) {
    let mut graph = Graph::default();
    let (mut node_kinds, mut edge_kinds) = (Numbers(FxHashMap::default()), Numbers(FxHashMap::default()));
    for rank in &lowered.ranks {
        let pace = paces.get(rank.rank.0).copied().unwrap_or(1.0);
        graph.add_node(node_kinds.of(NodeKind::Rank(rank.list, rank.kind, rank.times, pace.to_bits())));
    }
    for group in &lowered.groups {
        graph.add_node(node_kinds.of(NodeKind::Communicator(CostKey::of_group(&lowered.ranks, group))));
    }
    for channel in &lowered.channels {
        graph.add_node(node_kinds.of(NodeKind::Communicator(CostKey::of_channel(&lowered.ranks, channel))));
    }
    for hop in &lowered.hops {
        graph.add_node(node_kinds.of(NodeKind::Hop(shape_bits(&hop.shape), lowered.groups[hop.group as usize].rings)));
    }
    for (index, capacity) in lowered.capacities.iter().enumerate() {
        let kind = match lowered.has_queue.get(index) {
            Some(&has_queue) => NodeKind::Link(capacity.to_bits(), has_queue),
            None => NodeKind::Processor,
        };
        graph.add_node(node_kinds.of(kind));
    }
    let groups = lowered.ranks.len();
    let channels = groups + lowered.groups.len();
    let hops = channels + lowered.channels.len();
    let first = FirstNodes { groups, channels, hops, resources: hops + lowered.hops.len() };
    let (after, before) = (edge_kinds.of(EdgeKind::After), edge_kinds.of(EdgeKind::Before));
    for (index, hop) in lowered.hops.iter().enumerate() {
        graph.add_edge_seen_as((first.hops + index) as u32, first.hops as u32 + hop.after, after, before);
    }
    let mut add_edge = |left: usize, right: usize, kind: EdgeKind| graph.add_edge(left as u32, right as u32, edge_kinds.of(kind));
    for (index, hop) in lowered.hops.iter().enumerate() {
        add_edge(first.hops + index, first.groups + hop.group as usize, EdgeKind::HopOf);
        add_edge(hop.sender as usize, first.hops + index, EdgeKind::HopFrom);
        add_edge(hop.receiver as usize, first.hops + index, EdgeKind::HopTo);
        for &(link, load) in &hop.shape.loads {
            add_edge(first.hops + index, first.resources + link, EdgeKind::Loads(0, load.to_bits()));
        }
    }
    for (index, rank) in lowered.ranks.iter().enumerate() {
        add_edge(index, first.resources + rank.processor as usize, EdgeKind::RunsOn);
    }
    for (index, group) in lowered.groups.iter().enumerate() {
        for &(member, number) in &group.members {
            add_edge(member as usize, first.groups + index, EdgeKind::Member(number));
        }
        for (number, shape) in group.shapes().into_iter().enumerate() {
            for &(link, load) in shape.into_iter().flat_map(|shape| &shape.loads) {
                add_edge(first.groups + index, first.resources + link, EdgeKind::Loads(number, load.to_bits()));
            }
        }
    }
    for (index, channel) in lowered.channels.iter().enumerate() {
        add_edge(channel.sender as usize, first.channels + index, EdgeKind::Sends(channel.send_peer));
        add_edge(channel.receiver as usize, first.channels + index, EdgeKind::Receives(channel.receive_peer));
        for &(link, load) in &channel.shape.loads {
            add_edge(first.channels + index, first.resources + link, EdgeKind::Loads(0, load.to_bits()));
        }
    }
    (graph.classes(), first)
}

fn fold_groups(lowered: &mut Lowered<'_>, ranks: &Representatives, groups: &Representatives, resources: &Representatives) {
    let mut kept: Vec<_> = groups.nodes.iter().map(|&node| lowered.groups[node].clone()).collect();
    for group in &mut kept {
        let members: BTreeSet<(u32, u32)> =
            group.members.iter().map(|&(member, number)| (ranks.index_of[member as usize], number)).collect();
        group.members = members.into_iter().collect();
        group.shapes_mut().into_iter().flatten().for_each(|shape| shape.loads.clear());
    }
    for (group, &index) in lowered.groups.iter().zip(&groups.index_of) {
        let folded = kept[index as usize].shapes_mut();
        for (shape, folded) in group.shapes().into_iter().zip(folded) {
            if let (Some(shape), Some(folded)) = (shape, folded) {
                add_loads(shape, folded, resources);
            }
        }
    }
    lowered.groups = kept;
}

fn fold_channels(lowered: &mut Lowered<'_>, ranks: &Representatives, channels: &Representatives, resources: &Representatives) {
    let mut kept: Vec<_> = channels.nodes.iter().map(|&node| lowered.channels[node].clone()).collect();
    for channel in &mut kept {
        channel.sender = ranks.index_of[channel.sender as usize];
        channel.receiver = ranks.index_of[channel.receiver as usize];
        channel.shape.loads.clear();
    }
    for (channel, &index) in lowered.channels.iter().zip(&channels.index_of) {
        add_loads(&channel.shape, &mut kept[index as usize].shape, resources);
    }
    lowered.channels = kept;
}

/// Folds the hops. The previous hops of all hops of a class are in one class, and so are the next
/// hops. So a ring folds onto a ring.
fn fold_hops(
    lowered: &mut Lowered<'_>,
    ranks: &Representatives,
    groups: &Representatives,
    hops: &Representatives,
    resources: &Representatives,
) {
    let mut kept: Vec<_> = hops.nodes.iter().map(|&node| lowered.hops[node].clone()).collect();
    for hop in &mut kept {
        hop.group = groups.index_of[hop.group as usize];
        hop.sender = ranks.index_of[hop.sender as usize];
        hop.receiver = ranks.index_of[hop.receiver as usize];
        hop.before = hops.index_of[hop.before as usize];
        hop.after = hops.index_of[hop.after as usize];
        hop.shape.loads.clear();
        hop.weights = [0.0; 2];
    }
    for (hop, &index) in lowered.hops.iter().zip(&hops.index_of) {
        let folded = &mut kept[index as usize];
        add_loads(&hop.shape, &mut folded.shape, resources);
        for (weight, end) in folded.weights.iter_mut().zip([hop.sender, hop.receiver]) {
            // Counts the hops of all groups of the class: a kept rank need not be in the kept
            // group.
            *weight += f64::from(u8::from(ranks.is_representative(end as usize)));
        }
    }
    lowered.hops = kept;
    // The kept hops of a group are those of the first group of its class, and are consecutive.
    let Lowered { groups, hops, .. } = lowered;
    for (number, group) in (0..).zip(groups) {
        let begin = hops.partition_point(|hop| hop.group < number) as u32;
        group.hops = begin..hops.partition_point(|hop| hop.group <= number) as u32;
    }
}

/// Adds the loads of `shape` on kept links to `folded`, the shape that stands for it. Loads on the
/// same link stay separate entries, since one of them may limit the rate of the communication.
fn add_loads(shape: &Shape, folded: &mut Shape, resources: &Representatives) {
    for &(link, load) in &shape.loads {
        if resources.is_representative(link) {
            folded.loads.push((resources.index_of[link] as usize, load));
        }
    }
}
