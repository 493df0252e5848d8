//! The ranks and instruction lists that a drawing of many ranks shows.

use foretell_program::{Axis, Coordinates, Program, Rank, RankTimeline, StageProgram, Timeline};

/// Returns the first `known` ranks if they are at most `most`; otherwise the first rank of each
/// stage; of more than `most` stages, evenly spaced ones.
pub(crate) fn shown_ranks(program: &Program, known: usize, most: usize) -> Vec<Rank> {
    if known <= most {
        return (0..known).map(Rank).collect();
    }
    let origin: Coordinates = program.mesh.coordinates(Rank(0));
    let stages = program.mesh.stage_count();
    let ranks = spread(stages, most).map(|stage| program.mesh.rank(origin.with(Axis::Pipeline, stage)));
    ranks.filter(|rank| rank.0 < known).collect()
}

/// Returns at most `most` evenly spaced lists of a Program, each with the first rank that runs it
/// and that rank's timeline.
pub(crate) fn shown_lists<'a>(
    program: &'a Program,
    timeline: &'a Timeline,
    most: usize,
) -> impl Iterator<Item = (Rank, &'a StageProgram, &'a RankTimeline)> {
    spread(program.lists.len(), most).filter_map(|index| {
        let list = program.lists.get(index)?;
        let rank = (0..timeline.ranks.len()).map(Rank).find(|&rank| program.list_index(rank) == index)?;
        Some((rank, list, timeline.rank(rank)?))
    })
}

/// At most `most` evenly spaced indices below `all`. Includes the first and the last, which differ
/// most.
fn spread(all: usize, most: usize) -> impl Iterator<Item = usize> {
    let count = all.min(most);
    (0..count).map(move |index| if count > 1 { index * (all - 1) / (count - 1) } else { 0 })
}
