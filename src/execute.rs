//! `foretell execute`: predicts a plan, then trains as it says.

use crate::failure::Failure;
use crate::input;
use crate::inputs;
use crate::launch::{Hosts, backend_for, enough_devices, this_program};
use crate::live::LiveProgress;
use crate::output;
use crate::plan_file::{Input, LoadedPlan, PlanFile};
use crate::predict::{self, PredictedPlan};
use crate::recovery::{Recovery, Resumption};
use crate::run_folder::{Predicted, RunFolder};
use clap::Args;
use foretell_executor::checkpoint::check_start;
use foretell_executor::data::{Augmentation, DataSource, Dataset, InputOptions, OnBadSample};
use foretell_executor::transport::LEAST_PEER_TIMEOUT;
use foretell_executor::{
    BackendKind, Checkpoints, Evaluation, ExecutorError, Length, Outcome, RunEvent, Start, StepMetrics, StopSignals, TrainingJob,
    TransportKind, World, executable, execute, supported,
};
use foretell_models::Model;
use foretell_program::{Period, Plan};
use foretell_units::Seconds;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

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
    /// stated, data, seed and length are those of that run
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
}

/// Training options of `execute` and `run`.
#[derive(Debug, Clone, Args)]
pub struct TrainingArguments {
    /// Number of steps to train [default: 50, unless --epochs is given]
    #[arg(long, value_name = "N", conflicts_with = "epochs")]
    pub steps: Option<usize>,
    /// Number of passes over the data
    #[arg(long, value_name = "E")]
    pub epochs: Option<usize>,
    /// Data: digits, text, synthetic, a folder of pictures (train/CLASS/*), of IDX or CIFAR files,
    /// a .txt file, or files of tokens [default: by the model]
    #[arg(long, value_name = "D")]
    pub data: Option<DataSource>,
    /// Threads per rank that read and decode samples ahead of the steps [default: the plan's, or
    /// one per free core up to 4 for pictures]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(..=1024))]
    pub workers: Option<u16>,
    /// Batches that are prepared ahead of the step [default: the plan's, or 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub prefetch: Option<u16>,
    /// Random changes of training pictures: none, or a list of crop, flip and jitter=S (brightness,
    /// contrast and saturation; jitter=B:C:S:H for each and the hue) [default: crop,flip]
    #[arg(long, value_name = "LIST")]
    pub augment: Option<Augmentation>,
    /// What to do with a sample that cannot be used: end the run, or take another and count it
    #[arg(long, value_name = "WHAT", default_value = "error")]
    pub on_bad_sample: BadSamplePolicy,
    /// Seed of everything random [default: 0]
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,
    /// Weights to start from: a safetensors file with torchvision's or Hugging Face's names, the
    /// index of several, or a folder of either
    #[arg(long, value_name = "FILE")]
    pub init: Option<PathBuf>,
    /// Steps between checkpoints, or `never` [default: one checkpoint at the end]
    #[arg(long, value_name = "N|never")]
    pub save_every: Option<SaveEvery>,
    /// Number of checkpoints to keep [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub keep: Option<u64>,
    /// Do not evaluate after each epoch
    #[arg(long)]
    pub no_evaluation: bool,
    /// How long a rank may send no sign of life before the run ends and names it
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = peer_timeout)]
    pub peer_timeout: Duration,
    /// Also write TensorBoard's event files, into the run's folder
    #[arg(long)]
    pub tensorboard: bool,
    /// Connect ranks by TCP over the loopback interface instead of shared memory
    #[arg(long)]
    pub tcp: bool,
}

/// What to do with a sample that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum BadSamplePolicy {
    Error,
    Skip,
}

impl From<BadSamplePolicy> for OnBadSample {
    fn from(policy: BadSamplePolicy) -> Self {
        match policy {
            BadSamplePolicy::Error => OnBadSample::Error,
            BadSamplePolicy::Skip => OnBadSample::Skip,
        }
    }
}

