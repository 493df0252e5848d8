//! Compilation and simulation of the layouts of a round.

use super::deadline::deadline_of;
use super::incumbents::{Incumbent, Incumbents, PredictedStep};
use super::queue::QueuedLayout;
use crate::bounds::Bounds;
use crate::error::PlannerError;
use crate::objective;
use crate::space::{Objective, Request};
use foretell_program::{Layout, Plan, PlanError, Program};
use foretell_simulator::{
    Deadline, Folding, MemoryUse, Options, Prediction, Recording, SimulationError, Stop, memory_use, predict_with_memory,
};
use foretell_units::diagnostic::Mistake;
use foretell_units::{Bytes, Seconds};
use std::sync::Arc;

/// Steps with at least this many micro-batches are first simulated with fewer.
const MANY_MICRO_BATCHES: usize = 48;

/// The least difference in micro-batches between the two short steps from which the time of a long
/// one is extrapolated.
const BETWEEN_SHORT_STEPS: usize = 8;

/// The memory of a short step is checked first if the whole step has at least this many times as
/// many micro-batches.
const SHORTENED: usize = 4;

/// A layout surely fits if its estimated memory is below this share of the limit.
const SURELY_FITS: f64 = 0.6;

/// The outcome of a layout that was to be simulated.
pub(super) enum Outcome {
    /// The compiler refused it. Contains the message.
    Indivisible(Mistake),
    /// It does not fit. Contains, for each stage, the weighted bytes of the fullest device.
    OutOfMemory(Vec<f64>),
    /// It keeps more on a host than the host has memory.
    OutOfHostMemory,
    /// Its simulation was stopped: its value is at least this, so the layout need not be returned.
    Stopped(f64),
    /// The search's time was over before the simulation ended.
    Interrupted,
    /// It was simulated to the end.
    Simulated(Box<Incumbent>),
}

impl Outcome {
    /// Returns the value of a layout that was simulated to the end.
    pub(super) fn value(&self) -> Option<f64> {
        match self {
            Self::Simulated(incumbent) => Some(incumbent.value),
            _ => None,
        }
    }
}

/// The outcome of the first layout of a group that shares a Program.
pub(super) struct FirstOutcome {
    pub(super) outcome: Option<Outcome>,
    /// The Program, if there are further layouts.
    program: Option<Program>,
}

/// Simulates the layouts of one round. The incumbents are those before the round.
#[derive(Clone, Copy)]
pub(super) struct Simulations<'a> {
    pub(super) bounds: &'a Bounds<'a>,
    pub(super) incumbents: &'a Incumbents<'a>,
}

