//! The assumptions of one run.

use crate::cost::Quantile;
use foretell_units::Picoseconds;
use std::sync::Arc;

/// What a run assumes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scenario {
    pub(crate) quantile: Quantile,
    pub(crate) recording: Recording,
    /// How much slower than its costs each rank's device is, by rank of the Program; empty where none is.
    pub(crate) paces: Vec<f64>,
    /// Until when it goes on.
    pub(crate) deadline: Option<Arc<Deadline>>,
    /// Whether ranks are taken ahead of the event queue. The answer is the same.
    pub(crate) fast_path: FastPath,
    /// Where devices that have a share of a processor stand when the step begins.
    pub(crate) periods: QuotaPeriods,
}

/// Whether what follows of itself is worked out at once, or event by event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum FastPath {
    #[default]
    On,
    /// The oracle of tests.
    #[cfg(test)]
    Off,
}

/// What is kept of a simulation beside when each rank ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Recording {
    /// When each instruction of each rank that is simulated began and ended.
    #[default]
    Spans,
    /// No more: memory is then that of what goes on at one time.
    Ends,
}

/// When a simulation may stop, with [`SimulationError::PastDeadline`]: as soon as it is certain that the step ends later than this.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Deadline {
    /// A step that ends later need not be simulated to its end.
    pub step: Picoseconds,
    /// Of each list of the Program some instructions, ascending, and how long the step goes on at least after each has ended, what a step takes
    /// beside its instructions included.
    pub rest: Vec<Vec<(u32, Picoseconds)>>,
}

/// Where devices stand in their periods when a step begins, or when it has ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct QuotaPeriods {
    /// How long ago the period began.
    pub(super) into: Picoseconds,
    /// What each device has left of its budget, in picoseconds at its share's pace; nothing where all have all of it.
    pub(super) left: Vec<f64>,
}
