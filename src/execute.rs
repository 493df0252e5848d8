//! `foretell execute`: really trains as a plan says, after foretelling it.

use crate::calibrate::this_program;
use crate::failure::Failure;
use crate::inputs;
use crate::lab::Ground;
use crate::output;
use crate::plan_file::{LoadedPlan, PlanFile};
use crate::predict::{self, Foretold};
use crate::run_folder::{Predicted, RunFolder};
use clap::Args;
use foretell_executor::backend::devices;
use foretell_executor::data::{DataSource, Dataset};
use foretell_executor::{BackendKind, Length, Outcome, Progress, TrainingJob, TransportKind, World, execute, machine, supported};
use foretell_models::Model;
use foretell_program::Plan;
use foretell_topologies::{Architecture, Topology};
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
    /// Let several ranks share a core or a GPU: to check layouts, not to time them
    #[arg(long)]
    oversubscribe: bool,
}

/// What `execute` and `run` let a user choose of the training itself.
#[derive(Debug, Clone, Args)]
pub struct TrainingArguments {
    /// Train so many steps [default: 50, if no epochs are given]
    #[arg(long, value_name = "N", conflicts_with = "epochs")]
    pub steps: Option<usize>,
    /// Train so many times through the data
    #[arg(long, value_name = "E")]
    pub epochs: Option<usize>,
    /// digits, text, synthetic, or the path of IDX, CIFAR, .txt or token files [default: what fits the model]
    #[arg(long, value_name = "D")]
    pub data: Option<DataSource>,
    /// The seed of everything random
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
    let backend = executable_in(&loaded.topology, world.as_ref())?;
    if let Some(world) = world.as_ref().filter(|world| world.rank > 0) {
        return Err(world.become_rank(&this_program()?, backend).into());
    }
    arguments.training.possible(&loaded.model.model, &loaded.plan, backend)?;
    if loaded.file.input.is_some() {
        output::note(
            "the plan's `input` is simulated only: here each rank reads or generates its samples on a thread of its own",
        );
    }
    let profile = inputs::profile(arguments.profile.as_deref())?;
    let foretold = predict::foretell(&loaded, profile.as_ref(), arguments.oversubscribe)?;
    let ranks = foretold.compiled.training.mesh.world_size();
    let here = world.as_ref().map_or(ranks, World::local_size);
    enough_devices(here, &loaded.topology, backend, arguments.oversubscribe)?;
    predict::fitting(&foretold, &loaded)?;
    predict::remarks(&loaded.topology, &foretold.prediction, ranks);
    let folder = arguments.run.as_deref().map_or_else(RunFolder::next, |path| Ok(RunFolder::at(path)))?;
    let outcome = train(&loaded, &foretold, &arguments.training, &folder, world)?;
    if json {
        return output::json(&document(&outcome, &folder));
    }
    output::line(&summary(&outcome))?;
    output::line(&format!("the run is in {0}; `foretell check {0}` lays the prediction beside it", folder.path().display()))
}

/// As [`executable_in`], of ranks that are started on this machine.
pub fn executable_here(topology: &Topology) -> Result<BackendKind, Failure> {
    executable_in(topology, None)
}

