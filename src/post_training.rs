//! RL post-training: `plan --method grpo` and `simulate` of a plan with a rollout. It prints what
//! the planner and the simulator find.

use crate::choices::{Choices, Setting};
use crate::failure::{Failure, code};
use crate::host::Instant;
use crate::output;
use crate::plan_file::{LoadedPlan, PlanFile, PolicyTraining};
use crate::predict;
use crate::running_cost::{self, CostAnswer};
use foretell_planner::{
    FixedRollout, Framework, PlacedRoles, PlacementSearch, PlanJob, PlannedRoles, PostTrainingPlanError, PostTrainingRequest,
    Request, plan_post_training,
};
use foretell_program::{PolicyMethod, Profile, Rollout, RolloutOffload, RolloutPlacement};
use foretell_reports::{Column, Section, page, table};
use foretell_simulator::{ActorJob, PhaseMemory, PostTrainingError, PostTrainingPrediction, predict_post_training};
use foretell_units::{Bytes, Seconds};
use schemars::JsonSchema;
use serde::Serialize;
use std::path::Path;

/// The document of `plan --method grpo` and `ppo`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct PlanRolesAnswer {
    /// The fastest plan. Its paths are absolute.
    plan: PlanFile,
    /// The prediction of its step.
    predicted: PostTrainingPrediction,
    /// The next fastest.
    alternatives: Vec<AlternativeRoles>,
    /// What the search did.
    search: PlacementSearch,
    /// What a step costs, and a run if its length is stated. The energy is not known.
    cost: CostAnswer,
}

/// Another placement.
#[derive(Debug, Serialize, JsonSchema)]
struct AlternativeRoles {
    /// The plan.
    plan: PlanFile,
    /// The prediction of its step.
    predicted: PostTrainingPrediction,
}

/// The document of `simulate` of a plan with a rollout.
#[derive(Debug, Serialize, JsonSchema)]
pub struct SimulateRolesAnswer {
    #[serde(flatten)]
    prediction: PostTrainingPrediction,
    /// What the prediction assumes, a sentence each.
    remarks: Vec<String>,
    /// If the roles do not fit: changes of the rollout with which they would.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    changes: Vec<ChangedRollout>,
    /// What a step costs, and a run if its length is stated. The energy is not known.
    cost: CostAnswer,
}

/// A change with which the roles fit.
#[derive(Debug, Serialize, JsonSchema)]
struct ChangedRollout {
    /// The change, as `--rollout` takes it.
    rollout: String,
    /// The step with it.
    step_seconds: f64,
    /// Memory of the fullest device with it.
    peak_memory_bytes: u64,
}

/// Width of a timeline's bars.
const BARS: usize = 40;

/// An error of post-training as a failure of the input.
fn of_error(error: PostTrainingError) -> Failure {
    Failure::of_input(error)
}

/// Plans a job. Its setting must have a policy.
pub fn plan(choices: &Choices, setting: &Setting, profile: Option<&Profile>, top: usize) -> Result<PlannedRoles, Failure> {
    search(choices, setting, profile, top)?.map_err(|error| match error {
        PostTrainingPlanError::Planner(error) => Failure::Unplanned(error),
        error @ PostTrainingPlanError::OutOfMemory { .. } => Failure::of_undone(error),
        error => Failure::of_input(error),
    })
}

