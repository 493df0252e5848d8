//! Who exchanges: ranks that run collectives together, and pairs of which one sends to the other; over which links, and what an exchange of theirs takes
//! when it is alone.
//!
//! It must not know when exchanges happen, and how their members were found ([`crate::pairing`]).

use super::ranks::{LoweringContext, SimulatedRank};
use super::repeated::Repeated;
use crate::cost::{CollectiveCall, CommunicationCost, CostModel, Quantile, Source};
use crate::gpu::NodeSpread;
use crate::network::{AlgorithmTerms, Collectives, FlowContext, MeshRotation, Shape, goes_round};
use foretell_program::{Collective, CollectiveAlgorithm, Exchange, Rank, Reach};
use foretell_topologies::{DeviceId, LinkClass, Topology, TopologyError};
use foretell_units::Seconds;
use std::ops::Range;

/// Ranks that run collectives together.
#[derive(Clone, Debug)]
pub(crate) struct ProcessGroup {
    /// The members that are simulated, and each one's number for the group in its stage.
    pub(crate) members: Vec<(u32, u32)>,
    /// How many members each of them was made ready for.
    pub(crate) multiplicity: usize,
    /// How many members there must be.
    pub(crate) size: usize,
    /// The first of its exchanges; the others follow.
    pub(crate) first_communication: u32,
    /// Which collectives, in order.
    pub(crate) collectives: Repeated<CollectiveCall>,
    /// The flows of each algorithm that its collectives may use.
    pub(crate) ring: Option<Shape>,
    pub(crate) tree: Option<Shape>,
    pub(crate) pairs: Option<Shape>,
    pub(crate) shift: Option<Shape>,
    /// How far apart its members are, if samples hold for the devices of all of them.
    pub(crate) measured: Option<Reach>,
    /// How its members spread over nodes, for each kind of device among them, where the profiles of GPUs answer.
    pub(crate) spreads: Spreads,
    /// The kind of its first device, for the overheads.
    pub(crate) kind: usize,
    /// Where it is run step by step, the hops of its rings, and how many rings there are.
    pub(crate) hops: Range<u32>,
    pub(crate) rings: u32,
}

/// The messages of one rank to another.
#[derive(Clone, Debug)]
pub(crate) struct Channel {
    pub(crate) sender: u32,
    pub(crate) receiver: u32,
    /// The sending list's number of the peer, and the receiving list's.
    pub(crate) send_peer: u32,
    pub(crate) receive_peer: u32,
    pub(crate) first_communication: u32,
    /// The bytes of each message.
    pub(crate) bytes: Repeated<u64>,
    pub(crate) shape: Shape,
    pub(crate) measured: Option<Reach>,
    pub(crate) spreads: Spreads,
    pub(crate) kind: usize,
}

/// How ranks spread over the nodes of a cluster, by the kind of device whose links count; empty where the profiles of GPUs do not answer.
pub(crate) type Spreads = Vec<(usize, NodeSpread)>;

/// Those of devices of some kinds.
pub(crate) fn spreads(costs: &CostModel, kinds: impl Iterator<Item = usize>, devices: &[DeviceId]) -> Spreads {
    let mut found = Spreads::new();
    for kind in kinds {
        if found.iter().all(|(other, _)| *other != kind) {
            let Some(profiled_gpu) = costs.profiled_gpu(kind) else { return Spreads::new() };
            found.push((kind, profiled_gpu.node_spread(devices)));
        }
    }
    found
}

/// What takes longest: ranks of several kinds wait for the slowest.
fn slowest(costs: impl Iterator<Item = CommunicationCost>) -> Option<CommunicationCost> {
    let total = |cost: &CommunicationCost| (cost.latency + cost.flow).value();
    costs.max_by(|one, other| total(one).total_cmp(&total(other)))
}

