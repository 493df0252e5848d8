//! `foretell execute`: predicts a plan, then trains according to it.

use crate::failure::{Failure, code};
use crate::framework;
use crate::input;
use crate::inputs;
use crate::launch::{backend_for, enough_devices, this_program};
use crate::output;
use crate::plan_file::{LoadedPlan, PlanFile};
use crate::predict;
use crate::recovery::{Recovery, Resumption};
use crate::run_folder::RunFolder;
use crate::training::{Training, TrainingArguments};
use clap::Args;
use foretell_executor::{Departure, Evaluation, ObservedPaces, Outcome, World};
use foretell_program::StalenessDistribution;
use schemars::JsonSchema;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Train as a plan says, with a process for each rank on this machine
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  foretell execute --plan plan.yaml --profile profile.yaml --epochs 3 --data digits --run runs/first"
)]
pub struct Arguments {
    /// The plan [default with --resume: the run's own]
    #[arg(long, value_name = "FILE", required_unless_present = "resume")]
    plan: Option<PathBuf>,
    /// Recipe that replaces the plan's `training`: optimizer, schedule, loss, frozen parameters
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// Measured costs, for the prediction that is made before the run
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    #[command(flatten)]
    pub training: TrainingArguments,
    /// The run's folder [default: the next free number under runs/, or that of --resume]
    #[arg(long, value_name = "DIR")]
    run: Option<PathBuf>,
    /// Go on from the last whole checkpoint of the run in this folder, in any layout. Unless
    /// stated, data, how they are read, seed and length are those of that run
    #[arg(long, value_name = "RUN", conflicts_with = "init")]
    resume: Option<PathBuf>,
    /// When a rank is lost, go on from the last checkpoint with the ranks that are left, planned
    /// again for them
    #[arg(long)]
    elastic: bool,
    /// How often to go on from the last checkpoint after the loss of a rank [default: 0; with
    /// --elastic, the number of ranks]
    #[arg(long, value_name = "N")]
    max_restarts: Option<usize>,
    /// Replace the run that the folder has
    #[arg(long, requires = "run")]
    overwrite: bool,
    /// Let ranks share a core or a GPU, to check a layout without timing it
    #[arg(long)]
    oversubscribe: bool,
    /// Python that has the framework of the plan's stack, if that is another than ours [default:
    /// python3]
    #[arg(long, value_name = "PROGRAM")]
    python: Option<PathBuf>,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let resumption = arguments.resume.as_deref().map(Resumption::find).transpose()?;
    let plan = match (&arguments.plan, &arguments.resume) {
        (Some(plan), _) => plan.clone(),
        (None, Some(run)) => run.join("plan.yaml"),
        (None, None) => return Err(Failure::input(code::OPTION_MISSING, "a run needs a plan").hint("give one with `--plan`")),
    };
    let mut loaded = PlanFile::load(&plan)?;
    arguments.recipe.as_deref().map(|recipe| loaded.apply_recipe(recipe)).transpose()?;
    if let (false, Some(path)) = (loaded.plan.stack.is_own(), &arguments.profile) {
        return run_framework(arguments, &loaded, path, json);
    }
    let training = resumption
        .as_ref()
        .map_or_else(|| Ok(arguments.training.clone()), |training| training.fill_left_out(&arguments.training))?;
    let world = World::from_environment()?;
    let backend = backend_for(&loaded.topology, world.as_ref())?;
    World::check_transport(world.as_ref(), training.transport(), backend)?;
    if let Some(world) = world.as_ref().filter(|world| world.rank > 0) {
        return Err(world.become_rank(&this_program()?, backend, training.transport()).into());
    }
    let dataset = training.check_possible(&loaded.model.model, &loaded.plan, loaded.file.input.as_ref(), backend)?;
    let profile = inputs::profile(arguments.profile.as_deref())?;
    let mut predicted = predict::predict_own(&loaded, profile.as_ref(), arguments.oversubscribe)?;
    let options = training.input_options(loaded.file.input.as_ref());
    let waiting = input::waiting_for(&loaded, &dataset, &options, &predicted)?;
    if let Some(waiting) = &waiting {
        waiting.apply(&mut predicted);
    }
    let start = resumption.as_ref().map_or_else(|| training.start(), Resumption::start);
    let job = training.job(&loaded, &predicted, start.clone());
    let steps_per_epoch = dataset.steps_per_epoch(loaded.plan.global_batch).map_err(foretell_executor::ExecutorError::from)?;
    job.check_rounds(steps_per_epoch)?;
    drop(dataset);
    let ranks = predicted.compiled.training.mesh.world_size();
    let here = world.as_ref().map_or(ranks, World::local_size);
    enough_devices(here, &loaded.topology, backend, arguments.oversubscribe)?;
    predict::require_fit(&predicted, &loaded)?;
    predict::print_caveats(&loaded.topology, &predicted.prediction, ranks, &predicted.remarks);
    let recovery = Recovery {
        elastic: arguments.elastic,
        max_restarts: arguments.max_restarts.unwrap_or(if arguments.elastic { ranks } else { 0 }),
        profile: profile.as_ref(),
        oversubscribe: arguments.oversubscribe,
    };
    recovery.check_options(world.as_ref(), &training, &loaded.plan)?;
    // Check before touching anything in the folder.
    training.check_start(&job)?;
    if let (Some(init), Some(run), true) = (&training.init, &arguments.run, arguments.overwrite) {
        refuse_weights_in(init, run)?;
    }
    let folder = match (&arguments.run, &arguments.resume) {
        (Some(path), Some(run)) if is_same_folder(run, path) => RunFolder::claim_to_resume(path)?,
        (None, Some(run)) => RunFolder::claim_to_resume(run)?,
        (path, _) => RunFolder::claim(path.as_deref(), arguments.overwrite).and_then(|folder| folder.clear().map(|()| folder))?,
    };
    if let Some(profile) = &profile {
        folder.keep_profile(profile)?;
    }
    let outcome = recovery.train(Training { loaded, predicted, arguments: &training, folder: &folder, world, start })?;
    training.record(&outcome)?;
    if json {
        return output::json(&document(&outcome, &folder));
    }
    output::line(&summary(&outcome))?;
    output::line(&format!("the run is in {0}; `foretell check {0}` compares it with its prediction", folder.path().display()))
}

