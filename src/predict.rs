//! Predicts a loaded plan. Shared by `simulate`, `execute` and `run`.

use crate::failure::{Failure, code};
use crate::host::{self, Instant};
use crate::output::{note, with_spinner};
use crate::plan_file::LoadedPlan;
use foretell_models::Model;
use foretell_planner::Candidate;
use foretell_program::{Compiled, LayoutDimension, Mode, Plan, Profile, Program, Stack};
use foretell_reports::{Breakdown, LayoutRow, PredictionSummary, layouts_table, prediction_table};
use foretell_simulator::{
    CheckpointCost, CostModel, Disturbance, InputBound, Load, MemoryUse, Options, OverfullDevice, Oversubscription,
    PacedPrediction, PowerModel, Prediction, Recording, Simulation, SimulationError, StepKind, TracedPrediction, checkpoint_cost,
    load, memory_use, plan_costs, predict_with_memory, simulate, traced_energy, traced_prediction,
};
use foretell_topologies::{LOCAL_DEVICE, Topology};
use foretell_units::diagnostic::{Mistake, one_line};
use foretell_units::{BytesPerSecond, Joules, Seconds};
use serde::{Deserialize, Serialize};

/// What the prediction says of the input pipeline.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct PredictedInput {
    /// The part that limits the step.
    pub bound: InputBound,
    /// The time per step that waits for samples.
    pub wait_seconds: f64,
    /// Workers of each rank.
    pub workers: usize,
}

/// A plan's Programs and their prediction.
pub struct PredictedPlan {
    /// The training and the evaluation Program.
    pub compiled: Compiled,
    /// The prediction's figures.
    pub prediction: Prediction,
    /// The simulated timeline and its analysis; where steps differ, those of the usual one.
    pub simulation: Simulation,
    /// The step time without jitter and stragglers, if some were simulated.
    pub undisturbed: Option<Seconds>,
    /// What the prediction assumes, one sentence each.
    pub remarks: Vec<String>,
    /// The energy of the devices, if the framework's own operators predict the step and the power
    /// of the devices is known.
    pub traced_energy: Option<Joules>,
    /// The memory that the run needs.
    memory: MemoryUse,
    /// What a checkpoint costs.
    pub checkpoint: CheckpointCost,
    /// The rate at which checkpoints are written and read, if it is known.
    pub storage: Option<BytesPerSecond>,
    /// What limits the input pipeline, if the prediction has one.
    pub input: Option<PredictedInput>,
}

/// How many servers and links a text lists, the busiest first.
const LOADS_SHOWN: usize = 4;

/// Whether several ranks may share a device.
pub fn oversubscription(allowed: bool) -> Oversubscription {
    if allowed { Oversubscription::Allowed } else { Oversubscription::Refused }
}

/// Compiles and simulates a plan.
pub fn predict(loaded: &LoadedPlan, profile: Option<&Profile>, oversubscribe: bool) -> Result<PredictedPlan, Failure> {
    let options = Options { oversubscription: oversubscription(oversubscribe), ..Options::default() };
    with_spinner("simulate", || predict_as(loaded, profile, &options))
}