impl ProcessGroup {
    /// That of these members, of which shift tell those that stand for others; none if flows of theirs do not turn along.
    pub(crate) fn new(
        context: &LoweringContext<'_>,
        rotation: Option<&MeshRotation>,
        ranks: &[SimulatedRank],
        members: &[Rank],
        collectives: Repeated<CollectiveCall>,
        first_communication: u32,
        mode: Collectives,
    ) -> Result<Option<Self>, TopologyError> {
        let LoweringContext { topology, costs, .. } = *context;
        let kind_of = |member: &Rank| ranks[context.place(*member)].kind;
        let devices: Vec<DeviceId> = members.iter().map(|&member| context.device(member)).collect();
        let uses =
            |wanted: fn(Collective) -> bool| devices.len() > 1 && collectives.distinct().iter().any(|call| wanted(call.kind));
        let around = context.around(rotation);
        let kind = members.first().map_or(0, kind_of);
        // Two members are each other's ring and tree. Where the profiles of GPUs say what collectives take, these load links as rings do.
        let spreads = spreads(costs, members.iter().map(kind_of), &devices);
        let asks_for_tree = mode == Collectives::Flow && devices.len() > 2 && spreads.is_empty();
        let mut turn_along = true;
        let mut shape = |is_used: bool, of: fn(FlowContext<'_>, &[DeviceId]) -> Result<Option<Shape>, TopologyError>| {
            let shape = if is_used && turn_along { of(around, &devices)? } else { None };
            turn_along &= shape.is_some() || !is_used;
            Ok::<_, TopologyError>(shape)
        };
        let tree = shape(asks_for_tree && uses(|kind| kind == Collective::AllReduce), Shape::double_tree)?;
        // What goes round step by step has hops instead of flows.
        let ring = shape(mode == Collectives::Flow && uses(goes_round), Shape::ring)?;
        let pairs = shape(uses(|kind| kind == Collective::AllToAll), Shape::all_pairs)?;
        let shift = shape(uses(|kind| kind == Collective::Shift), Shape::shift)?;
        if !turn_along {
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
            measured: if are_measured { Some(reach(topology, &devices)?) } else { None },
            spreads,
            kind,
            collectives,
            hops: 0..0,
            rings: 0,
        }))
    }

    /// The flows of all algorithms.
    pub(crate) fn shapes(&self) -> [Option<&Shape>; 4] {
        [&self.ring, &self.tree, &self.pairs, &self.shift].map(Option::as_ref)
    }

    pub(crate) fn shapes_mut(&mut self) -> [Option<&mut Shape>; 4] {
        [&mut self.ring, &mut self.tree, &mut self.pairs, &mut self.shift].map(Option::as_mut)
    }

    /// Whether its collective that is the `which`-th different one is run step by step.
    pub(crate) fn is_stepped(&self, which: usize) -> bool {
        !self.hops.is_empty() && goes_round(self.collectives.distinct()[which].kind)
    }

    /// What its collective that is the `which`-th different one takes alone, and over which flows.
    pub(crate) fn cost(&self, costs: &CostModel, which: usize, quantile: Quantile) -> (CommunicationCost, Option<&Shape>) {
        self.cost_of(costs, self.collectives.distinct()[which], quantile)
    }

    /// The same of a collective of a kind that it has.
    pub(crate) fn cost_of(
        &self,
        costs: &CostModel,
        call: CollectiveCall,
        quantile: Quantile,
    ) -> (CommunicationCost, Option<&Shape>) {
        let CollectiveCall { kind: collective, bytes, algorithm: asked, .. } = call;
        let members = self.size;
        if members < 2 {
            return (NOTHING, None);
        }
        let (exchange, shape, algorithm) = match collective {
            Collective::AllReduce => (Exchange::AllReduce, self.ring.as_ref(), AlgorithmTerms::ring_whole(members)),
            Collective::ReduceScatter => (Exchange::ReduceScatter, self.ring.as_ref(), AlgorithmTerms::ring_half(members)),
            Collective::AllGather => (Exchange::AllGather, self.ring.as_ref(), AlgorithmTerms::ring_half(members)),
            // Each member takes in as much as in an all-gather; nobody measures it separately.
            Collective::AllToAll => (Exchange::AllGather, self.pairs.as_ref(), AlgorithmTerms::ALL_PAIRS),
            // Every member sends one message; nobody measures them all at once separately.
            Collective::Shift => (Exchange::SendReceive, self.shift.as_ref(), AlgorithmTerms::MESSAGE),
        };
        let of_kind = |(kind, spread): &(usize, NodeSpread)| {
            Some(
                costs
                    .profiled_gpu(*kind)?
                    .collective(spread, call, algorithm.share)
                    .through_fabric(shape.map_or(0.0, |shape| shape.fabric_seconds_per_byte)),
            )
        };
        if let Some(cost) = slowest(self.spreads.iter().filter_map(of_kind)) {
            return (cost, shape);
        }
        let measured_members = if collective == Collective::Shift { 2 } else { members };
        let parameters = costs.parameters(self.kind);
        // What was measured went round rings.
        if asked != CollectiveAlgorithm::Tree
            && let Some((reach, table)) = self.measured.zip(costs.exchanges(self.kind))
            && let Some(cost) = table.cost((exchange, reach), measured_members, bytes, bytes * algorithm.share, quantile)
        {
            return (costs.rescaled(cost, reach), shape);
        }
        let overhead = parameters.exchange_overhead;
        let alone = |shape: Option<&Shape>, algorithm: AlgorithmTerms| {
            shape.map(|shape| algorithm.cost(shape, overhead, bytes, quantile))
        };
        let ring = alone(shape, algorithm).unwrap_or(NOTHING);
        let tree = if collective == Collective::AllReduce {
            alone(self.tree.as_ref(), AlgorithmTerms::double_tree(members))
        } else {
            None
        };
        let is_better = |tree: &CommunicationCost, ring: &CommunicationCost| match asked {
            CollectiveAlgorithm::Automatic => tree.latency + tree.flow < ring.latency + ring.flow,
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
    /// What its message that is the `which`-th different one takes alone.
    pub(crate) fn cost(&self, costs: &CostModel, which: usize, quantile: Quantile) -> CommunicationCost {
        let bytes = self.bytes.distinct()[which] as f64;
        let of_kind = |(kind, spread): &(usize, NodeSpread)| {
            Some(costs.profiled_gpu(*kind)?.message(spread, bytes).through_fabric(self.shape.fabric_seconds_per_byte))
        };
        if let Some(cost) = slowest(self.spreads.iter().filter_map(of_kind)) {
            return cost;
        }
        let parameters = costs.parameters(self.kind);
        self.measured
            .zip(costs.exchanges(self.kind))
            .and_then(|(reach, table)| {
                let cost = table.cost((Exchange::SendReceive, reach), 2, bytes, bytes, quantile)?;
                Some(costs.rescaled(cost, reach))
            })
            .unwrap_or_else(|| AlgorithmTerms::MESSAGE.cost(&self.shape, parameters.exchange_overhead, bytes, quantile))
    }
}

const NOTHING: CommunicationCost = CommunicationCost {
    latency: Seconds::ZERO,
    flow: Seconds::ZERO,
    bytes: 0.0,
    processor_share: Some(0.0),
    source: Source::Measured,
};

/// How far apart devices are that exchange around a ring.
pub(crate) fn reach(topology: &Topology, devices: &[DeviceId]) -> Result<Reach, TopologyError> {
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

/// Everything that the cost of a group's collectives or of a channel's messages follows from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum CostKey {
    Group {
        /// The list of the first member and the group's number there, from which its collectives
        /// follow.
        list: usize,
        number: u32,
        size: usize,
        shapes: [Option<ShapeBits>; 4],
        measured: Option<Reach>,
        spreads: Spreads,
        /// The kind of the first device.
        kind: usize,
    },
    Channel {
        /// The lists of sender and receiver and the peers' numbers there, from which its messages
        /// follow.
        lists: [usize; 2],
        peers: [u32; 2],
        shape: ShapeBits,
        measured: Option<Reach>,
        spreads: Spreads,
        /// The kind of the sender's device.
        kind: usize,
    },
}

/// Bits of a shape's hop latency, and of its seconds per byte over all links and over the fabric.
pub(crate) type ShapeBits = [u64; 3];

/// The bits from which the uncontended cost of a shape follows.
pub(crate) fn shape_bits(shape: &Shape) -> ShapeBits {
    [shape.hop_latency.value(), shape.seconds_per_byte, shape.fabric_seconds_per_byte].map(f64::to_bits)
}

impl CostKey {
    /// The key of a group whose members are among `ranks`.
    pub(crate) fn of_group(ranks: &[SimulatedRank], group: &ProcessGroup) -> Self {
        let first = group.members.first();
        let (list, number) = first.map_or((0, 0), |&(member, number)| (ranks[member as usize].list, number));
        let shapes = group.shapes().map(|shape| shape.map(shape_bits));
        let (size, measured, spreads, kind) = (group.size, group.measured, group.spreads.clone(), group.kind);
        Self::Group { list, number, size, shapes, measured, spreads, kind }
    }

    /// The key of a channel whose ends are among `ranks`.
    pub(crate) fn of_channel(ranks: &[SimulatedRank], channel: &Channel) -> Self {
        let lists = [channel.sender, channel.receiver].map(|rank| ranks[rank as usize].list);
        let peers = [channel.send_peer, channel.receive_peer];
        let (shape, measured, kind) = (shape_bits(&channel.shape), channel.measured, channel.kind);
        Self::Channel { lists, peers, shape, measured, spreads: channel.spreads.clone(), kind }
    }
}
