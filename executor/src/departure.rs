//! Which ranks may leave a run: those of workers that go at their own pace, if no other rank needs
//! the state that they hold.

use crate::error::ExecutorError;
use crate::job::TrainingJob;
use crate::server::serves;
use crate::state::RankState;
use foretell_models::GraphOptions;
use foretell_program::{Axis, Compiled, Rank, StateValue};

/// The first rank that never leaves.
pub(crate) fn first_to_stay(compiled: &Compiled) -> Rank {
    let ranks = (0..compiled.training.mesh.world_size()).map(Rank);
    let stays = |rank: &Rank| compiled.pacing.is_none() || serves(compiled, *rank);
    ranks.into_iter().find(stays).expect("invariant: a rank that serves never leaves")
}

/// The ranks of each worker that goes at its own pace; empty if all workers make each step
/// together.
pub(crate) fn workers(compiled: &Compiled) -> Vec<Vec<usize>> {
    let Some(pacing) = compiled.pacing else { return Vec::new() };
    let mesh = &compiled.training.mesh;
    let mut workers = vec![Vec::new(); pacing.workers];
    for rank in (0..mesh.world_size()).map(Rank).filter(|&rank| !serves(compiled, rank)) {
        if let Some(worker) = workers.get_mut(mesh.coordinates(rank).along(Axis::Data)) {
            worker.push(rank.0);
        }
    }
    workers
}

/// The ranks of each worker that may leave. None may if updates wait for several workers, or if
/// checkpoints need state that workers hold: parameters that are not trained.
pub(crate) fn leavers(job: &TrainingJob, compiled: &Compiled) -> Result<Vec<Vec<usize>>, ExecutorError> {
    if compiled.pacing.is_some_and(|pacing| pacing.quorum.is_some()) {
        return Ok(Vec::new());
    }
    let workers = workers(compiled);
    if job.checkpoints.is_none() || workers.is_empty() {
        return Ok(workers);
    }
    let graph = job.plan.training.graph(&job.model, &job.name, &GraphOptions::ONE)?;
    let holds_state = |&rank: &usize| {
        let state = RankState::new(&compiled.saving, &graph, Rank(rank));
        let saved = |instruction| state.saved_pieces(instruction).into_iter();
        // The rounding errors of a worker that has left are not needed.
        state.list.instructions.iter().flat_map(saved).any(|piece| piece.value != StateValue::Residual)
    };
    let is_needed = workers.iter().flatten().any(holds_state);
    Ok(if is_needed { Vec::new() } else { workers })
}
