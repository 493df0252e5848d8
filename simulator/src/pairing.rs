//! Who exchanges with whom: the members of each group, and the two ends of each message.
//!
//! The n-th collective of a group meets the n-th of every other member; the n-th message from one rank to another meets the n-th receive
//! there.

use crate::calls::{Call, Calls, Repeated, message_bytes};
use crate::cost::CostModel;
use crate::error::SimulationError;
use crate::lists::{LoweredList, Messages};
use crate::lowering::SimulatedRank;
use crate::network::{Around, Shape};
use crate::orbits::Orbits;
use crate::parties::{Channel, GroupSet, reach, spreads};
use crate::rings::{Collectives, Hop, goes_round, hops, steps, take_as_foretold};
use crate::simulation::Quantile;
use foretell_program::{Axis, Group, Program, Rank};
use foretell_topologies::{DeviceId, Topology};
use std::collections::BTreeMap;

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

    pub(crate) fn around<'a>(&'a self, orbits: Option<&'a Orbits>) -> Around<'a> {
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
