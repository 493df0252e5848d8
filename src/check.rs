//! `foretell check`: compares a run's prediction with its measurement, instruction by instruction.

use crate::binding::{self, Limits};
use crate::failure::{Failure, code};
use crate::framework;
use crate::input::bound_phrase;
use crate::output;
use crate::plan_file::{LoadedPlan, PlanFile};
use crate::predict;
use crate::run_folder::{Measured, Predicted, RunFolder};
use clap::Args;
use foretell_executor::{ObservedReference, read_timeline};
use foretell_program::{Compiled, Profile, Timeline};
use foretell_reports::{
    AtPace, Chart, CheckDocument, CheckpointCheck, InputCheck, KindRow, LossPoint, Plot, Section, check_table, compare, page,
    write_trace,
};
use foretell_simulator::{InputBound, Options, Oversubscription, Prediction, Recording, memory_use, predict_cycle};
use foretell_units::{Bytes, Seconds, median};
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
    let folder = RunFolder::at(&arguments.run);
    folder.require_finished()?;
    if framework::is_of_framework(&folder) {
        let checked = framework::check(&folder)?;
        return if json { output::json(&checked) } else { output::line(&checked.text()) };
    }
    let checked = output::with_spinner("check", || {
        let checked = check(&folder)?;
        checked.write_reports().map(|()| checked)
    })?;
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
    prediction: Prediction,
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
    if compiled.pacing.is_some() {
        let hint = "compare `samples_per_second` and `staleness` of `simulate --json` and `execute --json`";
        return Err(Failure::input(
            code::OPTION_VALUE,
            "workers at their own pace share no step whose instructions could be compared",
        )
        .hint(hint));
    }
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
    // The prediction is judged by the step from end to end, as users measure it. The spans explain
    // the difference.
    let interval = (prediction.step_seconds_p10, prediction.step_seconds_p90);
    document.input = predicted.input.map(|input| {
        let wait =
            |side: fn(&KindRow) -> Seconds| document.comparison.by_kind.iter().filter(|row| row.kind == "load").map(side).sum();
        InputCheck::new(
            bound_phrase(input.bound),
            input.bound != InputBound::Step,
            wait(|row| row.predicted),
            wait(|row| row.measured),
            Seconds::new(totals.step_seconds),
        )
    });
    document.checkpoint = CheckpointCheck::new(
        [prediction.checkpoint_seconds, prediction.checkpoint_write_seconds],
        [totals.checkpoint_seconds, totals.checkpoint_write_seconds],
    );
    document.set_steps(prediction.step_seconds, Seconds::new(totals.step_seconds), interval.0, interval.1);
    let wait = predicted.input.map_or(Seconds::ZERO, |input| Seconds::new(input.wait_seconds));
    if let (Some(profile), Some(reference)) = (folder.profile()?, &totals.reference)
        && let Some(at_pace) = at_pace(&loaded, &compiled, &profile, reference, wait)?
    {
        document.set_pace(at_pace);
    }
    let Predicted { prediction, timeline: predicted, .. } = predicted;
    Ok(Checked { document, folder: folder.clone(), loaded, compiled, prediction, predicted, measured })
}

/// Predicts the step again, at the pace that each rank's device had in each part of the run. `None`
/// if the profile does not have the reference kernel.
fn at_pace(
    loaded: &LoadedPlan,
    compiled: &Compiled,
    profile: &Profile,
    reference: &ObservedReference,
    input_wait: Seconds,
) -> Result<Option<AtPace>, Failure> {
    let Some(calibrated) = profile.reference.map(|sample| sample.median.value()).filter(|&time| time > 0.0) else {
        return Ok(None);
    };
    let world = compiled.training.mesh.world_size();
    let is_sound = |part: &Vec<f64>| part.len() == world && part.iter().all(|&time| time > 0.0 && time.is_finite());
    let parts: Vec<Vec<f64>> = reference.processor_seconds.iter().filter(|part| is_sound(part)).cloned().collect();
    let paces: Vec<Vec<f64>> = parts.iter().map(|part| part.iter().map(|time| time / calibrated).collect()).collect();
    let means = paces.iter().map(|part| part.iter().sum::<f64>() / world as f64);
    let Some(pace) = median(means, f64::total_cmp) else { return Ok(None) };
    let costs = predict::costs(Some(profile), &loaded.topology, &loaded.plan, &loaded.model.model)?;
    let memory = memory_use(&compiled.training, Some(&compiled.evaluation), &loaded.topology, &costs);
    // The run itself shared devices between ranks, so this prediction may too.
    let oversubscription = Oversubscription::Allowed;
    let options = Options { oversubscription, recording: Recording::Ends, observed_paces: paces, ..Options::default() };
    let (prediction, _) = predict_cycle(compiled, &memory, &loaded.topology, &costs, &options)?;
    let prediction = prediction.waiting_for_input(input_wait);
    Ok(Some(AtPace {
        pace,
        predicted_step: prediction.step_seconds,
        p10: prediction.step_seconds_p10,
        p90: prediction.step_seconds_p90,
        inside_interval: false,
        reference_kernels: reference.count,
        reference_seconds: reference.seconds,
    }))
}

