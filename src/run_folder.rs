//! A run's folder: its files, written and read (`docs/reference/contract.md`).

use crate::failure::{Failure, code};
use crate::inputs;
use crate::output;
use crate::plan_file::{LoadedPlan, ModelReference, PlanFile};
use foretell_executor::{ObservedReference, Outcome, regular, remove_abandoned};
use foretell_program::{Profile, Timeline};
use foretell_simulator::PredictedInput;
use foretell_simulator::Prediction;
use foretell_topologies::{Topology, TopologyReference, TopologySpec};
use foretell_units::SchemaVersion;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// `predicted.json`: the prediction made before the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Predicted {
    /// The version of the file's form.
    #[serde(default)]
    pub schema_version: SchemaVersion,
    /// The model's name, which a model written in place lacks.
    pub name: String,
    /// The prediction's figures.
    #[serde(flatten)]
    pub prediction: Prediction,
    /// The predicted spans.
    pub timeline: Timeline,
    /// The part of the input pipeline that limits the step, if the run has a pipeline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<PredictedInput>,
}

/// `measured.json`: totals of a finished run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measured {
    /// The version of the file's form.
    #[serde(default)]
    pub schema_version: SchemaVersion,
    /// Median step time.
    pub step_seconds: f64,
    /// Number of steps.
    pub steps: usize,
    /// The allocated arena of each stage; empty if memory was not measured.
    pub peak_memory_bytes: Vec<u64>,
    /// Median time that a step waited for a checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_seconds: Option<f64>,
    /// Median time from the end of a step until the checkpoint after it was on storage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_write_seconds: Option<f64>,
    /// The reference kernel's times; `None` on GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<ObservedReference>,
}

impl From<&Outcome> for Measured {
    fn from(outcome: &Outcome) -> Self {
        let checkpoint = outcome.median_checkpoint();
        Self {
            checkpoint_seconds: checkpoint.map(|(wait, _)| wait.value()),
            checkpoint_write_seconds: checkpoint.map(|(_, written)| written.value()),
            schema_version: SchemaVersion,
            step_seconds: outcome.median_step().value(),
            steps: outcome.steps.len(),
            peak_memory_bytes: outcome.arenas.iter().map(|arena| arena.count()).collect(),
            reference: outcome.references.observed(&outcome.first_steps),
        }
    }
}

/// Files of a run that a resuming run keeps or replaces.
const KEPT_TO_RESUME: [&str; 6] =
    ["predicted.json", "plan.yaml", "metrics.jsonl", "evaluation.jsonl", "checkpoints", "tensorboard"];
/// The other files of a run, which are removed when it is resumed.
const LEFT_BEHIND: [&str; 9] = [
    "measured.json",
    PREDICTED_OPERATORS,
    MEASURED_OPERATORS,
    PROFILE,
    "timeline",
    "ranks",
    "trace.json",
    "report.html",
    "plots",
];
/// The predicted seconds of each operator in a step of another framework.
pub const PREDICTED_OPERATORS: &str = "predicted-operators.json";
/// What a run of another framework measured.
pub const MEASURED_OPERATORS: &str = "measured-operators.json";
/// The profile that the prediction was made with.
const PROFILE: &str = "profile.yaml";
/// Files that show that a folder is a run's: other folders are never cleared.
const SIGNS_OF_A_RUN: [&str; 3] = ["predicted.json", "metrics.jsonl", "checkpoints"];
/// The file whose lock prevents a second run in the folder.
const LOCK: &str = "lock";

/// A run's folder.
#[derive(Clone, Debug)]
pub struct RunFolder {
    path: PathBuf,
    /// Held while this process writes into the folder. The system releases it when the process
    /// ends, however it ends.
    _lock: Option<Arc<File>>,
}

impl RunFolder {
    /// The folder at a path.
    pub fn at(path: &Path) -> Self {
        Self { path: path.into(), _lock: None }
    }

    /// The folder for a new run at `path`, or the next free number under `runs`. No other run can
    /// claim it before this process ends.
    ///
    /// # Errors
    /// [`Failure::Input`] if another process runs there, or if the folder already has a run and
    /// `overwrite` is not set.
    pub fn claim(path: Option<&Path>, overwrite: bool) -> Result<Self, Failure> {
        let mut folder = match path {
            Some(path) => Self::at(path),
            None => Self::next()?,
        };
        folder.lock()?;
        if folder.has_run() && !overwrite {
            let path = folder.path.display();
            let hint = "give another folder with `--run`, or `--overwrite` to replace that run";
            return Err(Failure::input(code::RUN_TAKEN, format!("`{path}` has a run already")).hint(hint));
        }
        Ok(folder)
    }

    /// Claims the folder of a run that is resumed there, and removes its files except those that
    /// are kept.
    ///
    /// # Errors
    /// [`Failure::Input`] if another process runs there.
    pub fn claim_to_resume(path: &Path) -> Result<Self, Failure> {
        let mut folder = Self::at(path);
        folder.lock()?;
        folder.remove(&LEFT_BEHIND)?;
        Ok(folder)
    }

    fn has_run(&self) -> bool {
        SIGNS_OF_A_RUN.iter().any(|name| self.file(name).exists())
    }

