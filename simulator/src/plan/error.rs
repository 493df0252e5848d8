//! Why a plan has no prediction.

use super::costs::PlanCostError;
use crate::error::SimulationError;
use foretell_program::traced::Untraced;
use foretell_program::{PlanError, Rank};
use foretell_topologies::TopologyError;
use miette::Diagnostic;
use thiserror::Error;

/// Why a plan has no prediction.
#[derive(Debug, Error, Diagnostic)]
pub enum PlanPredictionError {
    /// The plan has no costs.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Costs(#[from] PlanCostError),
    /// The plan cannot be compiled.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Plan(#[from] PlanError),
    /// A changed topology is invalid.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Topology(#[from] TopologyError),
    /// The step cannot be simulated.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Simulation(#[from] SimulationError),
    /// The framework's own operators do not predict the step.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Untraced(#[from] Untraced),
    /// The framework measured its operators on these devices, so nothing is known about other
    /// devices.
    #[error("the framework measured its own operators on these devices, and nothing is known of changed ones")]
    #[diagnostic(code(what_if::measured), help("leave out `--profile`"))]
    Measured,
    /// The layout has more ranks than there are devices.
    #[error("the layout has {ranks} ranks, but `{topology}` has {devices} devices")]
    #[diagnostic(
        code(plan::too_many_ranks),
        help("use a smaller layout, more `nodes`, or `--oversubscribe` to check it without timing it")
    )]
    TooManyRanks {
        /// Ranks of the layout.
        ranks: usize,
        /// Name of the topology.
        topology: String,
        /// Number of its devices.
        devices: usize,
    },
    /// A straggler is not a rank of the layout.
    #[error("`--straggler` names {rank}, but the layout has ranks 0 to {last}")]
    #[diagnostic(code(plan::no_such_rank), help("name one of these"))]
    NoSuchRank {
        /// The straggler.
        rank: Rank,
        /// The last rank.
        last: usize,
    },
    /// Jitter and stragglers cannot be simulated for a step that its framework's operators predict.
    #[error("the plan is predicted by its framework's own operators, which nothing can disturb yet")]
    #[diagnostic(code(plan::undisturbed), help("leave out `--jitter` and `--straggler`, or ask under `stack: fsdp`"))]
    Undisturbed,
}
