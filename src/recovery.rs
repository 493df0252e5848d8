//! Resumes a run from its checkpoint (`--resume`), and restarts it after the loss of a rank
//! (`--max-restarts`, `--elastic`).

use crate::failure::{Failure, code};
use crate::input;
use crate::launch::backend_for;
use crate::output;
use crate::plan_file::LoadedPlan;
use crate::predict::{self, oversubscription};
use crate::run_folder::Measured;
use crate::training::{CompletedSteps, ExecutorFailure, SaveEvery, Training, TrainingArguments, train};
use foretell_executor::checkpoint::{CheckpointError, CheckpointState, FoundCheckpoint, last_whole};
use foretell_executor::{ExecutorError, Length, Outcome, References, Start, StopSignals, World};
use foretell_planner::{Request, plan};
use foretell_program::{Layout, Mode, Plan, Profile};
use foretell_simulator::{CostModel, Stop};
use std::path::Path;
use std::time::{Duration, Instant};

/// The longest search for a layout of the remaining ranks.
const LONGEST_SEARCH: Duration = Duration::from_secs(10);

/// A checkpoint to resume from.
pub struct Resumption {
    found: FoundCheckpoint,
}

impl Resumption {
    /// Finds the last complete checkpoint of the run in a folder. Prints a note on each damaged
    /// one.
    pub fn find(run: &Path) -> Result<Self, Failure> {
        let found = last_whole(run).map_err(ExecutorError::from)?;
        for damage in &found.damaged {
            output::note(&format!("{damage}; the run goes on from step {}", found.state.step));
        }
        Ok(Self { found })
    }

    /// The start of the resumed run.
    pub fn start(&self) -> Start {
        Start::Checkpoint { path: self.found.path.clone(), step: self.found.state.step }
    }

    /// Fills in arguments that the user left out with those of the resumed run.
    pub fn fill_left_out(&self, arguments: &TrainingArguments) -> Result<TrainingArguments, Failure> {
        let mut arguments = arguments.clone();
        let CheckpointState { seed, data, input, length, .. } = &self.found.state;
        arguments.seed.get_or_insert(*seed);
        let count = |count: usize| u16::try_from(count).unwrap_or(u16::MAX);
        arguments.workers = arguments.workers.or(input.workers.map(count));
        arguments.prefetch.get_or_insert(count(input.prefetch));
        arguments.augment.get_or_insert(input.augmentation);
        arguments.on_bad_sample.get_or_insert(input.on_bad_sample.into());
        if arguments.data.is_none() {
            arguments.data = Some(data.parse().map_err(Failure::of_input)?);
        }
        match length {
            _ if arguments.steps.is_some() || arguments.epochs.is_some() => {}
            Length::Steps(steps) => arguments.steps = Some(*steps),
            Length::Epochs(epochs) => arguments.epochs = Some(*epochs),
        }
        Ok(arguments)
    }
}

/// What to do when a rank is lost.
pub struct Recovery<'a> {
    /// Whether to restart with fewer ranks, in a new layout, instead of with as many as before.
    pub elastic: bool,
    /// The maximum number of restarts.
    pub max_restarts: usize,
    /// Measured costs, for planning again.
    pub profile: Option<&'a Profile>,
    /// Whether ranks may share devices.
    pub oversubscribe: bool,
}

