//! Numbers of ranks of a layout.

use foretell_program::{Layout, StageLayout};

/// Returns the ranks of a layout.
pub(crate) fn world_size(layout: &Layout) -> usize {
    let of_stage = |stage: &StageLayout| stage.data * stage.tensor * stage.context * stage.expert;
    match &layout.stages {
        Some(stages) => stages.iter().map(of_stage).sum(),
        None => of_stage(&layout.stage(0)) * layout.pipeline,
    }
}

/// Returns the ranks of each stage, for layouts with one mesh for all stages.
pub(crate) fn ranks_of_stage(layout: &Layout) -> usize {
    layout.data * inner_ranks(layout)
}

/// Returns the ranks of each stage that divide one micro-batch among themselves: those along
/// `tensor`, `context` and `expert`.
pub(crate) fn inner_ranks(layout: &Layout) -> usize {
    layout.tensor * layout.context * layout.expert
}

/// Returns the most ranks over which ZeRO shards a parameter of a layout. Parameters of experts
/// have fewer shards, since `expert` shards them by expert.
pub(crate) fn most_shards(layout: &Layout) -> usize {
    match &layout.stages {
        Some(stages) => stages.iter().map(|stage| most_shards_of_stage(layout, stage)).max().unwrap_or(1),
        None => most_shards_of_stage(layout, &layout.stage(0)),
    }
}

/// Returns the most ranks over which a layout shards a parameter's optimizer state.
pub(crate) fn optimizer_shards(layout: &Layout) -> usize {
    if layout.zero > 0 { most_shards(layout) } else { 1 }
}

/// Returns the most ranks over which ZeRO shards a parameter of one stage of a layout.
pub(crate) fn most_shards_of_stage(layout: &Layout, stage: &StageLayout) -> usize {
    layout.shard_group.unwrap_or(stage.data) * stage.context * stage.expert
}
