//! Who exchanges with whom: the members of each group, and the two ends of each message.
//!
//! The n-th collective of a group meets the n-th of every other member; the n-th message from one rank to another meets the n-th receive
//! there.

use super::calls::{CallsByList, message_bytes};
use super::communicators::{Channel, ProcessGroup, reach, spreads};
use super::list::{LoweredList, Messages};
use super::ranks::{LoweringContext, SimulatedRank};
use super::repeated::Repeated;
use crate::cost::{CollectiveCall, Quantile};
use crate::error::SimulationError;
use crate::network::{Collectives, Hop, MeshRotation, Shape, goes_round, hops, set_step_costs, steps};
use foretell_program::{Axis, Group, Program, Rank};
use foretell_topologies::DeviceId;
use std::collections::BTreeMap;

/// All of it.
#[derive(Debug)]
pub(crate) struct Pairing {
    pub(crate) groups: Vec<ProcessGroup>,
    pub(crate) channels: Vec<Channel>,
    pub(crate) hops: Vec<Hop>,
    pub(crate) communications: u32,
}

impl Pairing {
    /// Finds the groups and channels, and tells each rank which are its own; none where ranks may not be turned after all, since the flows of some
    /// group do not turn along.
    pub(crate) fn new(
        context: &LoweringContext<'_>,
        lists: &[LoweredList],
        mode: Collectives,
        ranks: &mut [SimulatedRank],
    ) -> Result<Option<Self>, SimulationError> {
        let mut pairing = Self { groups: Vec::new(), channels: Vec::new(), hops: Vec::new(), communications: 0 };
        let all = pairing.find_groups(context, lists, mode, ranks)? && pairing.find_channels(context, lists, ranks)?;
        Ok(all.then_some(pairing))
    }

    /// Says whether all flows turn along.
    fn find_groups(
        &mut self,
        context: &LoweringContext<'_>,
        lists: &[LoweredList],
        mode: Collectives,
        ranks: &mut [SimulatedRank],
    ) -> Result<bool, SimulationError> {
        let program = context.program;
        // A group is known by what it is and by its first member.
        let mut known: BTreeMap<(&Group, Rank), u32> = BTreeMap::new();
        let calls = CallsByList::new(program, lists);
        for index in 0..ranks.len() {
            let list = &program.lists[ranks[index].list];
            for (number, group) in list.groups.iter().enumerate() {
                check_stages(program, group, list.stage)?;
                let first = first_member(program, group, ranks[index].rank);
                let next = self.groups.len() as u32;
                let set = *known.entry((group, first)).or_insert(next);
                if set == next {
                    let members = group.members(&program.mesh, ranks[index].rank);
                    let rotation = context.rotation_within(group);
                    let collectives = calls.of(ranks[index].list, number);
                    let Some(mut group) =
                        ProcessGroup::new(context, rotation, ranks, &members, collectives, self.communications, mode)?
                    else {
                        return Ok(false);
                    };
                    if mode == Collectives::Steps && !self.step(context, rotation, &members, next, &mut group)? {
                        return Ok(false);
                    }
                    self.communications += group.collectives.len() as u32;
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
        context: &LoweringContext<'_>,
        rotation: Option<&MeshRotation>,
        members: &[Rank],
        number: u32,
        group: &mut ProcessGroup,
    ) -> Result<bool, SimulationError> {
        let costs = context.costs;
        if members.len() > 1 && group.collectives.distinct().iter().any(|call| goes_round(call.kind)) {
            let places: Vec<(Rank, DeviceId)> = members.iter().map(|&member| (member, context.device(member))).collect();
            let first = self.hops.len() as u32;
            let place = |rank: Rank| context.place(rank) as u32;
            let Some((hops, rings)) = hops(context.around(rotation), number, &places, place, first)? else { return Ok(false) };
            self.hops.extend(hops);
            group.hops = first..self.hops.len() as u32;
            group.rings = rings;
            if !group.spreads.is_empty() {
                let parts = group.size as f64 * f64::from(group.rings);
                let of_step = |call: &CollectiveCall| {
                    let cost = group.cost_of(costs, *call, Quantile::Median).0;
                    (call.bytes / parts, (cost.latency + cost.flow).value() / f64::from(steps(call.kind, group.size)))
                };
                let around = group.collectives.distinct().iter().filter(|call| goes_round(call.kind));
                let foretold: Vec<(f64, f64)> = around.map(of_step).collect();
                set_step_costs(self.hops.get_mut(first as usize..).unwrap_or_default(), &foretold);
            }
        }
        Ok(true)
    }

    /// Every member must run the same collectives.
    fn check_groups(&self, calls: &CallsByList, ranks: &[SimulatedRank]) -> Result<(), SimulationError> {
        for group in &self.groups {
            let Some(&(first, _)) = group.members.first() else { continue };
            let mut last_list = ranks[first as usize].list;
            if group.members.len() * group.multiplicity != group.size && group.collectives.len() > 0 {
                return Err(SimulationError::Unmatched {
                    left: format!("the group of {}", ranks[first as usize].rank),
                    right: "the lists of its members".into(),
                    reason: format!(
                        "it has {} members and is listed {} times",
                        group.size,
                        group.members.len() * group.multiplicity
                    ),
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
        context: &LoweringContext<'_>,
        lists: &[LoweredList],
        ranks: &mut [SimulatedRank],
    ) -> Result<bool, SimulationError> {
        let LoweringContext { program, topology, costs, .. } = *context;
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
                let place = context.place(receiver);
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
                let Some(shape) = Shape::point_to_point(context.around(None), devices[0], devices[1])? else { return Ok(false) };
                let channel = Channel {
                    sender: sender as u32,
                    receiver: place as u32,
                    send_peer: send_peer as u32,
                    receive_peer: receive_peer as u32,
                    first_communication: self.communications,
                    shape,
                    measured: if are_measured { Some(reach(topology, &devices)?) } else { None },
                    spreads: spreads(costs, [sender, place].into_iter().map(|rank| ranks[rank].kind), &devices),
                    kind: ranks[sender].kind,
                    bytes,
                };
                self.communications += channel.bytes.len() as u32;
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
