//! Pipeline schedules: each is an ordering, a function from (stages, micro-batches, chunks) to each stage's list of passes, and says where
//! the model's chunks lie.
//!
//! Nobody else knows their names. A schedule states how many chunks' activations a stage holds at once, and is tested for
//! that, for deadlock, and for running each pass once and in dependency order. Lists that have a closed form are written out ([`lists`]);
//! the others are what a stage does in a simulation with unit durations ([`greedy`]).

mod greedy;
mod lists;
pub(crate) mod timing;

pub use timing::{PassTimes, pass_starts};

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
    /// The same with several chunks of the model a stage, dealt out in turn (Narayanan et al. 2021): the pipeline fills and drains a chunk
    /// at a time, so its bubble is divided by the number of chunks.
    #[serde(rename = "interleaved")]
    Interleaved,
    /// 1F1B whose gradients of parameters wait for the bubbles (ZB-H1; Qi et al. 2024, "Zero Bubble Pipeline Parallelism"): a third of its
    /// bubble where all passes take equally long, within the memory that it needs at most.
    #[serde(rename = "zb-h1")]
    ZeroBubbleH1,
    /// Two chunks a stage, down the stages and up again, and gradients of parameters apart (ZB-V; Qi et al. 2024, "Pipeline
    /// Parallelism with Controllable Memory"): where all passes take equally long no bubble but that of filling the pipeline, within
    /// 1F1B's memory.
    #[serde(rename = "zb-v")]
    ZeroBubbleV,
}

/// A pass of one micro-batch through one chunk of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StagePass {
    /// From the chunk's input to its output.
    Forward,
    /// All gradients: of the chunk's input and of its parameters.
    Backward,
    /// The gradient of the chunk's input, and all that it needs.
    InputGradient,
    /// The gradients of the chunk's parameters, after the input's.
    WeightGradient,
}

impl StagePass {
    /// Whether it is the last pass of a micro-batch through a chunk, after which nothing of it is held.
    pub const fn is_last(self) -> bool {
        matches!(self, StagePass::Backward | StagePass::WeightGradient)
    }
}

/// One entry of a stage's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Task {
    /// Which way.
    pub pass: StagePass,
    /// Whose samples.
    pub micro_batch: usize,
    /// Through which of the stage's chunks, counted in the model's order.
    pub chunk: usize,
}

impl Task {
    /// Whether another is the way back of this one's micro-batch through the same chunk.
    pub fn returns_with(&self, other: &Task) -> bool {
        let goes_back = self.pass == StagePass::Forward && other.pass != StagePass::Forward;
        goes_back && (self.micro_batch, self.chunk) == (other.micro_batch, other.chunk)
    }
}

impl Schedule {
    /// Every schedule there is.
    pub const ALL: [Schedule; 5] =
        [Schedule::Gpipe, Schedule::OneForwardOneBackward, Schedule::Interleaved, Schedule::ZeroBubbleH1, Schedule::ZeroBubbleV];

    /// The name used in plan files.
    pub const fn name(self) -> &'static str {
        match self {
            Schedule::Gpipe => "gpipe",
            Schedule::OneForwardOneBackward => "1f1b",
            Schedule::Interleaved => "interleaved",
            Schedule::ZeroBubbleH1 => "zb-h1",
            Schedule::ZeroBubbleV => "zb-v",
        }
    }

    /// Whether it orders so many chunks a stage.
    pub const fn allows(self, chunks: usize) -> bool {
        match self {
            Schedule::Gpipe | Schedule::OneForwardOneBackward | Schedule::ZeroBubbleH1 => chunks == 1,
            Schedule::Interleaved => chunks >= 1,
            Schedule::ZeroBubbleV => chunks == 2,
        }
    }

    /// Whether gradients of inputs and of parameters are passes of their own.
    pub const fn splits_backward(self) -> bool {
        matches!(self, Schedule::ZeroBubbleH1 | Schedule::ZeroBubbleV)
    }

    /// The stage of the model's `position`-th chunk, and which of the stage's chunks it is.
    pub const fn place(self, stages: usize, _chunks: usize, position: usize) -> (usize, usize) {
        match self {
            Schedule::ZeroBubbleV if position >= stages => (2 * stages - 1 - position, 1),
            _ => (position % stages, position / stages),
        }
    }

    /// The position in the model of a stage's chunk.
    pub const fn position(self, stages: usize, stage: usize, chunk: usize) -> usize {
        match self {
            Schedule::ZeroBubbleV if chunk == 1 => 2 * stages - 1 - stage,
            _ => chunk * stages + stage,
        }
    }

    /// What every stage does, in order.
    pub fn orders(self, stages: usize, micro_batches: usize, chunks: usize) -> Vec<Vec<Task>> {
        let each = |list: &dyn Fn(usize) -> Vec<Task>| (0..stages).map(list).collect();
        match self {
            Schedule::Gpipe => each(&|_| lists::gpipe(micro_batches)),
            Schedule::Interleaved if chunks > 1 => {
                if micro_batches.is_multiple_of(stages) {
                    each(&|stage| lists::interleaved(stages, micro_batches, chunks, stage))
                } else {
                    greedy::interleaved(stages, micro_batches, chunks)
                }
            }
            Schedule::OneForwardOneBackward | Schedule::Interleaved => {
                each(&|stage| lists::one_forward_one_backward(stages, micro_batches, stage))
            }
            Schedule::ZeroBubbleH1 => each(&|stage| lists::zero_bubble_h1(stages, micro_batches, stage)),
            Schedule::ZeroBubbleV => greedy::zero_bubble_v(stages, micro_batches),
        }
    }

    /// What every stage may do until it holds as many micro-batches as it ever does, and then to the end of fewer micro-batches: one of these
    /// begins as [`Self::orders`] does. Many micro-batches cost no more than a few here.
    pub fn beginnings(self, stages: usize, micro_batches: usize, chunks: usize) -> Vec<Vec<Vec<Task>>> {
        let few = self.few_micro_batches(stages, micro_batches);
        match self {
            Schedule::ZeroBubbleV => greedy::all_zero_bubble_v(stages, few).collect(),
            _ => vec![self.orders(stages, few, chunks)],
        }
    }

    /// The least number of micro-batches whose [`Self::beginnings`] are those of so many.
    pub fn few_micro_batches(self, stages: usize, micro_batches: usize) -> usize {
        // The steady state is reached with as many as there are stages. Where micro-batches go round in groups, those that are left over are one of their
        // own; the other orders see how many there are when the last begins.
        let left_over = if self == Schedule::Interleaved { micro_batches % stages } else { 0 };
        let few = 2 * stages + left_over;
        if self == Schedule::Gpipe { micro_batches } else { micro_batches.min(few) }
    }

    /// What one stage does, in order.
    pub fn order(self, stages: usize, micro_batches: usize, chunks: usize, stage: usize) -> Vec<Task> {
        self.orders(stages, micro_batches, chunks).swap_remove(stage)
    }

    /// The most activations of one micro-batch in one chunk that a stage holds at once: each from its forward pass until its last.
    pub fn in_flight_bound(self, stages: usize, micro_batches: usize, chunks: usize, stage: usize) -> usize {
        let bound = match self {
            Schedule::Gpipe => micro_batches,
            Schedule::Interleaved if chunks > 1 => lists::interleaved_warm_up(stages, chunks, stage) + 1,
            Schedule::OneForwardOneBackward | Schedule::Interleaved => stages - stage,
            Schedule::ZeroBubbleH1 => stages,
            Schedule::ZeroBubbleV => 2 * stages,
        };
        bound.min(micro_batches * chunks)
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}
