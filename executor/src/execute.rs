//! A training run from the launcher's side: its folder, its metrics, its outcome.

use crate::backend_kind::BackendKind;
use crate::error::ExecutorError;
use crate::files::write_whole;
use crate::job::{Bits, EvaluationReport, Job, Report, StepReport, TrainingJob};
use crate::launcher::{LaunchOptions, Ranks};
use crate::recording::read_timeline;
use crate::{data::Dataset, supported};
use foretell_program::{MetricKind, Rank, Timeline, compile};
use foretell_units::{Bytes, Seconds};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The state of dynamic loss scaling after a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScaling {
    /// The factor on the next step's loss.
    pub loss_scale: f64,
    /// Steps whose update was skipped so far.
    pub skipped_steps: f64,
}

/// One training step, as `metrics.jsonl` has it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Counted from 0.
    pub step: usize,
    /// The mean over the global batch.
    pub loss: f64,
    /// From the end of the step before (of its last rank) to the end of this one.
    pub seconds: f64,
    /// The step size.
    pub learning_rate: f32,
    /// Of the whole run.
    pub samples_per_second: f64,
    /// The Euclidean norm of the gradient of all parameters.
    pub gradient_norm: f64,
    /// Of a mixture of experts: how often a token was sent to an expert that had no slot left, over all mixtures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropped_tokens: Option<u64>,
    /// Where the loss is scaled (`fp16`): how.
    #[serde(flatten)]
    pub scaling: Option<LossScaling>,
}

/// One evaluation, as `evaluation.jsonl` has it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// The training step that it follows.
    pub step: usize,
    /// The epoch of that step.
    pub epoch: usize,
    /// The mean over all evaluation samples.
    pub loss: f64,
    /// The share of predictions whose first choice is right.
    pub top1: f64,
    /// Samples that were evaluated.
    pub samples: usize,
}

/// What a run tells while it goes.
#[derive(Clone, Copy, Debug)]
pub enum Progress {
    /// All ranks have started; so many steps are to come.
    Started {
        /// Steps.
        steps: usize,
    },
    /// A step is done.
    Step(StepMetrics),
    /// An evaluation is done.
    Evaluation(Evaluation),
}

/// How a run went.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Every step.
    pub steps: Vec<StepMetrics>,
    /// Every evaluation.
    pub evaluations: Vec<Evaluation>,
    /// The arena of each stage, as it was allocated.
    pub arenas: Vec<Bytes>,
    /// Median spans, where a folder was given to keep them.
    pub timeline: Option<Timeline>,
    /// Ranks.
    pub world_size: usize,
    /// What ran the kernels.
    pub backend: BackendKind,
}

impl Outcome {
    /// The median duration of the steps; the first, which warms up, is left out where there are others.
    pub fn median_step(&self) -> Seconds {
        let mut seconds: Vec<f64> = self.steps.iter().map(|step| step.seconds).skip(usize::from(self.steps.len() > 2)).collect();
        seconds.sort_by(f64::total_cmp);
        Seconds::new(seconds.get(seconds.len() / 2).copied().unwrap_or(0.0))
    }
}