/// Compiles and simulates a plan with the given options.
pub fn predict_as(loaded: &LoadedPlan, profile: Option<&Profile>, options: &Options) -> Result<PredictedPlan, Failure> {
    let started = Instant::now();
    let compiled = loaded.compile()?;
    let ranks = compiled.training.mesh.world_size();
    let devices = loaded.topology.device_count();
    if ranks > devices && options.oversubscription == Oversubscription::Refused {
        let hint = "use a smaller layout, more `nodes`, or `--oversubscribe` to check it without timing it";
        return Err(Failure::input(
            code::PLAN_TOO_MANY_RANKS,
            format!("the layout has {ranks} ranks, but `{}` has {devices} devices", loaded.topology.name()),
        )
        .hint(hint)
        .in_file(&loaded.path));
    }
    if let Some((rank, _)) = options.disturbance.stragglers.iter().find(|(rank, _)| rank.0 >= ranks) {
        return Err(Failure::input(
            code::OPTION_VALUE,
            format!("`--straggler` names {rank}, but the layout has ranks 0 to {}", ranks - 1),
        ));
    }
    let costs = costs(profile, &loaded.topology, &loaded.plan, &loaded.model.model)?;
    let mut memory = memory_use(&compiled.training, Some(&compiled.evaluation), &loaded.topology, &costs);
    let (mut prediction, simulation) = predict_cycle(&compiled, &memory, &loaded.topology, &costs, options)?;
    let traced = traced_prediction(&loaded.plan, &loaded.model.model, &loaded.topology, &costs).ok();
    if traced.is_some() && !options.disturbance.is_none() {
        let hint = "leave out `--jitter` and `--straggler`, or ask under `stack: fsdp`";
        let reason = "the plan is predicted by its framework's own operators, which nothing can disturb yet";
        return Err(Failure::input(code::OPTION_VALUE, reason).hint(hint));
    }
    let energy = |traced: &TracedPrediction| traced_energy(&traced.time, ranks, &loaded.topology, &PowerModel::default());
    let of_energy = traced.as_ref().and_then(energy);
    let of_operators = traced.map(|traced| {
        (prediction, memory) = (traced.prediction, traced.memory_use);
        let stack = loaded.plan.stack.name();
        let others = if costs.framework(0).is_some() { "of our own operators" } else { "of its profile" };
        format!("times and memory are those of the operators of `{stack}`; the timeline and the critical path are {others}")
    });
    let undisturbed = (!options.disturbance.is_none()).then(|| {
        let options = Options { disturbance: Disturbance::default(), recording: Recording::Ends, ..options.clone() };
        let total = compiled.cycle.steps() as f64;
        let share = |(program, count): (&Program, &usize)| {
            let simulation = simulate(program, &loaded.topology, &costs, &options)?;
            Ok(Seconds::from(simulation.step) * (*count as f64 / total))
        };
        compiled.step_programs().into_iter().zip(&compiled.cycle.counts()).map(share).sum::<Result<Seconds, SimulationError>>()
    });
    let undisturbed = undisturbed.transpose()?;
    let checkpoint = checkpoint_cost(&compiled.saving, &loaded.topology, &costs);
    let storage = costs.storage_rate(&loaded.topology);
    // Other stacks write theirs in their own ways.
    if loaded.plan.stack == Stack::default() {
        prediction = prediction.with_checkpoint(checkpoint);
    }
    if loaded.plan.mode != Mode::Synchronous {
        let steps: Vec<(&Program, usize)> = compiled.step_programs().into_iter().zip(compiled.cycle.counts()).collect();
        let paced = (prediction.step_seconds, prediction.paces.as_ref());
        prediction.load = Some(load(&steps, &loaded.topology, &costs, options, paced)?);
    }
    prediction.wall_seconds = Seconds::new(started.elapsed().as_secs_f64());
    let of_usual_step = (compiled.cycle.steps() > 1).then(|| {
        let steps = compiled.cycle.steps();
        format!("steps differ, in a cycle of {steps}; the timeline, the critical path and the energy are those of its first step")
    });
    let of_paces = prediction.paces.as_ref().map(paces_in_words);
    let remarks =
        loaded.remarks.iter().chain(&costs.remarks).cloned().chain(of_operators).chain(of_usual_step).chain(of_paces).collect();
    Ok(PredictedPlan {
        compiled,
        prediction,
        simulation,
        undisturbed,
        memory,
        remarks,
        traced_energy: of_energy,
        checkpoint,
        storage,
        input: None,
    })
}

/// Says how workers that go at their own pace do.
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

