//! The least time from each pass to the end of the step: the longest chain to the end, found
//! backwards over the passes.

use super::costs::PipelineCosts;
use super::timetable::{Timetable, extra_between};
use crate::bounds::passes::{Chain, PassTime};
use foretell_program::{PassTimes, StagePass, Task, pass_starts};
use std::cell::RefCell;

/// Least times to the end of the step from the events that a pass leads to, in picoseconds.
struct TimeLeft {
    /// From the time at which the stage's compute stream is free.
    from_compute: f64,
    /// From the end of the stage's tensor-parallel collectives.
    from_collective: f64,
    /// From the arrival of the pass's message; `None` if no other stage receives one.
    from_message: Option<f64>,
    /// For a stage's last pass, the time of the rest of its list.
    tail: Option<PassTime>,
}

impl TimeLeft {
    /// Returns the time left from the start of `chain`, one of the pass's chains. `tail` selects
    /// the chain with the same origin in the rest of the list.
    fn before(&self, chain: &Chain, tail: fn(&PassTime) -> &Chain) -> f64 {
        let message = self.from_message.map_or(0.0, |left| chain.message + left);
        let collective = if chain.collective > 0.0 { chain.collective + self.from_collective } else { 0.0 };
        let tail = self.tail.as_ref().map_or(0.0, |time| tail(time).end);
        (chain.compute + self.from_compute).max(message).max(collective).max(tail)
    }

    /// Returns the time left from the start of the chain from the collective stream. Its zeros mean
    /// that no such chain exists, and contribute nothing.
    fn before_collective(&self, chain: &Chain) -> f64 {
        let known = |length: f64, left: f64| if length > 0.0 { length + left } else { 0.0 };
        let message = self.from_message.map_or(0.0, |left| known(chain.message, left));
        let tail = self.tail.as_ref().map_or(0.0, |time| time.from_collective.end);
        let compute = known(chain.compute, self.from_compute);
        compute.max(known(chain.collective, self.from_collective)).max(message).max(tail)
    }
}

impl PipelineCosts<'_> {
    /// Returns, for each stage in the order of its passes, the least picoseconds from the last
    /// kernel of each pass to the end of the step. Messages from a stage to the next take
    /// `extra_messages[stage]` picoseconds longer than the costs say. `None` if the orders
    /// deadlock.
    pub(in crate::bounds) fn time_left(&self, timetable: &Timetable, extra_messages: &[f64]) -> Option<Vec<Vec<f64>>> {
        let Timetable { schedule, stages, chunks, micro_batches, orders, .. } = timetable;
        let sequence: RefCell<Vec<(usize, Task)>> = RefCell::default();
        let note = |stage: usize, task: &Task, free: u64, _| {
            sequence.borrow_mut().push((stage, *task));
            PassTimes { start: free, free, passed: free }
        };
        pass_starts(*schedule, *stages, *chunks, orders, note)?;
        let mut from_compute: Vec<f64> = (0..*stages).map(|stage| self.time_after_passes(stage)).collect();
        let mut from_collective = vec![0.0; *stages];
        // By direction (forward, backward), position in the model, and micro-batch: the time left
        // from the arrival of the pass's message.
        let mut from_arrival = [vec![0.0; stages * chunks * micro_batches], vec![0.0; stages * chunks * micro_batches]];
        let mut left: Vec<Vec<f64>> = orders.iter().map(|order| vec![0.0; order.len()]).collect();
        let mut remaining: Vec<usize> = orders.iter().map(Vec::len).collect();
        for (stage, task) in sequence.into_inner().into_iter().rev() {
            let direction = usize::from(task.pass != StagePass::Forward);
            let index = |position: usize| position * micro_batches + task.micro_batch;
            let receiver = timetable.receiver(stage, &task);
            let from_message = receiver.map(|(position, other)| {
                from_arrival[direction][index(position)] + extra_between(extra_messages, *stages, stage, other)
            });
            let is_last = remaining[stage] == orders[stage].len();
            let tail = is_last.then(|| self.chunk(stage, task.chunk).tail);
            let after =
                TimeLeft { from_compute: from_compute[stage], from_collective: from_collective[stage], from_message, tail };
            remaining[stage] -= 1;
            left[stage][remaining[stage]] = after.from_compute;
            let own = self.pass_time(stage, &task);
            from_compute[stage] = after.before(&own.from_compute, |tail| &tail.from_compute);
            from_collective[stage] = after.from_collective.max(after.before_collective(&own.from_collective));
            if task.pass != StagePass::WeightGradient {
                from_arrival[direction][index(schedule.position(*stages, stage, task.chunk))] =
                    after.before(&own.from_arrival, |tail| &tail.from_arrival);
            }
        }
        Some(left)
    }
}