#[derive(Deserialize)]
struct LossLine {
    step: usize,
    /// `None` if it was not finite.
    loss: Option<f64>,
}

impl Checked {
    /// Writes plots, trace and page into the run's folder.
    pub fn write_reports(&self) -> Result<(), Failure> {
        let program = &self.compiled.training;
        let both = [&self.predicted, &self.measured];
        let mut trace = Vec::new();
        write_trace(program, &both, &mut trace)?;
        output::write(&self.folder.file("trace.json"), &trace)?;
        let (training, evaluation) = (self.losses("metrics.jsonl")?, self.losses("evaluation.jsonl")?);
        let plots = [
            ("timeline", Plot::timeline("One step", program, &both)),
            ("memory", Plot::memory("Memory over the step", program, &self.predicted)),
            ("loss", Plot::loss("Loss", &training, &evaluation)),
        ];
        for (name, plot) in plots {
            output::write(&self.folder.file(&format!("plots/{name}.svg")), plot.svg()?.as_bytes())?;
            output::write(&self.folder.file(&format!("plots/{name}.png")), &plot.png()?)?;
        }
        output::write(&self.folder.file("report.html"), self.page()?.as_bytes())
    }

    /// The report as one page.
    pub fn page(&self) -> Result<String, Failure> {
        let program = &self.compiled.training;
        let both = [&self.predicted, &self.measured];
        let (training, evaluation) = (self.losses("metrics.jsonl")?, self.losses("evaluation.jsonl")?);
        let chart = |heading: &str, chart: Chart, caption: &str| Section::Chart {
            heading: heading.into(),
            chart: Box::new(chart),
            caption: caption.into(),
        };
        let (plan, topology) = (&self.loaded.plan, &self.loaded.topology);
        let measured = self.document.comparison.measured_step;
        let mut sections = vec![
            binding::answer(plan, &self.prediction, topology, Limits::default(), Some(measured))?,
            chart(
                "Timeline",
                Chart::timeline(program, &both),
                "How each rank spent the step: predicted above, measured below. Communication counts as exposed while kernels wait for it.",
            ),
        ];
        sections.extend(Section::check(&self.document));
        sections.extend([
            chart(
                "Memory",
                Chart::memory(program, &self.predicted, Some(topology.least_memory())),
                "Bytes in use over the step, and the tensors that hold them at the peak.",
            ),
            chart("Loss", Chart::loss(&training, &evaluation), "Loss of the training steps and of the evaluations."),
            Section::Listing { heading: "Plan".into(), text: self.loaded.file.to_yaml()? },
        ]);
        let title = format!("{}: predicted and measured", self.loaded.model.name);
        Ok(page(&title, &sections)?)
    }

    fn losses(&self, file: &str) -> Result<Vec<LossPoint>, Failure> {
        let path = self.folder.file(file);
        let text = crate::inputs::read(&path)?;
        let point = |line: &str| {
            let line: LossLine = serde_json::from_str(line).map_err(|error| {
                Failure::input(
                    code::FILE_FORM,
                    format!("`{}` is not in the form that `foretell execute` writes: {error}", path.display()),
                )
            })?;
            Ok(line.loss.map(|loss| LossPoint { step: line.step as u64, loss }))
        };
        text.lines().map(point).filter_map(Result::transpose).collect()
    }
}