/// When checkpoints are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveEvery {
    /// Never, not even at the end.
    Never,
    /// After each so many steps, and at the end.
    Steps(usize),
}

impl FromStr for SaveEvery {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            ("never", _) => Ok(SaveEvery::Never),
            (_, Ok(steps)) if steps > 0 => Ok(SaveEvery::Steps(steps)),
            _ => Err("give a number of steps above 0, or `never`".into()),
        }
    }
}

fn peer_timeout(text: &str) -> Result<Duration, String> {
    let seconds: Seconds = text.parse().map_err(|error: foretell_units::UnitError| error.to_string())?;
    let least = LEAST_PEER_TIMEOUT.as_secs_f64();
    if !(least..=86_400.0).contains(&seconds.value()) {
        return Err(format!("it must lie between {least} s, since heartbeats are a second apart, and a day"));
    }
    Ok(Duration::from_secs_f64(seconds.value()))
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let resumption = arguments.resume.as_deref().map(Resumption::find).transpose()?;
    let plan = match (&arguments.plan, &arguments.resume) {
        (Some(plan), _) => plan.clone(),
        (None, Some(run)) => run.join("plan.yaml"),
        (None, None) => return Err(Failure::Input("a run needs a plan; hint: give one with `--plan`".into())),
    };
    let mut loaded = PlanFile::load(&plan)?;
    arguments.recipe.as_deref().map(|recipe| loaded.apply_recipe(recipe)).transpose()?;
    let training = resumption.as_ref().map_or_else(|| Ok(arguments.training.clone()), |one| one.complete(&arguments.training))?;
    let world = World::from_environment()?;
    let backend = backend_for(&loaded.topology, world.as_ref())?;
    if let Some(world) = world.as_ref().filter(|world| world.rank > 0) {
        return Err(world.become_rank(&this_program()?, backend).into());
    }
    let dataset = training.check_possible(&loaded.model.model, &loaded.plan, loaded.file.input.as_ref(), backend)?;
    let profile = inputs::profile(arguments.profile.as_deref())?;
    let mut predicted = predict::predict(&loaded, profile.as_ref(), arguments.oversubscribe)?;
    let options = training.input_options(loaded.file.input.as_ref());
    let waiting = input::waiting_for(&loaded, &dataset, &options, profile.as_ref(), &predicted)?;
    if let Some(waiting) = &waiting {
        waiting.apply(&mut predicted);
    }
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
    recovery.check(world.as_ref(), &training)?;
    let start = resumption.as_ref().map_or_else(|| training.start(), Resumption::start);
    // Before anything of the folder is touched.
    training.check_start(&training.job(&loaded, start.clone()))?;
    let folder = match (&arguments.run, &arguments.resume) {
        (Some(path), Some(run)) if is_same_folder(run, path) => RunFolder::claim_to_resume(path)?,
        (None, Some(run)) => RunFolder::claim_to_resume(run)?,
        (path, _) => RunFolder::claim(path.as_deref(), arguments.overwrite).and_then(|folder| folder.clear().map(|()| folder))?,
    };
    let outcome = recovery.train(Training { loaded, predicted, arguments: &training, folder: &folder, world, start })?;
    if json {
        return output::json(&document(&outcome, &folder));
    }
    output::line(&summary(&outcome))?;
    output::line(&format!("the run is in {0}; `foretell check {0}` compares it with its prediction", folder.path().display()))
}

/// Whether two paths lead to one folder.
fn is_same_folder(one: &Path, other: &Path) -> bool {
    let canonical = |path: &Path| std::fs::canonicalize(path).ok();
    canonical(one).is_some_and(|one| canonical(other) == Some(one))
}

