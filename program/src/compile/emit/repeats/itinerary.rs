//! The passes and messages of each micro-batch, in the order of the list. A micro-batch can repeat
//! an earlier one whose itinerary matches.

use crate::compile::messages::Receive;
use crate::compile::state::ParameterGathers;
use crate::schedule::{StagePass, Task};
use foretell_models::TensorId;
use std::collections::BTreeSet;

/// The segments of a micro-batch, and when each of them comes in the list.
#[derive(Default)]
pub(super) struct Itinerary {
    /// The chunk and pass of each pass in order, and whether the backward pass of the same chunk
    /// and micro-batch follows at once.
    pub(super) passes: Vec<(usize, StagePass, bool)>,
    /// The tensor and sending stage of each message, ascending.
    pub(super) messages: Vec<(TensorId, usize)>,
    /// The positions of the passes among all segments of the list.
    pass_positions: Vec<usize>,
    /// The positions of the messages among all segments of the list.
    message_positions: Vec<usize>,
}

impl Itinerary {
    /// Whether `earlier` has the same segments, each of them earlier.
    pub(super) fn repeats(&self, earlier: &Self) -> bool {
        let all_later = |own: &[usize], others: &[usize]| own.iter().zip(others).all(|(own, other)| own > other);
        self.passes == earlier.passes
            && self.messages == earlier.messages
            && all_later(&self.pass_positions, &earlier.pass_positions)
            && all_later(&self.message_positions, &earlier.message_positions)
    }
}

/// The itinerary of each micro-batch.
pub(super) fn itineraries(tasks: &[Task], receives: &[Vec<Receive>]) -> Vec<Itinerary> {
    let count = tasks.iter().map(|task| task.micro_batch + 1).max().unwrap_or(0);
    let mut itineraries: Vec<Itinerary> = (0..count).map(|_| Itinerary::default()).collect();
    let mut messages: Vec<Vec<(TensorId, usize, usize)>> = vec![Vec::new(); count];
    let mut position = 0;
    for (index, task) in tasks.iter().enumerate() {
        for receive in receives.get(index).into_iter().flatten() {
            position += 1;
            if let Some(messages) = messages.get_mut(receive.micro_batch) {
                messages.push((receive.tensor, receive.from, position));
            }
        }
        position += 1;
        let itinerary = &mut itineraries[task.micro_batch];
        let returns = tasks.get(index + 1).is_some_and(|next| task.returns_with(next));
        itinerary.passes.push((task.chunk, task.pass, returns));
        itinerary.pass_positions.push(position);
    }
    for (itinerary, mut messages) in itineraries.iter_mut().zip(messages) {
        messages.sort_unstable();
        itinerary.messages = messages.iter().map(|&(tensor, from, _)| (tensor, from)).collect();
        itinerary.message_positions = messages.iter().map(|&(.., position)| position).collect();
    }
    itineraries
}

/// The micro-batches that are not copied, nor copied from: the first and last of each pass of each
/// chunk and, if parameters are gathered once a step, the one before each first pass.
pub(super) fn unique_micro_batches(tasks: &[Task], gathers: ParameterGathers) -> BTreeSet<usize> {
    let mut unique = BTreeSet::new();
    let mut seen = BTreeSet::new();
    for (index, task) in tasks.iter().enumerate() {
        if seen.insert((task.chunk, task.pass)) {
            unique.insert(task.micro_batch);
            // The first parameters that a pass reads are gathered during the task before it.
            let before = index.checked_sub(1).filter(|_| gathers == ParameterGathers::Once);
            unique.extend(before.map(|before| tasks[before].micro_batch));
        }
    }
    for task in tasks.iter().rev() {
        if seen.remove(&(task.chunk, task.pass)) {
            unique.insert(task.micro_batch);
        }
    }
    unique
}
