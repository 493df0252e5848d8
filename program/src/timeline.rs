//! Timelines: when each instruction of a Program ran, predicted or measured. Both interpreters
//! return this type, keyed by the same instructions, so that the two can be compared.

use crate::mesh::Rank;
use crate::program::InstructionId;
use foretell_units::Picoseconds;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The time span of one instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// The instruction of the rank's list.
    pub instruction: InstructionId,
    /// The start, relative to the start of the step.
    pub start: Picoseconds,
    /// The end, relative to the start of the step.
    pub end: Picoseconds,
}

impl Span {
    /// The duration.
    pub fn duration(&self) -> Picoseconds {
        self.end.saturating_sub(self.start)
    }
}

/// The step of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankTimeline {
    /// The span of every instruction of the rank's list, in the order of the list.
    pub spans: Vec<Span>,
    /// The end of the rank's step.
    pub end: Picoseconds,
}

/// The source of a timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// The simulator predicted it.
    Predicted,
    /// The executor measured it.
    Measured,
}

/// One step of a run: every rank's spans.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// The source.
    pub origin: Origin,
    /// The timeline of each rank. Ranks that were simulated as one share it.
    pub ranks: Vec<Arc<RankTimeline>>,
}

impl Timeline {
    /// The duration of the step: the end of the last rank.
    pub fn step(&self) -> Picoseconds {
        self.ranks.iter().map(|rank| rank.end).max().unwrap_or_default()
    }

    /// One rank's spans.
    pub fn rank(&self, rank: Rank) -> Option<&RankTimeline> {
        self.ranks.get(rank.0).map(Arc::as_ref)
    }
}
