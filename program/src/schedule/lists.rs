//! The schedules whose lists can be written down at once.

use super::{StagePass, Task};

fn task(pass: StagePass, micro_batch: usize, chunk: usize) -> Task {
    Task { pass, micro_batch, chunk }
}

pub(super) fn gpipe(micro_batches: usize) -> Vec<Task> {
    let all = |pass| (0..micro_batches).map(move |micro_batch| task(pass, micro_batch, 0));
    all(StagePass::Forward).chain(all(StagePass::Backward)).collect()
}

/// A stage runs ahead by as many micro-batches as there are stages after it, then takes turns.
pub(super) fn one_forward_one_backward(stages: usize, micro_batches: usize, stage: usize) -> Vec<Task> {
    let forward = |index| task(StagePass::Forward, index, 0);
    let backward = |index| task(StagePass::Backward, index, 0);
    take_turns(micro_batches, stages - 1 - stage, forward, backward)
}

/// The order of 1F1B over (micro-batch, chunk) pairs: as many micro-batches as there are stages go through a chunk, then the same through the
/// next (Narayanan et al. 2021, and Megatron-LM). The micro-batches are a multiple of the stages.
pub(super) fn interleaved(stages: usize, micro_batches: usize, chunks: usize, stage: usize) -> Vec<Task> {
    let forward = |index| {
        let (micro_batch, turn) = interleaved_turn(stages, micro_batches, chunks, index);
        task(StagePass::Forward, micro_batch, turn)
    };
    let backward = |index| {
        let (micro_batch, turn) = interleaved_turn(stages, micro_batches, chunks, index);
        task(StagePass::Backward, micro_batch, chunks - 1 - turn)
    };
    take_turns(micro_batches * chunks, interleaved_warm_up(stages, chunks, stage), forward, backward)
}

/// How many forward passes a stage runs ahead by: until the first micro-batch has come back from the last chunk, where as many
/// follow as there are stages to go there and back.
pub(super) fn interleaved_warm_up(stages: usize, chunks: usize, stage: usize) -> usize {
    2 * (stages - 1 - stage) + (chunks - 1) * stages
}

/// The micro-batch of the `index`-th pass of an interleaved stage, and the how-many-eth of the chunks it goes through. The last
/// micro-batches, if they are fewer than the stages, go through the chunks as a smaller group.
pub(super) fn interleaved_turn(stages: usize, micro_batches: usize, chunks: usize, index: usize) -> (usize, usize) {
    let first = index / (stages * chunks) * stages;
    let group = stages.min(micro_batches - first);
    let within = index - first * chunks;
    (first + within % group, within / group)
}

/// `warm_up` forward passes, then one forward and one backward in turn, then the backward passes that are left.
fn take_turns(count: usize, warm_up: usize, forward: impl Fn(usize) -> Task, backward: impl Fn(usize) -> Task) -> Vec<Task> {
    let warm_up = warm_up.min(count);
    let mut tasks: Vec<Task> = (0..warm_up).map(&forward).collect();
    for index in warm_up..count {
        tasks.push(forward(index));
        tasks.push(backward(index - warm_up));
    }
    tasks.extend((count - warm_up..count).map(backward));
    tasks
}

/// 1F1B in which a stage puts off the gradients of its parameters by as many micro-batches as there are stages before it: it then holds
/// as many micro-batches as 1F1B's first stage does, and has work where 1F1B's drain leaves it none.
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
    let put_off = stage.min(micro_batches);
    tasks.extend((micro_batches - put_off..micro_batches).map(|micro_batch| task(StagePass::WeightGradient, micro_batch, 0)));
    tasks
}
