//! `foretell check`: compares a run's prediction with its measurement, instruction by instruction.

use crate::failure::Failure;
use crate::output;
use crate::plan_file::{LoadedPlan, PlanFile};
use crate::run_folder::{Measured, Predicted, RunFolder};
use clap::Args;
use foretell_executor::read_timeline;
use foretell_program::{Compiled, Timeline};
use foretell_reports::{CheckDocument, LossPoint, Plot, Section, check_table, compare, page, write_trace};
use foretell_units::{Bytes, Seconds};
use serde::Deserialize;
use std::path::PathBuf;

/// Compare a run's prediction with its measurement, by instruction, with the cause of each
/// difference
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  foretell check runs/first")]
pub struct Arguments {
    /// The run's folder
    #[arg(value_name = "RUN")]
    run: PathBuf,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let checked = check(&RunFolder::at(&arguments.run))?;
    checked.write_reports()?;
    if json {
        return output::json(&checked.document);
    }
    output::line(&check_table(&checked.document))?;
    output::line(&format!("the report is {}", checked.folder.file("report.html").display()))
}

/// A run with its comparison.
pub struct Checked {
    /// The JSON document.
    pub document: CheckDocument,
    folder: RunFolder,
    loaded: LoadedPlan,
    compiled: Compiled,
    predicted: Timeline,
    measured: Timeline,
}

/// Checks the run in a folder.
pub fn check(folder: &RunFolder) -> Result<Checked, Failure> {
    folder.require_finished()?;
    let mut loaded = PlanFile::load(&folder.file("plan.yaml"))?;
    let predicted: Predicted = folder.read("predicted.json")?;
    loaded.model.name = predicted.name;
    let compiled = loaded.compile()?;
    check_compiled(folder, loaded, compiled)
}

/// Checks the run in a folder whose plan has been compiled already.
pub fn check_compiled(folder: &RunFolder, loaded: LoadedPlan, compiled: Compiled) -> Result<Checked, Failure> {
    let predicted: Predicted = folder.read("predicted.json")?;
    let totals: Measured = folder.read("measured.json")?;
    let world_size = compiled.training.mesh.world_size();
    let measured = read_timeline(&folder.file("timeline"), world_size)?;
    let comparison = compare(&compiled.training, &predicted.timeline, &measured);
    let prediction = &predicted.prediction;
    let peak = |bytes: &[u64]| Bytes::new(bytes.iter().copied().max().unwrap_or(0));
    let predicted_peaks: Vec<u64> = prediction.peak_memory_bytes.iter().map(|bytes| bytes.count()).collect();
    let mut document = CheckDocument::new(
        comparison,
        prediction.step_seconds_p10,
        prediction.step_seconds_p90,
        peak(&predicted_peaks),
        Some(peak(&totals.peak_memory_bytes)),
    );
    // The step from end to end, as users count it, is what the prediction is judged by. The spans
    // explain it.
    let interval = (prediction.step_seconds_p10, prediction.step_seconds_p90);
    document.set_steps(prediction.step_seconds, Seconds::new(totals.step_seconds), interval.0, interval.1);
    Ok(Checked { document, folder: folder.clone(), loaded, compiled, predicted: predicted.timeline, measured })
}

#[derive(Deserialize)]
struct LossLine {
    step: usize,
    loss: f64,
}

impl Checked {
    /// Writes plots, trace and page into the run's folder.
    pub fn write_reports(&self) -> Result<(), Failure> {
        let program = &self.compiled.training;
        let both = [&self.predicted, &self.measured];
        let mut trace = Vec::new();
        write_trace(program, &both, &mut trace)?;
        output::write(&self.folder.file("trace.json"), &trace)?;
        let plots = [
            (
                "timeline",
                "Timeline",
                "Each rank's step: predicted above, measured below.",
                Plot::timeline("One step", program, &both),
            ),
            (
                "memory",
                "Memory",
                "Bytes in use in each stage's arena over the step.",
                Plot::memory("Memory over the step", program, &self.predicted),
            ),
            ("loss", "Loss", "Loss of the training steps and of the evaluations.", self.loss_plot()?),
        ];
        let mut sections = Section::check(&self.document);
        for (name, heading, caption, plot) in plots {
            output::write(&self.folder.file(&format!("plots/{name}.svg")), plot.svg()?.as_bytes())?;
            output::write(&self.folder.file(&format!("plots/{name}.png")), &plot.png()?)?;
            sections.push(Section::Figure { heading: heading.into(), plot: Box::new(plot), caption: caption.into() });
        }
        sections.push(Section::Listing { heading: "Plan".into(), text: self.loaded.file.to_yaml()? });
        let title = format!("{}: predicted and measured", self.loaded.model.name);
        output::write(&self.folder.file("report.html"), page(&title, &sections)?.as_bytes())
    }

    fn loss_plot(&self) -> Result<Plot, Failure> {
        Ok(Plot::loss("Loss", &self.losses("metrics.jsonl")?, &self.losses("evaluation.jsonl")?))
    }

    fn losses(&self, file: &str) -> Result<Vec<LossPoint>, Failure> {
        let path = self.folder.file(file);
        let text = crate::inputs::read(&path)?;
        let point = |line: &str| {
            let line: LossLine = serde_json::from_str(line).map_err(|error| {
                Failure::Input(format!("`{}` is not in the form that `foretell execute` writes: {error}", path.display()))
            })?;
            Ok(LossPoint { step: line.step as u64, loss: line.loss })
        };
        text.lines().map(point).collect()
    }
}
