//! Folding: ranks that must behave alike are simulated once.
//!
//! Ranks meet in groups and channels, and share links and processors. Of each class of [`crate::symmetry`] one is kept: its members see the same
//! at every instant, since what happens to one follows only from how many of each class it meets and shares with. A link that is kept is loaded by an
//! exchange as often as by all of its class before. So the answer is that of simulating everyone, but for the rounding of sums.
//!
//! Where ranks share a processor everyone is simulated: who of them comes first at an instant is then a matter of their order.

use super::colour_refinement::Graph;
use crate::lowering::{CostKey, Lowered, ShapeBits, shape_bits};
use crate::network::Shape;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// What a node is, before its edges are looked at.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum NodeKind {
    /// A rank, with its list, its kind of device, its work and the bits of its pace.
    Rank(usize, usize, usize, u64),
    /// A group or a channel.
    Communicator(CostKey),
    /// With what its messages take alone, and its group's number of rings.
    Hop(ShapeBits, u32),
    /// With its capacity, and whether it has a queue.
    Link(u64, bool),
    Processor,
}

/// What ties two things.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum EdgeKind {
    /// A rank has the group under this number.
    Member(u32),
    /// A rank sends to, or receives from, its peer of this number through the channel.
    Sends(u32),
    Receives(u32),
    /// A hop is of a group; a rank sends or receives through it.
    HopOf,
    HopFrom,
    HopTo,
    /// A hop begins where another ends, or ends where it begins.
    After,
    Before,
    /// A rank runs on a processor.
    RunsOn,
    /// An exchange's shape of this number loads a link so much, bit by bit.
    Loads(usize, u64),
}

/// Numbers for kinds, in the order of first use.
struct Numbers<Key>(FxHashMap<Key, u64>);

impl<Key: std::hash::Hash + Eq> Numbers<Key> {
    fn of(&mut self, key: Key) -> u64 {
        let next = self.0.len() as u64;
        *self.0.entry(key).or_insert(next)
    }
}

/// Where the things of each sort begin among all.
struct FirstNodes {
    groups: usize,
    channels: usize,
    hops: usize,
    shared: usize,
}

/// For each thing of a sort the place of the one that stands for it among those that are kept, and these.
struct Representatives {
    place: Vec<u32>,
    first: Vec<usize>,
}

impl Representatives {
    fn new(classes: &[u32]) -> Self {
        let mut known: FxHashMap<u32, u32> = FxHashMap::default();
        let mut first = Vec::new();
        let place = classes.iter().enumerate().map(|(index, class)| {
            *known.entry(*class).or_insert_with(|| {
                first.push(index);
                first.len() as u32 - 1
            })
        });
        Self { place: place.collect(), first }
    }
}

