//! A run's folder: its files, written and read (`docs/reference/contract.md`).

use crate::failure::Failure;
use crate::inputs;
use crate::output;
use crate::plan_file::{LoadedPlan, ModelReference, PlanFile};
use foretell_executor::Outcome;
use foretell_program::Timeline;
use foretell_simulator::Prediction;
use foretell_topologies::{Topology, TopologyReference, TopologySpec};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// `predicted.json`: the prediction made before the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Predicted {
    /// The model's name, which a model written in place lacks.
    pub name: String,
    /// The prediction's figures.
    #[serde(flatten)]
    pub prediction: Prediction,
    /// The predicted spans.
    pub timeline: Timeline,
}

/// `measured.json`: totals of a finished run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measured {
    /// Median step time.
    pub step_seconds: f64,
    /// Number of steps.
    pub steps: usize,
    /// The allocated arena of each stage.
    pub peak_memory_bytes: Vec<u64>,
}

/// Files of a finished run that a new run in the same folder does not overwrite at its start.
const LEFT_BEHIND: [&str; 6] = ["measured.json", "timeline", "ranks", "trace.json", "report.html", "plots"];

/// A run's folder.
#[derive(Clone, Debug)]
pub struct RunFolder(PathBuf);

impl RunFolder {
    /// The folder at a path.
    pub fn at(path: &Path) -> Self {
        Self(path.into())
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The path of a file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Makes the folder with the next free number under `runs`. Making it here keeps two runs from
    /// sharing it.
    pub fn next() -> Result<Self, Failure> {
        let runs = Path::new("runs");
        let refused = |path: &Path, error: std::io::Error| {
            let hint = "give a folder that you may write to with `--run`";
            Failure::Undone(format!("the folder `{}` cannot be made: {error}; hint: {hint}", path.display()))
        };
        std::fs::create_dir_all(runs).map_err(|error| refused(runs, error))?;
        let mut number = 1;
        loop {
            let path = runs.join(number.to_string());
            match std::fs::create_dir(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(refused(&path, error)),
            }
        }
    }

    /// Removes an earlier run's files, so that two runs never mix. A folder without
    /// `predicted.json` is not a run's and is left alone.
    pub fn clear(&self) -> Result<(), Failure> {
        if !self.file("predicted.json").is_file() {
            return Ok(());
        }
        for name in LEFT_BEHIND {
            let path = self.file(name);
            let removed = if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
            match removed {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    let hint = "give another folder with `--run`";
                    let path = path.display();
                    return Err(Failure::Undone(format!("`{path}` of an earlier run cannot be removed: {error}; hint: {hint}")));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Refuses a folder without a finished run.
    pub fn require_finished(&self) -> Result<(), Failure> {
        let folder = self.0.display();
        if !self.file("predicted.json").is_file() {
            let hint = "give the folder that `foretell run` or `foretell execute` made";
            return Err(Failure::Input(format!("`{folder}` is not a run's folder: it has no predicted.json; hint: {hint}")));
        }
        if !self.file("measured.json").is_file() {
            let hint = format!("train again with `foretell execute --plan {folder}/plan.yaml`");
            return Err(Failure::Input(format!("the run in `{folder}` did not finish: it has no measured.json; hint: {hint}")));
        }
        Ok(())
    }

    /// Writes the plan with its topology, and a model that is not the zoo's, in place: the folder
    /// needs no other file.
    pub fn keep_plan(&self, loaded: &LoadedPlan) -> Result<(), Failure> {
        let topology = TopologyReference::InPlace(Box::new(specification(&loaded.topology)?));
        let model = match &loaded.file.model {
            ModelReference::Named(name) if inputs::is_zoo_name(name) => ModelReference::Named(name.clone()),
            _ => ModelReference::InPlace(loaded.model.model.clone()),
        };
        let file = PlanFile::new(model, topology, None, &loaded.plan);
        output::write(&self.file("plan.yaml"), file.to_yaml()?.as_bytes())
    }

    /// Writes the prediction, before the run.
    pub fn keep_prediction(&self, predicted: &Predicted) -> Result<(), Failure> {
        self.keep("predicted.json", predicted)
    }

    /// Writes the totals of a finished run.
    pub fn keep_measured(&self, outcome: &Outcome) -> Result<(), Failure> {
        let measured = Measured {
            step_seconds: outcome.median_step().value(),
            steps: outcome.steps.len(),
            peak_memory_bytes: outcome.arenas.iter().map(|arena| arena.count()).collect(),
        };
        self.keep("measured.json", &measured)
    }

    fn keep<T: Serialize>(&self, name: &str, document: &T) -> Result<(), Failure> {
        let text = serde_json::to_vec(document).map_err(|error| Failure::Undone(error.to_string()))?;
        output::write(&self.file(name), &text)
    }

    /// Reads one of the folder's documents.
    pub fn read<T: for<'de> Deserialize<'de>>(&self, name: &str) -> Result<T, Failure> {
        let path = self.file(name);
        let text = inputs::read(&path)?;
        serde_json::from_str(&text).map_err(|error| {
            let hint = "use a folder of a finished run, as it was written";
            Failure::Input(format!(
                "`{}` is not in the form that `foretell execute` writes: {error}; hint: {hint}",
                path.display()
            ))
        })
    }
}

/// Converts a topology back to the form that files have.
fn specification(topology: &Topology) -> Result<TopologySpec, Failure> {
    let wrong = |error: &dyn std::fmt::Display| Failure::Undone(format!("the topology cannot be written: {error}"));
    let text = serde_saphyr::to_string(topology).map_err(|error| wrong(&error))?;
    serde_saphyr::from_str(&text).map_err(|error| wrong(&error))
}
