//! Schedules that are found by simulation: whenever a stage is free, it runs the first of its
//! preferences that is ready and fits into its memory. Passes take whole units of time, so the
//! result is deterministic.

use super::timing::{duration, finish};
use super::{Schedule, StagePass, Task, lists};

/// Interleaved 1F1B for numbers of micro-batches that are no multiple of the stages. With a smaller
/// last group, the fixed alternation of [`lists::interleaved`] would deadlock. Instead, every stage
/// goes through the forward passes and through the backward passes in Megatron-LM's order, and runs
/// whichever is ready, preferring the backward pass. It holds no more activations than with a
/// multiple of the stages.
///
/// It never deadlocks. Of the stages that are furthest behind in the forward order, the first can
/// advance unless its memory is full. Of the stages that are furthest behind in the backward order,
/// the last can advance if it has run the forward pass of that micro-batch. It has run that pass if
/// its memory is full: the memory holds more passes than there are between a chunk's positions in
/// the two orders.
pub(super) fn interleaved(stages: usize, micro_batches: usize, chunks: usize) -> Vec<Vec<Task>> {
    let mut forwards = vec![0; stages];
    let mut backwards = vec![0; stages];
    let bound = |stage| Schedule::Interleaved.in_flight_bound(stages, micro_batches, chunks, stage);
    let count = micro_batches * chunks;
    Simulation::new(Schedule::Interleaved, stages, micro_batches, chunks).run(2 * count, |simulation, stage| {
        let (next_forward, next_backward): (usize, usize) = (forwards[stage], backwards[stage]);
        if next_backward < next_forward {
            let (micro_batch, turn) = lists::interleaved_turn(stages, micro_batches, chunks, next_backward);
            let task = Task { pass: StagePass::Backward, micro_batch, chunk: chunks - 1 - turn };
            if simulation.is_ready(stage, task) {
                backwards[stage] += 1;
                return Some(task);
            }
        }
        if next_forward < count && next_forward - next_backward < bound(stage) {
            let (micro_batch, chunk) = lists::interleaved_turn(stages, micro_batches, chunks, next_forward);
            let task = Task { pass: StagePass::Forward, micro_batch, chunk };
            if simulation.is_ready(stage, task) {
                forwards[stage] += 1;
                return Some(task);
            }
        }
        None
    })
}

/// The preferences of a stage of ZB-V among the passes that are ready. Weight gradients come last.
type Preferences = [(StagePass, usize); 4];

/// Several orders of preferences: none is the best for all numbers of stages and micro-batches.
const PREFERENCES: [Preferences; 4] = {
    use StagePass::{Forward, InputGradient};
    [
        [(InputGradient, 0), (InputGradient, 1), (Forward, 1), (Forward, 0)],
        [(Forward, 1), (InputGradient, 0), (InputGradient, 1), (Forward, 0)],
        [(Forward, 1), (InputGradient, 1), (InputGradient, 0), (Forward, 0)],
        [(InputGradient, 1), (InputGradient, 0), (Forward, 1), (Forward, 0)],
    ]
};

/// The shortest of the orders that [`all_zero_bubble_v`] finds.
pub(super) fn zero_bubble_v(stages: usize, micro_batches: usize) -> Vec<Vec<Task>> {
    let mut best: Option<(u64, Vec<Vec<Task>>)> = None;
    for orders in all_zero_bubble_v(stages, micro_batches) {
        let end = finish(Schedule::ZeroBubbleV, stages, 2, &orders);
        if best.as_ref().is_none_or(|(least, _)| end < *least) {
            best = Some((end, orders));
        }
    }
    best.expect("invariant: there are orders of preferences").1
}

/// The orders of all preferences. Each is tried in two ways: with weight gradients only when a
/// stage has nothing else to do, and with accumulated weight gradients before the next forward
/// pass.
pub(super) fn all_zero_bubble_v(stages: usize, micro_batches: usize) -> impl Iterator<Item = Vec<Vec<Task>>> {
    let both = |preferences| [true, false].map(|may_pile_up| (preferences, may_pile_up));
    PREFERENCES
        .iter()
        .flat_map(both)
        .map(move |(preferences, may_pile_up)| v_shaped(stages, micro_batches, preferences, may_pile_up))
}

