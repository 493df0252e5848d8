//! The order of a schedule's passes, and what follows from the order alone.

use super::in_flight::InFlight;
use foretell_program::{Schedule, StagePass, Task};

/// A schedule's passes for a pipeline of one size.
#[derive(Clone, Debug)]
pub(crate) struct Timetable {
    pub(super) schedule: Schedule,
    pub(super) stages: usize,
    /// Chunks of each stage.
    pub(super) chunks: usize,
    pub(super) micro_batches: usize,
    /// Passes of each stage, in order.
    pub(crate) orders: Vec<Vec<Task>>,
    in_flight: InFlight,
    /// By stage, the (micro-batch, chunk) pairs whose backward pass directly follows their forward
    /// pass, sorted.
    immediate_returns: Vec<Vec<(usize, usize)>>,
    /// Whether neighbouring chunks of the model are always on different stages.
    neighbours_differ: bool,
}

impl Timetable {
    pub(super) fn new(schedule: Schedule, stages: usize, micro_batches: usize, chunks: usize) -> Self {
        let orders = schedule.orders(stages, micro_batches, chunks);
        let in_flight = InFlight::of_orders(&orders, chunks);
        let immediate_returns = |order: &Vec<Task>| {
            let pairs = order.windows(2).filter(|pair| pair[0].returns_with(&pair[1]));
            let mut found: Vec<(usize, usize)> = pairs.map(|pair| (pair[0].micro_batch, pair[0].chunk)).collect();
            found.sort_unstable();
            found
        };
        let immediate_returns = orders.iter().map(immediate_returns).collect();
        let stage_of = |position: usize| schedule.place(stages, position).0;
        let neighbours_differ = (1..stages * chunks).all(|position| stage_of(position - 1) != stage_of(position));
        Self { schedule, stages, chunks, micro_batches, orders, in_flight, immediate_returns, neighbours_differ }
    }

    /// Returns the most micro-batches that the stages hold.
    pub(in crate::bounds) fn in_flight(&self) -> &InFlight {
        &self.in_flight
    }

    /// Returns `true` if all activations of a stage's forward pass go to the host when activations
    /// are offloaded: the backward pass does not follow at once, and neighbouring chunks are on
    /// other stages.
    pub(super) fn offloads_all(&self, stage: usize, task: &Task) -> bool {
        let returns_at_once = self.immediate_returns[stage].binary_search(&(task.micro_batch, task.chunk)).is_ok();
        self.neighbours_differ && !returns_at_once
    }

    /// Returns the chunk that receives the message of a stage's task, as its position in the model,
    /// and its stage. `None` if no other stage receives one.
    pub(super) fn receiver(&self, stage: usize, task: &Task) -> Option<(usize, usize)> {
        let Self { schedule, stages, chunks, .. } = self;
        let position = schedule.position(*stages, stage, task.chunk);
        let next = match task.pass {
            StagePass::Forward => Some(position + 1),
            StagePass::Backward | StagePass::InputGradient => position.checked_sub(1),
            StagePass::WeightGradient => None,
        };
        let next = next.filter(|&next| next < stages * chunks)?;
        Some((next, schedule.place(*stages, next).0)).filter(|&(_, other)| other != stage)
    }
}

/// Returns the extra time of a message between two neighbouring stages over that in the costs.
/// `extra[n]` is that from stage n to the next (from the last to the first); an empty `extra` means
/// none.
pub(super) fn extra_between(extra: &[f64], stages: usize, stage: usize, other: usize) -> f64 {
    let first = if (stage + 1) % stages == other { stage } else { other };
    extra.get(first).copied().unwrap_or(0.0)
}
