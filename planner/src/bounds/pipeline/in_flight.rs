//! The micro-batches that stages hold at the times of their largest memory.

use foretell_program::{Schedule, StagePass, Task};

/// The micro-batches of each stage at two times: when it holds the most micro-batches, and when the
/// most of them wait for their weight-gradient pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::bounds) struct InFlight(Vec<[HeldMicroBatches; 2]>);

/// The micro-batches that a stage holds at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::bounds) struct HeldMicroBatches {
    /// Indexed by chunk: the micro-batches between their forward and their backward pass.
    pub(super) saved: Vec<usize>,
    /// Indexed by chunk: the micro-batches between their input-gradient and their weight-gradient
    /// pass.
    pub(super) awaiting_weights: Vec<usize>,
    /// Chunk whose forward pass runs at that time, if that is known.
    pub(super) forward_chunk: Option<usize>,
    /// Chunk of the backward pass that comes next, before anything is freed, if that is known.
    pub(super) backward_chunk: Option<usize>,
}

impl InFlight {
    /// Returns the most that stages hold, from their complete orders of passes.
    pub(super) fn of_orders(orders: &[Vec<Task>], chunks: usize) -> Self {
        Self(orders.iter().map(|order| [when_most_saved(order, chunks), when_most_awaiting_weights(order, chunks)]).collect())
    }

    /// Returns a lower bound on the most that stages hold. It orders only the first passes of a
    /// step, so many micro-batches cost no more than a few.
    pub(super) fn lower_bound(schedule: Schedule, stages: usize, micro_batches: usize, chunks: usize) -> Self {
        let beginnings = schedule.beginnings(stages, micro_batches, chunks).into_iter();
        let all = beginnings.map(|orders| Self::of_orders(&orders, chunks));
        let least = |left: Self, right: Self| {
            let stages = left.0.into_iter().zip(right.0);
            Self(stages.map(|([a, b], [c, d])| [a.least(c), b.least(d)]).collect())
        };
        all.reduce(least).unwrap_or(Self(Vec::new()))
    }

    /// Returns the most micro-batches that a stage holds between forward and backward pass.
    pub(in crate::bounds) fn most_saved(&self, stage: usize) -> usize {
        self.0[stage].iter().map(HeldMicroBatches::total_saved).max().unwrap_or(0)
    }

    /// Returns what a stage holds at both times.
    pub(in crate::bounds) fn of_stage(&self, stage: usize) -> &[HeldMicroBatches] {
        &self.0[stage]
    }
}

/// Returns what a stage holds when it holds the most micro-batches for the first time.
fn when_most_saved(order: &[Task], chunks: usize) -> HeldMicroBatches {
    let mut now = HeldMicroBatches::none(chunks);
    let (mut most, mut most_total) = (now.clone(), 0);
    for task in order {
        let goes_back = matches!(task.pass, StagePass::Backward | StagePass::InputGradient);
        if goes_back && now.total_saved() == most_total && most.backward_chunk.is_none() {
            most.backward_chunk = Some(task.chunk);
        }
        now.run(task);
        if now.total_saved() > most_total {
            most_total = now.total_saved();
            most = HeldMicroBatches { forward_chunk: Some(task.chunk), ..now.clone() };
        }
    }
    most
}

/// Returns what a stage holds when the most micro-batches wait for their weight-gradient pass. Only
/// the order up to the last forward pass counts, since the rest may differ with more micro-batches.
fn when_most_awaiting_weights(order: &[Task], chunks: usize) -> HeldMicroBatches {
    let end = order.iter().rposition(|task| task.pass == StagePass::Forward).map_or(0, |last| last + 1);
    let mut now = HeldMicroBatches::none(chunks);
    let mut most = now.clone();
    if order.iter().any(|task| task.pass == StagePass::WeightGradient) {
        for task in &order[..end] {
            now.run(task);
            let rank = |held: &HeldMicroBatches| (held.awaiting_weights.iter().sum::<usize>(), held.total_saved());
            if rank(&now) > rank(&most) {
                most = now.clone();
            }
        }
    }
    most
}

impl HeldMicroBatches {
    fn none(chunks: usize) -> Self {
        Self { saved: vec![0; chunks], awaiting_weights: vec![0; chunks], ..Self::default() }
    }

    /// Returns a lower bound on `self` and `other`.
    fn least(self, other: Self) -> Self {
        let least =
            |left: Vec<usize>, right: Vec<usize>| left.into_iter().zip(right).map(|(left, right)| left.min(right)).collect();
        Self {
            saved: least(self.saved, other.saved),
            awaiting_weights: least(self.awaiting_weights, other.awaiting_weights),
            forward_chunk: self.forward_chunk.filter(|_| self.forward_chunk == other.forward_chunk),
            backward_chunk: self.backward_chunk.filter(|_| self.backward_chunk == other.backward_chunk),
        }
    }

    /// Returns the micro-batches of all chunks between forward and backward pass.
    pub(super) fn total_saved(&self) -> usize {
        self.saved.iter().sum()
    }

    /// Updates the counts for a task that has run.
    fn run(&mut self, task: &Task) {
        let (saved, awaiting_weights) = (&mut self.saved[task.chunk], &mut self.awaiting_weights[task.chunk]);
        match task.pass {
            StagePass::Forward => *saved += 1,
            StagePass::Backward | StagePass::InputGradient => {
                *saved = saved.saturating_sub(1);
                *awaiting_weights += usize::from(task.pass == StagePass::InputGradient);
            }
            StagePass::WeightGradient => *awaiting_weights = awaiting_weights.saturating_sub(1),
        }
    }
}