/// Lets another framework train. The profile at `path` was measured with its operators.
fn run_framework(arguments: &Arguments, loaded: &LoadedPlan, path: &Path, json: bool) -> Result<(), Failure> {
    let profile = inputs::profile(Some(path))?.expect("invariant: a path gives a profile");
    let training = &arguments.training;
    framework::refuse_options(training)?;
    let of_own = [
        ("--resume", arguments.resume.is_some()),
        ("--elastic", arguments.elastic),
        ("--max-restarts", arguments.max_restarts.is_some()),
        ("--oversubscribe", arguments.oversubscribe),
    ];
    if let Some((option, _)) = of_own.into_iter().find(|(_, is_given)| *is_given) {
        let message = format!("`{option}` is of our own executor, and `{}` trains", loaded.plan.stack.name());
        return Err(Failure::input(code::OPTION_VALUE, message).hint("leave it out"));
    }
    let folder = RunFolder::claim(arguments.run.as_deref(), arguments.overwrite)?;
    folder.clear()?;
    let trained = framework::execute(loaded, &profile, training, arguments.python.as_ref(), &folder)?;
    if json {
        return output::json(&trained);
    }
    let checked = framework::check(&folder)?;
    output::line(&checked.text())?;
    if framework::saves(training) {
        output::line(&format!("what was trained is in {}", folder.file(framework::CHECKPOINTS).display()))?;
    }
    output::line(&format!("the run of `{}` is in {}", loaded.plan.stack.name(), folder.path().display()))
}

/// Refuses weights that lie in the folder of the run that will be replaced.
fn refuse_weights_in(weights: &Path, run: &Path) -> Result<(), Failure> {
    let canonical = |path: &Path| std::fs::canonicalize(path).ok();
    match (canonical(weights), canonical(run)) {
        (Some(inside), Some(folder)) if inside.starts_with(&folder) => {
            let (weights, run) = (weights.display(), run.display());
            let hint = "give another folder with `--run`";
            Err(Failure::input(
                code::OPTION_VALUE,
                format!("`--overwrite` would delete the weights `{weights}`, which lie in `{run}`"),
            )
            .hint(hint))
        }
        _ => Ok(()),
    }
}

/// Whether two paths lead to one folder.
fn is_same_folder(one: &Path, other: &Path) -> bool {
    let canonical = |path: &Path| std::fs::canonicalize(path).ok();
    canonical(one).is_some_and(|path| canonical(other) == Some(path))
}

/// The document of `execute`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ExecuteAnswer {
    /// The run's folder.
    run: String,
    /// The steps that this command made.
    steps: usize,
    /// The duration of each.
    step_seconds: Vec<f64>,
    /// Their median.
    step_seconds_median: f64,
    /// The loss of each step; null where it was not finite.
    #[schemars(with = "Vec<Option<f64>>")]
    loss: Vec<f64>,
    /// The norm of each step's whole gradient; null where it was not finite.
    #[schemars(with = "Vec<Option<f64>>")]
    gradient_norm: Vec<f64>,
    /// The allocated arena of each stage; empty if memory was not measured.
    peak_memory_bytes: Vec<u64>,
    /// Samples in a second.
    samples_per_second: f64,
    /// The last evaluation.
    evaluation: Option<EvaluationAnswer>,
    /// Samples that were left out or replaced.
    bad_samples: Option<u64>,
    /// The step that the run resumed from; 0 for a new run.
    resumed_from_step: usize,
    /// Median time that a step waited for a checkpoint; null without checkpoints.
    checkpoint_seconds: Option<f64>,
    /// Median time until a checkpoint was on storage; null without checkpoints.
    checkpoint_write_seconds: Option<f64>,
    /// How often the run was restarted.
    restarts: usize,
    /// The workers that have left.
    departures: Vec<DepartureAnswer>,
    /// How old the parameters of pushed gradients were, in steps.
    staleness: StalenessDistribution,
    /// The number of ranks.
    world_size: usize,
    /// The backend: `cpu` or `cuda`.
    backend: &'static str,
}

