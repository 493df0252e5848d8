//! Process groups and channels: the ranks that communicate, the links that they load, and the cost
//! of each collective or message without contention.
//!
//! [`super::pairing`] finds the members. Nothing here depends on when communication happens.

use super::ranks::{LoweringContext, SimulatedRank};
use super::repeated::Repeated;
use crate::cost::{CollectiveCall, CommunicationCost, CostModel, Parameters, Quantile, Source};
use crate::gpu::NodeSpread;
use crate::network::{AlgorithmTerms, Collectives, FlowContext, MeshRotation, Shape, is_ring_collective};
use foretell_program::{Collective, CollectiveAlgorithm, Exchange, Rank, Reach};
use foretell_topologies::{DeviceId, LinkClass, Topology, TopologyError};
use foretell_units::Seconds;
use std::ops::Range;

/// Ranks that run collectives together.
#[derive(Clone, Debug)]
pub(crate) struct ProcessGroup {
    /// The simulated members, each with the group's number in its list.
    pub(crate) members: Vec<(u32, u32)>,
    /// Number of members that each simulated member stands for under a mesh rotation.
    pub(crate) multiplicity: usize,
    /// Number of members.
    pub(crate) size: usize,
    /// The index of its first collective among all communications. Its other collectives follow.
    pub(crate) first_communication: u32,
    /// Its collectives, in order.
    pub(crate) collectives: Repeated<CollectiveCall>,
    /// Link loads of each algorithm that its collectives may use.
    pub(crate) ring: Option<Shape>,
    pub(crate) tree: Option<Shape>,
    pub(crate) pairs: Option<Shape>,
    pub(crate) shift: Option<Shape>,
    /// The reach of its ring, if samples cover the devices of all members.
    pub(crate) measured_reach: Option<Reach>,
    /// How its members spread over nodes, if the GPU profiles have the costs.
    pub(crate) spread_by_kind: SpreadByKind,
    /// The kind of its first member's device, whose overheads apply.
    pub(crate) kind: usize,
    /// The range of its rings' hops in [`super::Lowered::hops`]. Empty unless it runs step by step.
    pub(crate) hops: Range<u32>,
    /// Number of its rings; 0 unless it runs step by step.
    pub(crate) rings: u32,
}

/// The messages of one rank to another.
#[derive(Clone, Debug)]
pub(crate) struct Channel {
    /// The simulated ranks at its ends.
    pub(crate) sender: u32,
    pub(crate) receiver: u32,
    /// The index of the receiver among the peers that the sender's list sends to.
    pub(crate) send_peer: u32,
    /// The index of the sender among the peers that the receiver's list receives from.
    pub(crate) receive_peer: u32,
    /// The index of its first message among all communications. Its other messages follow.
    pub(crate) first_communication: u32,
    /// The bytes of each message.
    pub(crate) bytes: Repeated<u64>,
    /// Number of ranks that each send a part of a message between stages: the size of `tensor` at
    /// the sender.
    pub(crate) parts: usize,
    /// Link loads of a message.
    pub(crate) shape: Shape,
    /// The reach of a message, if samples cover the devices of both ends.
    pub(crate) measured_reach: Option<Reach>,
    /// How its ends spread over nodes, if the GPU profiles have the costs.
    pub(crate) spread_by_kind: SpreadByKind,
    /// The kind of the sender's device, whose overheads apply.
    pub(crate) kind: usize,
}

/// How ranks spread over the nodes of a cluster, for each kind of device among them. Empty if the
/// GPU profiles lack one of the kinds.
pub(crate) type SpreadByKind = Vec<(usize, NodeSpread)>;

/// How `devices`, which are of these kinds, spread over nodes.
pub(super) fn spread_by_kind(costs: &CostModel, kinds: impl Iterator<Item = usize>, devices: &[DeviceId]) -> SpreadByKind {
    let mut found = SpreadByKind::new();
    for kind in kinds {
        if found.iter().all(|(other, _)| *other != kind) {
            let Some(gpu) = costs.profiled_gpu(kind) else { return SpreadByKind::new() };
            found.push((kind, gpu.node_spread(devices)));
        }
    }
    found
}