/// Trains, with a process for each rank on this machine. With a folder, metrics, logs and spans are written into it as they come.
///
/// # Errors
/// [`ExecutorError`]: the plan makes no Program, the data do not fit, a rank died (named, with its cause), or the loss is no number.
pub fn execute(
    job: &TrainingJob,
    folder: Option<&Path>,
    options: &LaunchOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Outcome, ExecutorError> {
    supported(&job.plan, options.backend)?;
    let compiled = compile(&job.model, &job.name, &job.plan)?;
    let mesh = &compiled.training.mesh;
    let dataset = Dataset::open(&job.data, &job.model.sample(), job.seed)?;
    let steps = job.length.steps(dataset.steps_per_epoch(job.plan.global_batch)?)?;
    drop(dataset);
    let timeline = folder.map(|folder| folder.join("timeline"));
    let job = TrainingJob { timeline: timeline.clone().map(absolute).transpose()?, ..job.clone() };
    let mut files = folder.map(RunFiles::create).transpose()?;
    let mut ranks = Ranks::start(mesh.world_size(), &Job::Train(Box::new(job)), options)?;
    if let Some(folder) = folder {
        let ids: Vec<String> = ranks.process_ids().iter().map(u32::to_string).collect();
        write_whole(&folder.join("ranks").join("pids"), ids.join("\n").as_bytes())?;
    }
    progress(Progress::Started { steps });
    let mut collector = Collector::new(mesh.world_size(), compiled.training.predictions, compiled.training.samples);
    let predictions_per_sample = compiled.training.predictions / compiled.training.samples.max(1);
    let mut arenas = vec![Bytes::ZERO; mesh.stage_count()];
    let mut outcome = Outcome {
        steps: Vec::new(),
        evaluations: Vec::new(),
        arenas: Vec::new(),
        timeline: None,
        world_size: mesh.world_size(),
        backend: options.backend,
    };
    let mut running = mesh.world_size();
    while running > 0 {
        let (rank, report) = ranks.next()?;
        match report {
            Report::Steps(reports) => {
                for metrics in reports.into_iter().filter_map(|report| collector.step(report)).collect::<Vec<_>>() {
                    if !metrics.loss.is_finite() {
                        return Err(ExecutorError::Diverged { step: metrics.step, loss: metrics.loss });
                    }
                    files.as_mut().map(|files| files.metrics.line(&metrics)).transpose()?;
                    outcome.steps.push(metrics);
                    progress(Progress::Step(metrics));
                }
            }
            Report::Evaluation(report) => {
                // Without samples there is nothing to say.
                let whole = collector.evaluation(report, predictions_per_sample);
                if let Some(evaluation) = whole.filter(|evaluation| evaluation.samples > 0) {
                    if !evaluation.loss.is_finite() {
                        return Err(ExecutorError::Diverged { step: evaluation.step, loss: evaluation.loss });
                    }
                    files.as_mut().map(|files| files.evaluation.line(&evaluation)).transpose()?;
                    outcome.evaluations.push(evaluation);
                    progress(Progress::Evaluation(evaluation));
                }
            }
            Report::Finished { arena } => {
                let stage = mesh.stage_of(Rank(rank));
                arenas[stage] = arenas[stage].max(arena);
                running -= 1;
            }
            _ => {}
        }
    }
    ranks.finish()?;
    outcome.arenas = arenas;
    outcome.timeline = timeline.map(|folder| read_timeline(&folder, outcome.world_size)).transpose()?;
    Ok(outcome)
}

fn absolute(path: PathBuf) -> Result<PathBuf, ExecutorError> {
    std::path::absolute(&path).map_err(|error| ExecutorError::system(format!("find `{}`", path.display()), error))
}

/// Puts the ranks' parts of steps and evaluations together.
struct Collector {
    world_size: usize,
    predictions: usize,
    samples: usize,
    /// By step: the parts that have come, of the steps that are not whole.
    steps: BTreeMap<usize, Vec<StepReport>>,
    /// By the training step that they follow: the parts of all evaluations.
    evaluations: BTreeMap<usize, Vec<EvaluationReport>>,
    last_end: Option<u64>,
}

impl Collector {
    fn new(world_size: usize, predictions: usize, samples: usize) -> Self {
        Self { world_size, predictions, samples, steps: BTreeMap::new(), evaluations: BTreeMap::new(), last_end: None }
    }

    /// A rank's part of a step; the whole once all have sent theirs.
    fn step(&mut self, report: StepReport) -> Option<StepMetrics> {
        let step = report.step;
        let parts = self.steps.entry(step).or_default();
        parts.push(report);
        if parts.len() < self.world_size {
            return None;
        }
        let parts = self.steps.remove(&step)?;
        let learning_rate = parts.first().map_or(0.0, |part| f64::from(part.learning_rate) as f32);
        let end = parts.iter().map(|part| part.end).max().unwrap_or(0);
        let begin = parts.iter().map(|part| part.start).max().unwrap_or(0);
        // A step that follows an evaluation begins after it.
        let begin = self.last_end.map_or(begin, |last| if self.evaluated(step) { begin } else { last });
        let seconds = end.saturating_sub(begin) as f64 * 1e-9;
        let metrics = parts.iter().map(|part| &part.metrics);
        let loss = sum(metrics.clone(), MetricKind::Loss) / self.predictions as f64;
        let gradient_norm = sum(metrics.clone(), MetricKind::SquaredGradientNorm).sqrt();
        let has_mixtures = metrics.clone().flatten().any(|(kind, _)| *kind == MetricKind::Dropped);
        let dropped_tokens = has_mixtures.then(|| sum(metrics, MetricKind::Dropped) as u64);
        let one =
            |kind| parts.iter().flat_map(|part| &part.metrics).find(|(known, _)| *known == kind).map(|&(_, one)| one.into());
        let (loss_scale, skipped_steps) = (one(MetricKind::LossScale), one(MetricKind::SkippedSteps));
        self.last_end = Some(end);
        let samples_per_second = self.samples as f64 / seconds;
        let scaling = loss_scale
            .zip(skipped_steps)
            .map(|(loss_scale, skipped_steps): (f64, f64)| LossScaling { loss_scale, skipped_steps });
        Some(StepMetrics { step, loss, seconds, learning_rate, samples_per_second, gradient_norm, dropped_tokens, scaling })
    }

    fn evaluated(&self, step: usize) -> bool {
        step.checked_sub(1).is_some_and(|before| self.evaluations.contains_key(&before))
    }

    fn evaluation(&mut self, report: EvaluationReport, predictions_per_sample: usize) -> Option<Evaluation> {
        let (step, epoch, samples) = (report.step, report.epoch, report.samples);
        let parts = self.evaluations.entry(step).or_default();
        parts.push(report);
        if parts.len() < self.world_size {
            return None;
        }
        let predictions = (samples * predictions_per_sample) as f64;
        let metrics = parts.iter().map(|part| &part.metrics);
        let loss = sum(metrics.clone(), MetricKind::Loss) / predictions;
        let top1 = sum(metrics, MetricKind::Correct) / predictions;
        Some(Evaluation { step, epoch, loss, top1, samples })
    }
}

/// The sum of one kind of metric over all ranks, in the order of their values, so that who reports first makes no difference.
fn sum<'a>(parts: impl Iterator<Item = &'a Vec<(MetricKind, Bits)>>, kind: MetricKind) -> f64 {
    let mut values: Vec<f64> = parts.flatten().filter(|(known, _)| *known == kind).map(|&(_, value)| value.into()).collect();
    values.sort_by(f64::total_cmp);
    values.iter().sum()
}

