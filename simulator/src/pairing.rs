//! Who exchanges with whom: the members of each group, and the two ends of each message.
//!
//! The n-th collective of a group meets the n-th of every other member; the n-th message from one rank to another meets the n-th receive
//! there.

use crate::cost::{CostModel, Source};
use crate::error::SimulationError;
use crate::exchange::{Algorithm, Cost};
use crate::gpu::Reachable;
use crate::lists::{LoweredList, Messages};
use crate::lowering::SimulatedRank;
use crate::network::{Around, Shape};
use crate::orbits::Orbits;
use crate::rings::{Collectives, Hop, goes_round, hops, steps, take_as_foretold};
use crate::simulation::Quantile;
use foretell_program::{Axis, Collective, CollectiveAlgorithm, CollectiveRole, Exchange, Group, Operation, Program, Rank, Reach};
use foretell_topologies::{DeviceId, LinkClass, Topology, TopologyError};
use foretell_units::Seconds;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// A sequence in which few things are said many times. Whoever has the same shares it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Repeated<T> {
    distinct: Arc<[T]>,
    /// Of each the place among those.
    which: Arc<[u32]>,
}

impl<T: Copy + PartialEq> Repeated<T> {
    fn new(things: impl IntoIterator<Item = T>) -> Self {
        let mut distinct: Vec<T> = Vec::new();
        let which = things.into_iter().map(|thing| {
            let known = distinct.iter().position(|one| *one == thing);
            known.unwrap_or_else(|| {
                distinct.push(thing);
                distinct.len() - 1
            }) as u32
        });
        let which = which.collect();
        Self { distinct: distinct.into(), which }
    }

    pub(crate) fn len(&self) -> usize {
        self.which.len()
    }

    /// Its different things, in the order of first use.
    pub(crate) fn distinct(&self) -> &[T] {
        &self.distinct
    }

    /// Which of them the `nth` is.
    pub(crate) fn which(&self, nth: usize) -> u32 {
        self.which[nth]
    }

    pub(crate) fn get(&self, nth: usize) -> T {
        self.distinct[self.which[nth] as usize]
    }
}

/// A collective of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Call {
    pub(crate) kind: Collective,
    /// What it is for.
    pub(crate) role: CollectiveRole,
    /// Of the whole tensor.
    pub(crate) bytes: f64,
    /// How it is made.
    pub(crate) algorithm: CollectiveAlgorithm,
}

/// Ranks that run collectives together.
#[derive(Clone, Debug)]
pub(crate) struct GroupSet {
    /// The members that are simulated, and each one's number for the group in its stage.
    pub(crate) members: Vec<(u32, u32)>,
    /// How many members each of them was made ready for.
    pub(crate) turns: usize,
    /// How many members there must be.
    pub(crate) size: usize,
    /// The first of its exchanges; the others follow.
    pub(crate) first_exchange: u32,
    /// Which collectives, in order.
    pub(crate) collectives: Repeated<Call>,
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
    pub(crate) first_exchange: u32,
    /// The bytes of each message.
    pub(crate) bytes: Repeated<u64>,
    pub(crate) shape: Shape,
    pub(crate) measured: Option<Reach>,
    pub(crate) spreads: Spreads,
    pub(crate) kind: usize,
}

/// How ranks spread over the nodes of a cluster, by the kind of device whose links count; empty where the profiles of GPUs do not answer.
pub(crate) type Spreads = Vec<(usize, Reachable)>;

/// Those of devices of some kinds.
fn spreads(costs: &CostModel, kinds: impl Iterator<Item = usize>, devices: &[DeviceId]) -> Spreads {
    let mut found = Spreads::new();
    for kind in kinds {
        if found.iter().all(|(other, _)| *other != kind) {
            let Some(graphics) = costs.graphics(kind) else { return Spreads::new() };
            found.push((kind, graphics.reach(devices)));
        }
    }
    found
}

/// What takes longest: ranks of several kinds wait for the slowest.
fn slowest(costs: impl Iterator<Item = Cost>) -> Option<Cost> {
    let total = |cost: &Cost| (cost.latency + cost.flow).value();
    costs.max_by(|one, other| total(one).total_cmp(&total(other)))
}

/// All of it.
#[derive(Debug)]
pub(crate) struct Pairing {
    pub(crate) groups: Vec<GroupSet>,
    pub(crate) channels: Vec<Channel>,
    pub(crate) hops: Vec<Hop>,
    pub(crate) exchanges: u32,
}

