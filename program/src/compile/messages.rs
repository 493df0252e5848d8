//! Messages between stages: who receives what before which of its tasks.
//!
//! Two stages' messages arrive in the order in which they are sent, whichever chunks they are for. So a stage receives in the sender's
//! order: what one of its tasks needs, and what was sent before that.
//!
//! A message that nobody takes holds its sender up as soon as the place of what is sent is wanted again. So it is also taken before
//! any task that, with passes of equal length, begins no earlier than the sender's next one: what a stage does before it takes a
//! message then never waits for what the sender does after it. (Proof: by the time at which tasks begin. A task begins later than those
//! whose messages it needs; one that waits for its stage's earlier message to be taken begins later than all that come before the
//! taking.)

use super::Lowering;
use super::cuts::Cuts;
use crate::schedule::{Schedule, StagePass, Task, timing};
use foretell_models::{OperatorId, Pass, TensorId};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// A tensor that comes from another stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Receive {
    pub(super) tensor: TensorId,
    pub(super) micro_batch: usize,
    pub(super) from: usize,
}

/// The stage's pass in which an operator runs.
pub(super) fn pass_of(schedule: Schedule, pass: Pass) -> StagePass {
    match pass {
        Pass::Forward => StagePass::Forward,
        Pass::InputGradient if schedule.splits_backward() => StagePass::InputGradient,
        Pass::WeightGradient if schedule.splits_backward() => StagePass::WeightGradient,
        Pass::InputGradient | Pass::WeightGradient => StagePass::Backward,
    }
}

/// A pass through a chunk, of any micro-batch.
pub(super) type ChunkPass = (usize, StagePass);

/// What leaves a stage and where it is read.
struct Traffic {
    /// For each stage and pass what it sends to whom, in the order of its operators.
    sends: Vec<FxHashMap<ChunkPass, Vec<(TensorId, usize)>>>,
    /// For each stage and tensor that it receives, who reads it.
    readers: Vec<FxHashMap<TensorId, Vec<ChunkPass>>>,
}

impl Traffic {
    fn new(lowering: &Lowering, cuts: &Cuts, schedule: Schedule) -> Self {
        let mut sends = vec![FxHashMap::default(); cuts.stages];
        let mut readers = vec![FxHashMap::default(); cuts.stages];
        let place = |id: OperatorId| {
            let operator = &lowering.graph.operators[id.0];
            let chunk = cuts.chunk_of_block[operator.block];
            (cuts.stage_of_block[operator.block], (chunk, pass_of(schedule, operator.pass)))
        };
        for (index, operator) in lowering.graph.operators.iter().enumerate() {
            let (stage, pass) = place(OperatorId(index));
            for output in operator.outputs.iter().filter(|output| lowering.is_activation(output.tensor)) {
                for other in lowering.other_readers(output.tensor, stage, &cuts.stage_of_block) {
                    let list: &mut Vec<(TensorId, usize)> = sends[stage].entry(pass).or_default();
                    list.push((output.tensor, other));
                }
                for &reader in &lowering.consumers[output.tensor.0] {
                    let (other, pass) = place(reader);
                    if other != stage {
                        let passes: &mut Vec<ChunkPass> = readers[other].entry(output.tensor).or_default();
                        if !passes.contains(&pass) {
                            passes.push(pass);
                        }
                    }
                }
            }
        }
        Self { sends, readers }
    }
}

/// For each stage and each of its tasks, what is received before it, in that order.
pub(super) fn receives(lowering: &Lowering, cuts: &Cuts, schedule: Schedule, orders: &[Vec<Task>]) -> Vec<Vec<Vec<Receive>>> {
    let mut receives: Vec<Vec<Vec<Receive>>> = orders.iter().map(|order| vec![Vec::new(); order.len()]).collect();
    if cuts.stages == 1 {
        return receives;
    }
    let traffic = Traffic::new(lowering, cuts, schedule);
    let starts = timing::starts(schedule, cuts.stages, cuts.chunks, orders);
    let index_of = |order: &Vec<Task>| order.iter().enumerate().map(|(index, &task)| (task, index)).collect();
    let indices: Vec<FxHashMap<Task, usize>> = orders.iter().map(index_of).collect();
    for (from, order) in orders.iter().enumerate() {
        // For each receiver, in the order of sending: what, and before which task at the latest.
        let mut messages: BTreeMap<usize, Vec<(Receive, usize)>> = BTreeMap::new();
        for (index, task) in order.iter().enumerate() {
            for &(tensor, to) in traffic.sends[from].get(&(task.chunk, task.pass)).into_iter().flatten() {
                let micro_batch = task.micro_batch;
                let readers = traffic.readers[to].get(&tensor).into_iter().flatten();
                let read =
                    readers.filter_map(|&(chunk, pass)| indices[to].get(&Task { pass, micro_batch, chunk }).copied()).min();
                let next = starts.as_ref().and_then(|starts| {
                    let next = *starts[from].get(index + 1)?;
                    Some(starts[to].partition_point(|&start| start < next))
                });
                let latest = [read, next].into_iter().flatten().min().unwrap_or(usize::MAX);
                messages.entry(to).or_default().push((Receive { tensor, micro_batch, from }, latest));
            }
        }
        for (to, messages) in messages {
            // What is sent earlier is received no later.
            let mut latest = orders[to].len().saturating_sub(1);
            let before: Vec<usize> = messages
                .iter()
                .rev()
                .map(|&(_, own)| {
                    latest = latest.min(own);
                    latest
                })
                .collect();
            for (&(receive, _), &before) in messages.iter().zip(before.iter().rev()) {
                receives[to][before].push(receive);
            }
        }
    }
    receives
}
