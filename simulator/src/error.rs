//! Why a Program cannot be simulated: one clear sentence each, with the mend where the user has one.

use foretell_topologies::TopologyError;
use foretell_units::Picoseconds;
use thiserror::Error;

/// Why a simulation gives no answer.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum SimulationError {
    /// The mesh is larger than the cluster.
    #[error("{ranks} ranks need as many devices, and `{topology}` has {devices}; hint: use more nodes, or oversubscribe")]
    TooFewDevices {
        /// Ranks of the Program.
        ranks: usize,
        /// Devices of the topology.
        devices: usize,
        /// Its name.
        topology: String,
    },
    /// Two jobs are placed on one node.
    #[error("jobs {} and {} both run on node `{node}`; hint: begin one of them on another node", jobs[0], jobs[1])]
    SharedNode {
        /// Which jobs, counted from 0.
        jobs: [usize; 2],
        /// The first such node.
        node: String,
    },
    /// Two ranks that talk to each other are not joined.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The Program contradicts itself: a fault of whoever made it.
    #[error("stage {stage}, instruction {instruction}: {reason}")]
    Malformed {
        /// The pipeline stage.
        stage: usize,
        /// The instruction's place in the stage's list.
        instruction: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// The Program does not say of each rank which of its lists it runs, or the lists are not in their stages' order.
    #[error("the Program gives {given} ranks one of its {lists} lists of instructions, and its mesh has {ranks} ranks")]
    ListsOfRanks {
        /// Lists that there are.
        lists: usize,
        /// Ranks that are given one.
        given: usize,
        /// Ranks of the mesh.
        ranks: usize,
    },
    /// Ranks that are to be simulated by one of them do not do alike, or nothing is known of what they run on.
    #[error("one rank a stage cannot stand for all: {reason}; hint: simulate every rank")]
    NoRepresentative {
        /// Why not.
        reason: String,
    },
    /// Two sides of a communication do not agree on what they exchange.
    #[error("{left} and {right} do not match: {reason}")]
    Unmatched {
        /// One side.
        left: String,
        /// The other.
        right: String,
        /// How they differ.
        reason: String,
    },
    /// Collectives of one group may go on at once, so that its members' steps are not one sequence.
    #[error(
        "stage {stage}: collectives of one group, or messages with one peer, stand in several streams; hint: simulate them as flows"
    )]
    Overlapping {
        /// The pipeline stage.
        stage: usize,
    },
    /// It was asked to stop where the step ends later than that: see [`Deadline`](crate::Deadline).
    #[error("the step takes {at_least} at least, later than was asked for")]
    PastDeadline {
        /// What the step takes at least.
        at_least: Picoseconds,
    },
    /// Nothing can proceed, and not everything is done.
    #[error("deadlock after {done} of {total} instructions: {}", waiting.join("; "))]
    Deadlock {
        /// Instructions that finished, over all ranks.
        done: usize,
        /// Instructions there are, over all ranks.
        total: usize,
        /// What the first few ranks that wait are waiting in.
        waiting: Vec<String>,
    },
}