/// Where ranks run, and which of them are made ready.
#[derive(Clone, Copy)]
pub(crate) struct World<'a> {
    pub(crate) program: &'a Program,
    pub(crate) topology: &'a Topology,
    pub(crate) costs: &'a CostModel,
    /// The device of the first rank, and over how many from there on they are dealt out.
    pub(crate) first_device: usize,
    pub(crate) devices: usize,
    /// What tells the ranks that stand for others; all are made ready where there is nothing of the kind.
    pub(crate) orbits: Option<&'a Orbits>,
}

impl World<'_> {
    pub(crate) fn device(&self, rank: Rank) -> DeviceId {
        DeviceId(self.first_device + rank.0 % self.devices)
    }

    /// The place of a rank among those that are made ready, or of the one that stands for it.
    pub(crate) fn place(&self, rank: Rank) -> usize {
        self.orbits.map_or(rank.0, |orbits| orbits.place(rank.0))
    }

    /// The ranks that are made ready.
    pub(crate) fn ranks(&self) -> Vec<Rank> {
        let world = self.program.mesh.world_size();
        match self.orbits {
            Some(orbits) => orbits.firsts(world).map(Rank).collect(),
            None => (0..world).map(Rank).collect(),
        }
    }

    /// The turns of the ranks that a group joins; none of a group that turns as a whole.
    fn orbits_within(&self, group: &Group) -> Option<&Orbits> {
        self.orbits.filter(|orbits| group.axes.contains(&orbits.axis))
    }

    fn around<'a>(&'a self, orbits: Option<&'a Orbits>) -> Around<'a> {
        Around { topology: self.topology, links: &self.costs.links, orbits }
    }
}

impl Pairing {
    /// Finds the groups and channels, and tells each rank which are its own; none where ranks may not be turned after all, since the flows of some
    /// group do not turn along.
    pub(crate) fn new(
        world: &World<'_>,
        lists: &[LoweredList],
        mode: Collectives,
        ranks: &mut [SimulatedRank],
    ) -> Result<Option<Self>, SimulationError> {
        let mut pairing = Self { groups: Vec::new(), channels: Vec::new(), hops: Vec::new(), exchanges: 0 };
        let all = pairing.find_groups(world, lists, mode, ranks)? && pairing.find_channels(world, lists, ranks)?;
        Ok(all.then_some(pairing))
    }

    /// Says whether all flows turn along.
    fn find_groups(
        &mut self,
        world: &World<'_>,
        lists: &[LoweredList],
        mode: Collectives,
        ranks: &mut [SimulatedRank],
    ) -> Result<bool, SimulationError> {
        let program = world.program;
        // A group is known by what it is and by its first member.
        let mut known: BTreeMap<(&Group, Rank), u32> = BTreeMap::new();
        let calls = Calls::new(program, lists);
        for index in 0..ranks.len() {
            let list = &program.lists[ranks[index].list];
            for (number, group) in list.groups.iter().enumerate() {
                check_stages(program, group, list.stage)?;
                let first = first_member(program, group, ranks[index].rank);
                let next = self.groups.len() as u32;
                let set = *known.entry((group, first)).or_insert(next);
                if set == next {
                    let members = group.members(&program.mesh, ranks[index].rank);
                    let orbits = world.orbits_within(group);
                    let collectives = calls.of(ranks[index].list, number);
                    let Some(mut group) = GroupSet::new(world, orbits, ranks, &members, collectives, self.exchanges, mode)?
                    else {
                        return Ok(false);
                    };
                    if mode == Collectives::Steps && !self.step(world, orbits, &members, next, &mut group)? {
                        return Ok(false);
                    }
                    self.exchanges += group.collectives.len() as u32;
                    self.groups.push(group);
                }
                let members = &mut self.groups[set as usize].members;
                members.push((index as u32, number as u32));
                ranks[index].groups.push(set);
            }
        }
        self.check_groups(&calls, ranks)?;
        Ok(true)
    }

