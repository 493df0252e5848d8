//! One training run: its options on the command line, and one attempt at it in the run's folder.
//! This module does not know how a run continues after the loss of a rank.

use crate::failure::{Failure, code};
use crate::input::cores_per_rank;
use crate::launch::Hosts;
use crate::live::LiveProgress;
use crate::output;
use crate::plan_file::{Input, LoadedPlan, MOST_AHEAD};
use crate::run_folder::{Predicted, RunFolder};
use clap::Args;
use foretell_executor::checkpoint::check_start;
use foretell_executor::data::{Augmentation, DataSource, Dataset, InputOptions, OnBadSample};
use foretell_executor::regular;
use foretell_executor::transport::LEAST_PEER_TIMEOUT;
use foretell_executor::{
    ArrivalOrder, BackendKind, Checkpoints, Departure, Evaluation, ExecutorError, Length, OnDivergence, Outcome, RunEvent, Start,
    StepMetrics, StopSignals, TrainingJob, TransportKind, World, executable, execute, supported,
};
use foretell_models::Model;
use foretell_program::{Period, Plan};
use foretell_simulator::PlanPrediction;
use foretell_units::diagnostic::Mistake;
use foretell_units::{SchemaVersion, Seconds};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// Training options of `execute` and `run`.
#[derive(Debug, Clone, Args)]
pub struct TrainingArguments {
    /// Number of steps to train [default: 50, unless --epochs is given]
    #[arg(long, value_name = "N", conflicts_with = "epochs", value_parser = foretell_units::count)]
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
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(..=i64::from(MOST_AHEAD)))]
    pub workers: Option<u16>,
    /// Batches that are prepared ahead of the step [default: the plan's, or 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(MOST_AHEAD)))]
    pub prefetch: Option<u16>,
    /// Random changes of training pictures: none, or a list of crop, flip and jitter=S (brightness,
    /// contrast and saturation; jitter=B:C:S:H for each and the hue) [default: crop,flip]
    #[arg(long, value_name = "LIST")]
    pub augment: Option<Augmentation>,
    /// What to do with a sample that cannot be used: end the run, or take another and count it
    /// [default: error]
    #[arg(long, value_name = "WHAT")]
    pub on_bad_sample: Option<BadSamplePolicy>,
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
    /// Go on when the loss is no longer finite, instead of ending with an error
    #[arg(long)]
    pub allow_divergence: bool,
    /// Do not evaluate after each epoch
    #[arg(long)]
    pub no_evaluation: bool,
    /// How long a rank may send no sign of life before the run ends and names it
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = peer_timeout)]
    pub peer_timeout: Duration,
    /// Encrypt what ranks send by TCP: always so, this only states it
    #[arg(long)]
    pub encrypt: bool,
    /// Also write TensorBoard's event files, into the run's folder
    #[arg(long)]
    pub tensorboard: bool,
    /// Write the order of pulls and pushes at parameter servers, where workers go at their own
    /// pace, so that `--replay-order` can make the same run again
    #[arg(long, value_name = "FILE")]
    pub record_order: Option<PathBuf>,
    /// Have pulls and pushes in the order of this file, bit for bit the run that recorded it
    #[arg(long, value_name = "FILE", value_parser = read_order)]
    pub replay_order: Option<ArrivalOrder>,
    /// Connect ranks by TCP over the loopback interface instead of shared memory
    #[arg(long, conflicts_with = "transport")]
    pub tcp: bool,
    /// Transport between ranks: `shared-memory` or `tcp` on this machine, or `mpi` between ranks
    /// that Open MPI's mpirun started [default: shared-memory; tcp where others start the ranks]
    #[arg(long, value_name = "KIND", value_parser = transport, hide_possible_values = true)]
    pub transport: Option<TransportKind>,
}

fn transport(name: &str) -> Result<TransportKind, Mistake> {
    match name {
        "shared-memory" => Ok(TransportKind::SharedMemory),
        "tcp" => Ok(TransportKind::Tcp),
        "mpi" => Ok(TransportKind::Mpi),
        _ => Err(Mistake::new("there is no such transport", "use `shared-memory`, `tcp` or `mpi`")),
    }
}

/// The longest file with an order of arrivals. A turn has some 30 bytes.
const MOST_ORDER: u64 = 4 << 30;

/// Steps of a run without `--steps`. It is rounded up to a complete round, if the round has at most
/// `LONGEST_USUAL_ROUND` steps.
const USUAL_STEPS: usize = 50;
const LONGEST_USUAL_ROUND: usize = 10_000;