impl Simulations<'_> {
    /// Compiles layouts that share a Program, and simulates the first if it fits.
    ///
    /// Memory for evaluation is checked only for layouts to return: it hardly ever exceeds that for
    /// training.
    pub(super) fn first(&self, layouts: &[QueuedLayout]) -> Result<FirstOutcome, PlannerError> {
        let Some(first) = layouts.first() else { return Ok(FirstOutcome { outcome: None, program: None }) };
        let plan = self.plan_of(first);
        let without_program = |outcome| Ok(FirstOutcome { outcome: Some(outcome), program: None });
        if let Some(held) = self.held_too_much(&plan) {
            return without_program(Outcome::OutOfMemory(held));
        }
        match self.bounds.compiler.training_until(&plan, &|| self.stop().is_raised()) {
            Ok(program) => {
                let outcome = Some(self.outcome(first, plan, &program, None)?);
                Ok(FirstOutcome { outcome, program: Some(program).filter(|_| layouts.len() > 1) })
            }
            Err(PlanError::Interrupted) => without_program(Outcome::Interrupted),
            Err(error) => without_program(Outcome::Indivisible(Mistake::of(&error))),
        }
    }

    /// Returns what ends a compilation or simulation. Until there is an answer, a search has a
    /// little more time.
    fn stop(&self) -> &Stop {
        let request = self.bounds.request;
        if self.incumbents.best().is_some() { &request.stop } else { &request.give_up }
    }

    /// Simulates further layouts that share the first one's Program, until one can wait because of
    /// its bound and the values so far. `best` is the best value of the first simulations of the
    /// round. Returns the outcomes of the first layouts of the group, including the first one's.
    pub(super) fn rest(
        &self,
        layouts: &[QueuedLayout],
        first: FirstOutcome,
        mut best: Option<f64>,
    ) -> Result<Vec<Outcome>, PlannerError> {
        let mut outcomes: Vec<Outcome> = first.outcome.into_iter().collect();
        let (Some(mut program), Some(first)) = (first.program, layouts.first()) else { return Ok(outcomes) };
        let returns_one = self.bounds.request.top <= 1;
        for layout in &layouts[1..] {
            if self.stop().is_raised() {
                break;
            }
            let is_settled_by_round = |best: f64| returns_one && self.incumbents.would_settle(layout.bound, best, best);
            let can_wait = Incumbents::is_far(layout.bound, first.bound)
                || self.incumbents.settles(layout.bound)
                || best.is_some_and(is_settled_by_round);
            if can_wait && outcomes.iter().any(|outcome| matches!(outcome, Outcome::Simulated(_) | Outcome::Stopped(_))) {
                break;
            }
            let plan = self.plan_of(layout);
            if !plan.mesh().is_ok_and(|mesh| program.reorder_ranks(mesh)) {
                break;
            }
            let outcome = self.outcome(layout, plan, &program, best)?;
            best = best.into_iter().chain(outcome.value()).reduce(f64::min);
            outcomes.push(outcome);
        }
        Ok(outcomes)
    }

    fn plan_of(&self, layout: &QueuedLayout) -> Plan {
        Plan { layout: layout.layout.clone(), ..self.bounds.request.base.clone() }
    }

    /// Simulates a layout with this Program if it fits. The simulation stops if the layout cannot
    /// beat `best` or an incumbent.
    fn outcome(&self, layout: &QueuedLayout, plan: Plan, program: &Program, best: Option<f64>) -> Result<Outcome, PlannerError> {
        let (bounds, request) = (self.bounds, self.bounds.request);
        let memory = memory_use(program, None, request.topology, request.costs);
        let weights = bounds.kinds.weights_of_stages(program);
        let held = weighted(&memory.needed_by_stage, &weights);
        if most(&held) > bounds.memory_limit {
            return Ok(Outcome::OutOfMemory(held));
        }
        if memory.overfull_host.is_some() {
            return Ok(Outcome::OutOfHostMemory);
        }
        let value_per_second = bounds.value_per_second(&plan.layout);
        let predicts_value = match request.objective {
            Objective::SlowEnd => true,
            Objective::Energy => false,
            Objective::Time | Objective::Cost | Objective::Goodput => request.costs.step_spread.is_some(),
        };
        let stop = self.stop();
        // Check again: preparing a simulation takes time too.
        if stop.is_raised() {
            return Ok(Outcome::Interrupted);
        }
        let (value, predicted) = if predicts_value {
            let deadline = self.deadline(layout, program, best).map(Arc::new);
            let prediction = match predict(request, program, memory.clone(), (deadline, stop.clone())) {
                Err(SimulationError::Interrupted) => return Ok(Outcome::Interrupted),
                Err(SimulationError::PastDeadline { at_least }) => {
                    return Ok(Outcome::Stopped(Seconds::from(at_least).value() * value_per_second));
                }
                prediction => prediction?,
            };
            let value = match request.objective {
                Objective::SlowEnd => prediction.step_seconds_p90.value(),
                Objective::Time | Objective::Cost | Objective::Goodput => prediction.step_seconds.value() * value_per_second,
                Objective::Energy => unreachable!("invariant: the energy of a step has no prediction of its time"),
            };
            (value, Some(PredictedStep { prediction, memory, weights }))
        } else {
            match objective::simulated_value(request, program, value_per_second, stop) {
                Err(SimulationError::Interrupted) => return Ok(Outcome::Interrupted),
                value => (value?, None),
            }
        };
        Ok(Outcome::Simulated(Box::new(Incumbent { value, index: layout.index, plan, predicted })))
    }

    /// Simulates two short steps of a layout with many micro-batches, and extrapolates to the whole
    /// step. Returns [`Outcome::Stopped`] with the value of the whole step if each further
    /// micro-batch takes as long as those between the two short steps; [`Outcome::OutOfMemory`] if
    /// a short step does not fit, since the whole one holds no less. `None` for layouts with few
    /// micro-batches, for schedules that hold all micro-batches, and for objectives that do not
    /// follow from the step time.
    ///
    /// The value is no bound, since contention for links may change the pace later. So it only
    /// decides which steps are simulated in full.
    pub(super) fn value_by_short_steps(&self, layout: &Layout, micro_batches: usize) -> Result<Option<Outcome>, PlannerError> {
        let (schedule, stages, request) = (layout.schedule, layout.pipeline, self.bounds.request);
        let (group, few) = (schedule.group_size(stages).max(1), schedule.equivalent_micro_batches(stages, micro_batches));
        // Both short steps have the whole step's remainder of micro-batches beyond whole groups.
        let more = few + BETWEEN_SHORT_STEPS.next_multiple_of(group);
        let tells_value = matches!(request.objective, Objective::Time | Objective::Cost | Objective::Goodput);
        if !tells_value || micro_batches < MANY_MICRO_BATCHES || 3 * more > micro_batches || schedule.holds_all_micro_batches() {
            return Ok(None);
        }
        let mut values = [0.0; 2];
        for (value, count) in values.iter_mut().zip([few, more]) {
            match self.short_step(layout, count)? {
                Outcome::Stopped(own) => *value = own,
                other => return Ok(Some(other)),
            }
        }
        let [short, long] = values;
        let pace = (long - short).max(0.0) / (more - few) as f64;
        Ok(Some(Outcome::Stopped(long + pace * (micro_batches - more) as f64)))
    }

    /// Simulates a step of a layout with `micro_batches` micro-batches. Returns
    /// [`Outcome::Stopped`] with its value, or the outcome that prevents one.
    fn short_step(&self, layout: &Layout, micro_batches: usize) -> Result<Outcome, PlannerError> {
        let (bounds, request) = (self.bounds, self.bounds.request);
        let global_batch = layout.samples_at_once().saturating_mul(micro_batches);
        let plan = Plan { layout: layout.clone(), global_batch, ..request.base.clone() };
        let program = match bounds.compiler.training_until(&plan, &|| self.stop().is_raised()) {
            Ok(program) => program,
            Err(PlanError::Interrupted) => return Ok(Outcome::Interrupted),
            Err(error) => return Ok(Outcome::Indivisible(Mistake::of(&error))),
        };
        let memory = memory_use(&program, None, request.topology, request.costs);
        let held = weighted(&memory.needed_by_stage, &bounds.kinds.weights_of_stages(&program));
        if most(&held) > bounds.memory_limit {
            return Ok(Outcome::OutOfMemory(held));
        }
        if memory.overfull_host.is_some() {
            return Ok(Outcome::OutOfHostMemory);
        }
        if self.stop().is_raised() {
            return Ok(Outcome::Interrupted);
        }
        match predict(request, &program, memory, (None, self.stop().clone())) {
            Err(SimulationError::Interrupted) => Ok(Outcome::Interrupted),
            prediction => Ok(Outcome::Stopped(prediction?.step_seconds.value() * bounds.value_per_second(layout))),
        }
    }

    /// Returns the weighted bytes of each stage of a step with few micro-batches, if these exceed
    /// the memory limit: the whole step holds no less, and compiling it may take a hundred times as
    /// long.
    fn held_too_much(&self, plan: &Plan) -> Option<Vec<f64>> {
        let (bounds, layout) = (self.bounds, &plan.layout);
        let micro_batches = plan.micro_batches().ok()?;
        let few = layout.schedule.equivalent_micro_batches(layout.pipeline, micro_batches);
        let surely_fits = || bounds.estimates.memory_of_layout(layout, micro_batches).is_some_and(|share| share < SURELY_FITS);
        if layout.stages.is_some() || layout.shares.is_some() || micro_batches < SHORTENED * few || surely_fits() {
            return None;
        }
        let global_batch = layout.samples_at_once().checked_mul(few)?;
        let short = Plan { global_batch, ..plan.clone() };
        let program = bounds.compiler.training_until(&short, &|| self.stop().is_raised()).ok()?;
        let memory = memory_use(&program, None, bounds.request.topology, bounds.request.costs);
        let held = weighted(&memory.needed_by_stage, &bounds.kinds.weights_of_stages(&program));
        (most(&held) > bounds.memory_limit).then_some(held)
    }

    /// Returns the deadline of a layout's simulation. `None` if it has to run to its end: any
    /// layout would be returned, or it was stopped before and its exact value is needed.
    fn deadline(&self, layout: &QueuedLayout, program: &Program, best: Option<f64>) -> Option<Deadline> {
        let request = self.bounds.request;
        if layout.is_stopped {
            return None;
        }
        let to_beat = self.incumbents.value_to_be_returned(best)?;
        let enough = if self.incumbents.is_small_space() { to_beat } else { to_beat / (1.0 + request.tolerance) };
        let step = Seconds::new(enough / self.bounds.value_per_second(&layout.layout));
        deadline_of(self.bounds, &layout.layout, program, step)
    }
}

