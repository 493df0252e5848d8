//! Schedules with a closed form.

use super::{StagePass, Task};

fn task(pass: StagePass, micro_batch: usize, chunk: usize) -> Task {
    Task { pass, micro_batch, chunk }
}

pub(super) fn gpipe(micro_batches: usize) -> Vec<Task> {
    let all = |pass| (0..micro_batches).map(move |micro_batch| task(pass, micro_batch, 0));
    all(StagePass::Forward).chain(all(StagePass::Backward)).collect()
}

/// A stage runs ahead by one forward pass for every stage after it, then alternates.
pub(super) fn one_forward_one_backward(stages: usize, micro_batches: usize, stage: usize) -> Vec<Task> {
    let forward = |index| task(StagePass::Forward, index, 0);
    let backward = |index| task(StagePass::Backward, index, 0);
    alternate(micro_batches, stages - 1 - stage, forward, backward)
}

/// 1F1B over pairs of micro-batch and chunk. A group of `stages` micro-batches goes through a
/// chunk, then through the next (Narayanan et al. 2021, and Megatron-LM). `micro_batches` is a
/// multiple of `stages`.
pub(super) fn interleaved(stages: usize, micro_batches: usize, chunks: usize, stage: usize) -> Vec<Task> {
    let forward = |index| {
        let (micro_batch, turn) = interleaved_turn(stages, micro_batches, chunks, index);
        task(StagePass::Forward, micro_batch, turn)
    };
    let backward = |index| {
        let (micro_batch, turn) = interleaved_turn(stages, micro_batches, chunks, index);
        task(StagePass::Backward, micro_batch, chunks - 1 - turn)
    };
    alternate(micro_batches * chunks, interleaved_warm_up(stages, chunks, stage), forward, backward)
}

/// The number of forward passes that a stage runs ahead by: those before the first micro-batch's
/// backward pass reaches the stage.
pub(super) fn interleaved_warm_up(stages: usize, chunks: usize, stage: usize) -> usize {
    2 * (stages - 1 - stage) + (chunks - 1) * stages
}

/// The micro-batch of an interleaved stage's pass number `index`, and the number of its chunk,
/// counted in the direction of the pass. If the last micro-batches are fewer than the stages, they
/// form a smaller group.
pub(super) fn interleaved_turn(stages: usize, micro_batches: usize, chunks: usize, index: usize) -> (usize, usize) {
    let first = index / (stages * chunks) * stages;
    let group = stages.min(micro_batches - first);
    let within = index - first * chunks;
    (first + within % group, within / group)
}

/// `warm_up` forward passes, then forward and backward passes in turn, then the remaining backward
/// passes.
fn alternate(count: usize, warm_up: usize, forward: impl Fn(usize) -> Task, backward: impl Fn(usize) -> Task) -> Vec<Task> {
    let warm_up = warm_up.min(count);
    let mut tasks: Vec<Task> = (0..warm_up).map(&forward).collect();
    for index in warm_up..count {
        tasks.push(forward(index));
        tasks.push(backward(index - warm_up));
    }
    tasks.extend((count - warm_up..count).map(backward));
    tasks
}

/// 1F1B in which a stage postpones its weight gradients by one micro-batch for every stage before
/// it. It then holds as many micro-batches as 1F1B's first stage, and has work while 1F1B's
/// pipeline drains.
pub(super) fn zero_bubble_h1(stages: usize, micro_batches: usize, stage: usize) -> Vec<Task> {
    let mut tasks = Vec::with_capacity(3 * micro_batches);
    for one in one_forward_one_backward(stages, micro_batches, stage) {
        match one.pass {
            StagePass::Backward => {
                tasks.push(task(StagePass::InputGradient, one.micro_batch, 0));
                if one.micro_batch >= stage {
                    tasks.push(task(StagePass::WeightGradient, one.micro_batch - stage, 0));
                }
            }
            _ => tasks.push(one),
        }
    }
    let postponed = stage.min(micro_batches);
    tasks.extend((micro_batches - postponed..micro_batches).map(|micro_batch| task(StagePass::WeightGradient, micro_batch, 0)));
    tasks
}