impl Lowered<'_> {
    /// The same with one rank for all that must behave alike when each goes at its pace, where paces differ.
    pub(crate) fn folded(mut self, paces: &[f64]) -> Self {
        if self.shares_processors() {
            return self;
        }
        let (classes, places) = self.classes(paces);
        let ranks = Representatives::new(&classes[..places.groups]);
        if ranks.first.len() == self.ranks.len() {
            return self;
        }
        let groups = Representatives::new(&classes[places.groups..places.channels]);
        let channels = Representatives::new(&classes[places.channels..places.hops]);
        let hops = Representatives::new(&classes[places.hops..places.shared]);
        let shared = Representatives::new(&classes[places.shared..]);
        self.fold_groups(&ranks, &groups, &shared);
        self.fold_channels(&ranks, &channels, &shared);
        self.fold_hops(&ranks, &groups, &hops, &shared);
        let first_processor = self.capacities.len() - self.processors;
        self.ranks = ranks
            .first
            .iter()
            .map(|&first| {
                let mut rank = self.ranks[first].clone();
                rank.processor = shared.place[rank.processor as usize];
                rank.groups.iter_mut().for_each(|group| *group = groups.place[*group as usize]);
                rank.sends.iter_mut().for_each(|channel| *channel = channels.place[*channel as usize]);
                rank.receives.iter_mut().for_each(|channel| *channel = channels.place[*channel as usize]);
                rank
            })
            .collect();
        self.of_rank.iter_mut().for_each(|place| *place = ranks.place[*place as usize]);
        self.processors = shared.first.iter().filter(|&&first| first >= first_processor).count();
        self.has_queue = shared.first.iter().filter_map(|&first| self.has_queue.get(first).copied()).collect();
        self.capacities = shared.first.iter().map(|&first| self.capacities[first]).collect();
        self.number_communications();
        self
    }

    /// The class of each rank, group, channel, link and processor, in this order.
    fn classes(&self, paces: &[f64]) -> (Vec<u32>, FirstNodes) {
        let mut graph = Graph::default();
        let (mut kinds, mut edge_kinds) = (Numbers(FxHashMap::default()), Numbers(FxHashMap::default()));
        for rank in &self.ranks {
            let pace = paces.get(rank.rank.0).copied().unwrap_or(1.0);
            graph.add_node(kinds.of(NodeKind::Rank(rank.list, rank.kind, rank.work, pace.to_bits())));
        }
        let first_group = self.ranks.len();
        for group in &self.groups {
            graph.add_node(kinds.of(NodeKind::Communicator(CostKey::of_group(&self.ranks, group))));
        }
        let first_channel = first_group + self.groups.len();
        for channel in &self.channels {
            graph.add_node(kinds.of(NodeKind::Communicator(CostKey::of_channel(&self.ranks, channel))));
        }
        let first_hop = first_channel + self.channels.len();
        for hop in &self.hops {
            graph.add_node(kinds.of(NodeKind::Hop(shape_bits(&hop.shape), self.groups[hop.group as usize].rings)));
        }
        let first_shared = first_hop + self.hops.len();
        for (index, capacity) in self.capacities.iter().enumerate() {
            let kind = match self.has_queue.get(index) {
                Some(&has_queue) => NodeKind::Link(capacity.to_bits(), has_queue),
                None => NodeKind::Processor,
            };
            graph.add_node(kinds.of(kind));
        }
        let [after, before] = [EdgeKind::After, EdgeKind::Before].map(|tie| edge_kinds.of(tie));
        for (index, hop) in self.hops.iter().enumerate() {
            graph.add_edge_seen_as((first_hop + index) as u32, first_hop as u32 + hop.after, after, before);
        }
        let mut edge = |one: usize, other: usize, kind: EdgeKind| graph.add_edge(one as u32, other as u32, edge_kinds.of(kind));
        for (index, hop) in self.hops.iter().enumerate() {
            edge(first_hop + index, first_group + hop.group as usize, EdgeKind::HopOf);
            edge(hop.sender as usize, first_hop + index, EdgeKind::HopFrom);
            edge(hop.receiver as usize, first_hop + index, EdgeKind::HopTo);
            for &(link, load) in &hop.shape.loads {
                edge(first_hop + index, first_shared + link, EdgeKind::Loads(0, load.to_bits()));
            }
        }
        for (index, rank) in self.ranks.iter().enumerate() {
            edge(index, first_shared + rank.processor as usize, EdgeKind::RunsOn);
        }
        for (index, group) in self.groups.iter().enumerate() {
            for &(member, number) in &group.members {
                edge(member as usize, first_group + index, EdgeKind::Member(number));
            }
            for (number, shape) in group.shapes().into_iter().enumerate() {
                for &(link, load) in shape.into_iter().flat_map(|shape| &shape.loads) {
                    edge(first_group + index, first_shared + link, EdgeKind::Loads(number, load.to_bits()));
                }
            }
        }
        for (index, channel) in self.channels.iter().enumerate() {
            edge(channel.sender as usize, first_channel + index, EdgeKind::Sends(channel.send_peer));
            edge(channel.receiver as usize, first_channel + index, EdgeKind::Receives(channel.receive_peer));
            for &(link, load) in &channel.shape.loads {
                edge(first_channel + index, first_shared + link, EdgeKind::Loads(0, load.to_bits()));
            }
        }
        (graph.classes(), FirstNodes { groups: first_group, channels: first_channel, hops: first_hop, shared: first_shared })
    }

    fn fold_groups(&mut self, ranks: &Representatives, groups: &Representatives, shared: &Representatives) {
        let mut kept: Vec<_> = groups.first.iter().map(|&first| self.groups[first].clone()).collect();
        for group in &mut kept {
            let members: BTreeSet<(u32, u32)> =
                group.members.iter().map(|&(member, number)| (ranks.place[member as usize], number)).collect();
            group.members = members.into_iter().collect();
            group.shapes_mut().into_iter().flatten().for_each(|shape| shape.loads.clear());
        }
        for (group, &place) in self.groups.iter().zip(&groups.place) {
            let of_class = kept[place as usize].shapes_mut();
            for (shape, folded) in group.shapes().into_iter().zip(of_class) {
                if let (Some(shape), Some(folded)) = (shape, folded) {
                    add_loads(shape, folded, shared);
                }
            }
        }
        self.groups = kept;
    }

    fn fold_channels(&mut self, ranks: &Representatives, channels: &Representatives, shared: &Representatives) {
        let mut kept: Vec<_> = channels.first.iter().map(|&first| self.channels[first].clone()).collect();
        for channel in &mut kept {
            channel.sender = ranks.place[channel.sender as usize];
            channel.receiver = ranks.place[channel.receiver as usize];
            channel.shape.loads.clear();
        }
        for (channel, &place) in self.channels.iter().zip(&channels.place) {
            add_loads(&channel.shape, &mut kept[place as usize].shape, shared);
        }
        self.channels = kept;
    }
}

