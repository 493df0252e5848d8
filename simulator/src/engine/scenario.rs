//! The assumptions of one run.

use crate::cost::Quantile;
use foretell_units::Picoseconds;
use std::sync::Arc;

/// The assumptions of one run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scenario {
    pub(crate) quantile: Quantile,
    pub(crate) recording: Recording,
    /// For each rank of the Program, the factor by which its device is slower than the cost model
    /// says. Empty if every factor is 1.
    pub(crate) paces: Vec<f64>,
    /// The deadline after which the run stops early. `None` to run to the end.
    pub(crate) deadline: Option<Arc<Deadline>>,
    /// Tells the run to stop without an answer.
    pub(crate) stop: Stop,
    pub(crate) fast_path: FastPath,
    /// How far devices with a quota are in their periods when the step begins.
    pub(crate) periods: QuotaPeriods,
}

/// Whether ranks may run ahead of the event queue. The answer is the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum FastPath {
    #[default]
    On,
    /// For the test that compares the fast path with the plain run.
    #[cfg(test)]
    Off,
}

/// Which times a simulation keeps besides the end of each rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Recording {
    /// The start and end of each instruction of each simulated rank.
    #[default]
    Spans,
    /// None. Memory does not grow with the number of instructions.
    Ends,
}

/// When a simulation may stop early, with
/// [`SimulationError::PastDeadline`](crate::SimulationError::PastDeadline): as soon as the step is
/// certain to end after [`Self::step`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Deadline {
    /// The latest end of a step that is worth simulating to its end.
    pub step: Picoseconds,
    /// For each list of the Program, some of its instructions in ascending order, each with the
    /// least time from its end to the end of the step, overheads of the step included.
    pub remaining: Vec<Vec<(u32, Picoseconds)>>,
}

/// A callback that tells a simulation to end without an answer, with
/// [`SimulationError::Interrupted`](crate::SimulationError::Interrupted). The default never does.
#[derive(Clone, Default)]
pub struct Stop(Option<Arc<dyn Fn() -> bool + Send + Sync>>);

impl Stop {
    /// Simulations end once `is_over` returns `true`. They call it often, from any thread.
    pub fn when(is_over: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(is_over)))
    }

    /// Returns whether simulations should end now.
    pub fn is_raised(&self) -> bool {
        self.0.as_ref().is_some_and(|is_over| is_over())
    }
}

impl std::fmt::Debug for Stop {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(if self.0.is_some() { "Stop(when asked)" } else { "Stop(never)" })
    }
}

impl PartialEq for Stop {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (None, None) => true,
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
}

/// How far devices with a quota are in their periods, at the start or end of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct QuotaPeriods {
    /// Time since the current period began.
    pub(super) elapsed: Picoseconds,
    /// For each device with a quota, its unused budget, in picoseconds of work at its long-run
    /// pace. Empty if all budgets are full.
    pub(super) budgets: Vec<f64>,
}
