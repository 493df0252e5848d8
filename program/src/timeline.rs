//! Timelines: when each instruction of a Program ran, whether foretold or measured. Both interpreters return this one type, keyed by
//! the same instructions, so that they can be laid side by side.

use crate::mesh::Rank;
use crate::program::InstructionId;
use foretell_units::Picoseconds;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// One instruction's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Which instruction of the rank's stage.
    pub instruction: InstructionId,
    /// When it began, from the start of the step.
    pub start: Picoseconds,
    /// When it had finished.
    pub end: Picoseconds,
}

impl Span {
    /// How long it took.
    pub fn duration(&self) -> Picoseconds {
        self.end.saturating_sub(self.start)
    }
}

/// One rank's step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankTimeline {
    /// Every instruction of the rank's stage once, in the order of the list.
    pub spans: Vec<Span>,
    /// When the rank had finished its step.
    pub end: Picoseconds,
}

/// Where a timeline comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// The simulator foretold it.
    Predicted,
    /// The executor measured it.
    Measured,
}

/// One step of a run: every rank's spans.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// Where it comes from.
    pub origin: Origin,
    /// By rank. Ranks that were simulated as one share theirs.
    pub ranks: Vec<Arc<RankTimeline>>,
}

impl Timeline {
    /// How long the step took: until the last rank had finished.
    pub fn step(&self) -> Picoseconds {
        self.ranks.iter().map(|rank| rank.end).max().unwrap_or_default()
    }

    /// One rank's spans.
    pub fn rank(&self, rank: Rank) -> Option<&RankTimeline> {
        self.ranks.get(rank.0).map(Arc::as_ref)
    }
}
