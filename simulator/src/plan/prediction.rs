//! The prediction of a plan's step, as `foretell simulate` gives it.

use super::costs::plan_costs;
use super::error::PlanPredictionError;
use crate::answers::{
    CheckpointCost, Disturbance, InputBound, MemoryUse, Operators, Options, PacedPrediction, PowerModel, Prediction,
    TracedPrediction, checkpoint_cost, load, memory_use, predict_cycle, simulate, traced_course, traced_ends, traced_energy,
    traced_prediction,
};
use crate::cost::CostModel;
use crate::engine::Recording;
use crate::error::SimulationError;
use crate::lowering::Oversubscription;
use foretell_models::Model;
use foretell_program::{Compiled, Mode, Plan, Profile, Program, Stack, Timeline, compile};
use foretell_topologies::Topology;
use foretell_units::{BytesPerSecond, Joules, Seconds};
use serde::{Deserialize, Serialize};

/// What a prediction says of the input pipeline.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct PredictedInput {
    /// The part of the input pipeline that limits the step.
    pub bound: InputBound,
    /// Time per step spent waiting for samples.
    pub wait_seconds: f64,
    /// Number of workers of each rank.
    pub workers: usize,
}

/// A plan's Programs and their prediction.
pub struct PlanPrediction {
    /// The training and the evaluation Program.
    pub compiled: Compiled,
    /// The figures of the prediction. The caller adds how long the prediction took.
    pub prediction: Prediction,
    /// The timeline of [`PlanPrediction::program`]. If steps differ, that of the first step.
    pub timeline: Timeline,
    /// The framework's own step. `None` unless its operators predict the step and its spans are
    /// recorded.
    traced_program: Option<Box<Program>>,
    /// The step time without jitter and stragglers. `None` if none were simulated.
    pub undisturbed: Option<Seconds>,
    /// What the prediction assumes, one sentence each.
    pub remarks: Vec<String>,
    /// The energy of the devices. `None` unless the framework's own operators predict the step and
    /// the power of the devices is known.
    pub traced_energy: Option<Joules>,
    /// The memory that the run needs.
    pub memory: MemoryUse,
    /// The cost of a checkpoint.
    pub checkpoint: CheckpointCost,
    /// The rate at which checkpoints are written and read. `None` if unknown.
    pub storage: Option<BytesPerSecond>,
    /// What limits the input pipeline. `None` if nothing states how samples are read.
    pub input: Option<PredictedInput>,
}

impl PlanPrediction {
    /// The Program of the timeline: that of the framework's own operators if they predict the step,
    /// else the training Program.
    pub fn program(&self) -> &Program {
        self.traced_program.as_deref().unwrap_or(&self.compiled.training)
    }
}

