//! Adjustments of the times in a truncated model whose stages are on other nodes than the layout's.

use foretell_program::{Axis, CollectiveRole, Mesh, Operation, Program, Rank, StageProgram, Stream};
use foretell_simulator::LeastTimes;
use foretell_topologies::Topology;
use foretell_units::{Bytes, Picoseconds};
use std::collections::BTreeMap;

/// Returns the bytes of the largest message between stages.
pub(super) fn largest_message(program: &Program) -> f64 {
    let instructions = program.lists.iter().flat_map(|list| &list.instructions);
    let bytes = instructions.filter_map(|instruction| match *instruction.operation {
        Operation::Send { bytes, .. } => Some(bytes.value()),
        _ => None,
    });
    bytes.fold(0.0, f64::max)
}

/// Gives every message the time of the fastest message of its size, since the layout's stages may
/// share nodes where the truncated model's do not.
///
/// Returns the least extra time, in picoseconds, of a message between neighbouring stages that
/// share no node; 0 if `topology` is `None`.
pub(super) fn equalise_messages(program: &Program, times: &mut [LeastTimes], topology: Option<&Topology>) -> f64 {
    let mut fastest: BTreeMap<Bytes, Picoseconds> = BTreeMap::new();
    let mut fastest_of_pair: BTreeMap<(Bytes, usize, usize), Picoseconds> = BTreeMap::new();
    for is_second_pass in [false, true] {
        for (list, times) in program.lists.iter().zip(times.iter_mut()) {
            for (instruction, duration) in list.instructions.iter().zip(&mut times.in_full_buckets) {
                let Operation::Send { bytes, .. } = *instruction.operation else { continue };
                let fastest = fastest.entry(bytes).or_insert(*duration);
                *fastest = (*fastest).min(*duration);
                if is_second_pass {
                    *duration = *fastest;
                } else if let Stream::SendTo(peer) = list.streams[instruction.stream.0 as usize] {
                    let pair = (bytes, list.stage, list.peers[peer.0 as usize].stage);
                    let of_pair = fastest_of_pair.entry(pair).or_insert(*duration);
                    *of_pair = (*of_pair).min(*duration);
                }
            }
        }
    }
    let extra =
        |(&(bytes, ..), duration): (&(Bytes, usize, usize), &Picoseconds)| duration.saturating_sub(fastest[&bytes]).0 as f64;
    let Some(topology) = topology.filter(|_| fastest_of_pair.iter().any(|pair| extra(pair) > 0.0)) else { return 0.0 };
    let share = stages_sharing_nodes(&program.mesh, topology);
    let is_between_nodes = |&(&(_, from, to), _): &(&(Bytes, usize, usize), _)| from.abs_diff(to) == 1 && !share[from.min(to)];
    fastest_of_pair.iter().filter(is_between_nodes).map(extra).reduce(f64::min).unwrap_or(0.0)
}

/// Sets the time of collectives between stages to zero. They sum the gradients of a table that the
/// first and the last stage share.
pub(super) fn leave_out_sums_over_stages(lists: &[StageProgram], times: &mut [LeastTimes]) {
    for (list, times) in lists.iter().zip(times) {
        for (index, instruction) in list.instructions.iter().enumerate() {
            if let Operation::Collective { group, .. } = *instruction.operation
                && list.groups[group.0 as usize].axes.contains(&Axis::Pipeline)
            {
                times.durations[index] = Picoseconds::ZERO;
                times.in_full_buckets[index] = Picoseconds::ZERO;
            }
        }
    }
}

/// Returns, for each stage, `true` if a rank shares a node with its counterpart in the next stage;
/// the stage after the last is the first.
///
/// Only the first data-parallel replica counts: it is a whole pipeline, and no step ends before it
/// does.
pub(in crate::bounds) fn stages_sharing_nodes(mesh: &Mesh, topology: &Topology) -> Vec<bool> {
    let node_of = |rank: Rank| topology.node_of(topology.device_of_rank(rank.0));
    let mut share = vec![false; mesh.stage_count()];
    for rank in (0..mesh.world_size()).map(Rank) {
        let own = mesh.coordinates(rank);
        if own.along(Axis::Data) + own.along(Axis::Shard) > 0 {
            continue;
        }
        let stage = own.along(Axis::Pipeline);
        let next = mesh.rank(own.with(Axis::Pipeline, (stage + 1) % share.len()));
        share[stage] = share[stage] || node_of(rank) == node_of(next);
    }
    share
}

/// Sets the time and the launch overhead of messages to zero, and of the tensor-parallel collective
/// nearest to them in each pass: between unequal meshes, the receiver may do the reduction that the
/// sender does here.
pub(super) fn leave_out_messages(lists: &[StageProgram], times: &mut [LeastTimes]) {
    for (list, times) in lists.iter().zip(times) {
        let operation = |index: usize| &*list.instructions[index].operation;
        let is_message = |index: usize| matches!(operation(index), Operation::Send { .. } | Operation::Receive { .. });
        let is_tensor = |&index: &usize| matches!(operation(index), Operation::Collective { role: CollectiveRole::Tensor, .. });
        let mut are_left_out: Vec<bool> = (0..list.instructions.len()).map(is_message).collect();
        for pass in &list.passes {
            let range = pass.instructions.start as usize..pass.instructions.end as usize;
            if range.clone().any(is_message) {
                let (first, last) = (range.clone().find(is_tensor), range.clone().rfind(is_tensor));
                first.into_iter().chain(last).for_each(|index| are_left_out[index] = true);
            }
        }
        let (mut launched_before, mut left_out) = (Picoseconds::ZERO, Picoseconds::ZERO);
        for (index, is_left_out) in are_left_out.into_iter().enumerate() {
            if is_left_out {
                let of_each = [&mut times.durations, &mut times.in_full_buckets, &mut times.processor];
                of_each.into_iter().for_each(|times| times[index] = Picoseconds::ZERO);
            }
            if let Some(launched) = times.launched.get_mut(index) {
                let launch = launched.saturating_sub(launched_before);
                launched_before = *launched;
                if is_left_out {
                    left_out += launch;
                }
                *launched = launched.saturating_sub(left_out);
            }
        }
    }
}