impl Recovery<'_> {
    /// The policy under which the loss of a rank ends the run.
    pub fn none() -> Self {
        Recovery { elastic: false, max_restarts: 0, profile: None, oversubscribe: false }
    }

    /// Refuses options under which a run cannot restart.
    pub fn check_options(&self, world: Option<&World>, arguments: &TrainingArguments, plan: &Plan) -> Result<(), Failure> {
        if self.max_restarts == 0 {
            return Ok(());
        }
        if arguments.record_order.is_some() || arguments.replay_order.is_some() {
            let hint = "leave out `--max-restarts` and `--elastic`";
            return Err(Failure::input(code::OPTION_VALUE, "an order of arrivals is that of one run without restarts").hint(hint));
        }
        if self.elastic && matches!(plan.mode, Mode::ParameterServer(_)) {
            let hint = "use `--max-restarts`, which starts as many ranks again";
            return Err(Failure::input(
                code::OPTION_VALUE,
                "`--elastic` does not know how to lose a parameter server or its worker",
            )
            .hint(hint));
        }
        if self.elastic && !plan.mode.is_synchronous() {
            let hint = "use `--max-restarts`, which starts as many ranks again";
            return Err(Failure::input(
                code::OPTION_VALUE,
                "`--elastic` changes the number of replicas, and in this `mode` each has optimizer states of its own",
            )
            .hint(hint));
        }
        if let Some(world) = world {
            let hint = "leave out `--elastic` and `--max-restarts`, and let it start the ranks again with `--resume`";
            return Err(Failure::input(
                code::OPTION_VALUE,
                format!("ranks that {} started cannot be started again here", world.starter),
            )
            .hint(hint));
        }
        if arguments.save_every == Some(SaveEvery::Never) {
            let hint = "leave out `--save-every never`";
            return Err(
                Failure::input(code::OPTION_VALUE, "without checkpoints a run cannot go on after the loss of a rank").hint(hint)
            );
        }
        Ok(())
    }

    /// Trains to the end, restarting if necessary, and writes the totals. Repeated steps count
    /// once.
    pub fn train(&self, mut training: Training<'_>) -> Result<Outcome, Failure> {
        let signals = StopSignals::catch()?;
        let folder = training.folder;
        let (mut made, mut restarts) = (CompletedSteps::default(), 0);
        let full = training.predicted.compiled.training.mesh.world_size();
        let first = training.start.step();
        let mut first_steps = vec![first];
        check_program(&training)?;
        let mut outcome = loop {
            let lost = match train(&training, &signals, &mut made) {
                Ok(outcome) => break outcome,
                Err(ExecutorFailure::Command(failure)) => return Err(failure),
                Err(ExecutorFailure::Run(error @ (ExecutorError::RankDied { .. } | ExecutorError::LinkLost { .. })))
                    if restarts < self.max_restarts =>
                {
                    error
                }
                Err(ExecutorFailure::Run(error)) => return Err(error.into()),
            };
            restarts += 1;
            match last_whole(folder.path()) {
                Ok(found) => training.start = Resumption { found }.start(),
                // Without a checkpoint the run starts over.
                Err(CheckpointError::None { .. }) => {}
                Err(error) => return Err(ExecutorError::from(error).into()),
            }
            let step = training.start.step();
            // If the checkpoint of the final step exists, the lost rank had no work left.
            let is_complete = made.total > 0 && step == made.total;
            let before = training.predicted.compiled.training.mesh.world_size();
            if is_complete {
                output::note(&format!("{lost}; all {step} steps are in the last checkpoint"));
                break Outcome {
                    steps: Vec::new(),
                    evaluations: Vec::new(),
                    arenas: training.predicted.compiled.arenas(),
                    timeline: None,
                    cycle: training.predicted.compiled.cycle,
                    paces: None,
                    checkpoints: Vec::new(),
                    departures: Vec::new(),
                    references: References::default(),
                    first_steps: Vec::new(),
                    resumed_from_step: first,
                    restarts,
                    world_size: before,
                    backend: backend_for(&training.loaded.topology, None)?,
                };
            }
            let has_progressed = made.steps.last().is_some_and(|step| Some(&step.step) >= first_steps.last());
            made.steps.retain(|line| line.step < step);
            made.evaluations.retain(|evaluation| evaluation.step < step);
            first_steps.push(step);
            if self.elastic {
                // Also use devices that were lost earlier, unless the last attempt made no step:
                // then one of them may still be broken.
                let missing = if has_progressed { 1 } else { full.saturating_sub(before) + 1 };
                // At least one rank: the machine of this process still runs.
                training = self.planned_again(training, full.saturating_sub(missing).max(1))?;
                check_program(&training)?;
            }
            let ranks = training.predicted.compiled.training.mesh.world_size();
            output::note(&format!("{lost}; the run goes on from step {step} with {ranks} of {before} ranks"));
        };
        (outcome.steps, outcome.evaluations) = (made.steps, made.evaluations);
        outcome.first_steps = first_steps;
        outcome.resumed_from_step = first;
        outcome.restarts = restarts;
        folder.keep_measured(&Measured::from(&outcome))?;
        Ok(outcome)
    }

    /// The same run in the fastest layout of `ranks` ranks, or of the largest smaller number that
    /// has a layout.
    fn planned_again<'b>(&self, training: Training<'b>, ranks: usize) -> Result<Training<'b>, Failure> {
        let loaded = &training.loaded;
        let costs = predict::costs(self.profile, &loaded.topology, &loaded.plan, &loaded.model.model)?;
        let started = Instant::now();
        let stop = Stop::when(move || started.elapsed() > LONGEST_SEARCH);
        let mut refusal = Failure::undone(code::SYSTEM, "no rank is left");
        for ranks in (1..=ranks).rev() {
            match self.layout_of(loaded, ranks, &costs, &stop) {
                Ok(found) => {
                    let loaded = LoadedPlan { plan: found, ..loaded.clone() };
                    let mut predicted = predict::predict_own(&loaded, self.profile, self.oversubscribe)?;
                    let dataset = training.arguments.open_data(&loaded.model.model, &loaded.plan, loaded.file.input.as_ref())?;
                    let options = training.arguments.input_options(loaded.file.input.as_ref());
                    if let Some(waiting) = input::waiting_for(&loaded, &dataset, &options, &predicted)? {
                        waiting.apply(&mut predicted);
                    }
                    return Ok(Training { loaded, predicted, ..training });
                }
                Err(failure) => refusal = failure,
            }
        }
        Err(refusal)
    }

    /// The fastest layout of `ranks` ranks.
    fn layout_of(&self, loaded: &LoadedPlan, ranks: usize, costs: &CostModel, stop: &Stop) -> Result<Plan, Failure> {
        let base = Plan { layout: Layout::default(), ..loaded.plan.clone() };
        let request = Request {
            devices: ranks,
            oversubscription: oversubscription(self.oversubscribe),
            top: 1,
            stop: stop.clone(),
            ..Request::new(&loaded.model.model, &loaded.model.name, &loaded.topology, costs, &base)
        };
        let found = plan(&request)?.candidates.into_iter().next();
        found
            .map(|candidate| candidate.plan)
            .ok_or_else(|| Failure::undone(code::NOTHING_FITS, format!("no layout of {ranks} ranks was found")))
    }
}

/// Refuses a Program in which ranks race or wait for each other. No plan leads to one.
fn check_program(training: &Training<'_>) -> Result<(), Failure> {
    training.predicted.compiled.check().map_err(|fault| {
        Failure::undone(code::SYSTEM, format!("the plan's Program is unsound: {fault}"))
            .hint("report this fault of Foretell with the plan")
    })
}
