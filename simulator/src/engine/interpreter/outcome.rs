//! The outcome of a run once no event is left: the result, or an error that names the ranks that
//! wait for each other.

use super::{Interpreter, LATEST};
use crate::engine::RunOutcome;
use crate::error::SimulationError;
use foretell_program::{Origin, RankTimeline, Timeline};
use foretell_units::Picoseconds;
use std::sync::Arc;

impl Interpreter<'_> {
    pub(super) fn into_outcome(self) -> Result<RunOutcome, SimulationError> {
        if self.unfinished > 0 {
            return Err(self.deadlock());
        }
        if self.ranks.iter().any(|rank| rank.end > LATEST) {
            return Err(self.too_long());
        }
        let quantile = self.scenario.quantile;
        let mut spans_by_rank = self.recorder.map_or_else(Vec::new, |recorder| recorder.spans);
        spans_by_rank.resize_with(self.ranks.len(), Vec::new);
        let mut breakdowns = Vec::with_capacity(self.ranks.len());
        let mut timelines = Vec::with_capacity(self.ranks.len());
        for ((spans, rank), state) in spans_by_rank.into_iter().zip(&self.lowered.ranks).zip(&self.ranks) {
            let parameters = self.lowered.costs.parameters(rank.kind);
            let micro_batches = f64::from(self.lowered.lists[rank.list].micro_batches);
            let overhead = parameters.step_overhead.at(quantile) + parameters.micro_batch_overhead * micro_batches;
            let end = state.end + overhead.into();
            breakdowns.push(state.meter.breakdown(end));
            timelines.push(Arc::new(RankTimeline { spans, end }));
        }
        let last = timelines.iter().map(|rank| rank.end).max().unwrap_or(Picoseconds::ZERO);
        // Equivalent ranks share the timeline of their representative.
        let by_rank = self.lowered.representative_of.iter().map(|&index| Arc::clone(&timelines[index as usize]));
        Ok(RunOutcome {
            timeline: Timeline { origin: Origin::Predicted, ranks: by_rank.collect() },
            breakdowns,
            events: self.queue.handled() + self.run_ahead.blocks_without_event,
            #[cfg(test)]
            queue_events: self.queue.handled(),
            periods: self.fluids.quotas.periods_at(last),
            uncalibrated: self.costs.uncalibrated.iter().cloned().collect(),
        })
    }

    /// The error for a step that does not end by [`LATEST`].
    pub(super) fn too_long(&self) -> SimulationError {
        SimulationError::TooLong { limit: LATEST, running: self.unfinished_instructions() }
    }

    fn deadlock(&self) -> SimulationError {
        let total: usize = self.lowered.ranks.iter().map(|rank| self.lowered.lists[rank.list].actions.len()).sum();
        SimulationError::Deadlock { done: total - self.unfinished, total, waiting: self.unfinished_instructions() }
    }

    /// Descriptions of the first few unfinished instructions, for error messages.
    fn unfinished_instructions(&self) -> Vec<String> {
        // Enough to show a cycle, few enough to read.
        const SHOWN: usize = 8;
        let mut waiting = Vec::new();
        for (index, rank) in self.ranks.iter().enumerate() {
            let ends = &rank.block_list.streams[1..];
            let streams = self.progress[rank.first_stream as usize..].iter().zip(ends);
            let next = |busy: bool| {
                let open = streams.clone().filter(move |(progress, end)| progress.block() < **end && progress.is_busy() == busy);
                let instructions = open.filter_map(|(progress, _)| {
                    let block = &rank.block_list.blocks[progress.block() as usize];
                    rank.block_list.instructions(block).first().copied()
                });
                let mut instructions: Vec<u32> = instructions.collect();
                instructions.sort_unstable();
                instructions
            };
            // A rank hangs in blocks that began and did not end. If there are none, its own
            // instructions wait for each other.
            let mut hanging = next(true);
            if hanging.is_empty() {
                hanging = next(false).into_iter().take(1).collect();
            }
            waiting.extend(hanging.into_iter().map(|instruction| self.lowered.describe(index, instruction)));
        }
        let more = waiting.len().saturating_sub(SHOWN);
        waiting.truncate(SHOWN);
        if more > 0 {
            waiting.push(format!("and {more} more"));
        }
        waiting
    }
}