/// Predicts the step of a plan for the model called `name`.
///
/// # Errors
/// [`PlanPredictionError`] if the plan contradicts itself, its model or the topology.
pub fn predict_plan(
    (model, name): (&Model, &str),
    plan: &Plan,
    topology: &Topology,
    profile: Option<&Profile>,
    options: &Options,
) -> Result<PlanPrediction, PlanPredictionError> {
    let compiled = compile(model, name, plan)?;
    let ranks = compiled.training.mesh.world_size();
    let devices = topology.device_count();
    if ranks > devices && options.oversubscription == Oversubscription::Refused {
        return Err(PlanPredictionError::TooManyRanks { ranks, topology: topology.name().into(), devices });
    }
    if let Some((rank, _)) = options.disturbance.stragglers.iter().find(|(rank, _)| rank.0 >= ranks) {
        return Err(PlanPredictionError::NoSuchRank { rank: *rank, last: ranks - 1 });
    }
    let costs = plan_costs(profile, topology, plan, model)?;
    let is_of_framework = options.operators == Operators::Framework;
    let traced = is_of_framework.then(|| traced_prediction(plan, model, topology, &costs).ok()).flatten();
    if traced.is_some() && !options.disturbance.is_none() {
        return Err(PlanPredictionError::Undisturbed);
    }
    let energy = |traced: &TracedPrediction| traced_energy(&traced.time, ranks, topology, &PowerModel::default());
    let of_energy = traced.as_ref().and_then(energy);
    let of_operators =
        traced.is_some().then(|| format!("times and memory are those of the operators of `{}`", plan.stack.name()));
    let (memory, mut prediction, timeline, traced_program) = match traced {
        Some(traced) => {
            let (program, timeline) = match options.recording {
                Recording::Ends => (None, traced_ends(&traced, ranks)),
                Recording::Spans => {
                    let (program, timeline) = traced_course(&traced, &compiled.training, topology, &costs)?;
                    (Some(Box::new(program)), timeline)
                }
            };
            (traced.memory_use, traced.prediction, timeline, program)
        }
        None => {
            let memory = memory_use(&compiled.training, Some(&compiled.evaluation), topology, &costs);
            let (prediction, simulation) = predict_cycle(&compiled, &memory, topology, &costs, options)?;
            (memory, prediction, simulation.timeline, None)
        }
    };
    let undisturbed = (!options.disturbance.is_none()).then(|| undisturbed_step(&compiled, topology, &costs, options));
    let undisturbed = undisturbed.transpose()?;
    let checkpoint = checkpoint_cost(&compiled.saving, topology, &costs);
    let storage = costs.storage_rate(topology);
    // Other stacks write their own formats of checkpoints.
    if plan.stack == Stack::default() {
        prediction = prediction.with_checkpoint(checkpoint);
    }
    if plan.mode != Mode::Synchronous {
        let steps: Vec<(&Program, usize)> = compiled.step_programs().into_iter().zip(compiled.cycle.counts()).collect();
        let paced = (prediction.step_seconds, prediction.paces.as_ref());
        prediction.load = Some(load(&steps, topology, &costs, options, paced)?);
    }
    let of_usual_step = (compiled.cycle.steps() > 1).then(|| {
        let steps = compiled.cycle.steps();
        format!("steps differ, in a cycle of {steps}; the timeline, the critical path and the energy are those of its first step")
    });
    let of_paces = prediction.paces.as_ref().map(paces_in_words);
    let remarks = costs.remarks.into_iter().chain(of_operators).chain(of_usual_step).chain(of_paces).collect();
    Ok(PlanPrediction {
        compiled,
        prediction,
        timeline,
        traced_program,
        undisturbed,
        memory,
        remarks,
        traced_energy: of_energy,
        checkpoint,
        storage,
        input: None,
    })
}

/// The mean step without jitter and stragglers.
fn undisturbed_step(
    compiled: &Compiled,
    topology: &Topology,
    costs: &CostModel,
    options: &Options,
) -> Result<Seconds, SimulationError> {
    let options = Options { disturbance: Disturbance::default(), recording: Recording::Ends, ..options.clone() };
    let total = compiled.cycle.steps() as f64;
    let share = |(program, count): (&Program, &usize)| {
        let simulation = simulate(program, topology, costs, &options)?;
        Ok(Seconds::from(simulation.step) * (*count as f64 / total))
    };
    compiled.step_programs().into_iter().zip(&compiled.cycle.counts()).map(share).sum()
}

/// Describes asynchronous workers that each run at their own pace.
fn paces_in_words(paces: &PacedPrediction) -> String {
    let PacedPrediction { staleness, server_load, worker_seconds: [fastest, slowest], .. } = paces;
    format!(
        "workers go at their own pace: their own steps take {} to {}, the staleness of a push is {:.2} on average, {} at most \
         for 95 % and {} for all, and servers copy and update {:.0} % of the time; the timeline is of a step that all begin together",
        Seconds::new(*fastest),
        Seconds::new(*slowest),
        staleness.mean,
        staleness.p95,
        staleness.max,
        server_load * 100.0
    )
}