/// As [`plan`]; the inner error is the reason why no placement was found.
pub fn search(
    choices: &Choices,
    setting: &Setting,
    profile: Option<&Profile>,
    top: usize,
) -> Result<Result<PlannedRoles, PostTrainingPlanError>, Failure> {
    let (policy, started) = (policy(setting)?, Instant::now());
    let PolicyTraining { method, rollout } = policy;
    let fixed = choices.method.rollout.as_ref().map(crate::rollout::RolloutChoices::fixed).unwrap_or_default();
    let searched = as_searched(rollout, &fixed);
    check_framework(*method, &searched, setting.base.stack.name())?;
    let job = ActorJob::new(&setting.model.model, &setting.base, &searched, Some(1)).map_err(of_error)?;
    let costs = predict::costs(profile, &setting.topology, &job.plan, &job.model)?;
    let of_actor = PlanJob { model: &job.model, base: &job.plan, top, ..choices.job(setting, profile, started) };
    let actor = Request { searches_locally: false, ..of_actor.request(&costs, &job.plan) };
    let framework = framework_of(rollout)?;
    let request = PostTrainingRequest { method: *method, rollout, fixed, framework, base: &setting.base, actor };
    Ok(plan_post_training(&request))
}

/// The rollout as the framework is asked about it before engines are placed.
fn as_searched(rollout: &Rollout, fixed: &FixedRollout) -> Rollout {
    if fixed.placement.is_some() || rollout.off_policy == 0 {
        return rollout.clone();
    }
    // Engines on their own devices displace nothing.
    let offload = fixed.offload.unwrap_or(RolloutOffload::None);
    Rollout { placement: RolloutPlacement::Split(1), offload, ..rollout.clone() }
}

fn policy(setting: &Setting) -> Result<&PolicyTraining, Failure> {
    setting.policy.as_ref().ok_or_else(|| Failure::undone(code::SYSTEM, "the job has no rollout"))
}

fn framework_of(rollout: &Rollout) -> Result<Option<&'static Framework>, Failure> {
    rollout.framework.as_deref().map(Framework::named).transpose().map_err(Failure::of_input)
}

/// Refuses a rollout that its framework cannot place.
fn check_framework(method: PolicyMethod, rollout: &Rollout, stack: &str) -> Result<(), Failure> {
    let Some(framework) = framework_of(rollout)? else { return Ok(()) };
    framework.check(method, rollout, stack).map_err(|mistake| {
        let name = rollout.framework.as_deref().unwrap_or_default();
        Failure::of_input(mistake).about(&format!("framework `{name}`"))
    })
}

/// Runs `plan`.
pub fn run_plan(
    choices: &Choices,
    setting: &Setting,
    profile: Option<&Profile>,
    ((top, output, report), running): ((usize, Option<&Path>, Option<&Path>), &running_cost::Questions),
    json: bool,
) -> Result<(), Failure> {
    let planned = output::with_spinner("search", || plan(choices, setting, profile, top))?;
    let PlannedRoles { candidates, search } = &planned;
    let Some(best) = candidates.first() else {
        return Err(Failure::undone(code::NOTHING_FITS, "the search returned nothing"));
    };
    let file = |placed: &PlacedRoles| -> Result<PlanFile, Failure> {
        let file = choices.movable_plan_file(setting, &placed.plan)?;
        Ok(file.with_policy(Some(PolicyTraining { method: policy(setting)?.method, rollout: placed.rollout.clone() })))
    };
    if let Some(path) = output {
        output::write(path, file(best)?.to_yaml()?.as_bytes())?;
    }
    if let Some(path) = report {
        let text = format!("{}\n\n{}\n\nplacement 1:\n{}", fit(&best.prediction), placements(candidates), step(&best.prediction));
        let title = (setting.model.name.as_str(), setting.topology.name(), policy(setting)?.method);
        output::write(path, page_of(title, text, &file(best)?)?.as_bytes())?;
    }
    let cost = running_cost::answer_of_roles(running, &best.prediction, best.rollout.prompts, &setting.topology)?;
    if json {
        let alternative = |placed: &PlacedRoles| -> Result<AlternativeRoles, Failure> {
            Ok(AlternativeRoles { plan: file(placed)?, predicted: placed.prediction.clone() })
        };
        return output::json(&PlanRolesAnswer {
            plan: file(best)?,
            predicted: best.prediction.clone(),
            alternatives: candidates.iter().skip(1).map(alternative).collect::<Result<Vec<_>, _>>()?,
            search: *search,
            cost: cost.documents().0,
        });
    }
    best.prediction.assumptions.iter().for_each(|one| output::note(one));
    output::line(&fit(&best.prediction))?;
    let PolicyTraining { method, rollout } = policy(setting)?;
    let (model, topology, stack) = (&setting.model.name, setting.topology.name(), setting.base.stack.name());
    let framework = rollout.framework.as_deref().unwrap_or("any framework");
    output::line(&format!("{model} on {topology}, {} by {framework}, the actor trained by {stack}", method.name()))?;
    output::line(&placements(candidates))?;
    output::line(&format!("placement 1:\n{}", step(&best.prediction)))?;
    if let Some(table) = cost.table() {
        output::line(&table)?;
    }
    let PlacementSearch { placements, layouts, predicted, out_of_memory } = search;
    output::line(&format!(
        "searched: {placements} splits of the devices, {layouts} layouts of the actor, {predicted} steps, of which {out_of_memory} do not fit"
    ))?;
    if !setting.taken.is_empty() {
        output::line(&format!("defaults: {}", setting.taken.join(", ")))?;
    }
    output.map_or(Ok(()), |path| output::line(&format!("placement 1 is in {}", path.display())))
}