/// Reads an order of arrivals.
fn read_order(path: &str) -> Result<ArrivalOrder, Mistake> {
    let wrong = |message: String| Mistake::new(message, "give a file that `--record-order` wrote");
    let text = regular::read(Path::new(path), MOST_ORDER).map_err(|error| wrong(format!("cannot read it: {error}")))?;
    serde_json::from_slice(&text).map_err(|error| wrong(format!("it is no order of arrivals: {error}")))
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
    /// After every this many steps, and at the end.
    Steps(usize),
}

impl From<OnBadSample> for BadSamplePolicy {
    fn from(policy: OnBadSample) -> Self {
        match policy {
            OnBadSample::Error => BadSamplePolicy::Error,
            OnBadSample::Skip => BadSamplePolicy::Skip,
        }
    }
}

impl FromStr for SaveEvery {
    type Err = Mistake;

    fn from_str(text: &str) -> Result<Self, Mistake> {
        match (text, text.parse()) {
            ("never", _) => Ok(SaveEvery::Never),
            (_, Ok(steps)) if steps > 0 => Ok(SaveEvery::Steps(steps)),
            _ => Err(Mistake::new("this is no number of steps", "give a number of steps above 0, or `never`")),
        }
    }
}

fn peer_timeout(text: &str) -> Result<Duration, Mistake> {
    let seconds: Seconds = text.parse().map_err(|error: foretell_units::UnitError| Mistake::of(&error))?;
    let least = LEAST_PEER_TIMEOUT.as_secs_f64();
    if !(least..=86_400.0).contains(&seconds.value()) {
        let hint = format!("it lies between {least} s, since heartbeats are a second apart, and a day");
        return Err(Mistake::new("this is too short or too long", hint));
    }
    Ok(Duration::from_secs_f64(seconds.value()))
}

impl TrainingArguments {
    /// The transport between ranks.
    pub fn transport(&self) -> TransportKind {
        self.transport.unwrap_or(if self.tcp { TransportKind::Tcp } else { TransportKind::SharedMemory })
    }

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
            return Err(Failure::input(code::OPTION_VALUE, "a run of 0 steps trains nothing").hint("ask for at least 1"));
        }
        executable(model)?;
        supported(plan, backend)?;
        let dataset = self.open_data(model, plan, input)?;
        if dataset.bad_samples() > 0 {
            output::note(&format!("{} bad samples, files or classes are left out", dataset.bad_samples()));
        }
        Ok(dataset)
    }

    /// Opens the data of a run. Refuses fewer samples than a batch.
    pub fn open_data(&self, model: &Model, plan: &Plan, input: Option<&Input>) -> Result<Dataset, Failure> {
        let options = self.input_options(input);
        let dataset = Dataset::open_with(&self.data_for(model), &model.sample(), self.seed(), &options)
            .and_then(|data| data.steps_per_epoch(plan.global_batch).map(|_| data))
            .map_err(ExecutorError::from)?;
        Ok(dataset)
    }

    /// How samples are read: by the command line's options, else by the plan's.
    pub fn input_options(&self, input: Option<&Input>) -> InputOptions {
        let usual = InputOptions::default();
        InputOptions {
            workers: self.workers.map(usize::from).or(input.map(|input| input.workers)),
            prefetch: self.prefetch.map(usize::from).or(input.map(|input| input.prefetch)).unwrap_or(usual.prefetch),
            augmentation: self.augment.unwrap_or_default(),
            on_bad_sample: self.on_bad_sample.map(OnBadSample::from).unwrap_or_default(),
        }
    }

    /// Refuses weights or a checkpoint from which a job cannot start. Prints a note on tensors that
    /// start fresh.
    pub fn check_start(&self, job: &TrainingJob) -> Result<(), Failure> {
        let found = check_start(job)?;
        let path = self.init.as_deref().map(Path::display);
        if let (Some(path), [first, ..]) = (&path, &found.fresh[..]) {
            let several = found.fresh.len();
            output::note(&format!("`{first}` and the like ({several} tensors) start fresh: `{path}` has none of their size"));
        }
        if let (Some(path), [first, ..]) = (&path, &found.unused[..]) {
            output::note(&format!("the model does not use {} tensors of `{path}`, such as `{first}`", found.unused.len()));
        }
        Ok(())
    }

    /// The start of a run that resumes no other.
    pub fn start(&self) -> Start {
        self.init.clone().map_or(Start::Fresh, Start::Weights)
    }

    /// Writes the order of arrivals of a run, if it is to be recorded.
    pub fn record(&self, outcome: &Outcome) -> Result<(), Failure> {
        let Some(path) = &self.record_order else { return Ok(()) };
        let Some(paces) = &outcome.paces else {
            let hint = "leave out `--record-order`, or use a `staleness` above 0 or `backup_workers`";
            return Err(Failure::input(code::OPTION_VALUE, "all ranks made each step together, so there is no order to record")
                .hint(hint));
        };
        if let Some(Departure { worker, .. }) = outcome.departures.first() {
            let path = path.display();
            output::note(&format!("worker {worker} has left, and no run can repeat that, so `{path}` is not written"));
            return Ok(());
        }
        let text = serde_json::to_vec(&paces.order).map_err(|error| Failure::undone(code::SYSTEM, error.to_string()))?;
        output::write(path, &text)
    }

    /// The job that these arguments describe.
    pub fn job(&self, loaded: &LoadedPlan, predicted: &PlanPrediction, start: Start) -> TrainingJob {
        let ranks = predicted.compiled.training.mesh.world_size();
        TrainingJob {
            model: loaded.model.model.clone(),
            name: loaded.model.name.clone(),
            plan: loaded.plan.clone(),
            data: self.data_for(&loaded.model.model),
            input: self.input_options(loaded.file.input.as_ref()),
            cores_per_rank: cores_per_rank(&loaded.topology, ranks),
            seed: self.seed(),
            length: match (self.steps, self.epochs) {
                (_, Some(epochs)) => Length::Epochs(epochs),
                // If replicas exchange only after a round, a run must end with one. A longer round
                // must be given by `--steps`.
                (steps, None) => Length::Steps(steps.unwrap_or_else(|| {
                    let round = loaded.plan.cycle().round_steps();
                    if round > LONGEST_USUAL_ROUND { USUAL_STEPS } else { USUAL_STEPS.next_multiple_of(round) }
                })),
            },
            evaluate: !self.no_evaluation,
            timeline: None,
            start,
            replay: self.replay_order.clone(),
            on_divergence: self.on_divergence(),
            checkpoints: match self.save_every {
                Some(SaveEvery::Never) => None,
                Some(SaveEvery::Steps(steps)) => Some(Checkpoints::new(Some(Period::Steps(steps)), self.keep())),
                None => Some(Checkpoints::new(loaded.plan.training.save_every, self.keep())),
            },
        }
    }

    fn on_divergence(&self) -> OnDivergence {
        if self.allow_divergence { OnDivergence::Continue } else { OnDivergence::End }
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
    pub predicted: PlanPrediction,
    pub arguments: &'a TrainingArguments,
    /// The run's folder, cleared of earlier runs.
    pub folder: &'a RunFolder,
    /// The ranks that another launcher started; `None` to start them here.
    pub world: Option<World>,
    pub start: Start,
}

