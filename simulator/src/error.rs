//! Errors of a simulation.

use foretell_topologies::TopologyError;
use foretell_units::Picoseconds;
use miette::Diagnostic;
use thiserror::Error;

/// Why a simulation has no answer.
#[derive(Clone, Debug, PartialEq, Error, Diagnostic)]
pub enum SimulationError {
    /// The mesh has more ranks than the cluster has devices.
    #[error("{ranks} ranks need as many devices, and `{topology}` has {devices}")]
    #[diagnostic(code(simulation::too_few_devices), help("use more nodes, or oversubscribe"))]
    TooFewDevices {
        /// Ranks of the Program.
        ranks: usize,
        /// Devices that they may use.
        devices: usize,
        /// The name of the topology.
        topology: String,
    },
    /// Two jobs are placed on one node.
    #[error("jobs {} and {} both run on node `{node}`", jobs[0], jobs[1])]
    #[diagnostic(code(simulation::shared_node), help("begin one of them on another node"))]
    SharedNode {
        /// The indices of the two jobs.
        jobs: [usize; 2],
        /// The first such node.
        node: String,
    },
    /// No route joins two ranks that communicate.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Topology(#[from] TopologyError),
    /// An instruction refers to something that its list does not have. The compiler makes no such
    /// list.
    #[error("stage {stage}, instruction {instruction}: {reason}")]
    #[diagnostic(code(simulation::malformed))]
    Malformed {
        /// The pipeline stage.
        stage: usize,
        /// The instruction's index in the list.
        instruction: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// The Program does not give each rank one of its lists, or the lists are not in the order of
    /// their stages.
    #[error("the Program gives {given} ranks one of its {lists} instruction lists, and its mesh has {ranks} ranks")]
    #[diagnostic(code(simulation::lists_of_ranks))]
    ListsOfRanks {
        /// Number of lists.
        lists: usize,
        /// Number of ranks that are given a list.
        given: usize,
        /// Ranks of the mesh.
        ranks: usize,
    },
    /// One rank of each stage was to stand for all ranks of the stage, but it cannot.
    #[error("one rank of each stage cannot stand for all: {reason}")]
    #[diagnostic(code(simulation::no_representative), help("simulate every rank"))]
    NoRepresentative {
        /// Why it cannot stand for them.
        reason: String,
    },
    /// Two sides of a communication do not match.
    #[error("{left} and {right} do not match: {reason}")]
    #[diagnostic(code(simulation::unmatched))]
    Unmatched {
        /// One side.
        left: String,
        /// The other side.
        right: String,
        /// How they differ.
        reason: String,
    },
    /// Collectives were to run step by step, but two collectives of one group may run at the same
    /// time, so that the steps of a member are not one sequence.
    #[error("stage {stage}: collectives of one group, or messages with one peer, are in several streams")]
    #[diagnostic(code(simulation::overlapping), help("simulate them as flows"))]
    Overlapping {
        /// The pipeline stage.
        stage: usize,
    },
    /// The step ends after its [`Deadline`](crate::Deadline).
    #[error("the step takes at least {at_least}, and its deadline is earlier")]
    #[diagnostic(code(simulation::past_deadline))]
    PastDeadline {
        /// The least duration of the step.
        at_least: Picoseconds,
    },
    /// [`Stop`](crate::Stop) ended the simulation.
    #[error("the simulation was stopped before its end")]
    #[diagnostic(code(simulation::interrupted))]
    Interrupted,
    /// The step takes longer than the latest time that the simulator can represent.
    #[error("the step does not end within {limit}: {}", if running.is_empty() { "all ranks are past their last instruction".into() } else { running.join("; ") })]
    #[diagnostic(code(simulation::too_long), help("see the rates and sizes that these instructions use"))]
    TooLong {
        /// The latest time that the simulator can represent.
        limit: Picoseconds,
        /// The instructions that the first few ranks are running.
        running: Vec<String>,
    },
    /// No instruction can proceed, and some have not ended.
    #[error("deadlock after {done} of {total} instructions: {}", waiting.join("; "))]
    #[diagnostic(code(simulation::deadlock))]
    Deadlock {
        /// Instructions that ended, over all ranks.
        done: usize,
        /// Instructions of all ranks.
        total: usize,
        /// The instructions at which the first few ranks wait.
        waiting: Vec<String>,
    },
}