/// Simulates a plan with a rollout.
fn predict_roles(
    loaded: &LoadedPlan,
    policy: &PolicyTraining,
    profile: Option<&Profile>,
) -> Result<PostTrainingPrediction, Failure> {
    let PolicyTraining { method, rollout } = policy;
    let in_file = |error: PostTrainingError| of_error(error).in_file(&loaded.path);
    let job = ActorJob::new(&loaded.model.model, &loaded.plan, rollout, None).map_err(in_file)?;
    let costs = predict::costs(profile, &loaded.topology, &job.plan, &job.model)?;
    predict_post_training(*method, rollout, &job, &loaded.model.name, &loaded.topology, &costs).map_err(in_file)
}

/// Runs `simulate`. Returns the page of `--report` if it is wanted.
pub fn run_simulate(
    loaded: &LoadedPlan,
    policy: &PolicyTraining,
    profile: Option<&Profile>,
    (running, report): (&running_cost::Questions, Option<&Path>),
    json: bool,
) -> Result<(), Failure> {
    check_framework(policy.method, &policy.rollout, loaded.plan.stack.name()).map_err(|failure| failure.in_file(&loaded.path))?;
    let prediction = output::with_spinner("simulate", || predict_roles(loaded, policy, profile))?;
    let changes = if prediction.fits { Vec::new() } else { changes(loaded, policy, profile)? };
    let remarks: Vec<String> = loaded.remarks.iter().chain(&prediction.assumptions).cloned().collect();
    let text = format!("{}\n{}", fit(&prediction), step(&prediction));
    if let Some(path) = report {
        let title = (loaded.model.name.as_str(), loaded.topology.name(), policy.method);
        output::write(path, page_of(title, text.clone(), &loaded.file)?.as_bytes())?;
    }
    let cost = running_cost::answer_of_roles(running, &prediction, policy.rollout.prompts, &loaded.topology)?;
    let failure = (!prediction.fits).then(|| does_not_fit(&prediction, &changes).in_file(&loaded.path));
    if json {
        output::json(&SimulateRolesAnswer { prediction, remarks, changes, cost: cost.documents().0 })?;
    } else {
        remarks.iter().for_each(|remark| output::note(remark));
        output::line(&text)?;
        if let Some(table) = cost.table() {
            output::line(&table)?;
        }
    }
    failure.map_or(Ok(()), Err)
}

/// The page of `--report`: the answer and the plan.
fn page_of((model, topology, method): (&str, &str, PolicyMethod), text: String, file: &PlanFile) -> Result<String, Failure> {
    let heading = |heading: &str, text: String| Section::Listing { heading: heading.into(), text };
    let sections = [heading("Step", text), heading("Plan", file.to_yaml()?)];
    Ok(page(&format!("{model} on {topology}: {}", method.name()), &sections)?)
}

