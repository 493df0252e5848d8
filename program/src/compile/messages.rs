//! The messages between stages: which ones a stage receives before each of its tasks.
//!
//! Messages between two stages arrive in the order in which they are sent, whichever chunks they
//! are for. So a stage receives in the sender's order: the messages that its next task needs, and
//! all that were sent before those.
//!
//! A message that is not received blocks its sender as soon as the sender reuses the buffer. So a
//! stage receives each message at the latest before its first task that starts no earlier than the
//! sender's next task. Starts are those of a pipeline whose passes take unit times. Then nothing
//! that a stage runs before it receives a message waits for anything that the sender runs after
//! sending it.
//!
//! Proof that this does not deadlock, by induction over the unit-time starts: a task starts later
//! than the tasks whose messages it needs. A task that waits until its stage's previous message is
//! received starts later than all of the receiver's tasks before that receive. Two woven tasks
//! count as one: they receive before they begin, and send when both have ended ([`super::weave`]).

use super::cuts::{ChunkPass, Cuts};
use super::lowering::Lowering;
use crate::schedule::{Schedule, Task, WovenOrders};
use foretell_models::TensorId;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// The receipt of a tensor of one micro-batch from another stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Receive {
    pub(super) tensor: TensorId,
    pub(super) micro_batch: usize,
    /// The sending stage.
    pub(super) from: usize,
}

/// The tensors that leave each stage, and the passes that read them elsewhere.
struct StageTraffic {
    /// For each stage and chunk pass, the tensors that it sends and the receiving stage of each, in
    /// the order of its operators.
    sends: Vec<FxHashMap<ChunkPass, Vec<(TensorId, usize)>>>,
    /// For each stage and tensor that it receives, the chunk passes that read it.
    readers: Vec<FxHashMap<TensorId, Vec<ChunkPass>>>,
}

impl StageTraffic {
    fn new(lowering: &Lowering, cuts: &Cuts) -> Self {
        let mut sends = vec![FxHashMap::default(); cuts.stages];
        let mut readers = vec![FxHashMap::default(); cuts.stages];
        for operator in &lowering.graph.operators {
            let stage = cuts.stage(operator);
            for output in operator.outputs.iter().filter(|output| lowering.is_activation(output.tensor)) {
                for other in lowering.other_readers(output.tensor, stage, &cuts.stage_of_block) {
                    for pass in cuts.chunk_passes(operator) {
                        let list: &mut Vec<(TensorId, usize)> = sends[stage].entry(pass).or_default();
                        list.push((output.tensor, other));
                    }
                }
                for &reader in &lowering.consumers[output.tensor.0] {
                    let reader = &lowering.graph.operators[reader.0];
                    let other = cuts.stage(reader);
                    if other != stage {
                        let passes: &mut Vec<ChunkPass> = readers[other].entry(output.tensor).or_default();
                        for pass in cuts.chunk_passes(reader) {
                            if !passes.contains(&pass) {
                                passes.push(pass);
                            }
                        }
                    }
                }
            }
        }
        Self { sends, readers }
    }
}

/// For each stage and each of its tasks, the messages that the stage receives just before that
/// task, in order. `woven` has the tasks of each stage.
pub(super) fn receives(lowering: &Lowering, cuts: &Cuts, schedule: Schedule, woven: &WovenOrders) -> Vec<Vec<Vec<Receive>>> {
    let orders = &woven.orders;
    let mut receives: Vec<Vec<Vec<Receive>>> = orders.iter().map(|order| vec![Vec::new(); order.len()]).collect();
    if cuts.stages == 1 {
        return receives;
    }
    let traffic = StageTraffic::new(lowering, cuts);
    let starts = woven.starts(schedule, cuts.stages, cuts.chunks);
    let index_of = |order: &Vec<Task>| order.iter().enumerate().map(|(index, &task)| (task, index)).collect();
    let indices: Vec<FxHashMap<Task, usize>> = orders.iter().map(index_of).collect();
    for (from, order) in orders.iter().enumerate() {
        // For each receiving stage, in sending order: the message, and the last task that it may
        // precede.
        let mut messages: BTreeMap<usize, Vec<(Receive, usize)>> = BTreeMap::new();
        for (index, task) in order.iter().enumerate() {
            for &(tensor, to) in traffic.sends[from].get(&(task.chunk, task.pass)).into_iter().flatten() {
                let micro_batch = task.micro_batch;
                let readers = traffic.readers[to].get(&tensor).into_iter().flatten();
                let read =
                    readers.filter_map(|&(chunk, pass)| indices[to].get(&Task { pass, micro_batch, chunk }).copied()).min();
                let next = starts.as_ref().and_then(|starts| {
                    let next = *starts[from].get(woven.after(from, index))?;
                    Some(starts[to].partition_point(|&start| start < next))
                });
                let latest = [read, next].into_iter().flatten().min().unwrap_or(usize::MAX);
                messages.entry(to).or_default().push((Receive { tensor, micro_batch, from }, latest));
            }
        }
        for (to, messages) in messages {
            // A message that is sent before another is also received before it.
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
