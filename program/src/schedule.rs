//! Pipeline schedules: each is an ordering, a function from (stages, micro-batches) to each stage's list of passes.
//!
//! Nobody else knows their names. A schedule states how many micro-batches' activations a stage holds at once, and is tested for
//! that, for deadlock, and for running each pass once and in dependency order.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The order of micro-batches in the stages of a pipeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Schedule {
    /// All forward passes, then all backward passes (Huang et al. 2019).
    #[serde(rename = "gpipe")]
    Gpipe,
    /// One forward, one backward once the pipeline is full (Narayanan et al. 2019, 2021): as long as GPipe, with less memory.
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
}

/// A pass of one micro-batch through one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StagePass {
    /// From the stage's input to its output.
    Forward,
    /// All gradients: of the stage's input and of its parameters.
    Backward,
}

/// One entry of a stage's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Task {
    /// Which way.
    pub pass: StagePass,
    /// Whose samples.
    pub micro_batch: usize,
}

impl Schedule {
    /// Every schedule there is.
    pub const ALL: [Schedule; 2] = [Schedule::Gpipe, Schedule::OneForwardOneBackward];

    /// The name used in plan files.
    pub const fn name(self) -> &'static str {
        match self {
            Schedule::Gpipe => "gpipe",
            Schedule::OneForwardOneBackward => "1f1b",
        }
    }

    /// What a stage does, in order.
    pub fn order(self, stages: usize, micro_batches: usize, stage: usize) -> Vec<Task> {
        let forward = |micro_batch| Task { pass: StagePass::Forward, micro_batch };
        let backward = |micro_batch| Task { pass: StagePass::Backward, micro_batch };
        match self {
            Schedule::Gpipe => (0..micro_batches).map(forward).chain((0..micro_batches).map(backward)).collect(),
            Schedule::OneForwardOneBackward => {
                // A stage runs ahead by as many micro-batches as there are stages after it.
                let warm_up = (stages - 1 - stage).min(micro_batches);
                let mut tasks: Vec<Task> = (0..warm_up).map(forward).collect();
                for micro_batch in warm_up..micro_batches {
                    tasks.push(forward(micro_batch));
                    tasks.push(backward(micro_batch - warm_up));
                }
                tasks.extend((micro_batches - warm_up..micro_batches).map(backward));
                tasks
            }
        }
    }

    /// The most micro-batches whose activations a stage holds at once.
    pub fn in_flight_bound(self, stages: usize, micro_batches: usize, stage: usize) -> usize {
        match self {
            Schedule::Gpipe => micro_batches,
            Schedule::OneForwardOneBackward => (stages - stage).min(micro_batches),
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}
