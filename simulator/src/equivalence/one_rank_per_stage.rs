//! Lowers one rank of each stage, and assumes that the stage's other ranks are equivalent to it.
//!
//! The assumption holds if all devices of a stage are of one kind, if all groups of an axis are
//! spread over nodes in the same way, and if at any time only one group's communication loads a
//! link. Then all members of a collective reach it at the same time. Stragglers and contention
//! between groups on a link are ignored. [`super::folding`] proves equivalence instead.

use crate::cost::{CostModel, ProfiledGpu};
use crate::error::SimulationError;
use crate::gpu::NodeSpread;
use crate::lowering::{
    Channel, ListTimes, Lowered, LoweredList, ProcessGroup, SimulatedRank, SpreadByKind, balanced_parts, collectives, list_times,
    message_bytes, uneven_groups,
};
use crate::network::Shape;
use foretell_program::{Axis, Group, GroupId, Program, Rank};
use foretell_topologies::DeviceId;
use std::collections::{BTreeMap, BTreeSet};

/// Lowers one rank of each stage, on a device of the kind that `kind_of_stage` returns.
///
/// # Errors
/// [`SimulationError::NoRepresentative`] if the ranks of a stage run different lists, or if the
/// costs of collectives on a kind of device are unknown.
pub(crate) fn lower<'a>(
    program: &'a Program,
    costs: &'a CostModel,
    kind_of_stage: impl Fn(usize) -> usize,
) -> Result<Lowered<'a>, SimulationError> {
    let stages = program.mesh.stage_count();
    let no_representative = |reason: String| SimulationError::NoRepresentative { reason };
    if program.lists.len() != stages {
        return Err(no_representative(format!("the ranks of {stages} stages run {} lists", program.lists.len())));
    }
    let lists: Vec<LoweredList> = program.lists.iter().map(LoweredList::new).collect::<Result<_, _>>()?;
    let mut ranks = Vec::with_capacity(stages);
    let mut times: Vec<Vec<ListTimes>> = Vec::with_capacity(stages);
    let mut uncalibrated_kernels = BTreeSet::new();
    for (stage, source) in program.lists.iter().enumerate() {
        let kind = kind_of_stage(stage);
        if !costs.knows_collectives(kind) {
            return Err(no_representative(format!("the costs of collectives on the devices of stage {stage} are not known")));
        }
        let rank = program.mesh.rank(program.mesh.coordinates(Rank(0)).with(Axis::Pipeline, stage));
        // In an uneven group (causal attention over `context`), all members wait for the one with
        // the most work, which is the last.
        let uneven = uneven_groups(source, &lists[stage]);
        let members_in = |group: GroupId| {
            let members = || source.groups[group.0 as usize].members(&program.mesh, rank).len();
            match uneven.contains(&group) {
                true if costs.balances_parts(kind) => balanced_parts(members()),
                true => [members() - 1; 2],
                false => [0, 0],
            }
        };
        let list = (source, &lists[stage]);
        times.push(vec![list_times(program, list, costs, kind, &members_in, &mut uncalibrated_kernels)]);
        ranks.push(SimulatedRank {
            rank,
            device: DeviceId(rank.0),
            kind,
            list: stage,
            times: 0,
            processor: stage as u32,
            groups: Vec::new(),
            sends: Vec::new(),
            receives: vec![u32::MAX; lists[stage].receives.len()],
        });
    }
    let mut communications = 0;
    let groups = find_groups(program, costs, &lists, &mut ranks, &mut communications);
    let channels = find_channels(program, costs, &lists, &mut ranks, &mut communications)?;
    Ok(Lowered {
        sources: program.lists.iter().collect(),
        costs,
        representative_of: program.list_of_rank.clone(),
        ranks,
        lists,
        times,
        groups,
        channels,
        hops: Vec::new(),
        communications,
        capacities: vec![1.0; stages],
        has_queue: Vec::new(),
        processors: stages,
        uncalibrated_kernels,
        rotation: None,
    })
}

fn spread_by_kind(costs: &CostModel, kind: usize, program: &Program, group: &Group, rank: Rank) -> SpreadByKind {
    let spread = |gpu: &ProfiledGpu| (kind, NodeSpread::of(group, &program.mesh, rank, &gpu.cluster));
    costs.profiled_gpu(kind).map(spread).into_iter().collect()
}