/// Compiles a plan that is known to compile, and predicts its step.
pub(super) fn predicted_step(bounds: &Bounds<'_>, plan: &Plan) -> Result<PredictedStep, PlannerError> {
    let request = bounds.request;
    let compiled = bounds.compiler.training(plan);
    let program = compiled.map_err(|error| PlannerError::impossible(request, &error))?;
    let memory = memory_use(&program, None, request.topology, request.costs);
    let weights = bounds.kinds.weights_of_stages(&program);
    Ok(PredictedStep { prediction: predict(request, &program, memory.clone(), (None, Stop::default()))?, memory, weights })
}

fn predict(
    request: &Request<'_>,
    training: &Program,
    memory: MemoryUse,
    (deadline, stop): (Option<Arc<Deadline>>, Stop),
) -> Result<Prediction, SimulationError> {
    let Request { topology, costs, oversubscription, .. } = *request;
    let options =
        Options { oversubscription, recording: Recording::Ends, folding: Folding::On, deadline, stop, ..Options::default() };
    Ok(predict_with_memory(training, memory, topology, costs, &options)?.0)
}

/// Returns the weighted bytes of each stage.
pub(super) fn weighted(memory: &[Bytes], weights: &[f64]) -> Vec<f64> {
    memory.iter().zip(weights).map(|(bytes, weight)| bytes.value() * weight).collect()
}

/// Returns the weighted bytes of the fullest stage.
pub(super) fn most(held: &[f64]) -> Bytes {
    Bytes::new(held.iter().copied().fold(0.0, f64::max).ceil() as u64)
}
