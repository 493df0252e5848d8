//! A run's report, during the run and after it. It reads the run's folder, so the run may be
//! another process.

use super::REFRESH;
use crate::binding::{self, Limits};
use crate::check::check_compiled;
use crate::failure::{Failure, code};
use crate::inputs;
use crate::plan_file::{LoadedPlan, PlanFile};
use crate::progress_of::last_step;
use crate::run_folder::{Predicted, RunFolder};
use foretell_program::Compiled;
use foretell_reports::{Chart, Fact, LossPoint, Section, page};
use foretell_units::Seconds;
use serde::Deserialize;
use std::path::Path;

/// A run whose report is shown.
pub struct ServedRun {
    folder: RunFolder,
    loaded: LoadedPlan,
    compiled: Compiled,
    predicted: Predicted,
}

/// The fields of a line of `metrics.jsonl` or `evaluation.jsonl` that a chart needs.
#[derive(Deserialize)]
struct LossLine {
    step: u64,
    loss: Option<f64>,
}

impl ServedRun {
    /// The run of a folder.
    pub fn open(run: &Path) -> Result<Self, Failure> {
        let folder = RunFolder::at(run);
        if !folder.file("predicted.json").is_file() {
            let hint = "give the folder of a run that `foretell run` or `foretell execute` made";
            return Err(Failure::input(code::RUN_MISSING, format!("`{}` is not a run's folder", run.display())).hint(hint));
        }
        let mut loaded = PlanFile::load(&folder.file("plan.yaml"))?;
        let predicted: Predicted = folder.read("predicted.json")?;
        loaded.model.name.clone_from(&predicted.name);
        let compiled = loaded.compile()?;
        Ok(Self { folder, loaded, compiled, predicted })
    }

    /// The page, and whether the run is over.
    pub fn page(&self) -> Result<(String, bool), Failure> {
        let is_finished = self.folder.file("measured.json").is_file();
        // Workers at their own pace have no step to compare; their losses are still shown.
        let text = if is_finished && self.compiled.pacing.is_none() { self.checked() } else { self.so_far() };
        Ok((text?, is_finished))
    }

    fn checked(&self) -> Result<String, Failure> {
        check_compiled(&self.folder, self.loaded.clone(), self.compiled.clone())?.page()
    }

    /// The page of an active run.
    fn so_far(&self) -> Result<String, Failure> {
        let (prediction, topology) = (&self.predicted.prediction, &self.loaded.topology);
        let last = last_step(self.folder.path());
        let facts = match last {
            None => vec![Fact::new("steps", "0", "the ranks are starting")],
            Some(last) => vec![
                Fact::new("steps", (last.step + 1).to_string(), "made so far"),
                Fact::new("loss", format!("{:.4}", last.loss), "of the last step"),
                Fact::new("last step", Seconds::new(last.seconds).to_string(), format!("predicted {}", prediction.step_seconds)),
                Fact::new("samples/s", format!("{:.1}", last.samples_per_second), "of the last step"),
            ],
        };
        let chart = |heading: &str, chart: Chart, caption: &str| Section::Chart {
            heading: heading.into(),
            chart: Box::new(chart),
            caption: caption.into(),
        };
        let losses = [self.losses("metrics.jsonl"), self.losses("evaluation.jsonl")];
        let timeline = Chart::timeline(&self.compiled.training, &[&self.predicted.timeline]);
        let sections = [
            Section::Answer { facts, sentences: vec![format!("The page looks again each {REFRESH} seconds.")] },
            chart("Loss", Chart::loss(&losses[0], &losses[1]), "Loss of the training steps and of the evaluations so far."),
            binding::answer(&self.loaded.plan, prediction, topology, Limits::default(), None)?,
            chart("Timeline", timeline, "The predicted step. The measured one is added when the run has ended."),
            Section::Listing { heading: "Plan".into(), text: self.loaded.file.to_yaml()? },
        ];
        Ok(page(&format!("{}: a run in progress", self.loaded.model.name), &sections)?)
    }

    /// The losses so far. The last line may be incomplete.
    fn losses(&self, file: &str) -> Vec<LossPoint> {
        let text = inputs::read_run_file(&self.folder.file(file)).unwrap_or_default();
        let lines = text.lines().filter_map(|line| serde_json::from_str::<LossLine>(line).ok());
        lines.filter_map(|line| Some(LossPoint { step: line.step, loss: line.loss? })).collect()
    }
}
