//! The prediction of a cycle: the mean of several kinds of steps, weighted by how often the cycle
//! has each.

use super::memory::MemoryUse;
use super::prediction::{Prediction, StepKind, predict_with_memory};
use super::simulation::{Options, Simulation};
use crate::cost::CostModel;
use crate::engine::{Breakdown, Recording};
use crate::error::SimulationError;
use foretell_program::Compiled;
use foretell_topologies::Topology;
use foretell_units::Seconds;
use std::collections::BTreeSet;

/// Simulates each kind of step in a cycle. Returns the prediction of the mean step, and the
/// simulation of the first kind.
///
/// # Errors
/// As [`crate::simulate`].
pub fn predict_cycle(
    compiled: &Compiled,
    memory: &MemoryUse,
    topology: &Topology,
    costs: &CostModel,
    options: &Options,
) -> Result<(Prediction, Simulation), SimulationError> {
    let mut usual = None;
    let mut steps = Vec::new();
    // Predictions of unsynchronised workers read the spans of one step.
    let recording = if compiled.pacing.is_some() { Recording::Spans } else { options.recording };
    let options = &Options { recording, ..options.clone() };
    for (program, count) in compiled.step_programs().into_iter().zip(compiled.cycle.counts()) {
        let (mut prediction, simulation) = predict_with_memory(program, memory.clone(), topology, costs, options)?;
        if let Some(pacing) = compiled.pacing {
            prediction = prediction.at_own_paces(program, topology, costs, options, &simulation.timeline, pacing)?;
        }
        usual.get_or_insert(simulation);
        steps.push((prediction, count));
    }
    Ok(Prediction::of_cycle(steps).zip(usual).expect("invariant: a compiled plan has a step"))
}

impl Prediction {
    /// The mean over a cycle that has `count` steps of each prediction. Times, rates and the
    /// breakdown are those of the mean step. Memory is that of the first prediction. `None` if
    /// there is no step.
    ///
    /// Each step is predicted from a common start. For ranks that do not wait for each other within
    /// a cycle, this is exact as long as the same ranks are slow in every step.
    pub fn of_cycle(steps: Vec<(Self, usize)>) -> Option<Self> {
        let kinds: Vec<StepKind> = steps.iter().map(|(step, count)| step.as_kind(*count)).collect();
        let total = kinds.iter().map(|kind| kind.steps).sum::<usize>() as f64;
        let mean =
            |of: &dyn Fn(&Self) -> Seconds| steps.iter().map(|(step, count)| of(step) * (*count as f64 / total)).sum::<Seconds>();
        let step = mean(&|step| step.step_seconds);
        let outer = [mean(&|step| step.step_seconds_p05), mean(&|step| step.step_seconds_p95)];
        let inner = [mean(&|step| step.step_seconds_p10), mean(&|step| step.step_seconds_p90)];
        let breakdown_seconds = Breakdown {
            compute: mean(&|step| step.breakdown_seconds.compute),
            exposed_communication: mean(&|step| step.breakdown_seconds.exposed_communication),
            bubble: mean(&|step| step.breakdown_seconds.bubble),
            data: mean(&|step| step.breakdown_seconds.data),
            optimizer: mean(&|step| step.breakdown_seconds.optimizer),
        };
        let uncalibrated: BTreeSet<String> = steps.iter().flat_map(|(step, _)| &step.uncalibrated).cloned().collect();
        let events = steps.iter().map(|(step, _)| step.events).sum();
        let calibrated = steps.iter().all(|(step, _)| step.calibrated);
        let (first, _) = steps.into_iter().next()?;
        let mut whole = first.with_step(step, inner);
        [whole.step_seconds_p05, whole.step_seconds_p95] = outer;
        let uncalibrated = uncalibrated.into_iter().collect();
        // No list if there is one kind of step.
        let cycle = if kinds.len() > 1 { kinds } else { Vec::new() };
        Some(Self { breakdown_seconds, calibrated, uncalibrated, events, cycle, ..whole })
    }

    fn as_kind(&self, steps: usize) -> StepKind {
        let exposed_communication_seconds = self.breakdown_seconds.exposed_communication;
        StepKind { steps, step_seconds: self.step_seconds, exposed_communication_seconds }
    }
}