/// Finds the groups. A group within a stage has the stage's representative as its only simulated
/// member. A group across stages has the representatives of its stages.
fn find_groups(
    program: &Program,
    costs: &CostModel,
    lists: &[LoweredList],
    ranks: &mut [SimulatedRank],
    communications: &mut u32,
) -> Vec<ProcessGroup> {
    let mut groups: Vec<ProcessGroup> = Vec::new();
    let mut across_stages: BTreeMap<&Group, usize> = BTreeMap::new();
    for (stage, list) in program.lists.iter().enumerate() {
        for (number, group) in list.groups.iter().enumerate() {
            let SimulatedRank { rank, kind, .. } = ranks[stage];
            let next = groups.len();
            let is_across = group.axes.contains(&Axis::Pipeline);
            let index = if is_across { *across_stages.entry(group).or_insert(next) } else { next };
            if index == next {
                let collectives = collectives(program, lists, stage, number);
                let first_communication = *communications;
                *communications += collectives.len() as u32;
                let spread_by_kind = spread_by_kind(costs, kind, program, group, rank);
                let size = spread_by_kind.first().map_or(1, |(_, spread)| spread.members);
                groups.push(ProcessGroup {
                    multiplicity: 1,
                    members: Vec::new(),
                    size,
                    first_communication,
                    collectives,
                    ring: None,
                    tree: None,
                    pairs: None,
                    shift: None,
                    measured_reach: None,
                    spread_by_kind,
                    kind,
                    hops: 0..0,
                    rings: 0,
                });
            }
            groups[index].members.push((stage as u32, number as u32));
            ranks[stage].groups.push(index as u32);
        }
    }
    groups
}

/// Finds the channels between the representatives of stages.
fn find_channels(
    program: &Program,
    costs: &CostModel,
    lists: &[LoweredList],
    ranks: &mut [SimulatedRank],
    communications: &mut u32,
) -> Result<Vec<Channel>, SimulationError> {
    let mut channels: Vec<Channel> = Vec::new();
    for sender in 0..ranks.len() {
        for (send_peer, messages) in lists[sender].sends.iter().enumerate() {
            let SimulatedRank { rank, kind, .. } = ranks[sender];
            let receiver = program.lists[sender].peers[messages.peer.0 as usize].stage;
            let unmatched = |reason: &str| SimulationError::Unmatched {
                left: format!("the sends of stage {sender}"),
                right: format!("what stage {receiver} receives"),
                reason: reason.into(),
            };
            let is_from_sender = |stage: usize, peer: usize| {
                program.lists[stage].peers[lists[stage].receives[peer].peer.0 as usize].stage == sender
            };
            let receive_peer =
                lists.get(receiver).and_then(|list| (0..list.receives.len()).find(|&peer| is_from_sender(receiver, peer)));
            let Some(receive_peer) = receive_peer else { return Err(unmatched("no rank receives them")) };
            let bytes = message_bytes(program, sender, &messages.instructions);
            if bytes != message_bytes(program, receiver, &lists[receiver].receives[receive_peer].instructions) {
                return Err(unmatched("they differ in number or in bytes"));
            }
            let pair = Group::across(vec![sender.min(receiver), sender.max(receiver)]);
            let channel = Channel {
                sender: sender as u32,
                receiver: receiver as u32,
                send_peer: send_peer as u32,
                receive_peer: receive_peer as u32,
                first_communication: *communications,
                parts: program.mesh.stage(sender).size(Axis::Tensor),
                shape: Shape::default(),
                measured_reach: None,
                spread_by_kind: spread_by_kind(costs, kind, program, &pair, rank),
                kind,
                bytes,
            };
            *communications += channel.bytes.len() as u32;
            ranks[sender].sends.push(channels.len() as u32);
            ranks[receiver].receives[receive_peer] = channels.len() as u32;
            channels.push(channel);
        }
    }
    match ranks.iter().position(|rank| rank.receives.contains(&u32::MAX)) {
        None => Ok(channels),
        Some(stage) => Err(SimulationError::Unmatched {
            left: format!("the receives of stage {stage}"),
            right: "the sends of others".into(),
            reason: "no rank sends them".into(),
        }),
    }
}