/// What runs kernels on a topology's devices. Refuses those that are not this machine's, or not those on which somebody else started the
/// ranks, before anything is measured or trained on them.
pub fn executable_in(topology: &Topology, world: Option<&World>) -> Result<BackendKind, Failure> {
    let name = topology.name();
    let refused = |why: String, hint: &str| Err(Failure::Input(format!("{why}; hint: {hint}")));
    let mut architectures: Vec<Architecture> = topology.device_kinds().iter().map(|kind| kind.architecture).collect();
    architectures.dedup();
    let backend = match architectures[..] {
        [Architecture::Cpu] => BackendKind::Cpu,
        [Architecture::Gpu] => match devices() {
            Ok(gpus) if !gpus.is_empty() => BackendKind::Cuda { gpus: gpus.len() },
            Ok(_) => return refused(format!("the devices of `{name}` are GPUs, and the driver shows none"), "use `local`"),
            Err(error) => return refused(format!("the devices of `{name}` are not here: {error}"), "or use `local`"),
        },
        _ => {
            return refused(format!("the devices of `{name}` are not here"), "use `local`, or `local-gpus`");
        }
    };
    if let Some(world) = world {
        let (started, nodes) = (world.nodes.unwrap_or(topology.node_count()), topology.node_count());
        if topology.is_lab() || started != nodes {
            let why = format!("{} started ranks on {started} nodes, and `{name}` has {nodes}", world.starter);
            let hint = if topology.is_lab() {
                "a lab's ranks are started by `foretell execute` alone"
            } else {
                "use a topology of as many"
            };
            return refused(why, hint);
        }
    } else if topology.node_count() > 1 && !topology.is_lab() {
        let nodes = topology.node_count();
        let hint = "use `local`, or a topology that says `lab: true`, whose hosts are made of this machine's cores";
        return refused(format!("`{name}` has {nodes} nodes, and this machine is one"), hint);
    }
    Ok(backend)
}

/// Refuses more ranks than this machine has cores, or GPUs, whatever its topology file says, unless that is wanted. A lab's devices share cores:
/// each is as fast as that leaves it, which a calibration measures.
pub fn enough_devices(ranks: usize, topology: &Topology, backend: BackendKind, oversubscribe: bool) -> Result<(), Failure> {
    if topology.is_lab() {
        return Ok(());
    }
    let (devices, each) = match backend {
        BackendKind::Cpu => (machine::core_count(), "core"),
        BackendKind::Cuda { gpus } => (gpus, "GPU"),
    };
    if ranks > devices && !oversubscribe {
        let hint = "use a smaller layout, or `--oversubscribe` to check it without timing it";
        return Err(Failure::Input(format!("{ranks} ranks cannot have a {each} each: this machine has {devices}; hint: {hint}")));
    }
    Ok(())
}

impl TrainingArguments {
    /// Refuses what cannot be trained, before anything is measured: no steps, a precision that is not executed, data that are not there,
    /// or fewer of them than a batch.
    pub fn possible(&self, model: &Model, plan: &Plan, backend: BackendKind) -> Result<(), Failure> {
        if self.steps == Some(0) || self.epochs == Some(0) {
            return Err(Failure::Input("a run of no steps trains nothing; hint: ask for 1 at least".into()));
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

/// Trains, by ranks of its own or with those of a world, keeping plan and prediction in the folder beforehand and the measurements afterwards.
pub fn train(
    loaded: &LoadedPlan,
    foretold: &Foretold,
    arguments: &TrainingArguments,
    folder: &RunFolder,
    world: Option<World>,
) -> Result<Outcome, Failure> {
    let transport = if arguments.tcp { TransportKind::Tcp } else { TransportKind::SharedMemory };
    let ground = Ground::of(&loaded.topology, transport, Some(folder.file("ranks")), world)?;
    folder.clear()?;
    folder.keep_plan(loaded)?;
    folder.keep_prediction(&Predicted {
        name: loaded.model.name.clone(),
        prediction: foretold.prediction.clone(),
        timeline: foretold.simulation.timeline.clone(),
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
    let mut show = |progress: Progress| match progress {
        Progress::Started { steps } => bar.set_length(steps as u64),
        Progress::Step(step) => {
            bar.set_position(step.step as u64 + 1);
            bar.set_message(format!("loss {:.4}", step.loss));
        }
        Progress::Evaluation(evaluation) => {
            let text = format!("epoch {}: loss {:.4}, top-1 {:.2} %", evaluation.epoch, evaluation.loss, evaluation.top1 * 100.0);
            if bar.is_hidden() { eprintln!("{text}") } else { bar.println(text) }
        }
    };
    let outcome = execute(&job, Some(folder.path()), &ground.options, &mut show)?;
    bar.finish_and_clear();
    ground.close()?;
    folder.keep_measured(&outcome)?;
    Ok(outcome)
}

/// The contract's document of `execute`.
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

/// What a person sees of a run.
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