    /// Has a group run its collectives step by step, as far as they go round rings. Says whether all hops turn along.
    fn step(
        &mut self,
        world: &World<'_>,
        orbits: Option<&Orbits>,
        members: &[Rank],
        number: u32,
        group: &mut GroupSet,
    ) -> Result<bool, SimulationError> {
        let costs = world.costs;
        if members.len() > 1 && group.collectives.distinct().iter().any(|call| goes_round(call.kind)) {
            let places: Vec<(Rank, DeviceId)> = members.iter().map(|&member| (member, world.device(member))).collect();
            let first = self.hops.len() as u32;
            let place = |rank: Rank| world.place(rank) as u32;
            let Some((hops, rings)) = hops(world.around(orbits), number, &places, place, first)? else { return Ok(false) };
            self.hops.extend(hops);
            group.hops = first..self.hops.len() as u32;
            group.rings = rings;
            if !group.spreads.is_empty() {
                let parts = group.size as f64 * f64::from(group.rings);
                let of_step = |call: &Call| {
                    let cost = group.cost_of(costs, *call, Quantile::Median).0;
                    (call.bytes / parts, (cost.latency + cost.flow).value() / f64::from(steps(call.kind, group.size)))
                };
                let around = group.collectives.distinct().iter().filter(|call| goes_round(call.kind));
                let foretold: Vec<(f64, f64)> = around.map(of_step).collect();
                take_as_foretold(self.hops.get_mut(first as usize..).unwrap_or_default(), &foretold);
            }
        }
        Ok(true)
    }

    /// Every member must run the same collectives.
    fn check_groups(&self, calls: &Calls, ranks: &[SimulatedRank]) -> Result<(), SimulationError> {
        for group in &self.groups {
            let Some(&(first, _)) = group.members.first() else { continue };
            let mut last_list = ranks[first as usize].list;
            if group.members.len() * group.turns != group.size && group.collectives.len() > 0 {
                return Err(SimulationError::Unmatched {
                    left: format!("the group of {}", ranks[first as usize].rank),
                    right: "the lists of its members".into(),
                    reason: format!("it has {} members and is listed {} times", group.size, group.members.len() * group.turns),
                });
            }
            for &(member, number) in &group.members {
                let list = ranks[member as usize].list;
                if list == last_list {
                    continue;
                }
                last_list = list;
                if calls.of(list, number as usize) != group.collectives {
                    return Err(SimulationError::Unmatched {
                        left: ranks[first as usize].rank.to_string(),
                        right: ranks[member as usize].rank.to_string(),
                        reason: "they are members of one group but do not run the same collectives in it".into(),
                    });
                }
            }
        }
        Ok(())
    }

    /// Says whether all messages turn along.
    fn find_channels(
        &mut self,
        world: &World<'_>,
        lists: &[LoweredList],
        ranks: &mut [SimulatedRank],
    ) -> Result<bool, SimulationError> {
        let World { program, topology, costs, .. } = *world;
        for rank in ranks.iter_mut() {
            rank.receives = vec![u32::MAX; lists[rank.list].receives.len()];
        }
        let peer_of = |list: usize, messages: &Messages, rank: Rank| {
            program.lists[list].peers.get(messages.peer.0 as usize).map(|peer| peer.of(&program.mesh, rank))
        };
        let messages_of = |which: fn(&LoweredList) -> &[Messages]| -> Vec<Vec<Repeated<u64>>> {
            let of_list = |(number, list)| {
                let messages = which(list).iter();
                messages.map(|messages: &Messages| message_bytes(program, number, &messages.instructions)).collect()
            };
            lists.iter().enumerate().map(of_list).collect()
        };
        let (sent, received) = (messages_of(|list| &list.sends), messages_of(|list| &list.receives));
        for sender in 0..ranks.len() {
            let (list, from) = (ranks[sender].list, ranks[sender].rank);
            for (send_peer, messages) in lists[list].sends.iter().enumerate() {
                let receiver = peer_of(list, messages, from).filter(|rank| rank.0 < program.mesh.world_size());
                let name = receiver.map_or_else(|| "a rank that there is not".to_string(), |rank| rank.to_string());
                let unmatched = |reason: String| SimulationError::Unmatched {
                    left: format!("the sends of {from} to {name}"),
                    right: "what it receives".into(),
                    reason,
                };
                let Some(receiver) = receiver else { return Err(unmatched("nobody receives them".into())) };
                let place = world.place(receiver);
                if ranks[place].rank != receiver {
                    return Ok(false);
                }
                let other = ranks[place].list;
                let from_us = |one: &Messages| peer_of(other, one, receiver) == Some(from);
                let Some(receive_peer) = lists[other].receives.iter().position(from_us) else {
                    return Err(unmatched("nobody receives them".into()));
                };
                let bytes = sent[list][send_peer].clone();
                if bytes != received[other][receive_peer] {
                    return Err(unmatched("they differ in number or in bytes".into()));
                }
                let devices = [sender, place].map(|rank| ranks[rank].device);
                let are_measured = [sender, place].iter().all(|&rank| costs.exchanges(ranks[rank].kind).is_some());
                let Some(shape) = Shape::point_to_point(world.around(None), devices[0], devices[1])? else { return Ok(false) };
                let channel = Channel {
                    sender: sender as u32,
                    receiver: place as u32,
                    send_peer: send_peer as u32,
                    receive_peer: receive_peer as u32,
                    first_exchange: self.exchanges,
                    shape,
                    measured: if are_measured { Some(reach(topology, &devices)?) } else { None },
                    spreads: spreads(costs, [sender, place].into_iter().map(|rank| ranks[rank].kind), &devices),
                    kind: ranks[sender].kind,
                    bytes,
                };
                self.exchanges += channel.bytes.len() as u32;
                ranks[sender].sends.push(self.channels.len() as u32);
                ranks[place].receives[receive_peer] = self.channels.len() as u32;
                self.channels.push(channel);
            }
        }
        for rank in ranks.iter() {
            if let Some(peer) = rank.receives.iter().position(|&channel| channel == u32::MAX) {
                let other = peer_of(rank.list, &lists[rank.list].receives[peer], rank.rank);
                return Err(SimulationError::Unmatched {
                    left: format!("the receives of {}", rank.rank),
                    right: other.map_or_else(|| "a rank that there is not".to_string(), |other| format!("the sends of {other}")),
                    reason: "nobody sends them".into(),
                });
            }
        }
        Ok(true)
    }
}

