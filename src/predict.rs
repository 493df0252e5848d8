//! Predicts a loaded plan. Shared by `simulate`, `execute` and `run`.

use crate::failure::{Failure, code};
use crate::host::{self, Instant};
use crate::objective_words::ObjectiveWords;
use crate::output::{note, with_spinner};
use crate::plan_file::LoadedPlan;
use foretell_models::Model;
use foretell_planner::Candidate;
use foretell_program::{LayoutDimension, Plan, Profile};
use foretell_reports::{Breakdown, LayoutRow, PredictionSummary, layouts_table, prediction_table};
use foretell_simulator::{
    CostModel, Load, Operators, Options, OverfullDevice, Oversubscription, PlanPrediction, PlanPredictionError, Prediction,
    StepKind, plan_costs, predict_plan,
};
use foretell_topologies::{LOCAL_DEVICE, Topology};
use foretell_units::Seconds;
use foretell_units::diagnostic::{Mistake, one_line};

/// How many servers and links a text lists, the busiest first.
const LOADS_SHOWN: usize = 4;

/// Whether several ranks may share a device.
pub fn oversubscription(allowed: bool) -> Oversubscription {
    if allowed { Oversubscription::Allowed } else { Oversubscription::Refused }
}

/// Compiles and simulates a plan, by its framework's traced operators if they are known.
pub fn predict(loaded: &LoadedPlan, profile: Option<&Profile>, oversubscribe: bool) -> Result<PlanPrediction, Failure> {
    let options = Options { oversubscription: oversubscription(oversubscribe), ..Options::default() };
    with_spinner("simulate", || predict_as(loaded, profile, &options))
}

/// Compiles and simulates a plan as Foretell's executor runs it, whatever its framework.
pub fn predict_own(loaded: &LoadedPlan, profile: Option<&Profile>, oversubscribe: bool) -> Result<PlanPrediction, Failure> {
    let oversubscription = oversubscription(oversubscribe);
    let options = Options { oversubscription, operators: Operators::Own, ..Options::default() };
    with_spinner("simulate", || predict_as(loaded, profile, &options))
}

/// Compiles and simulates a plan with the given options.
pub fn predict_as(loaded: &LoadedPlan, profile: Option<&Profile>, options: &Options) -> Result<PlanPrediction, Failure> {
    let started = Instant::now();
    let model = (&loaded.model.model, loaded.model.name.as_str());
    let mut predicted = predict_plan(model, &loaded.plan, &loaded.topology, profile, options).map_err(|error| match error {
        error @ (PlanPredictionError::Plan(_) | PlanPredictionError::TooManyRanks { .. }) => {
            Failure::from(error).in_file(&loaded.path)
        }
        error => error.into(),
    })?;
    predicted.prediction.wall_seconds = Seconds::new(started.elapsed().as_secs_f64());
    let of_machine = profile.and_then(|profile| on_machine(profile, &loaded.topology));
    predicted.remarks.splice(0..0, loaded.remarks.iter().cloned());
    predicted.remarks.extend(of_machine);
    Ok(predicted)
}

/// The cost model of a plan, with its assumptions.
pub fn costs(profile: Option<&Profile>, topology: &Topology, plan: &Plan, model: &Model) -> Result<CostModel, Failure> {
    let mut costs = plan_costs(profile, topology, plan, model).map_err(Failure::of_input)?;
    costs.remarks.extend(profile.and_then(|profile| on_machine(profile, topology)));
    Ok(costs)
}

/// Returns a sentence if the profile of this machine's cores was measured on another machine.
fn on_machine(profile: &Profile, topology: &Topology) -> Option<String> {
    let is_local = topology.is_lab() || topology.device_kinds().iter().any(|kind| kind.name == LOCAL_DEVICE);
    let (there, here) = (&profile.machine.device, host::processor());
    (is_local && profile.device == LOCAL_DEVICE && *there != here).then(|| {
        let message = format!("the profile was measured on `{there}`, and this machine is `{here}`");
        one_line(&Mistake::new(message, "run `foretell calibrate` here"))
    })
}

/// Refuses a plan that does not fit its devices.
pub fn require_fit(predicted: &PlanPrediction, loaded: &LoadedPlan) -> Result<(), Failure> {
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
    // Kinds of steps that take equally long share a line: an exchange in fragments has many kinds.
    let mut kinds: Vec<StepKind> = Vec::new();
    for kind in &prediction.cycle {
        let times = (kind.step_seconds, kind.exposed_communication_seconds);
        match kinds.iter_mut().find(|kind| (kind.step_seconds, kind.exposed_communication_seconds) == times) {
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
    servers.sort_by(|server, other| other.busy.total_cmp(&server.busy));
    let servers: Vec<String> =
        servers.iter().map(|server| busy(format!("rank {}", server.rank), server.busy)).take(LOADS_SHOWN).collect();
    let links: Vec<String> =
        load.links.iter().map(|link| busy(format!("`{}`", link.link), link.busy)).take(LOADS_SHOWN).collect();
    let line = |what: &str, loads: Vec<String>| {
        if loads.is_empty() { String::new() } else { format!("\nbusy share of the time, {what}: {}", loads.join(", ")) }
    };
    line("servers", servers) + &line("links", links)
}

/// Prints the caveats of a prediction: estimated devices, assumptions of the costs, estimated
/// costs, shared devices.
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
pub fn layouts(candidates: &[Candidate], objective: &ObjectiveWords) -> String {
    let counts_tokens = candidates.iter().all(|candidate| candidate.prediction.tokens_per_second.is_some());
    let row = |candidate: &Candidate| {
        let Candidate { plan, prediction, value } = candidate;
        let mut dimensions = plan.layout.dimensions();
        let cell = plan.precision.to_string();
        dimensions.insert(0, LayoutDimension { title: "precision", words: Some(cell.clone()), cell, is_abridged: false });
        LayoutRow {
            dimensions,
            step: prediction.step_seconds,
            objective: objective.column().map(|title| (title, objective.amount(*value))),
            rate: prediction.tokens_per_second.filter(|_| counts_tokens).unwrap_or(prediction.samples_per_second),
            flops_of_device: prediction.model_flops_per_device_per_second,
            memory: prediction.peak_memory_bytes.iter().copied().max().unwrap_or_default(),
            mfu: (prediction.mfu > 0.0).then_some(prediction.mfu),
        }
    };
    let rows: Vec<LayoutRow> = candidates.iter().map(row).collect();
    layouts_table(&rows, if counts_tokens { "tokens/s" } else { "samples/s" })
}
