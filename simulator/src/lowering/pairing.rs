//! Finds which ranks communicate: the members of each group, and the two ends of each message.
//!
//! Collectives and messages pair up by order. The nth collective of a group on one member is the
//! nth on every member. The nth message that one rank sends to another is the nth that the other
//! receives from it.

use super::calls::{CallsByList, message_bytes};
use super::communicators::{Channel, ProcessGroup, reach, spread_by_kind};
use super::list::{LoweredList, Messages};
use super::ranks::{LoweringContext, SimulatedRank};
use super::repeated::Repeated;
use crate::cost::{CollectiveCall, Quantile};
use crate::error::SimulationError;
use crate::network::{Collectives, Hop, MeshRotation, Shape, hops, is_ring_collective, set_step_costs, steps};
use foretell_program::{Axis, Group, Program, Rank};
use foretell_topologies::DeviceId;
use std::collections::BTreeMap;

/// The communicators of a Program.
#[derive(Debug)]
pub(super) struct Pairing {
    pub(super) groups: Vec<ProcessGroup>,
    pub(super) channels: Vec<Channel>,
    pub(super) hops: Vec<Hop>,
    /// Number of collectives and messages.
    pub(super) communications: u32,
}

impl Pairing {
    /// Finds the groups and channels, and stores in each of `ranks` which of them it uses. Returns
    /// `None` if the flows of some group or channel are not symmetric under the context's rotation.
    pub(super) fn new(
        context: &LoweringContext<'_>,
        lists: &[LoweredList],
        mode: Collectives,
        ranks: &mut [SimulatedRank],
    ) -> Result<Option<Self>, SimulationError> {
        let mut pairing = Self { groups: Vec::new(), channels: Vec::new(), hops: Vec::new(), communications: 0 };
        let is_symmetric = pairing.find_groups(context, lists, mode, ranks)? && pairing.find_channels(context, lists, ranks)?;
        Ok(is_symmetric.then_some(pairing))
    }

    /// Finds the groups. Returns whether all flows are symmetric under the rotation.
    fn find_groups(
        &mut self,
        context: &LoweringContext<'_>,
        lists: &[LoweredList],
        mode: Collectives,
        ranks: &mut [SimulatedRank],
    ) -> Result<bool, SimulationError> {
        let program = context.program;
        // A group is identified by its axes and stages and by its first member.
        let mut known: BTreeMap<(&Group, Rank), u32> = BTreeMap::new();
        let calls = CallsByList::new(program, lists);
        for index in 0..ranks.len() {
            let list = &program.lists[ranks[index].list];
            for (number, group) in list.groups.iter().enumerate() {
                check_stages(program, group, list.stage)?;
                let first = first_member(program, group, ranks[index].rank);
                let next = self.groups.len() as u32;
                let found = *known.entry((group, first)).or_insert(next);
                if found == next {
                    let members = group.members(&program.mesh, ranks[index].rank);
                    let rotation = context.rotation_within(group);
                    let collectives = calls.of(ranks[index].list, number);
                    let group = ProcessGroup::new(context, rotation, ranks, &members, collectives, self.communications, mode)?;
                    let Some(mut group) = group else { return Ok(false) };
                    if mode == Collectives::Steps && !self.add_hops(context, rotation, &members, next, &mut group)? {
                        return Ok(false);
                    }
                    self.communications += group.collectives.len() as u32;
                    self.groups.push(group);
                }
                self.groups[found as usize].members.push((index as u32, number as u32));
                ranks[index].groups.push(found);
            }
        }
        self.check_groups(&calls, ranks)?;
        Ok(true)
    }

    /// Gives a group the hops of its rings, if it has ring collectives. Returns whether all hops
    /// are symmetric under the rotation.
    fn add_hops(
        &mut self,
        context: &LoweringContext<'_>,
        rotation: Option<&MeshRotation>,
        members: &[Rank],
        number: u32,
        group: &mut ProcessGroup,
    ) -> Result<bool, SimulationError> {
        if members.len() < 2 || !group.collectives.distinct().iter().any(|call| is_ring_collective(call.kind)) {
            return Ok(true);
        }
        let with_devices: Vec<(Rank, DeviceId)> = members.iter().map(|&member| (member, context.device(member))).collect();
        let first = self.hops.len() as u32;
        let index = |rank: Rank| context.index(rank) as u32;
        let found = hops(context.flow_context(rotation), number, &with_devices, index, first)?;
        let Some((hops, rings)) = found else { return Ok(false) };
        self.hops.extend(hops);
        group.hops = first..self.hops.len() as u32;
        group.rings = rings;
        if !group.spread_by_kind.is_empty() {
            // The GPU profiles have the cost of whole collectives, from which the cost of a step
            // follows.
            let parts = group.size as f64 * f64::from(group.rings);
            let step = |call: &CollectiveCall| {
                let cost = group.cost_of(context.costs, *call, Quantile::Median).0;
                (call.bytes / parts, (cost.latency + cost.flow).value() / f64::from(steps(call.kind, group.size)))
            };
            let around_rings = group.collectives.distinct().iter().filter(|call| is_ring_collective(call.kind));
            let steps: Vec<(f64, f64)> = around_rings.map(step).collect();
            set_step_costs(&mut self.hops[first as usize..], &steps);
        }
        Ok(true)
    }

