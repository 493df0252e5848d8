//! When the passes of given lists run: each after the one before it in its stage, and after its neighbour's in the model.

use super::{Schedule, StagePass, Task};

/// The units of time that a pass takes.
pub(super) const fn duration(pass: StagePass) -> u64 {
    match pass {
        StagePass::Backward => 2,
        StagePass::Forward | StagePass::InputGradient | StagePass::WeightGradient => 1,
    }
}

/// When each task of each list begins if passes take units of time ([`duration`]) and messages none; `None` where the lists wait for each other
/// in a circle.
pub(crate) fn starts(schedule: Schedule, stages: usize, chunks: usize, orders: &[Vec<Task>]) -> Option<Vec<Vec<u64>>> {
    let in_turn = |_: usize, task: &Task, free: u64, ready: u64| {
        let start = free.max(ready);
        let over = start + duration(task.pass);
        PassTimes { start, free: over, passed: over }
    };
    pass_starts(schedule, stages, chunks, orders, in_turn)
}

/// When a pass of a stage's list begins, when the stage is free for the next, and when another may take over the micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassTimes {
    /// When it begins.
    pub start: u64,
    /// When the stage is free again.
    pub free: u64,
    /// When the stage of the next chunk has what it needs.
    pub passed: u64,
}

/// When each task of each list begins; `None` where the lists wait for each other in a circle. `times` says what a stage's task takes that has the
/// stage from `free` on and what it needs of other stages from `ready` on. Lists may be of forward passes only.
pub fn pass_starts(
    schedule: Schedule,
    stages: usize,
    chunks: usize,
    orders: &[Vec<Task>],
    times: impl Fn(usize, &Task, u64, u64) -> PassTimes,
) -> Option<Vec<Vec<u64>>> {
    let positions = stages * chunks;
    let micro_batches = orders.iter().flatten().map(|task| task.micro_batch + 1).max().unwrap_or(0);
    // When another stage may take over from the forward pass and from the input's gradient of a micro-batch at a position.
    let mut done = [vec![None; positions * micro_batches], vec![None; positions * micro_batches]];
    let mut starts: Vec<Vec<u64>> = orders.iter().map(|order| Vec::with_capacity(order.len())).collect();
    let mut free = vec![0u64; stages];
    // Stages that may go on; each that does wakes those on both sides of its chunk.
    let mut awake: Vec<usize> = (0..stages).rev().collect();
    while let Some(stage) = awake.pop() {
        while let Some(task) = orders[stage].get(starts[stage].len()) {
            let position = schedule.position(stages, stage, task.chunk);
            let place = |position: usize| position * micro_batches + task.micro_batch;
            let ready = match task.pass {
                StagePass::Forward if position == 0 => Some(0),
                StagePass::Forward => done[0][place(position - 1)],
                StagePass::Backward | StagePass::InputGradient if position + 1 == positions => {
                    done[0][place(position)].map(|_| 0)
                }
                StagePass::Backward | StagePass::InputGradient => done[0][place(position)].and(done[1][place(position + 1)]),
                StagePass::WeightGradient => done[1][place(position)].map(|_| 0),
            };
            let Some(ready) = ready else { break };
            let times = times(stage, task, free[stage], ready);
            free[stage] = times.free;
            starts[stage].push(times.start);
            let neighbour = match task.pass {
                StagePass::Forward => {
                    done[0][place(position)] = Some(times.passed);
                    (position + 1 < positions).then_some(position + 1)
                }
                StagePass::Backward | StagePass::InputGradient => {
                    done[1][place(position)] = Some(times.passed);
                    position.checked_sub(1)
                }
                StagePass::WeightGradient => None,
            };
            let woken = neighbour.map(|position| schedule.place(stages, chunks, position).0);
            awake.extend(woken.filter(|&other| other != stage));
        }
    }
    starts.iter().zip(orders).all(|(starts, order)| starts.len() == order.len()).then_some(starts)
}

/// When the last task of all lists ends; the greatest number there is where they wait for each other in a circle.
pub(super) fn finish(schedule: Schedule, stages: usize, chunks: usize, orders: &[Vec<Task>]) -> u64 {
    let Some(starts) = starts(schedule, stages, chunks, orders) else { return u64::MAX };
    let ends = starts.iter().zip(orders).filter_map(|(starts, order)| Some(starts.last()? + duration(order.last()?.pass)));
    ends.max().unwrap_or(0)
}
