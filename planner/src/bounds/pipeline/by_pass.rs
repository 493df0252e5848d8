//! The bound on step time pass by pass, in the schedule's order.

use super::closed_form::OptimizerUpdate;
use super::costs::PipelineCosts;
use super::timetable::{Timetable, extra_between};
use crate::bounds::passes::{Chain, PassTime};
use foretell_program::{PassTimes, StagePass, Task, pass_starts};
use std::cell::Cell;

impl PipelineCosts<'_> {
    /// Returns a lower bound on the step time, in picoseconds: each pass starts when its stage is
    /// free and its message has arrived. Messages from a stage to the next take
    /// `extra_messages[stage]` picoseconds longer than the costs say.
    pub(in crate::bounds) fn least_time_by_pass(&self, timetable: &Timetable, extra_messages: &[f64]) -> f64 {
        let Timetable { schedule, stages, chunks, micro_batches, orders, .. } = timetable;
        let after_passes: Vec<f64> = (0..*stages).map(|stage| self.time_after_passes(stage)).collect();
        let bound = Cell::new(self.least_time(*micro_batches, OptimizerUpdate::Counted));
        // By stage, when its tensor-parallel collectives have ended; 0 if that is not known.
        let collectives_end = vec![Cell::new(0.0f64); *stages];
        // By stage, when the activations offloaded so far are on the host, at the earliest. A pass
        // may end earlier, by the time that copying as many bytes as the free device memory takes.
        let offload_end = vec![Cell::new(0.0f64); *stages];
        let slack: Vec<f64> = (0..*stages).map(|stage| self.free_memory(stage) * self.copy_time_per_byte(stage)).collect();
        let times = |stage: usize, task: &Task, free: u64, ready: u64| {
            let (free_at, ready_at, collectives_at) = (free as f64, ready as f64, collectives_end[stage].get());
            let after = |start: f64, length: f64| if length > 0.0 { start + length } else { 0.0 };
            let latest = |time: &PassTime, length: fn(&Chain) -> f64| {
                let from_own = (free_at + length(&time.from_compute)).max(ready_at + length(&time.from_arrival));
                from_own.max(after(collectives_at, length(&time.from_collective)))
            };
            let own = self.pass_time(stage, task);
            let origins = [(free_at, own.from_compute), (ready_at, own.from_arrival), (collectives_at, own.from_collective)];
            let ends = origins.map(|(start, chain)| after(start, chain.collective));
            collectives_end[stage].set(ends.into_iter().fold(collectives_at, f64::max));
            let (mut over, mut message) = (latest(&own, |chain| chain.compute), latest(&own, |chain| chain.message));
            if task.pass == StagePass::Forward && task.micro_batch == 0 {
                // The chunk's parameters are gathered after those of the chunks before it.
                let gathered: f64 = (0..task.chunk).map(|chunk| self.chunk(stage, chunk).gather_time).sum();
                let head = self.chunk(stage, task.chunk).head;
                (over, message) = (over.max(gathered + head.compute), message.max(gathered + head.message));
            }
            let offload_time = self.offloaded_bytes(timetable, stage, task) * self.copy_time_per_byte(stage);
            if offload_time > 0.0 {
                offload_end[stage].set(offload_end[stage].get().max(free_at.max(ready_at)) + offload_time);
                over = over.max(offload_end[stage].get() - slack[stage]);
            }
            let receiver = timetable.receiver(stage, task);
            let passed = receiver.map_or(0.0, |(_, other)| message + extra_between(extra_messages, *stages, stage, other));
            if orders[stage].last() == Some(task) {
                let tail = latest(&self.chunk(stage, task.chunk).tail, |chain| chain.end);
                bound.set(bound.get().max(tail).max(over + after_passes[stage]));
            }
            PassTimes { start: free.max(ready), free: over as u64, passed: passed as u64 }
        };
        // No schedule deadlocks, so `times` has seen the last pass of each stage.
        let _ = pass_starts(*schedule, *stages, *chunks, orders, times);
        bound.get()
    }

    /// Returns the bytes that a task leaves to copy to the host. They stay on the device until they
    /// are copied.
    fn offloaded_bytes(&self, timetable: &Timetable, stage: usize, task: &Task) -> f64 {
        if !self.offloads_activations() || task.pass != StagePass::Forward {
            return 0.0;
        }
        let offloaded = self.chunk(stage, task.chunk).offloaded;
        if timetable.offloads_all(stage, task) { offloaded.all_bytes } else { offloaded.bytes }
    }
}