    /// Checks that every group has all of its members and that all members run the same
    /// collectives.
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

    /// Finds the channels. Returns whether all messages are symmetric under the rotation.
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
        let bytes_of = |which: fn(&LoweredList) -> &[Messages]| -> Vec<Vec<Repeated<u64>>> {
            let of_list = |(number, list)| {
                let messages = which(list).iter();
                messages.map(|messages: &Messages| message_bytes(program, number, &messages.instructions)).collect()
            };
            lists.iter().enumerate().map(of_list).collect()
        };
        let (sent, received) = (bytes_of(|list| &list.sends), bytes_of(|list| &list.receives));
        for sender in 0..ranks.len() {
            let (list, from) = (ranks[sender].list, ranks[sender].rank);
            for (send_peer, messages) in lists[list].sends.iter().enumerate() {
                let receiver = peer_of(list, messages, from).filter(|rank| rank.0 < program.mesh.world_size());
                let name = receiver.map_or_else(|| NO_RANK.to_string(), |rank| rank.to_string());
                let unmatched = |reason: String| SimulationError::Unmatched {
                    left: format!("the sends of {from} to {name}"),
                    right: "what it receives".into(),
                    reason,
                };
                let Some(receiver) = receiver else { return Err(unmatched("no rank receives them".into())) };
                let receiver_index = context.index(receiver);
                if ranks[receiver_index].rank != receiver {
                    return Ok(false);
                }
                let receiver_list = ranks[receiver_index].list;
                let is_from_sender = |message: &Messages| peer_of(receiver_list, message, receiver) == Some(from);
                let Some(receive_peer) = lists[receiver_list].receives.iter().position(is_from_sender) else {
                    return Err(unmatched("no rank receives them".into()));
                };
                let bytes = sent[list][send_peer].clone();
                if bytes != received[receiver_list][receive_peer] {
                    return Err(unmatched("they differ in number or in bytes".into()));
                }
                let ends = [sender, receiver_index];
                let devices = ends.map(|rank| ranks[rank].device);
                let are_measured = ends.iter().all(|&rank| costs.exchanges(ranks[rank].kind).is_some());
                let shape = Shape::point_to_point(context.flow_context(None), devices[0], devices[1])?;
                let Some(shape) = shape else { return Ok(false) };
                let channel = Channel {
                    sender: sender as u32,
                    receiver: receiver_index as u32,
                    send_peer: send_peer as u32,
                    receive_peer: receive_peer as u32,
                    first_communication: self.communications,
                    parts: program.mesh.stage(program.mesh.stage_of(from)).size(Axis::Tensor),
                    shape,
                    measured_reach: if are_measured { Some(reach(topology, &devices)?) } else { None },
                    spread_by_kind: spread_by_kind(costs, ends.into_iter().map(|rank| ranks[rank].kind), &devices),
                    kind: ranks[sender].kind,
                    bytes,
                };
                self.communications += channel.bytes.len() as u32;
                ranks[sender].sends.push(self.channels.len() as u32);
                ranks[receiver_index].receives[receive_peer] = self.channels.len() as u32;
                self.channels.push(channel);
            }
        }
        for rank in ranks.iter() {
            if let Some(peer) = rank.receives.iter().position(|&channel| channel == u32::MAX) {
                let other = peer_of(rank.list, &lists[rank.list].receives[peer], rank.rank);
                return Err(SimulationError::Unmatched {
                    left: format!("the receives of {}", rank.rank),
                    right: other.map_or_else(|| NO_RANK.to_string(), |other| format!("the sends of {other}")),
                    reason: "no rank sends them".into(),
                });
            }
        }
        Ok(true)
    }
}

/// Names a rank outside the mesh in error messages.
const NO_RANK: &str = "a rank outside the mesh";

/// Checks that the stages of a group across stages exist in the mesh, and include the stage that
/// lists the group.
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

/// The first member of a rank's group, found without listing all members.
fn first_member(program: &Program, group: &Group, rank: Rank) -> Rank {
    let mut position = program.mesh.coordinates(rank);
    for &axis in &group.axes {
        let first = if axis == Axis::Pipeline { group.stages.iter().min().copied().unwrap_or_default() } else { 0 };
        position = position.with(axis, first);
    }
    program.mesh.rank(position)
}
