//! The answer that a finished search gives.

use super::answer::{Candidate, SearchResult};
use super::incumbents::PredictedStep;
use super::queue::NEIGHBOURS;
use super::searcher::Searcher;
use super::simulation::{most, predicted_step, weighted};
use crate::error::PlannerError;
use crate::space::{Objective, world_size};
use foretell_program::Recompute;
use foretell_simulator::{MemoryUse, memory_use};
use foretell_units::Bytes;
use rayon::prelude::*;

impl Searcher<'_> {
    /// Predicts the layouts to return, with the memory that evaluation needs, and returns each with
    /// its index among the incumbents. Once the search gives up, only the prediction of the best is
    /// still begun. Returns `None` if evaluation makes a layout too large: the layout is then no
    /// incumbent any more, and the search must continue.
    pub(super) fn predict_returned(&mut self) -> Result<Option<Vec<(usize, PredictedStep)>>, PlannerError> {
        let places = self.incumbents.returned();
        let incumbents = &mut self.incumbents.list;
        let known: Vec<Option<PredictedStep>> = places.iter().map(|&place| incumbents[place].predicted.take()).collect();
        let (request, list) = (self.request, &self.incumbents.list);
        let predict = |(turn, (&place, known)): (usize, (&usize, Option<PredictedStep>))| {
            let is_compiled = known.is_none() || request.base.stack.is_own();
            if turn > 0 && is_compiled && request.give_up.is_raised() {
                return Ok(None);
            }
            let plan = &list[place].plan;
            let mut predicted = known.map_or_else(|| predicted_step(&self.bounds, plan), Ok)?;
            if request.base.stack.is_own() {
                let evaluation = self.bounds.compiler.evaluation(plan);
                let evaluation = evaluation.map_err(|error| PlannerError::impossible(request, &error))?;
                let evaluation = memory_use(&evaluation, None, request.topology, request.costs);
                predicted.memory = sharing_arenas(predicted.memory, evaluation);
            }
            Ok(Some((place, predicted)))
        };
        let all: Vec<Option<(usize, PredictedStep)>> =
            places.par_iter().zip(known).enumerate().map(predict).collect::<Result<_, PlannerError>>()?;
        let all: Vec<(usize, PredictedStep)> = all.into_iter().flatten().collect();
        let held = all.iter().map(|(place, candidate)| (*place, weighted(&candidate.memory.needed_by_stage, &candidate.weights)));
        let too_large = held.into_iter().find(|(_, held)| most(held) > self.bounds.memory_limit);
        let Some((which, held)) = too_large else { return Ok(Some(all)) };
        for (place, predicted) in all {
            self.incumbents.list[place].predicted = Some(predicted);
        }
        let too_large = self.incumbents.list.remove(which);
        self.known.refuse(&too_large.plan.layout, held.clone());
        if too_large.index.family >= NEIGHBOURS {
            // The layout was not counted, and its family is still in the queue or outside of the
            // space.
            return Ok(None);
        }
        self.uncount_simulated(too_large.index, &too_large.plan.layout);
        self.found_too_large(too_large.index, 0.0, &too_large.plan.layout, &held);
        Ok(None)
    }

    /// Returns the answer: the incumbents to return, given by index, with their predictions. `left`
    /// is the least bound of the entries that were not searched, if any.
    pub(super) fn answer(mut self, predicted: Vec<(usize, PredictedStep)>, left: Option<f64>) -> SearchResult {
        let best = self.incumbents.value_to_beat(None).unwrap_or(f64::INFINITY);
        let candidate = |(place, predicted): (usize, PredictedStep)| {
            let prediction = predicted.prediction.with_memory(predicted.memory);
            let mut plan = self.incumbents.list[place].plan.clone();
            if let Recompute::FullLayersOfStages(layers) = &plan.layout.recompute
                && layers.iter().all(|&layers| layers == 0)
            {
                plan.layout.recompute = Recompute::None;
            }
            Candidate { plan, prediction, value: self.incumbents.list[place].value }
        };
        let candidates: Vec<Candidate> = predicted.into_iter().map(candidate).collect();
        // Without candidates the best value is the other search's. It is a time if the caller
        // compares searches by time.
        let is_slow_end = self.request.objective == Objective::SlowEnd;
        let seconds =
            |best: &Candidate| if is_slow_end { best.prediction.step_seconds_p90 } else { best.prediction.step_seconds };
        self.search.best_seconds = candidates.first().map_or(best, |best| seconds(best).value());
        for incumbent in &self.incumbents.list {
            let layout = &incumbent.plan.layout;
            let seconds = match self.request.objective {
                // A step's time does not follow from its energy.
                Objective::Energy => continue,
                // The value is the 90th percentile itself, as `best_seconds` is.
                Objective::SlowEnd => incumbent.value,
                Objective::Time | Objective::Cost | Objective::Goodput => incumbent.value / self.bounds.value_per_second(layout),
            };
            let least = self.search.seconds_by_devices.entry(world_size(layout)).or_insert(seconds);
            *least = least.min(seconds);
        }
        let on_all = self.search.seconds_by_devices.range(self.request.devices..);
        self.search.all_devices_seconds = on_all.map(|(_, seconds)| *seconds).reduce(f64::min);
        // The bound is a value; its ratio to the best value converts it to a time. A preferred
        // simpler layout may be slower than other known layouts, so these bound the answer too.
        let known = self.incumbents.list.iter().map(|incumbent| incumbent.value);
        let least = left.into_iter().chain(known).fold(best, f64::min);
        let share = least.max(self.bounds.least_value()).min(best) / best;
        self.search.lower_bound_seconds = self.search.best_seconds * share;
        self.search.gap = if share > 0.0 { 1.0 / share - 1.0 } else { f64::INFINITY };
        self.search.space = self.bounds.space.statement();
        self.search.heuristic_exclusions = self.search.space.iter().filter_map(|dimension| dimension.left_out).sum();
        let covered = self.search.space.iter().filter(|dimension| dimension.is_covered());
        self.search.covers = covered.map(|dimension| dimension.name.clone()).collect();
        self.search.bound_of_any_layout_seconds = self.bounds.least_step().value();
        SearchResult { candidates, value: best, search: self.search }
    }
}

/// Returns the memory of a run whose training and evaluation share the arena of each rank. The
/// hosts' memory is that of training, since evaluation does not offload.
fn sharing_arenas(training: MemoryUse, evaluation: MemoryUse) -> MemoryUse {
    let larger = |left: Vec<Bytes>, right: Vec<Bytes>| left.into_iter().zip(right).map(|(a, b)| a.max(b)).collect();
    MemoryUse {
        peak_by_stage: larger(training.peak_by_stage, evaluation.peak_by_stage),
        needed_by_stage: larger(training.needed_by_stage, evaluation.needed_by_stage),
        overfull_device: training.overfull_device.or(evaluation.overfull_device),
        overfull_host: training.overfull_host,
        components_by_stage: training.components_by_stage,
    }
}
