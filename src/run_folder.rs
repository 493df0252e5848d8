//! A run's folder: the contract's files, and how they are found again.

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

/// What was foretold before the run: the summary, and the spans.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Predicted {
    /// The contract's document.
    #[serde(flatten)]
    pub prediction: Prediction,
    /// When each instruction was to run.
    pub timeline: Timeline,
}

/// What a run says of itself when it is over.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measured {
    /// The median of the steps.
    pub step_seconds: f64,
    /// Every step.
    pub steps: usize,
    /// The arena of each stage, as it was allocated.
    pub peak_memory_bytes: Vec<u64>,
}

/// A run's folder.
#[derive(Clone, Debug)]
pub struct RunFolder(PathBuf);

impl RunFolder {
    /// The folder at a path.
    pub fn at(path: &Path) -> Self {
        Self(path.into())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A file of it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Keeps the plan, with the model and the topology in place, so that the folder needs nothing else.
    pub fn keep_plan(&self, loaded: &LoadedPlan) -> Result<(), Failure> {
        let topology = TopologyReference::InPlace(Box::new(specification(&loaded.topology)?));
        let model = ModelReference::InPlace(loaded.model.model.clone());
        let file = PlanFile::new(model, topology, None, &loaded.plan);
        output::write(&self.file("plan.yaml"), file.to_yaml()?.as_bytes())
    }

    /// Keeps a prediction; made before the run, and never changed after it.
    pub fn keep_prediction(&self, predicted: &Predicted) -> Result<(), Failure> {
        self.keep("predicted.json", predicted)
    }

    /// Keeps how the run went.
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

    /// Reads one of the folder's documents back.
    pub fn read<T: for<'de> Deserialize<'de>>(&self, name: &str) -> Result<T, Failure> {
        let path = self.file(name);
        let text = inputs::read(&path)?;
        serde_json::from_str(&text).map_err(|error| {
            let hint = "the folder is not that of a finished run, or was changed";
            Failure::Input(format!("`{}` is not as `foretell execute` writes it: {error}; hint: {hint}", path.display()))
        })
    }
}

/// The form of a topology that files have.
fn specification(topology: &Topology) -> Result<TopologySpec, Failure> {
    let wrong = |error: &dyn std::fmt::Display| Failure::Undone(format!("the topology cannot be written: {error}"));
    let text = serde_saphyr::to_string(topology).map_err(|error| wrong(&error))?;
    serde_saphyr::from_str(&text).map_err(|error| wrong(&error))
}