    /// Locks the folder, after creating it if necessary.
    fn lock(&mut self) -> Result<(), Failure> {
        let path = self.file(LOCK);
        let failed = |error: std::io::Error| {
            let hint = "give a folder that you may write to with `--run`";
            Failure::undone(code::FILE_UNWRITABLE, format!("`{}` cannot be locked: {error}", path.display())).hint(hint)
        };
        std::fs::create_dir_all(&self.path).map_err(failed)?;
        let options = OpenOptions::new().create(true).truncate(false).write(true).clone();
        let file = regular::open_to_write(&path, &options).map_err(failed)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                self._lock = Some(Arc::new(file));
                // A command that was killed while it wrote here may have left temporary files.
                remove_abandoned(&self.path).map_err(failed)
            }
            Err(Errno::WOULDBLOCK) => {
                let hint = "wait for it to end, or give another folder with `--run`";
                Err(Failure::input(code::RUN_TAKEN, format!("another process writes a run into `{}`", self.path.display()))
                    .hint(hint))
            }
            Err(error) => Err(failed(error.into())),
        }
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of a file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Makes the folder with the next free number under `runs`. Making it here keeps two runs from
    /// sharing it.
    fn next() -> Result<Self, Failure> {
        let runs = Path::new("runs");
        let refused = |path: &Path, error: std::io::Error| {
            let hint = "give a folder that you may write to with `--run`";
            Failure::undone(code::FILE_UNWRITABLE, format!("the folder `{}` cannot be made: {error}", path.display())).hint(hint)
        };
        std::fs::create_dir_all(runs).map_err(|error| refused(runs, error))?;
        let mut number = 1;
        loop {
            let path = runs.join(number.to_string());
            match std::fs::create_dir(&path) {
                Ok(()) => return Ok(Self::at(&path)),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(refused(&path, error)),
            }
        }
    }

    /// Removes an earlier run's files, so that two runs never mix. A folder that is not a run's is
    /// left alone.
    pub fn clear(&self) -> Result<(), Failure> {
        if !self.has_run() {
            return Ok(());
        }
        self.remove(&LEFT_BEHIND)?;
        self.remove(&KEPT_TO_RESUME)
    }

    fn remove(&self, names: &[&str]) -> Result<(), Failure> {
        for name in names {
            let path = self.file(name);
            let removed = if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
            match removed {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    let hint = "give another folder with `--run`";
                    let path = path.display();
                    return Err(Failure::undone(
                        code::FILE_UNWRITABLE,
                        format!("`{path}` of an earlier run cannot be removed: {error}"),
                    )
                    .hint(hint));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Refuses a folder without a finished run.
    pub fn require_finished(&self) -> Result<(), Failure> {
        let folder = self.path.display();
        if !self.file("predicted.json").is_file() {
            let hint = "give the folder that `foretell run` or `foretell execute` made";
            return Err(Failure::input(code::RUN_MISSING, format!("`{folder}` is not a run's folder: it has no predicted.json"))
                .hint(hint));
        }
        if !self.file("measured.json").is_file() {
            let hint = format!("train again with `foretell execute --plan {folder}/plan.yaml`");
            return Err(Failure::input(
                code::RUN_MISSING,
                format!("the run in `{folder}` did not finish: it has no measured.json"),
            )
            .hint(hint));
        }
        Ok(())
    }

    /// Writes the plan with its topology in place, and also with its model in place if the zoo does
    /// not have it: the folder needs no other file.
    pub fn keep_plan(&self, loaded: &LoadedPlan) -> Result<(), Failure> {
        let topology = TopologyReference::InPlace(Box::new(specification(&loaded.topology)?));
        let model = match &loaded.file.model {
            ModelReference::Named(name) if inputs::is_zoo_name(name) => ModelReference::Named(name.clone()),
            _ => ModelReference::InPlace(loaded.model.model.clone()),
        };
        let mut file = PlanFile::new(model, topology, None, &loaded.plan);
        file.input = loaded.file.input;
        output::write(&self.file("plan.yaml"), file.to_yaml()?.as_bytes())
    }

    /// Writes the profile that the prediction is made with, and returns its path.
    pub fn keep_profile(&self, profile: &Profile) -> Result<PathBuf, Failure> {
        let path = self.file(PROFILE);
        output::write(&path, inputs::profile_yaml(profile)?.as_bytes())?;
        Ok(path)
    }

    /// The profile that the prediction was made with; `None` if there was none.
    pub fn profile(&self) -> Result<Option<Profile>, Failure> {
        let path = self.file(PROFILE);
        if path.is_file() { inputs::profile(Some(&path)) } else { Ok(None) }
    }

    /// Writes the prediction, before the run.
    pub fn keep_prediction(&self, predicted: &Predicted) -> Result<(), Failure> {
        self.keep("predicted.json", predicted)
    }

    /// Writes the totals of a finished run.
    pub fn keep_measured(&self, measured: &Measured) -> Result<(), Failure> {
        self.keep("measured.json", measured)
    }

    /// Writes one of the folder's documents.
    pub fn keep<T: Serialize>(&self, name: &str, document: &T) -> Result<(), Failure> {
        let text = serde_json::to_vec(document).map_err(|error| Failure::undone(code::SYSTEM, error.to_string()))?;
        output::write(&self.file(name), &text)
    }

    /// Reads one of the folder's documents.
    pub fn read<T: for<'de> Deserialize<'de>>(&self, name: &str) -> Result<T, Failure> {
        let path = self.file(name);
        let text = inputs::read_run_file(&path)?;
        serde_json::from_str(&text).map_err(|error| {
            let hint = "use a folder of a finished run, as it was written";
            Failure::input(
                code::FILE_FORM,
                format!("`{}` is not in the form that `foretell execute` writes: {error}", path.display()),
            )
            .hint(hint)
        })
    }
}

/// Converts a topology back to the form that files have.
fn specification(topology: &Topology) -> Result<TopologySpec, Failure> {
    let wrong = |error: &dyn std::fmt::Display| {
        Failure::undone(code::FILE_UNWRITABLE, format!("the topology cannot be written: {error}"))
    };
    let text = serde_saphyr::to_string(topology).map_err(|error| wrong(&error))?;
    serde_saphyr::from_str(&text).map_err(|error| wrong(&error))
}
