//! What is left of a run when no event is: the answer, or who waits for whom.

use super::Interpreter;
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
        let quantile = self.scenario.quantile;
        let mut ranks = self.recorder.map_or_else(Vec::new, |recorder| recorder.spans);
        ranks.resize_with(self.ranks.len(), Vec::new);
        let mut breakdowns = Vec::with_capacity(self.ranks.len());
        let mut timelines = Vec::with_capacity(self.ranks.len());
        // Ranks that were simulated as one have one timeline.
        for ((spans, rank), state) in ranks.into_iter().zip(&self.lowered.ranks).zip(&self.ranks) {
            let parameters = self.lowered.costs.parameters(rank.kind);
            let micro_batches = f64::from(self.lowered.lists[rank.list].micro_batches);
            let overhead = parameters.step_overhead.at(quantile) + parameters.micro_batch_overhead * micro_batches;
            let end = state.end + overhead.into();
            breakdowns.push(state.meter.breakdown(end));
            timelines.push(Arc::new(RankTimeline { spans, end }));
        }
        let last = timelines.iter().map(|rank| rank.end).max().unwrap_or(Picoseconds::ZERO);
        let of_rank = self.lowered.of_rank.iter().map(|&place| Arc::clone(&timelines[place as usize]));
        Ok(RunOutcome {
            timeline: Timeline { origin: Origin::Predicted, ranks: of_rank.collect() },
            breakdowns,
            events: self.queue.handled() + self.run_ahead.passed,
            #[cfg(test)]
            queue_events: self.queue.handled(),
            periods: self.quotas.at(last),
            uncalibrated: self.costs.uncalibrated.iter().cloned().collect(),
        })
    }

    fn deadlock(&self) -> SimulationError {
        // Enough to see the circle, few enough to read.
        const SHOWN: usize = 8;
        let total: usize = self.lowered.ranks.iter().map(|rank| self.lowered.lists[rank.list].actions.len()).sum();
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
            // Those that started and did not end are what the rank hangs in; where there are none, it waits for itself.
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
        SimulationError::Deadlock { done: total - self.unfinished, total, waiting }
    }
}
