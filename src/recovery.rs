//! Going on: from a run's checkpoint (`--resume`), and after the loss of a rank (`--max-restarts`,
//! `--elastic`).

use crate::failure::Failure;
use crate::output;
use crate::plan_file::LoadedPlan;
use crate::predict::{self, oversubscription};
use crate::run_folder::Measured;
use crate::training::{ExecutorFailure, SaveEvery, Training, TrainingArguments, train};
use foretell_executor::checkpoint::{CheckpointError, CheckpointState, FoundCheckpoint, last_whole};
use foretell_executor::{ExecutorError, Length, Outcome, Start, StopSignals, World};
use foretell_planner::{Request, plan};
use foretell_program::{Layout, Plan, Profile};
use foretell_simulator::CostModel;
use std::path::Path;
use std::time::{Duration, Instant};

/// The longest search for a layout of the ranks that are left.
const LONGEST_SEARCH: Duration = Duration::from_secs(10);

/// A checkpoint to go on from.
pub struct Resumption {
    found: FoundCheckpoint,
}

impl Resumption {
    /// Finds the last whole checkpoint of the run in a folder. Notes each that is damaged.
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

    /// Arguments with what they leave open taken from the run that is resumed.
    pub fn complete(&self, arguments: &TrainingArguments) -> Result<TrainingArguments, Failure> {
        let mut arguments = arguments.clone();
        let CheckpointState { seed, data, length, .. } = &self.found.state;
        arguments.seed.get_or_insert(*seed);
        if arguments.data.is_none() {
            arguments.data = Some(data.parse().map_err(|error| Failure::Input(format!("{error}")))?);
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
    /// Whether to go on with the ranks that are left, instead of as many as before.
    pub elastic: bool,
    /// How often to go on.
    pub max_restarts: usize,
    /// Measured costs, to plan again.
    pub profile: Option<&'a Profile>,
    /// Whether ranks may share devices.
    pub oversubscribe: bool,
}

impl Recovery<'_> {
    /// The loss of a rank ends the run.
    pub fn none() -> Self {
        Recovery { elastic: false, max_restarts: 0, profile: None, oversubscribe: false }
    }

    /// Refuses what cannot be gone on with.
    pub fn check(&self, world: Option<&World>, arguments: &TrainingArguments) -> Result<(), Failure> {
        if self.max_restarts == 0 {
            return Ok(());
        }
        if let Some(world) = world {
            let hint = "leave out `--elastic` and `--max-restarts`, and let it start the ranks again with `--resume`";
            return Err(Failure::Input(format!(
                "ranks that {} started cannot be started again here; hint: {hint}",
                world.starter
            )));
        }
        if arguments.save_every == Some(SaveEvery::Never) {
            let hint = "leave out `--save-every never`";
            return Err(Failure::Input(format!("without checkpoints a run cannot go on after the loss of a rank; hint: {hint}")));
        }
        Ok(())
    }

    /// Trains to the end, and writes the totals. Steps that were repeated count once.
    pub fn train(&self, mut training: Training<'_>) -> Result<Outcome, Failure> {
        let signals = StopSignals::catch()?;
        let folder = training.folder;
        let (mut made, mut restarts) = (Vec::new(), 0);
        let first = training.start.step();
        let mut outcome = loop {
            let lost = match train(&training, &signals, &mut made) {
                Ok(outcome) => break outcome,
                Err(ExecutorFailure::Command(failure)) => return Err(failure),
                Err(ExecutorFailure::Run(error @ ExecutorError::RankDied { .. })) if restarts < self.max_restarts => error,
                Err(ExecutorFailure::Run(error)) => return Err(error.into()),
            };
            restarts += 1;
            match last_whole(folder.path()) {
                Ok(found) => training.start = Resumption { found }.start(),
                // The run goes back to where it began.
                Err(CheckpointError::None { .. }) => {}
                Err(error) => return Err(ExecutorError::from(error).into()),
            }
            let step = training.start.step();
            made.retain(|one| one.step < step);
            let before = training.predicted.compiled.training.mesh.world_size();
            if self.elastic {
                // The last rank is started again: this machine is still there.
                training = self.planned_again(training, (before - 1).max(1))?;
            }
            let ranks = training.predicted.compiled.training.mesh.world_size();
            output::note(&format!("{lost}; the run goes on from step {step} with {ranks} of {before} ranks"));
        };
        outcome.steps = made;
        outcome.resumed_from_step = first;
        outcome.restarts = restarts;
        folder.keep_measured(&Measured::from(&outcome))?;
        Ok(outcome)
    }

    /// The same run in the best layout of `ranks` ranks, or of fewer if none has so many.
    fn planned_again<'b>(&self, training: Training<'b>, ranks: usize) -> Result<Training<'b>, Failure> {
        let loaded = &training.loaded;
        let costs = predict::costs(self.profile, &loaded.topology, &loaded.plan, &loaded.model.model)?;
        let started = Instant::now();
        let is_over = || started.elapsed() > LONGEST_SEARCH;
        let mut refusal = Failure::Undone("no rank is left".into());
        for ranks in (1..=ranks).rev() {
            match self.layout_of(loaded, ranks, &costs, &is_over) {
                Ok(found) => {
                    let loaded = LoadedPlan { plan: found, ..loaded.clone() };
                    let predicted = predict::predict(&loaded, self.profile, self.oversubscribe)?;
                    return Ok(Training { loaded, predicted, ..training });
                }
                Err(failure) => refusal = failure,
            }
        }
        Err(refusal)
    }

    /// The fastest layout of so many ranks.
    fn layout_of(
        &self,
        loaded: &LoadedPlan,
        ranks: usize,
        costs: &CostModel,
        is_over: &(dyn Fn() -> bool + Sync),
    ) -> Result<Plan, Failure> {
        let base = Plan { layout: Layout::default(), ..loaded.plan.clone() };
        let request = Request {
            devices: ranks,
            oversubscription: oversubscription(self.oversubscribe),
            top: 1,
            stop: is_over,
            ..Request::new(&loaded.model.model, &loaded.model.name, &loaded.topology, costs, &base)
        };
        let found = plan(&request)?.candidates.into_iter().next();
        found.map(|candidate| candidate.plan).ok_or_else(|| Failure::Undone(format!("no layout of {ranks} ranks was found")))
    }
}