impl GroupSet {
    /// That of these members, of which orbits tell those that stand for others; none if flows of theirs do not turn along.
    fn new(
        world: &World<'_>,
        orbits: Option<&Orbits>,
        ranks: &[SimulatedRank],
        members: &[Rank],
        collectives: Repeated<Call>,
        first_exchange: u32,
        mode: Collectives,
    ) -> Result<Option<Self>, SimulationError> {
        let World { topology, costs, .. } = *world;
        let kind_of = |member: &Rank| ranks[world.place(*member)].kind;
        let devices: Vec<DeviceId> = members.iter().map(|&member| world.device(member)).collect();
        let uses =
            |wanted: fn(Collective) -> bool| devices.len() > 1 && collectives.distinct().iter().any(|call| wanted(call.kind));
        let around = world.around(orbits);
        let kind = members.first().map_or(0, kind_of);
        // Two members are each other's ring and tree. Where the profiles of GPUs say what collectives take, these load links as rings do.
        let spreads = spreads(costs, members.iter().map(kind_of), &devices);
        let asks_for_tree = mode == Collectives::Flow && devices.len() > 2 && spreads.is_empty();
        let mut turn_along = true;
        let mut shape = |is_used: bool, of: fn(Around<'_>, &[DeviceId]) -> Result<Option<Shape>, TopologyError>| {
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
        let turns = orbits.map_or(1, Orbits::turns);
        Ok(Some(Self {
            members: Vec::with_capacity(members.len() / turns),
            turns,
            size: members.len(),
            first_exchange,
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

    /// What its collective that is the `which`-th different one takes alone, and over which flows.
    pub(crate) fn cost(&self, costs: &CostModel, which: usize, quantile: Quantile) -> (Cost, Option<&Shape>) {
        self.cost_of(costs, self.collectives.distinct()[which], quantile)
    }

    /// The same of a collective of a kind that it has.
    pub(crate) fn cost_of(&self, costs: &CostModel, call: Call, quantile: Quantile) -> (Cost, Option<&Shape>) {
        let Call { kind: collective, bytes, algorithm: asked, .. } = call;
        let members = self.size;
        if members < 2 {
            return (NOTHING, None);
        }
        let (exchange, shape, algorithm) = match collective {
            Collective::AllReduce => (Exchange::AllReduce, self.ring.as_ref(), Algorithm::ring_whole(members)),
            Collective::ReduceScatter => (Exchange::ReduceScatter, self.ring.as_ref(), Algorithm::ring_half(members)),
            Collective::AllGather => (Exchange::AllGather, self.ring.as_ref(), Algorithm::ring_half(members)),
            // Each member takes in as much as in an all-gather; nobody measures it separately.
            Collective::AllToAll => (Exchange::AllGather, self.pairs.as_ref(), Algorithm::ALL_PAIRS),
            // Every member sends one message; nobody measures them all at once separately.
            Collective::Shift => (Exchange::SendReceive, self.shift.as_ref(), Algorithm::MESSAGE),
        };
        let of_kind = |(kind, spread): &(usize, Reachable)| {
            Some(costs.graphics(*kind)?.collective(spread, call, algorithm.share).through_fabric(shape))
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
        let alone =
            |shape: Option<&Shape>, algorithm: Algorithm| shape.map(|shape| algorithm.cost(shape, overhead, bytes, quantile));
        let ring = alone(shape, algorithm).unwrap_or(NOTHING);
        let tree =
            if collective == Collective::AllReduce { alone(self.tree.as_ref(), Algorithm::double_tree(members)) } else { None };
        let is_better = |tree: &Cost, ring: &Cost| match asked {
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
    pub(crate) fn cost(&self, costs: &CostModel, which: usize, quantile: Quantile) -> Cost {
        let bytes = self.bytes.distinct()[which] as f64;
        let of_kind = |(kind, spread): &(usize, Reachable)| {
            Some(costs.graphics(*kind)?.message(spread, bytes).through_fabric(Some(&self.shape)))
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
            .unwrap_or_else(|| Algorithm::MESSAGE.cost(&self.shape, parameters.exchange_overhead, bytes, quantile))
    }
}

const NOTHING: Cost =
    Cost { latency: Seconds::ZERO, flow: Seconds::ZERO, bytes: 0.0, processor_share: Some(0.0), source: Source::Measured };

/// A group across stages must be one of stages that there are, and of the one that lists it.
fn check_stages(program: &Program, group: &Group, stage: usize) -> Result<(), SimulationError> {
    let stages = program.mesh.stage_count();
    let is_across = group.axes.contains(&Axis::Pipeline);
    if !is_across || (group.stages.contains(&stage) && group.stages.iter().all(|&other| other < stages)) {
        return Ok(());
    }
    Err(SimulationError::Unmatched {
        left: format!("a group of stage {stage}"),
        right: "the mesh".into(),
        reason: format!("it is of the stages {:?}, and the mesh has {stages}", group.stages),
    })
}

/// The member of a rank's group that comes first, without listing them all.
fn first_member(program: &Program, group: &Group, rank: Rank) -> Rank {
    let mut position = program.mesh.coordinates(rank);
    for &axis in &group.axes {
        let first = if axis == Axis::Pipeline { group.stages.iter().min().copied().unwrap_or_default() } else { 0 };
        position = position.with(axis, first);
    }
    program.mesh.rank(position)
}

/// The collectives of each group of each list.
struct Calls(Vec<Vec<Repeated<Call>>>);

impl Calls {
    fn new(program: &Program, lists: &[LoweredList]) -> Self {
        let of_list =
            |list: usize| (0..lists[list].collectives.len()).map(|group| collectives(program, lists, list, group)).collect();
        Self((0..lists.len()).map(of_list).collect())
    }

    fn of(&self, list: usize, group: usize) -> Repeated<Call> {
        self.0[list][group].clone()
    }
}

/// The collectives of a group of a list, in order.
pub(crate) fn collectives(program: &Program, lists: &[LoweredList], list: usize, group: usize) -> Repeated<Call> {
    let instructions = lists[list].collectives[group].iter();
    Repeated::new(instructions.filter_map(|&index| match *program.lists[list].instructions[index as usize].operation {
        Operation::Collective { kind, role, bytes, algorithm, .. } => Some(Call { kind, role, bytes: bytes.value(), algorithm }),
        _ => None,
    }))
}

/// The bytes of messages of a list.
pub(crate) fn message_bytes(program: &Program, list: usize, instructions: &[u32]) -> Repeated<u64> {
    Repeated::new(instructions.iter().filter_map(|&index| match *program.lists[list].instructions[index as usize].operation {
        Operation::Send { bytes, .. } | Operation::Receive { bytes, .. } => Some(bytes.count()),
        _ => None,
    }))
}

/// How far apart devices are that exchange around a ring.
fn reach(topology: &Topology, devices: &[DeviceId]) -> Result<Reach, TopologyError> {
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