/// The longest of the costs, since ranks of several kinds wait for the slowest.
fn slowest(costs: impl Iterator<Item = CommunicationCost>) -> Option<CommunicationCost> {
    let total = |cost: &CommunicationCost| (cost.latency + cost.flow).value();
    costs.max_by(|cost, other| total(cost).total_cmp(&total(other)))
}

impl ProcessGroup {
    /// Creates the group of these members. With a rotation, link loads are those of the
    /// representatives. Returns `None` if the flows of some algorithm are not symmetric under it.
    pub(super) fn new(
        context: &LoweringContext<'_>,
        rotation: Option<&MeshRotation>,
        ranks: &[SimulatedRank],
        members: &[Rank],
        collectives: Repeated<CollectiveCall>,
        first_communication: u32,
        mode: Collectives,
    ) -> Result<Option<Self>, TopologyError> {
        let LoweringContext { topology, costs, .. } = *context;
        let kind_of = |member: &Rank| ranks[context.index(*member)].kind;
        let devices: Vec<DeviceId> = members.iter().map(|&member| context.device(member)).collect();
        let uses =
            |wanted: fn(Collective) -> bool| devices.len() > 1 && collectives.distinct().iter().any(|call| wanted(call.kind));
        let flow_context = context.flow_context(rotation);
        let kind = kind_of(members.first().expect("invariant: a group has a member"));
        let spread_by_kind = spread_by_kind(costs, members.iter().map(kind_of), &devices);
        // For two members, ring and tree are equal. Collectives whose costs come from GPU profiles
        // load links as rings do.
        let needs_tree = mode == Collectives::Flow && devices.len() > 2 && spread_by_kind.is_empty();
        let mut is_symmetric = true;
        let mut shape = |is_used: bool, of: fn(FlowContext<'_>, &[DeviceId]) -> Result<Option<Shape>, TopologyError>| {
            let shape = if is_used && is_symmetric { of(flow_context, &devices)? } else { None };
            is_symmetric &= shape.is_some() || !is_used;
            Ok::<_, TopologyError>(shape)
        };
        let tree = shape(needs_tree && uses(|kind| kind == Collective::AllReduce), Shape::double_tree)?;
        // A ring that runs step by step has hops instead of a shape.
        let ring = shape(mode == Collectives::Flow && uses(is_ring_collective), Shape::ring)?;
        let pairs = shape(uses(|kind| kind == Collective::AllToAll), Shape::all_pairs)?;
        let shift = shape(uses(|kind| kind == Collective::Shift), Shape::shift)?;
        if !is_symmetric {
            return Ok(None);
        }
        let are_measured = members.iter().all(|member| costs.exchanges(kind_of(member)).is_some());
        let multiplicity = rotation.map_or(1, MeshRotation::period);
        Ok(Some(Self {
            members: Vec::with_capacity(members.len() / multiplicity),
            multiplicity,
            size: members.len(),
            first_communication,
            ring,
            tree,
            pairs,
            shift,
            measured_reach: if are_measured { Some(reach(topology, &devices)?) } else { None },
            spread_by_kind,
            kind,
            collectives,
            hops: 0..0,
            rings: 0,
        }))
    }

    /// The link loads of each algorithm.
    pub(crate) fn shapes(&self) -> [Option<&Shape>; 4] {
        [&self.ring, &self.tree, &self.pairs, &self.shift].map(Option::as_ref)
    }

    pub(crate) fn shapes_mut(&mut self) -> [Option<&mut Shape>; 4] {
        [&mut self.ring, &mut self.tree, &mut self.pairs, &mut self.shift].map(Option::as_mut)
    }

    /// Whether collective `distinct` of the distinct collectives runs step by step.
    pub(crate) fn is_stepped(&self, distinct: usize) -> bool {
        !self.hops.is_empty() && is_ring_collective(self.collectives.distinct()[distinct].kind)
    }