impl TrainingArguments {
    /// Refuses what cannot be trained, before anything is measured: no steps, a precision that the
    /// backend lacks, missing data, or fewer samples than a batch.
    pub fn check_possible(
        &self,
        model: &Model,
        plan: &Plan,
        input: Option<&Input>,
        backend: BackendKind,
    ) -> Result<Dataset, Failure> {
        if self.steps == Some(0) || self.epochs == Some(0) {
            return Err(Failure::Input("a run of 0 steps trains nothing; hint: ask for at least 1".into()));
        }
        executable(model)?;
        supported(plan, backend)?;
        let options = self.input_options(input);
        let dataset = Dataset::open_with(&self.data_for(model), &model.sample(), self.seed(), &options)
            .and_then(|data| data.steps_per_epoch(plan.global_batch).map(|_| data))
            .map_err(foretell_executor::ExecutorError::from)?;
        if dataset.bad_samples() > 0 {
            output::note(&format!("{} bad samples, files or classes are left out", dataset.bad_samples()));
        }
        Ok(dataset)
    }

    /// How samples are read: as the command line says, else the plan.
    pub fn input_options(&self, input: Option<&Input>) -> InputOptions {
        let usual = InputOptions::default();
        InputOptions {
            workers: self.workers.map(usize::from).or(input.map(|input| input.workers)),
            prefetch: self.prefetch.map(usize::from).or(input.map(|input| input.prefetch)).unwrap_or(usual.prefetch),
            augmentation: self.augment.unwrap_or_default(),
            on_bad_sample: self.on_bad_sample.into(),
        }
    }

    /// Refuses weights or a checkpoint from which a job cannot start. Notes what starts anew.
    pub fn check_start(&self, job: &TrainingJob) -> Result<(), Failure> {
        let found = check_start(job)?;
        let path = self.init.as_deref().map(Path::display);
        if let (Some(path), [first, ..]) = (&path, &found.fresh[..]) {
            let several = found.fresh.len();
            output::note(&format!("`{first}` and the like ({several} tensors) start anew: `{path}` has none of their size"));
        }
        if let (Some(path), [first, ..]) = (&path, &found.unused[..]) {
            output::note(&format!("the model does not use {} tensors of `{path}`, such as `{first}`", found.unused.len()));
        }
        Ok(())
    }

    /// What a run that goes on from no other starts from.
    pub fn start(&self) -> Start {
        self.init.clone().map_or(Start::Anew, Start::Weights)
    }

    /// The job that trains as these arguments say.
    pub fn job(&self, loaded: &LoadedPlan, start: Start) -> TrainingJob {
        TrainingJob {
            model: loaded.model.model.clone(),
            name: loaded.model.name.clone(),
            plan: loaded.plan.clone(),
            data: self.data_for(&loaded.model.model),
            input: self.input_options(loaded.file.input.as_ref()),
            seed: self.seed(),
            length: match (self.steps, self.epochs) {
                (_, Some(epochs)) => Length::Epochs(epochs),
                (steps, None) => Length::Steps(steps.unwrap_or(50)),
            },
            evaluate: !self.no_evaluation,
            timeline: None,
            start,
            checkpoints: match self.save_every {
                Some(SaveEvery::Never) => None,
                Some(SaveEvery::Steps(steps)) => Some(Checkpoints::new(Some(Period::Steps(steps)), self.keep())),
                None => Some(Checkpoints::new(loaded.plan.training.save_every, self.keep())),
            },
        }
    }

    fn seed(&self) -> u64 {
        self.seed.unwrap_or(0)
    }

    fn keep(&self) -> Option<usize> {
        self.keep.map(|keep| usize::try_from(keep).unwrap_or(usize::MAX))
    }

    fn data_for(&self, model: &Model) -> DataSource {
        self.data.clone().unwrap_or_else(|| DataSource::default_for(&model.sample()))
    }
}

/// One attempt at a run, from its start to its end or failure.
pub struct Training<'a> {
    pub loaded: LoadedPlan,
    pub predicted: PredictedPlan,
    pub arguments: &'a TrainingArguments,
    /// The run's folder, cleared of earlier runs.
    pub folder: &'a RunFolder,
    /// The ranks that another launcher started; `None` to start them here.
    pub world: Option<World>,
    pub start: Start,
}

