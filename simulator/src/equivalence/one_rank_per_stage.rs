//! Ranks of a stage that are taken to behave alike: one of them is simulated.
//!
//! Unlike [`crate::folding`], which finds out who must behave alike, this takes it as given: devices of one kind in a stage, nodes on which all groups
//! of an axis lie as that of the stage's first rank does, and links on which only the exchanges of one group at a time meet. Then every member of a
//! collective reaches it at the same instant, and no rank has to be looked at but one a stage. It does not see stragglers or flows of different
//! groups that meet on a link.

use crate::cost::{CostModel, ProfiledGpu};
use crate::error::SimulationError;
use crate::gpu::NodeSpread;
use crate::lowering::{
    Channel, Lowered, LoweredList, ProcessGroup, SimulatedRank, Spreads, Work, balanced_parts, collectives, message_bytes,
    uneven_groups, work_of,
};
use crate::network::Shape;
use foretell_program::{Axis, Group, GroupId, Program, Rank};
use foretell_topologies::DeviceId;
use std::collections::{BTreeMap, BTreeSet};

/// The same made ready, but for the codes that it takes to run it.
pub(crate) fn lower<'a>(
    program: &'a Program,
    costs: &'a CostModel,
    kind_of_stage: impl Fn(usize) -> usize,
) -> Result<Lowered<'a>, SimulationError> {
    let stages = program.mesh.stage_count();
    let unlike = |reason: String| SimulationError::NoRepresentative { reason };
    if program.lists.len() != stages {
        return Err(unlike(format!("the ranks of {stages} stages run {} lists", program.lists.len())));
    }
    let lists: Vec<LoweredList> = program.lists.iter().map(LoweredList::new).collect::<Result<_, _>>()?;
    let mut ranks = Vec::with_capacity(stages);
    let mut work: Vec<Vec<Work>> = Vec::with_capacity(stages);
    let mut uncalibrated_kernels = BTreeSet::new();
    for (stage, list) in program.lists.iter().enumerate() {
        let kind = kind_of_stage(stage);
        if !costs.knows_collectives(kind) {
            return Err(unlike(format!("nothing is known of collectives on the devices of stage {stage}")));
        }
        let rank = program.mesh.rank(program.mesh.coordinates(Rank(0)).with(Axis::Pipeline, stage));
        // Of ranks whose parts differ (causal attention over `context`) the others wait for the one that has the most.
        let uneven = uneven_groups(list, &lists[stage]);
        let places_in = |group: GroupId| {
            let members = || list.groups.get(group.0 as usize).map_or(0, |group| group.members(&program.mesh, rank).len());
            match uneven.contains(&group) {
                true if costs.balances_parts(kind) => balanced_parts(members()),
                true => [members().saturating_sub(1); 2],
                false => [0, 0],
            }
        };
        let of_stage = work_of(program, (list, &lists[stage]), costs, kind, &places_in, &mut uncalibrated_kernels);
        work.push(vec![of_stage]);
        ranks.push(SimulatedRank {
            rank,
            device: DeviceId(rank.0),
            kind,
            list: stage,
            work: 0,
            processor: stage as u32,
            groups: Vec::new(),
            sends: Vec::new(),
            receives: vec![u32::MAX; lists[stage].receives.len()],
        });
    }
    let mut exchanges = 0;
    let groups = find_groups(program, costs, &lists, &mut ranks, &mut exchanges);
    let channels = find_channels(program, costs, &lists, &mut ranks, &mut exchanges)?;
    Ok(Lowered {
        sources: program.lists.iter().collect(),
        costs,
        of_rank: program.list_of_rank.clone(),
        ranks,
        lists,
        work,
        groups,
        channels,
        hops: Vec::new(),
        communications: exchanges,
        capacities: vec![1.0; stages],
        has_queue: Vec::new(),
        processors: stages,
        uncalibrated_kernels,
        rotation: None,
    })
}

fn spreads(costs: &CostModel, kind: usize, program: &Program, group: &Group, rank: Rank) -> Spreads {
    let of = |profiled_gpu: &ProfiledGpu| (kind, NodeSpread::of(group, &program.mesh, rank, &profiled_gpu.cluster));
    costs.profiled_gpu(kind).map(of).into_iter().collect()
}

/// A group within a stage has the representative as its only member; one across stages those of its stages.
fn find_groups(
    program: &Program,
    costs: &CostModel,
    lists: &[LoweredList],
    ranks: &mut [SimulatedRank],
    exchanges: &mut u32,
) -> Vec<ProcessGroup> {
    let mut groups: Vec<ProcessGroup> = Vec::new();
    let mut across: BTreeMap<&Group, usize> = BTreeMap::new();
    for (stage, list) in program.lists.iter().enumerate() {
        for (number, group) in list.groups.iter().enumerate() {
            let SimulatedRank { rank, kind, .. } = ranks[stage];
            let next = groups.len();
            let place = if group.axes.contains(&Axis::Pipeline) { *across.entry(group).or_insert(next) } else { next };
            if place == next {
                let calls = collectives(program, lists, stage, number);
                let first_communication = *exchanges;
                *exchanges += calls.len() as u32;
                let spreads = spreads(costs, kind, program, group, rank);
                let size = spreads.first().map_or(1, |(_, spread)| spread.members);
                groups.push(ProcessGroup {
                    multiplicity: 1,
                    members: Vec::new(),
                    size,
                    first_communication,
                    collectives: calls,
                    ring: None,
                    tree: None,
                    pairs: None,
                    shift: None,
                    measured: None,
                    spreads,
                    kind,
                    hops: 0..0,
                    rings: 0,
                });
            }
            groups[place].members.push((stage as u32, number as u32));
            ranks[stage].groups.push(place as u32);
        }
    }
    groups
}

fn find_channels(
    program: &Program,
    costs: &CostModel,
    lists: &[LoweredList],
    ranks: &mut [SimulatedRank],
    exchanges: &mut u32,
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
            let from_us = |stage: usize, peer: usize| {
                program.lists[stage].peers[lists[stage].receives[peer].peer.0 as usize].stage == sender
            };
            let receive_peer =
                lists.get(receiver).and_then(|list| (0..list.receives.len()).find(|&peer| from_us(receiver, peer)));
            let Some(receive_peer) = receive_peer else { return Err(unmatched("nobody receives them")) };
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
                first_communication: *exchanges,
                shape: Shape::default(),
                measured: None,
                spreads: spreads(costs, kind, program, &pair, rank),
                kind,
                bytes,
            };
            *exchanges += channel.bytes.len() as u32;
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
            reason: "nobody sends them".into(),
        }),
    }
}