    /// The uncontended cost of collective `distinct` of the distinct collectives, and its link
    /// loads.
    pub(crate) fn cost(&self, costs: &CostModel, distinct: usize, quantile: Quantile) -> (CommunicationCost, Option<&Shape>) {
        self.cost_of(costs, self.collectives.distinct()[distinct], quantile)
    }

    /// The uncontended cost of any collective of a kind that the group has, and its link loads.
    pub(crate) fn cost_of(
        &self,
        costs: &CostModel,
        call: CollectiveCall,
        quantile: Quantile,
    ) -> (CommunicationCost, Option<&Shape>) {
        let CollectiveCall { kind: collective, bytes, algorithm: requested, .. } = call;
        let members = self.size;
        if members < 2 {
            return (NO_COST, None);
        }
        let (exchange, shape, terms) = match collective {
            Collective::AllReduce => (Exchange::AllReduce, self.ring.as_ref(), AlgorithmTerms::ring_whole(members)),
            Collective::ReduceScatter => (Exchange::ReduceScatter, self.ring.as_ref(), AlgorithmTerms::ring_half(members)),
            Collective::AllGather => (Exchange::AllGather, self.ring.as_ref(), AlgorithmTerms::ring_half(members)),
            // Each member receives as much as in an all-gather. Profiles have no samples of
            // all-to-alls.
            Collective::AllToAll => (Exchange::AllGather, self.pairs.as_ref(), AlgorithmTerms::ALL_PAIRS),
            // Each member sends one message. Profiles have no samples of shifts.
            Collective::Shift => (Exchange::SendReceive, self.shift.as_ref(), AlgorithmTerms::MESSAGE),
        };
        let fabric_seconds_per_byte = shape.map_or(0.0, |shape| shape.fabric_seconds_per_byte);
        let of_kind = |(kind, spread): &(usize, NodeSpread)| {
            let cost = costs.profiled_gpu(*kind)?.collective(spread, call, terms.share);
            Some(cost.through_fabric(fabric_seconds_per_byte))
        };
        if let Some(cost) = slowest(self.spread_by_kind.iter().filter_map(of_kind)) {
            return (cost, shape);
        }
        let measured_members = if collective == Collective::Shift { 2 } else { members };
        // Samples were measured with rings.
        if requested != CollectiveAlgorithm::Tree
            && let Some((reach, table)) = self.measured_reach.zip(costs.exchanges(self.kind))
            && let Some(cost) = table.cost((exchange, reach), measured_members, bytes, bytes * terms.share, quantile)
        {
            return (costs.rescaled(cost, reach), shape);
        }
        let &Parameters { exchange_overhead: overhead, has_trees, .. } = costs.parameters(self.kind);
        let by_data_sheet =
            |shape: Option<&Shape>, terms: AlgorithmTerms| shape.map(|shape| terms.cost(shape, overhead, bytes, quantile));
        let ring = by_data_sheet(shape, terms).unwrap_or(NO_COST);
        let is_all_reduce = collective == Collective::AllReduce;
        let tree_shape = self.tree.as_ref().filter(|_| is_all_reduce);
        let tree = by_data_sheet(tree_shape, AlgorithmTerms::double_tree(members));
        let is_better = |tree: &CommunicationCost, ring: &CommunicationCost| match requested {
            CollectiveAlgorithm::Automatic => has_trees && tree.latency + tree.flow < ring.latency + ring.flow,
            CollectiveAlgorithm::Ring => false,
            CollectiveAlgorithm::Tree => true,
        };
        match tree {
            Some(tree) if is_better(&tree, &ring) => (tree, self.tree.as_ref()),
            _ => (ring, shape),
        }
    }
}