/// Trains. Writes plan and prediction into the folder before the run. `made` collects the steps as
/// they are made.
pub fn train(training: &Training<'_>, signals: &StopSignals, made: &mut Vec<StepMetrics>) -> Result<Outcome, ExecutorFailure> {
    let Training { loaded, predicted, arguments, folder, world, start } = training;
    let transport = if arguments.tcp { TransportKind::Tcp } else { TransportKind::SharedMemory };
    let mut hosts = Hosts::open(&loaded.topology, transport, Some(folder.file("ranks")), world.clone())?;
    hosts.options.signals = Some(signals.clone());
    hosts.options.peer_timeout = arguments.peer_timeout;
    folder.keep_plan(loaded)?;
    folder.keep_prediction(&Predicted {
        name: loaded.model.name.clone(),
        prediction: predicted.prediction.clone(),
        timeline: predicted.simulation.timeline.clone(),
        input: predicted.input,
    })?;
    let job = arguments.job(loaded, start.clone());
    let tensorboard = arguments.tensorboard.then(|| folder.file("tensorboard"));
    let step = predicted.prediction.step_seconds;
    let mut live = LiveProgress::new(loaded.plan.training.print_every, step, tensorboard.as_deref())?;
    let mut show = |event: RunEvent| {
        if let RunEvent::Step(step) = &event {
            made.push(*step);
        }
        live.show(&event);
    };
    let outcome = execute(&job, Some(folder.path()), &hosts.options, &mut show);
    live.finish()?;
    let outcome = outcome.map_err(ExecutorFailure::Run)?;
    hosts.close()?;
    Ok(outcome)
}

/// Why an attempt at a run failed.
pub enum ExecutorFailure {
    /// The run itself failed.
    Run(ExecutorError),
    /// Something before or after it failed.
    Command(Failure),
}

impl From<Failure> for ExecutorFailure {
    fn from(failure: Failure) -> Self {
        ExecutorFailure::Command(failure)
    }
}

/// The JSON document of `execute`.
pub fn document(outcome: &Outcome, folder: &RunFolder) -> Value {
    json!({
        "run": folder.path().display().to_string(),
        "steps": outcome.steps.len(),
        "step_seconds": outcome.steps.iter().map(|step| step.seconds).collect::<Vec<_>>(),
        "step_seconds_median": outcome.median_step().value(),
        "loss": outcome.steps.iter().map(|step| step.loss).collect::<Vec<_>>(),
        "gradient_norm": outcome.steps.iter().map(|step| step.gradient_norm).collect::<Vec<_>>(),
        "peak_memory_bytes": outcome.arenas.iter().map(|arena| arena.count()).collect::<Vec<_>>(),
        "samples_per_second": outcome.samples_per_second(),
        "evaluation": outcome.evaluations.last().map(evaluation_document),
        "bad_samples": outcome.steps.last().and_then(|step| step.bad_samples),
        "resumed_from_step": outcome.resumed_from_step,
        "restarts": outcome.restarts,
        "world_size": outcome.world_size,
        "backend": outcome.backend.name(),
    })
}

/// An evaluation without its tables by class, which `evaluation.jsonl` has. Measures that a model
/// of sequences lacks are null.
fn evaluation_document(evaluation: &Evaluation) -> Value {
    let classes = evaluation.classification.as_ref();
    json!({
        "step": evaluation.step,
        "epoch": evaluation.epoch,
        "samples": evaluation.samples,
        "loss": evaluation.loss,
        "perplexity": evaluation.perplexity,
        "top1": evaluation.top1,
        "top5": evaluation.top5,
        "precision": classes.map(|classes| classes.precision),
        "recall": classes.map(|classes| classes.recall),
        "f1": classes.map(|classes| classes.f1),
        "roc_auc": classes.and_then(|classes| classes.roc_auc),
    })
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