impl Lowered<'_> {
    /// Hops of one class have those before them and after them in one class each, so a ring folds onto a ring.
    fn fold_hops(&mut self, ranks: &Representatives, groups: &Representatives, hops: &Representatives, shared: &Representatives) {
        let mut kept: Vec<_> = hops.first.iter().map(|&first| self.hops[first].clone()).collect();
        for hop in &mut kept {
            hop.group = groups.place[hop.group as usize];
            hop.sender = ranks.place[hop.sender as usize];
            hop.receiver = ranks.place[hop.receiver as usize];
            hop.before = hops.place[hop.before as usize];
            hop.after = hops.place[hop.after as usize];
            hop.shape.loads.clear();
            hop.weights = [0.0; 2];
        }
        for (hop, &place) in self.hops.iter().zip(&hops.place) {
            let folded = &mut kept[place as usize];
            add_loads(&hop.shape, &mut folded.shape, shared);
            for (weight, end) in folded.weights.iter_mut().zip([hop.sender, hop.receiver]) {
                // Whatever group of the class: that of the kept rank need not be the kept one.
                *weight += f64::from(u8::from(ranks.first[ranks.place[end as usize] as usize] == end as usize));
            }
        }
        self.hops = kept;
        // The hops that are kept of a group are those of the first group of its class, and lie together.
        for (number, group) in (0..).zip(&mut self.groups) {
            let begin = self.hops.partition_point(|hop| hop.group < number) as u32;
            group.hops = begin..self.hops.partition_point(|hop| hop.group <= number) as u32;
        }
    }
}

/// Adds what an exchange loads of the links that are kept to the shape of the exchange that stands for it: each load by itself, as its own pace
/// may be that of the link.
fn add_loads(shape: &Shape, folded: &mut Shape, shared: &Representatives) {
    for &(link, load) in &shape.loads {
        let place = shared.place[link];
        if shared.first[place as usize] == link {
            folded.loads.push((place as usize, load));
        }
    }
}