/// The files that grow while a run goes.
struct RunFiles {
    metrics: LineFile,
    evaluation: LineFile,
}

impl RunFiles {
    fn create(folder: &Path) -> Result<Self, ExecutorError> {
        std::fs::create_dir_all(folder)
            .map_err(|error| ExecutorError::system(format!("make the folder `{}`", folder.display()), error))?;
        Ok(Self {
            metrics: LineFile::create(folder.join("metrics.jsonl"))?,
            evaluation: LineFile::create(folder.join("evaluation.jsonl"))?,
        })
    }
}

/// A file of one JSON document a line, each written at once so that it can be followed.
struct LineFile {
    path: PathBuf,
    file: File,
}

impl LineFile {
    fn create(path: PathBuf) -> Result<Self, ExecutorError> {
        let file = OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(true)
            .open(&path)
            .map_err(|error| ExecutorError::system(format!("write `{}`", path.display()), error))?;
        Ok(Self { path, file })
    }

    fn line<T: Serialize>(&mut self, value: &T) -> Result<(), ExecutorError> {
        let written = serde_json::to_vec(value).map_err(std::io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            self.file.write_all(&line)
        });
        written.map_err(|error| ExecutorError::system(format!("write `{}`", self.path.display()), error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(step: usize, loss: f64) -> StepReport {
        let metrics = vec![(MetricKind::Loss, loss.into()), (MetricKind::SquaredGradientNorm, f64::INFINITY.into())];
        StepReport { step, start: 0, end: 1_000, learning_rate: f64::from(0.1_f32).into(), metrics }
    }

    #[test]
    fn a_step_is_whole_when_all_ranks_have_sent_theirs_and_may_be_no_number() {
        let mut collector = Collector::new(2, 4, 4);
        assert!(collector.step(report(0, 2.0)).is_none());
        assert!(collector.step(report(1, f64::NAN)).is_none());
        let first = collector.step(report(0, 6.0)).expect("both have sent it");
        assert_eq!((first.step, first.loss, first.learning_rate), (0, 2.0, 0.1));
        let second = collector.step(report(1, 1.0)).expect("both have sent it");
        assert!(second.loss.is_nan());
        assert!(collector.steps.is_empty());
        // What is written stays JSON, whatever the numbers are.
        let text = serde_json::to_string(&first).expect("it is written");
        assert!(text.contains(r#""gradient_norm":null"#), "{text}");
    }
}