/// A worker that has left a run.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Departure")]
pub struct DepartureAnswer {
    /// The worker's number: its position along `data`.
    worker: usize,
    /// The steps that all workers had made.
    step: usize,
    /// The reason, with the rank.
    cause: String,
}

/// An evaluation without its tables by class, which `evaluation.jsonl` has. Measures that a model
/// of sequences lacks are null.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Evaluation")]
pub struct EvaluationAnswer {
    /// The step after which it was made.
    step: usize,
    /// The epoch.
    epoch: usize,
    /// Samples.
    samples: usize,
    /// Mean loss; null if it was not finite.
    #[schemars(with = "Option<f64>")]
    loss: f64,
    /// The exponential of the loss; null if it was not finite.
    #[schemars(with = "Option<f64>")]
    perplexity: f64,
    /// Share of samples whose label is the first prediction.
    top1: f64,
    /// Share of samples whose label is among the first five predictions.
    top5: f64,
    /// Precision, as the mean over classes.
    precision: Option<f64>,
    /// Recall, as the mean over classes.
    recall: Option<f64>,
    /// F1, as the mean over classes.
    f1: Option<f64>,
    /// Area under the ROC curve.
    roc_auc: Option<f64>,
}

/// The JSON document of `execute`.
pub fn document(outcome: &Outcome, folder: &RunFolder) -> ExecuteAnswer {
    ExecuteAnswer {
        run: folder.path().display().to_string(),
        steps: outcome.steps.len(),
        step_seconds: outcome.steps.iter().map(|step| step.seconds).collect(),
        step_seconds_median: outcome.median_step().value(),
        loss: outcome.steps.iter().map(|step| step.loss).collect(),
        gradient_norm: outcome.steps.iter().map(|step| step.gradient_norm).collect(),
        peak_memory_bytes: outcome.arenas.iter().map(|arena| arena.count()).collect(),
        samples_per_second: outcome.samples_per_second(),
        evaluation: outcome.evaluations.last().map(evaluation_document),
        bad_samples: outcome.steps.last().and_then(|step| step.bad_samples),
        resumed_from_step: outcome.resumed_from_step,
        checkpoint_seconds: outcome.median_checkpoint().map(|(wait, _)| wait.value()),
        checkpoint_write_seconds: outcome.median_checkpoint().map(|(_, written)| written.value()),
        restarts: outcome.restarts,
        departures: outcome.departures.iter().map(departure_document).collect(),
        staleness: outcome.paces.as_ref().map(|paces| paces.staleness).unwrap_or_default(),
        world_size: outcome.world_size,
        backend: outcome.backend.name(),
    }
}

fn departure_document(departure: &Departure) -> DepartureAnswer {
    DepartureAnswer { worker: departure.worker, step: departure.step, cause: departure.cause.clone() }
}

fn evaluation_document(evaluation: &Evaluation) -> EvaluationAnswer {
    let classes = evaluation.classification.as_ref();
    EvaluationAnswer {
        step: evaluation.step,
        epoch: evaluation.epoch,
        samples: evaluation.samples,
        loss: evaluation.loss,
        perplexity: evaluation.perplexity,
        top1: evaluation.top1,
        top5: evaluation.top5,
        precision: classes.map(|classes| classes.precision),
        recall: classes.map(|classes| classes.recall),
        f1: classes.map(|classes| classes.f1),
        roc_auc: classes.and_then(|classes| classes.roc_auc),
    }
}

/// Summarises a run in text.
pub fn summary(outcome: &Outcome) -> String {
    let first = outcome.steps.first().map_or(0.0, |step| step.loss);
    let last = outcome.steps.last().map_or(0.0, |step| step.loss);
    let mut text = format!(
        "{} steps of {} ranks, median {}; loss {first:.4} at first, {last:.4} at last",
        outcome.steps.len(),
        outcome.world_size,
        outcome.median_step()
    );
    if let Some(ObservedPaces { staleness, samples_per_second, .. }) = &outcome.paces {
        text.push_str(&format!(
            "\n{samples_per_second:.1} samples a second; staleness {:.2} on average, {} at most for 95 % of pushes, {} for all",
            staleness.mean, staleness.p95, staleness.max
        ));
    }
    for departure in &outcome.departures {
        text.push_str(&format!("\nworker {} left after {} steps", departure.worker, departure.step));
    }
    if let Some(bad) = outcome.steps.last().and_then(|step| step.bad_samples).filter(|&bad| bad > 0) {
        text.push_str(&format!("\n{bad} bad samples were left out or replaced; `ranks/` names them"));
    }
    if let Some(evaluation) = outcome.evaluations.last() {
        text.push_str(&format!(
            "\nevaluation on {} samples: loss {:.4}, top-1 {:.2} %",
            evaluation.samples,
            evaluation.loss,
            evaluation.top1 * 100.0
        ));
    }
    text
}
