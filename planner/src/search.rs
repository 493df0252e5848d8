//! The search for the best layouts of a request.
//!
//! First the layouts that an expert would try are simulated, and a climb starts from the best of
//! them (`experts.rs`, `first_answers.rs`, `climb.rs`).
//!
//! Everything that remains to be searched waits in a queue, ordered by lower bound: first families
//! with their arithmetic bound, then families with the bound of all their variants, then single
//! layouts (`queue.rs`). The search takes the entry with the least bound, replaces a family by its
//! layouts, and simulates layouts in rounds (`searcher.rs`, `simulation.rs`). It ends when no bound
//! in the queue can beat the best layouts found, the incumbents (`incumbents.rs`). Layouts that do
//! not fit are tried again with offloading or recomputation (`too_large.rs`).
//!
//! Rounds have fixed sizes, so that the answer does not depend on the number of threads. It must
//! not know what a schedule is called or how a bound is computed.

mod answer;
mod climb;
mod deadline;
mod experts;
mod first_answers;
mod incumbents;
mod local_search;
mod neighbours;
mod queue;
mod records;
mod refusal;
mod results;
mod searcher;
mod simulation;
mod timed_cuts;
mod too_large;
mod traced;

pub use answer::{Candidate, Search, SearchResult};
pub use deadline::deadline;

use crate::bounds::Bounds;
use crate::error::PlannerError;
use crate::objective;
use crate::space::Request;
use foretell_program::{MOST_RANKS, MOST_SAMPLES, Offload};
use searcher::Searcher;
use traced::plan_traced;

/// Finds the best layouts of a request.
///
/// # Errors
/// [`PlannerError`] if the sizes of the model or the request leave no layout, if none fits, or if
/// the search is given up.
pub fn plan(request: &Request<'_>) -> Result<SearchResult, PlannerError> {
    if request.devices > MOST_RANKS {
        let reason = format!("more than {MOST_RANKS} are not laid out");
        return Err(PlannerError::no_layout(request, reason, "use fewer nodes"));
    }
    if request.base.global_batch > MOST_SAMPLES {
        let reason = format!("a step has {MOST_SAMPLES} samples at most");
        return Err(PlannerError::no_layout(request, reason, "use a smaller global batch"));
    }
    objective::check(request)?;
    if let Some(planned) = plan_traced(request)? {
        return Ok(planned);
    }
    if request.fixed.offload == Some(Offload::State) {
        let reason = "`offload=state` as fixed: it is known of frameworks whose operators were traced for the job".to_owned();
        return Err(PlannerError::no_layout(request, reason, "fix `offload=optimizer`, or use `--stack hf-deepspeed`"));
    }
    let mut bounds = Bounds::new(request)?;
    match bounds.refusal_by_model_state().or_else(|| bounds.refusal_of_fixed_sizes()) {
        Some(refusal) => Err(refusal),
        None => {
            bounds.count_kernels();
            Searcher::new(request, bounds).run()
        }
    }
}
