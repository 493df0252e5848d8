//! Woven orders overlap passes: a stage runs a forward and a backward pass of two micro-batches
//! together, so that the communication of one overlaps the computation of the other (DualPipe and
//! DualPipeV, DeepSeek-AI 2024, "DeepSeek-V3 Technical Report"; Megatron-Core's combined 1F1B).
//! A pair starts when the inputs of both passes have arrived, and ends when both have ended. So
//! neither pass may depend, through other stages, on the other. In 1F1B, forward and backward
//! passes move in opposite directions: two neighbouring stages would each wait for the other's
//! pair. In a V-shaped schedule, forward passes of one chunk move in the same direction as backward
//! passes of the other, so this does not happen.

use super::timing::{PassTimes, duration, finish, run_starts};
use super::{Schedule, StagePass, Task};
use std::collections::VecDeque;

/// Each stage's tasks in order, and the pairs of tasks that run together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WovenOrders {
    /// The tasks of every stage.
    pub orders: Vec<Vec<Task>>,
    /// By stage: the indices of the tasks that run together with the task after them, ascending. No
    /// task is in two pairs.
    pub pairs: Vec<Vec<usize>>,
}

impl WovenOrders {
    /// Orders without pairs.
    pub fn unpaired(orders: Vec<Vec<Task>>) -> Self {
        let pairs = vec![Vec::new(); orders.len()];
        Self { orders, pairs }
    }

    /// Pairs all neighbouring passes of `orders`, starting with either the forward or the backward
    /// pass. Returns the orders unpaired if both ways lengthen the pipeline.
    pub(super) fn pairing(schedule: Schedule, stages: usize, chunks: usize, orders: Vec<Vec<Task>>) -> Self {
        let unpaired = finish(schedule, stages, chunks, &orders);
        let mut best = Self::unpaired(orders);
        for starts_forward in [true, false] {
            let pairs = best.orders.iter().map(|order| neighbouring_pairs(order, starts_forward)).collect();
            let other = Self { pairs, ..best.clone() };
            if other.pair_count() > best.pair_count() && other.finish(schedule, stages, chunks) <= unpaired {
                best = other;
            }
        }
        best
    }

    /// The number of pairs of all stages.
    pub fn pair_count(&self) -> usize {
        self.pairs.iter().map(Vec::len).sum()
    }

    /// The number of tasks that start together with task `index` of a stage: 2 if `index` is the
    /// first of a pair, else 1.
    fn length(&self, stage: usize, index: usize) -> usize {
        if self.pairs[stage].binary_search(&index).is_ok() { 2 } else { 1 }
    }

    /// The index of the first task of a stage that begins after its task `index` has ended.
    pub(crate) fn after(&self, stage: usize, index: usize) -> usize {
        index + self.length(stage, index)
    }

    /// The start of each task of each stage, with unit durations and without delays of messages.
    /// Both tasks of a pair have the same. `None` if the orders deadlock.
    pub(crate) fn starts(&self, schedule: Schedule, stages: usize, chunks: usize) -> Option<Vec<Vec<u64>>> {
        let unit_times = |_: usize, run: &[Task], free: u64, ready: u64| {
            let start = free.max(ready);
            let end = start + run.iter().map(|task| duration(task.pass)).sum::<u64>();
            PassTimes { start, free: end, passed: end }
        };
        run_starts(schedule, stages, chunks, &self.orders, |stage, index| self.length(stage, index), unit_times)
    }

    /// The end of the last task of all stages; `u64::MAX` if the orders deadlock.
    pub fn finish(&self, schedule: Schedule, stages: usize, chunks: usize) -> u64 {
        let Some(starts) = self.starts(schedule, stages, chunks) else { return u64::MAX };
        let end_of_stage = |(stage, starts): (usize, &Vec<u64>)| {
            let first = (starts.len().checked_sub(2)).filter(|&index| self.length(stage, index) == 2);
            let first = first.or(starts.len().checked_sub(1))?;
            Some(starts[first] + self.orders[stage][first..].iter().map(|task| duration(task.pass)).sum::<u64>())
        };
        starts.iter().enumerate().filter_map(end_of_stage).max().unwrap_or(0)
    }
}