/// The orders for some preferences. A stage holds at most `2 * stages` activations of a chunk, as
/// much as 1F1B's first stage. One of these is reserved for its second chunk, so the oldest
/// micro-batch can always advance.
fn v_shaped(stages: usize, micro_batches: usize, preferences: &Preferences, may_pile_up: bool) -> Vec<Vec<Task>> {
    // The number of passes of each kind through each chunk that a stage has begun.
    let mut begun = vec![[[0usize; 2]; 3]; stages];
    let kind = |pass: StagePass| match pass {
        StagePass::Forward => 0,
        StagePass::Backward | StagePass::InputGradient => 1,
        StagePass::WeightGradient => 2,
    };
    let simulation = Simulation::new(Schedule::ZeroBubbleV, stages, micro_batches, 2);
    simulation.run(3 * 2 * micro_batches, |simulation, stage| {
        let counts = begun[stage];
        let all = |pass| counts[kind(pass)].iter().sum::<usize>();
        let held = all(StagePass::Forward) - all(StagePass::WeightGradient);
        let postponed = all(StagePass::InputGradient) - all(StagePass::WeightGradient);
        let ready = |pass: StagePass, chunk: usize| {
            let micro_batch = counts[kind(pass)][chunk];
            let task = Task { pass, micro_batch, chunk };
            (micro_batch < micro_batches && simulation.is_ready(stage, task)).then_some(task)
        };
        let weights = || ready(StagePass::WeightGradient, 1).or_else(|| ready(StagePass::WeightGradient, 0));
        let chosen = preferences.iter().find_map(|&(pass, chunk)| match pass {
            StagePass::Forward if held + 1 > 2 * stages - usize::from(chunk == 0) => None,
            StagePass::Forward if !may_pile_up && postponed >= stage + 2 => weights().or_else(|| ready(pass, chunk)),
            _ => ready(pass, chunk),
        });
        let chosen = chosen.or_else(weights)?;
        begun[stage][kind(chosen.pass)][chosen.chunk] += 1;
        Some(chosen)
    })
}

/// A simulated pipeline in which every pass takes whole units of time.
struct Simulation {
    schedule: Schedule,
    stages: usize,
    micro_batches: usize,
    chunks: usize,
    now: u64,
    /// The ends of the forward passes and of the input gradients, indexed by position in the model
    /// and micro-batch.
    done: [Vec<u64>; 2],
}

impl Simulation {
    fn new(schedule: Schedule, stages: usize, micro_batches: usize, chunks: usize) -> Self {
        let never = vec![u64::MAX; stages * chunks * micro_batches];
        Self { schedule, stages, micro_batches, chunks, now: 0, done: [never.clone(), never] }
    }

    /// Lets every free stage choose a task at every instant, until each has `count` tasks.
    fn run(mut self, count: usize, mut choose: impl FnMut(&Self, usize) -> Option<Task>) -> Vec<Vec<Task>> {
        let mut orders = vec![Vec::with_capacity(count); self.stages];
        let mut free = vec![0u64; self.stages];
        let mut missing = count * self.stages;
        while missing > 0 {
            let mut chosen = Vec::new();
            for stage in 0..self.stages {
                if free[stage] <= self.now
                    && orders[stage].len() < count
                    && let Some(task) = choose(&self, stage)
                {
                    chosen.push((stage, task));
                }
            }
            for (stage, task) in chosen {
                free[stage] = self.now + duration(task.pass);
                let index = self.index(self.schedule.position(self.stages, stage, task.chunk), task.micro_batch);
                match task.pass {
                    StagePass::Forward => self.done[0][index] = free[stage],
                    StagePass::Backward | StagePass::InputGradient => self.done[1][index] = free[stage],
                    StagePass::WeightGradient => {}
                }
                orders[stage].push(task);
                missing -= 1;
            }
            self.now += 1;
        }
        orders
    }

    fn index(&self, position: usize, micro_batch: usize) -> usize {
        position * self.micro_batches + micro_batch
    }

    /// Whether all passes that a task depends on have ended.
    fn is_ready(&self, stage: usize, task: Task) -> bool {
        let position = self.schedule.position(self.stages, stage, task.chunk);
        let is_done = |kind: usize, position| self.done[kind][self.index(position, task.micro_batch)] <= self.now;
        match task.pass {
            StagePass::Forward => position == 0 || is_done(0, position - 1),
            StagePass::Backward | StagePass::InputGradient => {
                is_done(0, position) && (position + 1 == self.stages * self.chunks || is_done(1, position + 1))
            }
            StagePass::WeightGradient => is_done(1, position),
        }
    }
}