fn does_not_fit(prediction: &PostTrainingPrediction, changes: &[ChangedRollout]) -> Failure {
    let failure = Failure::undone(code::PLAN_TOO_LARGE, format!("the roles do not fit: {}", reason(prediction)));
    let offered = |change: &ChangedRollout| {
        let (memory, step) = (Bytes::new(change.peak_memory_bytes), Seconds::new(change.step_seconds));
        format!("`--rollout {}` ({memory}, {step} a step)", change.rollout)
    };
    let offered: Vec<String> = changes.iter().map(offered).collect();
    match offered.is_empty() {
        true => failure.hint("ask `plan` for a layout and placement that fit, or use more devices"),
        false => failure.hint(format!("it fits with {}", offered.join(", or "))),
    }
}

/// Why the roles do not fit.
fn reason(prediction: &PostTrainingPrediction) -> String {
    let (peak, device) = (prediction.peak_memory_bytes, prediction.device_memory_bytes);
    let (peak, device, holders) = (Bytes::new(peak), Bytes::new(device), &prediction.memory_peak);
    if peak > device {
        return format!("a device needs {peak} and has {device}; {holders}");
    }
    format!("an engine's share of memory holds its weights and no whole sequence; {holders}")
}

/// Changes of the rollout with which a step fits, each simulated.
fn changes(loaded: &LoadedPlan, policy: &PolicyTraining, profile: Option<&Profile>) -> Result<Vec<ChangedRollout>, Failure> {
    let rollout = &policy.rollout;
    let is_colocated = rollout.placement == RolloutPlacement::Colocated;
    let mut tried: Vec<(String, Rollout)> = Vec::new();
    if is_colocated && !rollout.sleep {
        tried.push(("sleep=on".into(), Rollout { sleep: true, ..rollout.clone() }));
    }
    for share in [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2] {
        tried.push((format!("memory-share={share}"), Rollout { memory_share: share, ..rollout.clone() }));
    }
    for tensor in [2 * rollout.tensor, 4 * rollout.tensor] {
        tried.push((format!("tensor={tensor}"), Rollout { tensor, ..rollout.clone() }));
    }
    for offload in RolloutOffload::ALL.into_iter().filter(|offload| is_colocated && *offload > rollout.offload) {
        tried.push((format!("offload={}", offload.name()), Rollout { offload, ..rollout.clone() }));
    }
    tried.push(("reference=off".into(), Rollout { reference: false, ..rollout.clone() }));
    let framework = framework_of(rollout)?;
    let mut found: Vec<ChangedRollout> = Vec::new();
    for (change, rollout) in tried {
        // One share of memory is enough: the largest that fits.
        let is_known = found.iter().any(|other| other.rollout.starts_with("memory-share") && change.starts_with("memory-share"));
        let stack = loaded.plan.stack.name();
        if is_known || framework.is_some_and(|framework| framework.check(policy.method, &rollout, stack).is_err()) {
            continue;
        }
        let Ok(prediction) = predict_roles(loaded, &PolicyTraining { method: policy.method, rollout }, profile) else { continue };
        if prediction.fits {
            let (step_seconds, peak_memory_bytes) = (prediction.step_seconds, prediction.peak_memory_bytes);
            found.push(ChangedRollout { rollout: change, step_seconds, peak_memory_bytes });
        }
    }
    Ok(found)
}

/// Whether the roles fit, in one line.
fn fit(prediction: &PostTrainingPrediction) -> String {
    let (peak, device) = (Bytes::new(prediction.peak_memory_bytes), Bytes::new(prediction.device_memory_bytes));
    match prediction.fits {
        true => format!("fits: {peak} of {device} on the fullest device; {}", prediction.memory_peak),
        false => format!("does not fit: {}", reason(prediction)),
    }
}