/// The indices of all tasks that can be paired with the next one. The first task of every pair is a
/// forward pass if `starts_forward`, else a backward pass.
fn neighbouring_pairs(order: &[Task], starts_forward: bool) -> Vec<usize> {
    let is_backward = |task: &Task| matches!(task.pass, StagePass::Backward | StagePass::InputGradient);
    let is_forward = |task: &Task| task.pass == StagePass::Forward;
    let is_pair = |pair: &[Task]| match pair {
        [one, other] if one.micro_batch == other.micro_batch => false,
        [one, other] if starts_forward => is_forward(one) && is_backward(other),
        [one, other] => is_backward(one) && is_forward(other),
        _ => false,
    };
    // Two pairs of the same direction share no task.
    order.windows(2).enumerate().filter(|(_, pair)| is_pair(pair)).map(|(index, _)| index).collect()
}

/// The orders of DualPipeV (DeepSeek-AI's repository `DualPipe`, `dualpipev.py`). Needs
/// `micro_batches >= 2 * stages`. Weight gradients are separate passes while the pipeline fills and
/// in the second half of the drain; all other backward passes are whole.
///
/// A stage holds one chunk's activations more than in ZB-V.
pub(super) fn dual_pipe_v(stages: usize, micro_batches: usize) -> WovenOrders {
    let stages = (0..stages).map(|stage| {
        let (order, after) = (DualPipeStage::default(), stages - 1 - stage);
        order.fill(stage, after).steady(micro_batches - 2 * stages + stage + 1, after).drain(stage, after)
    });
    let (orders, pairs) = stages.map(|stage| (stage.tasks, stage.pairs)).unzip();
    WovenOrders { orders, pairs }
}

/// The order of one stage of DualPipeV, under construction.
#[derive(Default)]
struct DualPipeStage {
    tasks: Vec<Task>,
    pairs: Vec<usize>,
    /// By chunk: the number of forward passes so far.
    forwards: [usize; 2],
    /// By chunk: the number of backward passes so far.
    backwards: [usize; 2],
    /// The weight gradients that are still to come.
    postponed: VecDeque<Task>,
}

impl DualPipeStage {
    /// From the start of the step to the first pair. There are `after` stages after this one.
    fn fill(mut self, stage: usize, after: usize) -> Self {
        (0..2 * after).for_each(|_| self.forward(0));
        for _ in 0..=stage {
            self.forward(0);
            self.forward(1);
        }
        for _ in 0..after {
            self.input_gradient(1);
            self.weight_gradient();
            self.forward(1);
        }
        self
    }

    /// Two pairs in each of `turns`. Then no forward pass of chunk 0 is left, and backward passes
    /// of chunk 1 run unpaired.
    fn steady(mut self, turns: usize, after: usize) -> Self {
        for turn in 0..turns {
            // As in `dualpipev.py`, the last stage does not pair its first backward pass: that
            // shortens the bubble.
            if turn == 0 && after == 0 {
                self.forward(0);
                self.backward(1);
            } else {
                self.pair(0, 1);
            }
            self.pair(1, 0);
        }
        for _ in 0..after {
            self.backward(1);
            self.pair(1, 0);
        }
        self
    }

    /// From the last forward pass to the end of the step.
    fn drain(mut self, stage: usize, after: usize) -> Self {
        // The second half of these passes postpone their weight gradients, which fill the bubble.
        for pass in 0..2 * (stage + 1) {
            let chunk = 1 - pass % 2;
            if pass <= stage { self.backward(chunk) } else { self.input_gradient(chunk) }
        }
        for _ in 0..after {
            self.weight_gradient();
            self.input_gradient(0);
        }
        (0..=stage).for_each(|_| self.weight_gradient());
        self
    }

    fn pair(&mut self, forward: usize, backward: usize) {
        self.pairs.push(self.tasks.len());
        self.forward(forward);
        self.backward(backward);
    }

    fn forward(&mut self, chunk: usize) {
        self.tasks.push(Task { pass: StagePass::Forward, micro_batch: self.forwards[chunk], chunk });
        self.forwards[chunk] += 1;
    }

    fn backward(&mut self, chunk: usize) {
        self.tasks.push(Task { pass: StagePass::Backward, micro_batch: self.backwards[chunk], chunk });
        self.backwards[chunk] += 1;
    }

    fn input_gradient(&mut self, chunk: usize) {
        let task = Task { pass: StagePass::InputGradient, micro_batch: self.backwards[chunk], chunk };
        self.backwards[chunk] += 1;
        self.postponed.push_back(Task { pass: StagePass::WeightGradient, ..task });
        self.tasks.push(task);
    }

    fn weight_gradient(&mut self) {
        self.tasks.extend(self.postponed.pop_front());
    }
}