/// Simulates each kind of step in a cycle. Returns the prediction of the mean step, and the
/// simulation of the usual one.
pub fn predict_cycle(
    compiled: &Compiled,
    memory: &MemoryUse,
    topology: &Topology,
    costs: &CostModel,
    options: &Options,
) -> Result<(Prediction, Simulation), Failure> {
    let mut usual = None;
    let mut steps = Vec::new();
    // The steps of workers at their own pace are read from the spans of one step.
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
    Prediction::of_cycle(steps).zip(usual).ok_or_else(|| Failure::undone(code::SYSTEM, "the plan has no step"))
}

/// The cost model of a plan, with what it assumes.
pub fn costs(profile: Option<&Profile>, topology: &Topology, plan: &Plan, model: &Model) -> Result<CostModel, Failure> {
    let mut costs = plan_costs(profile, topology, plan, model).map_err(Failure::of_input)?;
    costs.remarks.extend(profile.and_then(|profile| on_machine(profile, topology)));
    Ok(costs)
}

/// Returns a sentence if a profile stands for the cores of this machine, and was measured on
/// another.
fn on_machine(profile: &Profile, topology: &Topology) -> Option<String> {
    let is_local = topology.is_lab() || topology.device_kinds().iter().any(|kind| kind.name == LOCAL_DEVICE);
    let (there, here) = (&profile.machine.device, host::processor());
    (is_local && profile.device == LOCAL_DEVICE && *there != here).then(|| {
        let message = format!("the profile was measured on `{there}`, and this machine is `{here}`");
        one_line(&Mistake::new(message, "run `foretell calibrate` here"))
    })
}

/// Refuses a plan that does not fit its devices.
pub fn require_fit(predicted: &PredictedPlan, loaded: &LoadedPlan) -> Result<(), Failure> {
    if let Some(held) = &predicted.memory.overfull_host {
        let hint = "use `offload: none`, a higher `zero`, or more nodes";
        return Err(Failure::undone(
            code::PLAN_TOO_LARGE,
            format!("the plan does not fit: the ranks of a node need {held} of host memory, more than it has"),
        )
        .hint(hint)
        .in_file(&loaded.path));
    }
    let Some(OverfullDevice { stage, ranks, needed, kind, memory }) = &predicted.memory.overfull_device else {
        return Ok(());
    };
    let who = if *ranks > 1 {
        format!("stage {stage} and the ranks that share its device need")
    } else {
        format!("stage {stage} needs")
    };
    let hint = "use a larger `tensor` or `pipeline`, a smaller `micro_batch`, or `recompute: full`";
    Err(Failure::undone(
        code::PLAN_TOO_LARGE,
        format!("the plan does not fit: {who} {needed}, but a device of `{kind}` has {memory}"),
    )
    .hint(hint)
    .in_file(&loaded.path))
}

/// Formats a prediction as a table.
pub fn table(prediction: &Prediction, topology: &Topology) -> String {
    let breakdown = &prediction.breakdown_seconds;
    let known_peak = prediction.mfu > 0.0;
    let fullest = prediction.memory_by_component.iter().max_by_key(|footprint| footprint.total());
    let mut text = prediction_table(&PredictionSummary {
        step: prediction.step_seconds,
        interval: Some((prediction.step_seconds_p10, prediction.step_seconds_p90)),
        samples_per_second: prediction.samples_per_second,
        tokens_per_second: prediction.tokens_per_second,
        mfu: known_peak.then_some(prediction.mfu),
        hfu: known_peak.then_some(prediction.hfu),
        peak_memory: prediction.peak_memory_bytes.clone(),
        memory_parts: fullest.map(foretell_program::Footprint::parts).unwrap_or_default(),
        device_memory: topology.device_kinds().first().map(|kind| kind.memory).filter(|memory| {
            // Shown only if all device kinds have the same memory.
            topology.device_kinds().iter().all(|kind| kind.memory == *memory)
        }),
        breakdown: Breakdown {
            compute: breakdown.compute,
            exposed_communication: breakdown.exposed_communication,
            bubble: breakdown.bubble,
            data: breakdown.data,
            optimizer: breakdown.optimizer,
        },
        calibrated: prediction.calibrated,
    });
    // Kinds that take equally long share a line: those of the fragments of an exchange are many.
    let mut kinds: Vec<StepKind> = Vec::new();
    for kind in &prediction.cycle {
        let times = (kind.step_seconds, kind.exposed_communication_seconds);
        match kinds.iter_mut().find(|one| (one.step_seconds, one.exposed_communication_seconds) == times) {
            Some(one) => one.steps += kind.steps,
            None => kinds.push(*kind),
        }
    }
    for StepKind { steps, step_seconds, exposed_communication_seconds } in &kinds {
        let steps = if *steps == 1 { "1 step".into() } else { format!("{steps} steps") };
        let waits = format!("which waits {exposed_communication_seconds} for communication");
        text.push_str(&format!("\n{steps} of a cycle: {step_seconds} each, {waits}"));
    }
    text.push_str(&prediction.load.as_ref().map_or(String::new(), load_in_words));
    if let (Some(wait), Some(written)) = (prediction.checkpoint_seconds, prediction.checkpoint_write_seconds) {
        let (wait, written) = (Seconds::new(wait), Seconds::new(written));
        text.push_str(&format!("\na checkpoint: the next step waits {wait}, and it is on storage after {written}"));
    }
    text
}