/// The part of a run that was made so far, over all attempts.
#[derive(Default)]
pub struct CompletedSteps {
    /// The number of steps that the run is to have; 0 before its ranks have started.
    pub total: usize,
    /// The steps that were made and are kept.
    pub steps: Vec<StepMetrics>,
    /// The evaluations that were made and are kept.
    pub evaluations: Vec<Evaluation>,
}

/// Trains. Writes plan and prediction into the folder before the run. `made` collects steps and
/// evaluations as they are made.
pub fn train(training: &Training<'_>, signals: &StopSignals, made: &mut CompletedSteps) -> Result<Outcome, ExecutorFailure> {
    let Training { loaded, predicted, arguments, folder, world, start } = training;
    let mut hosts = Hosts::open(&loaded.topology, arguments.transport(), Some(folder.file("ranks")), world.clone())?;
    hosts.options.signals = Some(signals.clone());
    hosts.options.peer_timeout = arguments.peer_timeout;
    if arguments.encrypt {
        output::note("what ranks send by TCP is always encrypted, so `--encrypt` changes nothing");
    }
    folder.keep_plan(loaded)?;
    folder.keep_prediction(&Predicted {
        schema_version: SchemaVersion,
        name: loaded.model.name.clone(),
        prediction: predicted.prediction.clone(),
        timeline: predicted.timeline.clone(),
        input: predicted.input,
    })?;
    let job = arguments.job(loaded, predicted, start.clone());
    let tensorboard = arguments.tensorboard.then(|| folder.file("tensorboard"));
    let step = predicted.prediction.step_seconds;
    let mut live = LiveProgress::new(loaded.plan.training.print_every, step, tensorboard.as_deref())?;
    let mut show = |event: RunEvent| {
        match &event {
            RunEvent::Started { length } => made.total = length.steps,
            RunEvent::Step(step) => made.steps.push(*step),
            RunEvent::Evaluation(evaluation) => made.evaluations.push(evaluation.clone()),
            RunEvent::Left(_) => {}
        }
        live.show(&event);
    };
    let outcome = execute(&job, Some(folder.path()), &hosts.options, &mut show);
    // The run's own error takes precedence over the display's: after the loss of a rank the run may
    // be restarted.
    let shown = live.finish();
    let outcome = outcome.map_err(ExecutorFailure::Run)?;
    shown?;
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
