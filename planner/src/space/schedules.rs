//! Schedules, each with its number of chunks, that suit a mesh.
//!
//! Only properties of a schedule count here, never its name.

use super::Fixed;
use foretell_program::{Layout, Schedule};
use foretell_simulator::gpu::StackLimits;

/// Most micro-batches per stage for a schedule that holds all of them at once, as in Huang et al.
/// (2019).
const MOST_HELD_PER_STAGE: usize = 4;

/// Most chunks of a stage: with more, their messages cost more than the smaller bubble saves.
pub(super) const MOST_CHUNKS: usize = 12;

/// Returns the schedules to consider for a mesh's pipeline, each with a number of chunks per stage,
/// that are consistent with the fixed fields and supported by the software stack.
pub(super) fn schedules(
    mesh: &Layout,
    blocks: usize,
    micro_batches: usize,
    fixed: &Fixed,
    limits: Option<&StackLimits>,
) -> Vec<(Schedule, usize)> {
    let stages = mesh.pipeline;
    let mut found = Vec::new();
    for schedule in Schedule::ALL {
        // Every framework can run a single stage.
        let is_alone = stages == 1 && schedule == Schedule::default();
        let is_known = is_alone || limits.is_none_or(|limits| limits.has(schedule));
        let is_open = || is_known && is_worthwhile(schedule, mesh, micro_batches);
        let is_chosen = fixed.schedule.map_or_else(is_open, |fixed| fixed == schedule);
        if !is_chosen {
            continue;
        }
        // An incomplete last group of micro-batches loses most of what the groups save.
        let has_whole_groups = micro_batches.is_multiple_of(schedule.group_size(stages));
        let is_fixed = fixed.schedule.is_some() || fixed.virtual_stages.is_some();
        let usual = if schedule.allows_any_chunks() { chunk_counts(blocks, stages) } else { vec![*schedule.chunks().start()] };
        let considered = fixed.virtual_stages.as_ref().map_or(&usual[..], std::slice::from_ref);
        for &chunks in considered.iter().filter(|&&chunks| schedule.allows(chunks)) {
            let has_cuts = |positions: usize| fixed.cuts.as_ref().map_or(positions <= blocks, |cuts| cuts.len() == positions);
            if (has_whole_groups || is_fixed) && stages.checked_mul(chunks).is_some_and(has_cuts) {
                found.push((schedule, chunks));
            }
        }
    }
    found
}

/// Returns `true` if no other schedule is as good for a mesh in both time and memory.
fn is_worthwhile(schedule: Schedule, mesh: &Layout, micro_batches: usize) -> bool {
    if mesh.pipeline > 1 {
        // A schedule that holds all micro-batches is faster than one that holds few only if
        // messages are so slow that few micro-batches do not hide them.
        return !schedule.holds_all_micro_batches() || micro_batches <= MOST_HELD_PER_STAGE * mesh.pipeline;
    }
    // On one stage every order takes equally long, unless weight gradients can run while ranks
    // communicate.
    let communicates = mesh.tensor.max(mesh.context).max(mesh.expert) > 1;
    schedule.is_useful_without_pipeline() && (!schedule.splits_backward() || communicates)
}

/// Returns the numbers of chunks per stage to consider if the schedule allows any number: 2 to 4,
/// and those that divide the blocks evenly, with or without the first and the last block.
pub(super) fn chunk_counts(blocks: usize, stages: usize) -> Vec<usize> {
    let inner = blocks.saturating_sub(2);
    let is_even = |chunks: usize| [blocks, inner].iter().any(|&blocks| blocks > 0 && blocks.is_multiple_of(stages * chunks));
    (2..=MOST_CHUNKS).filter(|&chunks| chunks <= 4 || is_even(chunks)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_program::Stack;

    #[test]
    fn a_framework_runs_one_stage_alone_whatever_its_pipelines() {
        let limits = StackLimits::of(&Stack::new("maxtext-tpu"));
        let of_stages = |pipeline: usize| {
            let mesh = Layout { pipeline, ..Layout::default() };
            schedules(&mesh, 24, 8, &Fixed::default(), limits)
        };
        assert_eq!(of_stages(1), [(Schedule::default(), 1)]);
        assert_eq!(of_stages(4), [(Schedule::Gpipe, 1)]);
    }
}
