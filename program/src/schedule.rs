//! Pipeline schedules. A schedule assigns each chunk of the model to a stage, and orders the passes
//! of every stage, given the numbers of stages, micro-batches and chunks.
//!
//! The compiler, the simulator, the planner and the executor name no schedule: they ask for a
//! property. Only readers and writers of frameworks' files name schedules. Schedules with a closed
//! form are written out ([`lists`]). The others are found by simulation with unit durations
//! ([`greedy`]). A new schedule is a variant of [`Schedule`] and its literal in [`spec`].
//!
//! Every schedule is tested for deadlock, for running each pass once and in dependency order, and
//! for its stated bound on the activations that a stage holds. It must not know models, ranks or
//! durations: a task is a pass of a chunk and a micro-batch.

mod greedy;
mod lists;
mod spec;
mod timing;
mod woven;

pub use timing::{PassTimes, pass_starts};
pub use woven::WovenOrders;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::RangeInclusive;

/// The order of micro-batches in the stages of a pipeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum Schedule {
    /// All forward passes, then all backward passes (Huang et al. 2019).
    #[serde(rename = "gpipe")]
    Gpipe,
    /// One forward pass, one backward pass once the pipeline is full (Narayanan et al. 2019, 2021):
    /// GPipe's duration, with less memory.
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// 1F1B with several chunks of the model on each stage, assigned to stages round-robin
    /// (Narayanan et al. 2021). The pipeline fills and drains by chunks, so its bubble is divided
    /// by the number of chunks.
    #[serde(rename = "interleaved")]
    Interleaved,
    /// 1F1B whose weight gradients are postponed into the bubbles (ZB-H1; Qi et al. 2024, "Zero
    /// Bubble Pipeline Parallelism"). If all passes take equally long it has a third of 1F1B's
    /// bubble, and no stage holds more than 1F1B's first stage.
    #[serde(rename = "zb-h1")]
    ZeroBubbleH1,
    /// Two chunks on each stage, down the stages and up again, with separate weight gradients
    /// (ZB-V; Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"). If all passes take
    /// equally long its only bubble is that of filling the pipeline, within 1F1B's memory.
    #[serde(rename = "zb-v")]
    ZeroBubbleV,
}

/// A pass of one micro-batch through one chunk of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StagePass {
    /// From the chunk's input to its output.
    Forward,
    /// All gradients: of the chunk's input and of its weights.
    Backward,
    /// The gradient of the chunk's input, and the gradients of activations that it depends on.
    InputGradient,
    /// The gradients of the chunk's weights, after that of its input.
    WeightGradient,
}

impl StagePass {
    /// Whether this is the last pass of a micro-batch through a chunk, after which no activation of
    /// it is held.
    pub const fn is_last(self) -> bool {
        matches!(self, StagePass::Backward | StagePass::WeightGradient)
    }
}

/// One entry of a stage's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Task {
    /// The pass.
    pub pass: StagePass,
    /// The micro-batch.
    pub micro_batch: usize,
    /// The chunk, counted within the stage in the model's order.
    pub chunk: usize,
}

impl Task {
    /// Whether this is a forward pass and `other` the backward pass of the same micro-batch and
    /// chunk.
    pub fn returns_with(&self, other: &Task) -> bool {
        let turns_back = self.pass == StagePass::Forward && other.pass != StagePass::Forward;
        turns_back && (self.micro_batch, self.chunk) == (other.micro_batch, other.chunk)
    }
}

impl Schedule {
    /// Every schedule.
    pub const ALL: [Schedule; 5] =
        [Schedule::Gpipe, Schedule::OneForwardOneBackward, Schedule::Interleaved, Schedule::ZeroBubbleH1, Schedule::ZeroBubbleV];

