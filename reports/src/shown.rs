//! The ranks that a drawing of many ranks shows.

use foretell_program::{Axis, Coordinates, Program, Rank};

/// Returns all of the first `known` ranks; if they are more than `most`, the first of each stage;
/// if those are still too many, evenly spaced ones of them.
pub(crate) fn shown_ranks(program: &Program, known: usize, most: usize) -> Vec<Rank> {
    if known <= most {
        return (0..known).map(Rank).collect();
    }
    let origin: Coordinates = program.mesh.coordinates(Rank(0));
    let stages = program.mesh.stage_count();
    let count = stages.min(most);
    // Includes the first and the last stage.
    let stage = |index: usize| if count > 1 { index * (stages - 1) / (count - 1) } else { 0 };
    let ranks = (0..count).map(|index| program.mesh.rank(origin.with(Axis::Pipeline, stage(index))));
    ranks.filter(|rank| rank.0 < known).collect()
}