/// The placements that were found, the fastest first.
fn placements(candidates: &[PlacedRoles]) -> String {
    let row = |(index, placed): (usize, &PlacedRoles)| {
        let PlacedRoles { plan, rollout, prediction } = placed;
        let seconds = |seconds: f64| Seconds::new(seconds).to_string();
        vec![
            (index + 1).to_string(),
            engines_in_words(rollout),
            plan.layout.in_words(),
            seconds(prediction.step_seconds),
            seconds(prediction.generation_seconds),
            seconds(prediction.training_seconds),
            Bytes::new(prediction.peak_memory_bytes).to_string(),
        ]
    };
    let columns = [
        Column::numbers("#"),
        Column::words("engines"),
        Column::words("actor"),
        Column::numbers("step"),
        Column::numbers("generation"),
        Column::numbers("training"),
        Column::numbers("memory"),
    ];
    table(&columns, &candidates.iter().enumerate().map(row).collect::<Vec<_>>())
}

/// Where engines run, and their size.
pub fn engines_in_words(rollout: &Rollout) -> String {
    let place = match rollout.placement {
        RolloutPlacement::Colocated => "colocated".to_owned(),
        RolloutPlacement::Split(devices) => format!("on {devices} devices"),
    };
    let offload = match rollout.offload {
        RolloutOffload::None => String::new(),
        offload => format!(", offload {}", offload.name()),
    };
    format!("{place}, tensor {}, {:.0} % of memory{offload}", rollout.tensor, rollout.memory_share * 100.0)
}

/// A step: its roles as rows, the engines, and the memory.
fn step(prediction: &PostTrainingPrediction) -> String {
    let end = prediction.phases.iter().map(|span| span.end_seconds).fold(0.0, f64::max);
    let place = |seconds: f64| if end > 0.0 { (seconds / end * BARS as f64).round() as usize } else { 0 };
    let rows = prediction.phases.iter().map(|span| {
        let (from, to) = (place(span.start_seconds), place(span.end_seconds));
        let devices: usize =
            span.groups.iter().filter_map(|&group| prediction.groups.get(group)).map(|group| group.devices).sum();
        let duration = Seconds::new(span.end_seconds - span.start_seconds);
        let bar = format!("{}{}", " ".repeat(from), "█".repeat(to.saturating_sub(from).max(1)));
        vec![span.role.clone(), span.phase.clone(), devices.to_string(), duration.to_string(), bar]
    });
    let columns = [
        Column::words("role"),
        Column::words("phase"),
        Column::numbers("devices"),
        Column::numbers("takes"),
        Column::words("when"),
    ];
    let mut text = table(&columns, &rows.collect::<Vec<_>>());
    let (step, samples) = (Seconds::new(prediction.step_seconds), prediction.samples_per_second);
    text.push_str(&format!("\na step: {step}, {samples:.2} responses/s, {:.0} tokens/s", prediction.tokens_per_second));
    if let Some(engine) = &prediction.engine {
        text.push_str(&format!(
            "\nengines: {} of {}, {} responses each, {} at once (mean {:.0}), memory for {} tokens; the longest response has {} \
             tokens; {:.0} tokens/s",
            engine.engines,
            if engine.tensor == 1 { "1 device".into() } else { format!("{} devices", engine.tensor) },
            engine.responses,
            engine.concurrent,
            engine.mean_concurrent,
            engine.cached_tokens,
            engine.longest_response,
            engine.tokens_per_second
        ));
    }
    for PhaseMemory { group, phase, holders, bytes } in &prediction.memory {
        let roles = prediction.groups.get(*group).map_or("", |group| &group.roles);
        let parts: Vec<String> = holders.iter().map(|one| format!("{} {}", one.holder, Bytes::new(one.bytes))).collect();
        text.push_str(&format!("\nmemory in {phase} ({roles}): {}: {}", Bytes::new(*bytes), parts.join(", ")));
    }
    text
}