    /// The name in plan files.
    pub fn name(self) -> &'static str {
        self.spec().name
    }

    /// The schedule of a name in plan files.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|schedule| schedule.name() == name)
    }

    /// The names of all schedules, separated by commas, for messages.
    pub fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }

    /// The numbers of chunks on each stage that the schedule can order.
    pub fn chunks(self) -> RangeInclusive<usize> {
        self.spec().chunks.clone()
    }

    /// Whether the schedule orders this number of chunks on each stage.
    pub fn allows(self, chunks: usize) -> bool {
        self.spec().chunks.contains(&chunks)
    }

    /// Whether the schedule orders any number of chunks. If so, with one chunk it equals
    /// [`Self::of_one_chunk`].
    pub fn allows_any_chunks(self) -> bool {
        *self.spec().chunks.end() == usize::MAX
    }

    /// The schedule of one chunk on each stage with the same kinds of passes and the least memory.
    pub fn of_one_chunk(self) -> Self {
        self.spec().of_one_chunk
    }

    /// Whether the gradients of inputs and of weights are separate passes.
    pub fn splits_backward(self) -> bool {
        self.spec().splits_backward
    }

    /// Whether a stage holds the activations of all micro-batches of a step at once.
    pub fn holds_all_micro_batches(self) -> bool {
        self.spec().holds_all_micro_batches
    }

    /// Whether the schedule can be useful on a single stage: on one stage it holds no more
    /// activations than any other schedule, or it postpones weight gradients, which communication
    /// can overlap.
    pub fn is_useful_without_pipeline(self) -> bool {
        self.of_one_chunk() == self
    }

    /// The number of micro-batches that go through the chunks as a group. A schedule with groups
    /// gains little from numbers of micro-batches that are no multiple of the group size.
    pub fn group_size(self, stages: usize) -> usize {
        if self.spec().in_groups { stages } else { 1 }
    }

    /// The stage of the model's chunk at `position`, and its index among that stage's chunks.
    pub fn place(self, stages: usize, position: usize) -> (usize, usize) {
        self.spec().places.of(stages, position)
    }

    /// The position in the model of a stage's chunk: the inverse of [`Self::place`].
    pub fn position(self, stages: usize, stage: usize, chunk: usize) -> usize {
        self.spec().places.position(stages, stage, chunk)
    }

    /// The tasks of every stage, in order.
    pub fn orders(self, stages: usize, micro_batches: usize, chunks: usize) -> Vec<Vec<Task>> {
        (self.spec().orders)(stages, micro_batches, chunks)
    }

    /// The tasks of every stage, in order, and the pairs of a forward and a backward pass that a
    /// stage runs together. Pairs make the pipeline fill later, by at most a unit of time for each
    /// stage, and run no slower.
    pub fn woven_orders(self, stages: usize, micro_batches: usize, chunks: usize) -> WovenOrders {
        let own = self.spec().woven.and_then(|woven| woven(stages, micro_batches));
        own.unwrap_or_else(|| WovenOrders::pairing(self, stages, chunks, self.orders(stages, micro_batches, chunks)))
    }

    /// Orders of fewer micro-batches. One of them equals [`Self::orders`] until every stage holds
    /// its most activations, so bounds on memory need not order a whole long step.
    pub fn beginnings(self, stages: usize, micro_batches: usize, chunks: usize) -> Vec<Vec<Vec<Task>>> {
        let few = self.equivalent_micro_batches(stages, micro_batches);
        match self.spec().candidates {
            Some(candidates) => candidates(stages, few),
            None => vec![self.orders(stages, few, chunks)],
        }
    }

    /// The smallest number of micro-batches with the same [`Self::beginnings`] as `micro_batches`.
    pub fn equivalent_micro_batches(self, stages: usize, micro_batches: usize) -> usize {
        if self.holds_all_micro_batches() {
            return micro_batches;
        }
        // The steady state is reached with as many micro-batches as stages. Micro-batches left over
        // from whole groups form a smaller group, so the remainder is kept. Orders without groups
        // depend on the number of micro-batches only after the last one has begun.
        let left_over = micro_batches % self.group_size(stages);
        micro_batches.min(2 * stages + left_over)
    }

    /// The tasks of one stage, in order.
    pub fn order(self, stages: usize, micro_batches: usize, chunks: usize, stage: usize) -> Vec<Task> {
        self.orders(stages, micro_batches, chunks).swap_remove(stage)
    }

    /// The most activations that a stage holds at once, counted in micro-batches of one chunk. Each
    /// is held from its forward pass to its last backward pass.
    pub fn in_flight_bound(self, stages: usize, micro_batches: usize, chunks: usize, stage: usize) -> usize {
        let bound = (self.spec().in_flight)(stages, micro_batches, chunks, stage);
        bound.min(micro_batches * chunks)
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}