/// Lines with the load of the busiest servers and links.
fn load_in_words(load: &Load) -> String {
    let busy = |name: String, share: f64| format!("{name} {:.0} %", share * 100.0);
    let mut servers: Vec<_> = load.servers.iter().collect();
    servers.sort_by(|one, other| other.busy.total_cmp(&one.busy));
    let servers: Vec<String> = servers.iter().map(|one| busy(format!("rank {}", one.rank), one.busy)).take(LOADS_SHOWN).collect();
    let links: Vec<String> = load.links.iter().map(|one| busy(format!("`{}`", one.link), one.busy)).take(LOADS_SHOWN).collect();
    let line = |what: &str, loads: Vec<String>| {
        if loads.is_empty() { String::new() } else { format!("\nbusy share of the time, {what}: {}", loads.join(", ")) }
    };
    line("servers", servers) + &line("links", links)
}

/// Prints the caveats of a prediction: estimated devices, what costs assume, estimated costs,
/// shared devices.
pub fn print_caveats(topology: &Topology, prediction: &Prediction, ranks: usize, remarks: &[String]) {
    for remark in topology.notes().iter().chain(remarks) {
        note(remark);
    }
    if !prediction.calibrated {
        let example = prediction.uncalibrated.first().map_or(String::new(), |what| format!(" (first: {what})"));
        note(&format!("this prediction is not calibrated: {} durations are estimates{example}", prediction.uncalibrated.len()));
    }
    if ranks > topology.device_count() {
        note(&format!("{ranks} ranks share {} devices: this checks the layout, not its timing", topology.device_count()));
    }
}

/// Formats candidates as a table, the best first.
pub fn layouts(candidates: &[Candidate]) -> String {
    let counts_tokens = candidates.iter().all(|candidate| candidate.prediction.tokens_per_second.is_some());
    let row = |candidate: &Candidate| {
        let Candidate { plan, prediction } = candidate;
        let mut dimensions = plan.layout.dimensions();
        let cell = plan.precision.to_string();
        dimensions.insert(0, LayoutDimension { title: "precision", words: Some(cell.clone()), cell, is_abridged: false });
        LayoutRow {
            dimensions,
            step: prediction.step_seconds,
            rate: prediction.tokens_per_second.filter(|_| counts_tokens).unwrap_or(prediction.samples_per_second),
            flops_of_device: prediction.model_flops_per_device_per_second,
            memory: prediction.peak_memory_bytes.iter().copied().max().unwrap_or_default(),
            mfu: (prediction.mfu > 0.0).then_some(prediction.mfu),
        }
    };
    let rows: Vec<LayoutRow> = candidates.iter().map(row).collect();
    layouts_table(&rows, if counts_tokens { "tokens/s" } else { "samples/s" })
}
