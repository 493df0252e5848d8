//! `foretell execute`: predicts a plan, then trains as it says.

use crate::failure::Failure;
use crate::inputs;
use crate::launch::{Hosts, backend_for, enough_devices, this_program};
use crate::output;
use crate::plan_file::{LoadedPlan, PlanFile};
use crate::predict::{self, PredictedPlan};
use crate::run_folder::{Predicted, RunFolder};
use clap::Args;
use foretell_executor::data::{DataSource, Dataset};
use foretell_executor::{BackendKind, Length, Outcome, RunEvent, TrainingJob, TransportKind, World, execute, supported};
use foretell_models::Model;
use foretell_program::Plan;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Train as a plan says, with a process for each rank on this machine
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  foretell execute --plan plan.yaml --profile profile.yaml --epochs 3 --data digits --run runs/first"
)]
pub struct Arguments {
    /// The plan
    #[arg(long, value_name = "FILE")]
    plan: PathBuf,
    /// Measured costs, for the prediction that is made before the run
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    #[command(flatten)]
    pub training: TrainingArguments,
    /// The run's folder [default: the next free number under runs/]
    #[arg(long, value_name = "DIR")]
    run: Option<PathBuf>,
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
    /// Data: digits, text, synthetic, or a path of IDX, CIFAR, .txt or token files [default: by the
    /// model]
    #[arg(long, value_name = "D")]
    pub data: Option<DataSource>,
    /// Seed of everything random
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub seed: u64,
    /// Do not evaluate after each epoch
    #[arg(long)]
    pub no_evaluation: bool,
    /// Connect ranks by TCP over the loopback interface instead of shared memory
    #[arg(long)]
    pub tcp: bool,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let loaded = PlanFile::load(&arguments.plan)?;
    let world = World::from_environment()?;
    let backend = backend_for(&loaded.topology, world.as_ref())?;
    if let Some(world) = world.as_ref().filter(|world| world.rank > 0) {
        return Err(world.become_rank(&this_program()?, backend).into());
    }
    arguments.training.check_possible(&loaded.model.model, &loaded.plan, backend)?;
    if loaded.file.input.is_some() {
        output::note("the plan's `input` is only simulated; here each rank reads or generates its samples on one thread");
    }
    let profile = inputs::profile(arguments.profile.as_deref())?;
    let predicted = predict::predict(&loaded, profile.as_ref(), arguments.oversubscribe)?;
    let ranks = predicted.compiled.training.mesh.world_size();
    let here = world.as_ref().map_or(ranks, World::local_size);
    enough_devices(here, &loaded.topology, backend, arguments.oversubscribe)?;
    predict::require_fit(&predicted, &loaded)?;
    predict::print_caveats(&loaded.topology, &predicted.prediction, ranks);
    let folder = arguments.run.as_deref().map_or_else(RunFolder::next, |path| Ok(RunFolder::at(path)))?;
    let outcome = train(&loaded, &predicted, &arguments.training, &folder, world)?;
    if json {
        return output::json(&document(&outcome, &folder));
    }
    output::line(&summary(&outcome))?;
    output::line(&format!("the run is in {0}; `foretell check {0}` compares it with its prediction", folder.path().display()))
}

impl TrainingArguments {
    /// Refuses what cannot be trained, before anything is measured: no steps, a precision that the
    /// backend lacks, missing data, or fewer samples than a batch.
    pub fn check_possible(&self, model: &Model, plan: &Plan, backend: BackendKind) -> Result<(), Failure> {
        if self.steps == Some(0) || self.epochs == Some(0) {
            return Err(Failure::Input("a run of 0 steps trains nothing; hint: ask for at least 1".into()));
        }
        supported(plan, backend)?;
        let shape = model.sample();
        Dataset::open(&self.data_for(model), &shape, self.seed)
            .and_then(|data| data.steps_per_epoch(plan.global_batch))
            .map_err(foretell_executor::ExecutorError::from)?;
        Ok(())
    }

    fn data_for(&self, model: &Model) -> DataSource {
        self.data.clone().unwrap_or_else(|| DataSource::default_for(&model.sample()))
    }
}

/// Trains with ranks of its own, or with those that another launcher started (`world`). Writes plan
/// and prediction into the folder before the run, measurements after it.
pub fn train(
    loaded: &LoadedPlan,
    predicted: &PredictedPlan,
    arguments: &TrainingArguments,
    folder: &RunFolder,
    world: Option<World>,
) -> Result<Outcome, Failure> {
    let transport = if arguments.tcp { TransportKind::Tcp } else { TransportKind::SharedMemory };
    let hosts = Hosts::open(&loaded.topology, transport, Some(folder.file("ranks")), world)?;
    folder.clear()?;
    folder.keep_plan(loaded)?;
    folder.keep_prediction(&Predicted {
        name: loaded.model.name.clone(),
        prediction: predicted.prediction.clone(),
        timeline: predicted.simulation.timeline.clone(),
    })?;
    let job = TrainingJob {
        model: loaded.model.model.clone(),
        name: loaded.model.name.clone(),
        plan: loaded.plan.clone(),
        data: arguments.data_for(&loaded.model.model),
        seed: arguments.seed,
        length: match (arguments.steps, arguments.epochs) {
            (_, Some(epochs)) => Length::Epochs(epochs),
            (steps, None) => Length::Steps(steps.unwrap_or(50)),
        },
        evaluate: !arguments.no_evaluation,
        timeline: None,
    };
    let bar = output::progress(1, "train");
    let mut show = |progress: RunEvent| match progress {
        RunEvent::Started { steps } => bar.set_length(steps as u64),
        RunEvent::Step(step) => {
            bar.set_position(step.step as u64 + 1);
            bar.set_message(format!("loss {:.4}", step.loss));
        }
        RunEvent::Evaluation(evaluation) => {
            let text = format!("epoch {}: loss {:.4}, top-1 {:.2} %", evaluation.epoch, evaluation.loss, evaluation.top1 * 100.0);
            if bar.is_hidden() { eprintln!("{text}") } else { bar.println(text) }
        }
    };
    let outcome = execute(&job, Some(folder.path()), &hosts.options, &mut show)?;
    bar.finish_and_clear();
    hosts.close()?;
    folder.keep_measured(&outcome)?;
    Ok(outcome)
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
        "evaluation": outcome.evaluations.last(),
        "world_size": outcome.world_size,
        "backend": outcome.backend.name(),
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
