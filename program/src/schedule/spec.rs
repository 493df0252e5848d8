//! The specification of each schedule, as one literal: the order of its passes, the assignment of
//! its chunks to stages, the activations that it holds, and what it may be combined with.

use super::{Schedule, Task, WovenOrders, greedy, lists, woven};
use std::ops::RangeInclusive;

/// The tasks of every stage, in order.
type Orders = Vec<Vec<Task>>;

/// Everything about a schedule.
pub(super) struct ScheduleSpec {
    /// The name in plan files.
    pub(super) name: &'static str,
    /// The numbers of chunks on each stage that it can order.
    pub(super) chunks: RangeInclusive<usize>,
    /// The assignment of chunks to stages.
    pub(super) places: Places,
    /// Whether the gradients of inputs and of weights are separate passes.
    pub(super) splits_backward: bool,
    /// Whether micro-batches go through the chunks in groups, of as many as there are stages.
    pub(super) in_groups: bool,
    /// Whether a stage holds the activations of all micro-batches of a step at once.
    pub(super) holds_all_micro_batches: bool,
    /// The schedule of one chunk on each stage with the same kinds of passes and the least memory.
    pub(super) of_one_chunk: Schedule,
    /// The order, for numbers of stages, micro-batches and chunks.
    pub(super) orders: fn(usize, usize, usize) -> Orders,
    /// For numbers of stages and micro-batches, all orders from which `orders` takes the shortest;
    /// `None` if there is one order only.
    pub(super) candidates: Option<fn(usize, usize) -> Vec<Orders>>,
    /// For numbers of stages and micro-batches, an order made for pairs of passes, if the schedule
    /// has one.
    pub(super) woven: Option<fn(usize, usize) -> Option<WovenOrders>>,
    /// The most activations that a stage holds at once, in micro-batches of one chunk: for numbers
    /// of stages, micro-batches and chunks, and the stage.
    pub(super) in_flight: fn(usize, usize, usize, usize) -> usize,
}

/// The assignment of a model's chunks to stages.
pub(super) enum Places {
    /// Round-robin: chunk n is on stage n modulo the number of stages.
    InTurn,
    /// Down the stages and up again.
    DownAndUp,
}

impl Places {
    /// The stage of the chunk at a position in the model, and its index on that stage.
    pub(super) fn of(&self, stages: usize, position: usize) -> (usize, usize) {
        match self {
            Places::DownAndUp if position >= stages => (2 * stages - 1 - position, 1),
            Places::DownAndUp | Places::InTurn => (position % stages, position / stages),
        }
    }

    /// The position of a stage's chunk: the inverse of [`Self::of`].
    pub(super) fn position(&self, stages: usize, stage: usize, chunk: usize) -> usize {
        match self {
            Places::DownAndUp if chunk == 1 => 2 * stages - 1 - stage,
            Places::DownAndUp | Places::InTurn => chunk * stages + stage,
        }
    }
}

impl Schedule {
    pub(super) fn spec(self) -> &'static ScheduleSpec {
        match self {
            Schedule::Gpipe => &GPIPE,
            Schedule::OneForwardOneBackward => &ONE_FORWARD_ONE_BACKWARD,
            Schedule::Interleaved => &INTERLEAVED,
            Schedule::ZeroBubbleH1 => &ZERO_BUBBLE_H1,
            Schedule::ZeroBubbleV => &ZERO_BUBBLE_V,
        }
    }
}

static GPIPE: ScheduleSpec = ScheduleSpec {
    name: "gpipe",
    chunks: 1..=1,
    places: Places::InTurn,
    splits_backward: false,
    in_groups: false,
    holds_all_micro_batches: true,
    of_one_chunk: Schedule::OneForwardOneBackward,
    orders: |stages, micro_batches, _| (0..stages).map(|_| lists::gpipe(micro_batches)).collect(),
    candidates: None,
    woven: None,
    in_flight: |_, micro_batches, _, _| micro_batches,
};

static ONE_FORWARD_ONE_BACKWARD: ScheduleSpec = ScheduleSpec {
    name: "1f1b",
    chunks: 1..=1,
    places: Places::InTurn,
    splits_backward: false,
    in_groups: false,
    holds_all_micro_batches: false,
    of_one_chunk: Schedule::OneForwardOneBackward,
    orders: |stages, micro_batches, _| {
        (0..stages).map(|stage| lists::one_forward_one_backward(stages, micro_batches, stage)).collect()
    },
    candidates: None,
    woven: None,
    in_flight: |stages, _, _, stage| stages - stage,
};

static INTERLEAVED: ScheduleSpec = ScheduleSpec {
    name: "interleaved",
    chunks: 1..=usize::MAX,
    places: Places::InTurn,
    splits_backward: false,
    in_groups: true,
    holds_all_micro_batches: false,
    of_one_chunk: Schedule::OneForwardOneBackward,
    orders: |stages, micro_batches, chunks| match chunks {
        1 => (ONE_FORWARD_ONE_BACKWARD.orders)(stages, micro_batches, 1),
        _ if micro_batches.is_multiple_of(stages) => {
            (0..stages).map(|stage| lists::interleaved(stages, micro_batches, chunks, stage)).collect()
        }
        _ => greedy::interleaved(stages, micro_batches, chunks),
    },
    candidates: None,
    woven: None,
    in_flight: |stages, _, chunks, stage| match chunks {
        1 => stages - stage,
        _ => lists::interleaved_warm_up(stages, chunks, stage) + 1,
    },
};

static ZERO_BUBBLE_H1: ScheduleSpec = ScheduleSpec {
    name: "zb-h1",
    chunks: 1..=1,
    places: Places::InTurn,
    splits_backward: true,
    in_groups: false,
    holds_all_micro_batches: false,
    of_one_chunk: Schedule::ZeroBubbleH1,
    orders: |stages, micro_batches, _| (0..stages).map(|stage| lists::zero_bubble_h1(stages, micro_batches, stage)).collect(),
    candidates: None,
    woven: None,
    in_flight: |stages, _, _, _| stages,
};

static ZERO_BUBBLE_V: ScheduleSpec = ScheduleSpec {
    name: "zb-v",
    chunks: 2..=2,
    places: Places::DownAndUp,
    splits_backward: true,
    in_groups: false,
    holds_all_micro_batches: false,
    of_one_chunk: Schedule::ZeroBubbleH1,
    orders: |stages, micro_batches, _| greedy::zero_bubble_v(stages, micro_batches),
    candidates: Some(|stages, micro_batches| greedy::all_zero_bubble_v(stages, micro_batches).collect()),
    woven: Some(|stages, micro_batches| (micro_batches >= 2 * stages).then(|| woven::dual_pipe_v(stages, micro_batches))),
    in_flight: |stages, _, _, _| 2 * stages,
};