impl Channel {
    /// The uncontended cost of message `distinct` of the distinct messages.
    pub(crate) fn cost(&self, costs: &CostModel, distinct: usize, quantile: Quantile) -> CommunicationCost {
        let bytes = self.bytes.distinct()[distinct] as f64;
        let of_kind = |(kind, spread): &(usize, NodeSpread)| {
            let cost = costs.profiled_gpu(*kind)?.message(spread, bytes, self.parts);
            Some(cost.through_fabric(self.shape.fabric_seconds_per_byte))
        };
        if let Some(cost) = slowest(self.spread_by_kind.iter().filter_map(of_kind)) {
            return cost;
        }
        let parameters = costs.parameters(self.kind);
        self.measured_reach
            .zip(costs.exchanges(self.kind))
            .and_then(|(reach, table)| {
                let cost = table.cost((Exchange::SendReceive, reach), 2, bytes, bytes, quantile)?;
                Some(costs.rescaled(cost, reach))
            })
            .unwrap_or_else(|| AlgorithmTerms::MESSAGE.cost(&self.shape, parameters.exchange_overhead, bytes, quantile))
    }
}

/// The cost of a collective of one member.
const NO_COST: CommunicationCost = CommunicationCost {
    latency: Seconds::ZERO,
    flow: Seconds::ZERO,
    bytes: 0.0,
    processor_share: Some(0.0),
    source: Source::Measured,
};

/// The reach of a ring of devices: that of its farthest hop.
pub(super) fn reach(topology: &Topology, devices: &[DeviceId]) -> Result<Reach, TopologyError> {
    let next = devices.iter().cycle().skip(1);
    let mut reach = Reach::Node;
    for (&from, &to) in devices.iter().zip(next) {
        reach = reach.max(match topology.farthest_link(from, to)? {
            Some(LinkClass::Switch) => Reach::Fabric,
            Some(LinkClass::Nic) => Reach::Switch,
            Some(LinkClass::Device | LinkClass::HostMemory) | None => Reach::Node,
        });
    }
    Ok(reach)
}

/// Determines the cost of all of a group's collectives, or of a channel's messages: equal keys have
/// equal costs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum CostKey {
    Group {
        /// The list of the first member and the group's index there, which determine its
        /// collectives.
        list: usize,
        number: u32,
        size: usize,
        shapes: [Option<ShapeBits>; 4],
        measured_reach: Option<Reach>,
        spread_by_kind: SpreadByKind,
        /// The kind of the first device.
        kind: usize,
    },
    Channel {
        /// The lists of sender and receiver and the indices of the peers there, which determine its
        /// messages.
        lists: [usize; 2],
        peers: [u32; 2],
        shape: ShapeBits,
        measured_reach: Option<Reach>,
        spread_by_kind: SpreadByKind,
        /// The kind of the sender's device.
        kind: usize,
    },
}

/// Bits of a shape's hop latency, and of its seconds per byte over all links and over the fabric.
pub(crate) type ShapeBits = [u64; 3];

/// Returns the values that determine the uncontended cost of a shape, as bits.
pub(crate) fn shape_bits(shape: &Shape) -> ShapeBits {
    [shape.hop_latency.value(), shape.seconds_per_byte, shape.fabric_seconds_per_byte].map(f64::to_bits)
}

impl CostKey {
    /// The key of a group whose members are among `ranks`.
    pub(crate) fn of_group(ranks: &[SimulatedRank], group: &ProcessGroup) -> Self {
        let first = group.members.first();
        let (list, number) = first.map_or((0, 0), |&(member, number)| (ranks[member as usize].list, number));
        let shapes = group.shapes().map(|shape| shape.map(shape_bits));
        let (size, measured_reach, kind) = (group.size, group.measured_reach, group.kind);
        Self::Group { list, number, size, shapes, measured_reach, spread_by_kind: group.spread_by_kind.clone(), kind }
    }

    /// The key of a channel whose ends are among `ranks`.
    pub(crate) fn of_channel(ranks: &[SimulatedRank], channel: &Channel) -> Self {
        let lists = [channel.sender, channel.receiver].map(|rank| ranks[rank as usize].list);
        let peers = [channel.send_peer, channel.receive_peer];
        let (shape, measured_reach, kind) = (shape_bits(&channel.shape), channel.measured_reach, channel.kind);
        Self::Channel { lists, peers, shape, measured_reach, spread_by_kind: channel.spread_by_kind.clone(), kind }
    }
}
