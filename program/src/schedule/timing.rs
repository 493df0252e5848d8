//! The start times of a schedule's passes. Each pass comes after the one before it in its stage,
//! and after the pass of the neighbouring chunk that it needs.

use super::{Schedule, StagePass, Task};

/// The duration of a pass in units of time.
pub(super) const fn duration(pass: StagePass) -> u64 {
    match pass {
        StagePass::Backward => 2,
        StagePass::Forward | StagePass::InputGradient | StagePass::WeightGradient => 1,
    }
}

/// The start of each task of each stage, with unit durations ([`duration`]) and without delays of
/// messages. `None` if the orders deadlock.
fn starts(schedule: Schedule, stages: usize, chunks: usize, orders: &[Vec<Task>]) -> Option<Vec<Vec<u64>>> {
    let unit_times = |_: usize, task: &Task, free: u64, ready: u64| {
        let start = free.max(ready);
        let end = start + duration(task.pass);
        PassTimes { start, free: end, passed: end }
    };
    pass_starts(schedule, stages, chunks, orders, unit_times)
}

/// The times of one pass of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassTimes {
    /// The start.
    pub start: u64,
    /// When the stage is free for its next pass.
    pub free: u64,
    /// When the neighbouring chunk can take over the micro-batch.
    pub passed: u64,
}

/// The start of each task of each stage; `None` if the orders deadlock. Orders may consist of
/// forward passes only.
///
/// `times(stage, task, free, ready)` returns the times of a task, given when the stage is free and
/// when all results that the task needs have arrived.
pub fn pass_starts(
    schedule: Schedule,
    stages: usize,
    chunks: usize,
    orders: &[Vec<Task>],
    times: impl Fn(usize, &Task, u64, u64) -> PassTimes,
) -> Option<Vec<Vec<u64>>> {
    let of_run = |stage: usize, run: &[Task], free: u64, ready: u64| match run {
        [task, ..] => times(stage, task, free, ready),
        [] => PassTimes { start: free, free, passed: free },
    };
    run_starts(schedule, stages, chunks, orders, |_, _| 1, of_run)
}

/// As [`pass_starts`], for orders in which some tasks begin together: each run of
/// `length(stage, index)` tasks from a stage's task `index` on. A run waits for the inputs of all
/// its tasks.
pub(super) fn run_starts(
    schedule: Schedule,
    stages: usize,
    chunks: usize,
    orders: &[Vec<Task>],
    length: impl Fn(usize, usize) -> usize,
    times: impl Fn(usize, &[Task], u64, u64) -> PassTimes,
) -> Option<Vec<Vec<u64>>> {
    let positions = stages * chunks;
    let micro_batches = orders.iter().flatten().map(|task| task.micro_batch + 1).max().unwrap_or(0);
    let index = |position: usize, task: &Task| position * micro_batches + task.micro_batch;
    // The times at which the neighbouring chunk can continue after the forward pass and after the
    // input gradient, indexed by position in the model and micro-batch.
    let mut done = [vec![None; positions * micro_batches], vec![None; positions * micro_batches]];
    let mut starts: Vec<Vec<u64>> = orders.iter().map(|order| Vec::with_capacity(order.len())).collect();
    let mut free = vec![0u64; stages];
    // Stages that may be able to advance. A finished pass adds the stage of the neighbouring chunk.
    let mut awake: Vec<usize> = (0..stages).rev().collect();
    while let Some(stage) = awake.pop() {
        loop {
            let begun = starts[stage].len();
            let Some(run) = orders[stage].get(begun..begun + length(stage, begun)) else { break };
            let ready_for = |task: &Task| {
                let position = schedule.position(stages, stage, task.chunk);
                match task.pass {
                    StagePass::Forward if position == 0 => Some(0),
                    StagePass::Forward => done[0][index(position - 1, task)],
                    StagePass::Backward | StagePass::InputGradient if position + 1 == positions => {
                        done[0][index(position, task)].map(|_| 0)
                    }
                    StagePass::Backward | StagePass::InputGradient => {
                        done[0][index(position, task)].and(done[1][index(position + 1, task)])
                    }
                    StagePass::WeightGradient => done[1][index(position, task)].map(|_| 0),
                }
            };
            let ready = run.iter().try_fold(0, |latest: u64, task| ready_for(task).map(|ready| latest.max(ready)));
            let Some(ready) = ready else { break };
            let times = times(stage, run, free[stage], ready);
            free[stage] = times.free;
            for task in run {
                let position = schedule.position(stages, stage, task.chunk);
                starts[stage].push(times.start);
                let neighbour = match task.pass {
                    StagePass::Forward => {
                        done[0][index(position, task)] = Some(times.passed);
                        (position + 1 < positions).then_some(position + 1)
                    }
                    StagePass::Backward | StagePass::InputGradient => {
                        done[1][index(position, task)] = Some(times.passed);
                        position.checked_sub(1)
                    }
                    StagePass::WeightGradient => None,
                };
                let woken = neighbour.map(|position| schedule.place(stages, position).0);
                awake.extend(woken.filter(|&other| other != stage));
            }
        }
    }
    starts.iter().zip(orders).all(|(starts, order)| starts.len() == order.len()).then_some(starts)
}

/// The end of the last task of all stages; `u64::MAX` if the orders deadlock.
pub(super) fn finish(schedule: Schedule, stages: usize, chunks: usize, orders: &[Vec<Task>]) -> u64 {
    let Some(starts) = starts(schedule, stages, chunks, orders) else { return u64::MAX };
    let ends = starts.iter().zip(orders).filter_map(|(starts, order)| Some(starts.last()? + duration(order.last()?.pass)));
    ends.max().unwrap_or(0)
}
