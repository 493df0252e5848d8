//! A training run from the launcher's side: starting the ranks, collecting their reports, and
//! writing the run's folder. It must not know schedules or what an instruction does: ranks run
//! Programs by themselves.

mod checkpoints;
mod classification;
mod collector;
mod files;
mod paces;
#[cfg(test)]
mod simulated;

use crate::backend_kind::BackendKind;
use crate::data::{Dataset, OnBadSample};
use crate::departure;
use crate::disk::SystemDisk;
use crate::error::ExecutorError;
use crate::files::write_whole;
use crate::job::{ArrivalOrder, Job, OnDivergence, Report, TrainingJob};
use crate::launcher::{LaunchOptions, News, Ranks};
use crate::recording::read_timeline;
use crate::reference::References;
use crate::{executable, supported};
pub use checkpoints::MeasuredCheckpoint;
use checkpoints::SavedCheckpoints;
pub use classification::{Classification, PerClass, classification};
use collector::{BadSamples, Collector};
use files::RunFiles;
use foretell_program::{Axis, Compiled, Cycle, Mesh, Pacing, Rank, RunLength, StalenessDistribution, Timeline, compile};
use foretell_units::{Bytes, Seconds, median};
use paces::PaceCollector;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The invariant of reports about checkpoints.
const ONLY_SAVING: &str = "invariant: only ranks of a run that saves report checkpoints";

/// The state of dynamic loss scaling after a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScaling {
    /// The factor on the next step's loss.
    pub loss_scale: f64,
    /// The number of steps so far whose update was skipped.
    pub skipped_steps: f64,
}

/// The metrics of one training step: a line of `metrics.jsonl`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// The step, counted from 0.
    pub step: usize,
    /// The mean loss over the global batch.
    pub loss: f64,
    /// The time from the end of the previous step, on its last rank, to the end of this one.
    pub seconds: f64,
    /// The learning rate.
    pub learning_rate: f32,
    /// Throughput of the whole run.
    pub samples_per_second: f64,
    /// The Euclidean norm of the gradient of all parameters.
    pub gradient_norm: f64,
    /// The number of tokens that were routed to an expert at full capacity, over all mixtures of
    /// experts; `None` if the model has no mixtures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropped_tokens: Option<u64>,
    /// The number of samples so far that could not be used: replaced by others, or left out when
    /// the data was opened. `None` if such a sample ends the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bad_samples: Option<u64>,
    /// The state of loss scaling; `None` if the loss is not scaled.
    #[serde(flatten)]
    pub scaling: Option<LossScaling>,
}

/// One evaluation: a line of `evaluation.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// The training step that it follows.
    pub step: usize,
    /// The epoch of that step.
    pub epoch: usize,
    /// The mean loss over all evaluation samples.
    pub loss: f64,
    /// The share of predictions whose first choice is right, from 0 to 1.
    pub top1: f64,
    /// The share of predictions whose first five choices have the right one.
    pub top5: f64,
    /// The exponential of the loss.
    pub perplexity: f64,
    /// The measures of a classifier; `None` for models of sequences.
    #[serde(flatten)]
    pub classification: Option<Classification>,
    /// The number of samples that were evaluated.
    pub samples: usize,
}

/// An event of a run, for showing its progress.
#[derive(Clone, Debug)]
pub enum RunEvent {
    /// All ranks have started.
    Started {
        /// The length of the run.
        length: RunLength,
    },
    /// A step is done.
    Step(StepMetrics),
    /// An evaluation is done.
    Evaluation(Evaluation),
    /// A worker has left, and the others continue.
    Left(Departure),
}

/// A worker that has left a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Departure {
    /// The worker's number, its position along `data`.
    pub worker: usize,
    /// The number of steps that all had made.
    pub step: usize,
    /// The reason, with the rank.
    pub cause: String,
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// All steps, in order.
    pub steps: Vec<StepMetrics>,
    /// All evaluations, in order.
    pub evaluations: Vec<Evaluation>,
    /// The size of the arena of each stage's ranks, as it was allocated.
    pub arenas: Vec<Bytes>,
    /// The median spans; `None` without a folder to keep them in.
    pub timeline: Option<Timeline>,
    /// The first step after each start of the ranks' processes: the run's first step, and those
    /// after the loss of a rank. They warm up.
    pub first_steps: Vec<usize>,
    /// The number of steps before this run, made by the run that it resumes.
    pub resumed_from_step: usize,
    /// How many times the run was restarted after the loss of a rank.
    pub restarts: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// The backend that ran the kernels.
    pub backend: BackendKind,
    /// The order of the run's steps, if they differ.
    pub cycle: Cycle,
    /// Observations of workers that run at their own pace; `None` if all make each step together.
    pub paces: Option<ObservedPaces>,
    /// The cost of each checkpoint.
    pub checkpoints: Vec<MeasuredCheckpoint>,
    /// The workers that have left.
    pub departures: Vec<Departure>,
    /// The times of the reference kernel.
    pub references: References,
}

/// Observations of workers that run at their own pace.
#[derive(Clone, Debug, PartialEq)]
pub struct ObservedPaces {
    /// The staleness of pushes, over all servers.
    pub staleness: StalenessDistribution,
    /// The sum of the workers' rates, in samples per second.
    pub samples_per_second: f64,
    /// The order of arrivals.
    pub order: ArrivalOrder,
}

impl Outcome {
    /// Returns the median duration of the steps, without the steps that warm up if at least two
    /// others remain. In a mode whose steps differ, it is the mean over a cycle of each kind's
    /// median.
    pub fn median_step(&self) -> Seconds {
        let is_warm = |step: &&StepMetrics| !self.first_steps.contains(&step.step);
        let leaves_out = self.steps.iter().filter(is_warm).count() > 1;
        let counted: Vec<&StepMetrics> = self.steps.iter().filter(|step| !leaves_out || is_warm(step)).collect();
        let medians = self.cycle.counts().into_iter().enumerate().filter_map(|(program, count)| {
            let of_program = counted.iter().filter(|step| self.cycle.program_of_step(step.step) == program);
            Some((count as f64, median(of_program.map(|step| step.seconds), f64::total_cmp)?))
        });
        // A short run may not have made steps of every kind.
        let (steps, total) =
            medians.fold((0.0, 0.0), |(steps, total), (count, seconds)| (steps + count, total + count * seconds));
        Seconds::new(if steps > 0.0 { total / steps } else { 0.0 })
    }

    /// The median time that a step waits for a checkpoint, and the median time until a checkpoint
    /// is complete; `None` if the run wrote none.
    pub fn median_checkpoint(&self) -> Option<(Seconds, Seconds)> {
        let median_of =
            |part: fn(&MeasuredCheckpoint) -> f64| median(self.checkpoints.iter().map(part), f64::total_cmp).map(Seconds::new);
        median_of(|checkpoint| checkpoint.seconds).zip(median_of(|checkpoint| checkpoint.write_seconds))
    }

    /// The throughput at the median duration of the steps.
    pub fn samples_per_second(&self) -> f64 {
        if let Some(paces) = &self.paces {
            return paces.samples_per_second;
        }
        let samples = self.steps.first().map_or(0.0, |step| step.samples_per_second * step.seconds);
        let median = self.median_step().value();
        if median > 0.0 { samples / median } else { 0.0 }
    }
}

/// Trains with one process per rank. If `folder` is given, metrics, logs and spans are written into
/// it as they come. `progress` is called in the caller's thread.
///
/// # Errors
/// [`ExecutorError`] if the plan cannot be compiled or executed, the data do not fit the model, a
/// rank died, or the loss is no longer finite.
pub fn execute(
    job: &TrainingJob,
    folder: Option<&Path>,
    options: &LaunchOptions,
    progress: &mut dyn FnMut(RunEvent),
) -> Result<Outcome, ExecutorError> {
    executable(&job.model)?;
    supported(&job.plan, options.backend)?;
    let compiled = compile(&job.model, &job.name, &job.plan)?;
    let mesh = &compiled.training.mesh;
    let dataset = Dataset::open_with(&job.data, &job.model.sample(), job.seed, &job.input)?;
    let steps_per_epoch = dataset.steps_per_epoch(job.plan.global_batch)?;
    let steps = job.length.steps(steps_per_epoch)?;
    job.check_rounds(steps_per_epoch)?;
    let left_out = dataset.bad_samples();
    let length = RunLength { steps, steps_per_epoch };
    drop(dataset);
    let skips = job.input.on_bad_sample == OnBadSample::Skip;
    let bad = skips.then(|| BadSamples::new(left_out));
    if steps <= job.start.step() {
        return Err(ExecutorError::Unsupported {
            what: format!("going on after {} steps to a run of {steps}", job.start.step()),
            hint: "ask for more with `--steps` or `--epochs`, which count from the start of the run".into(),
        });
    }
    if job.replay.is_some() && compiled.pacing.is_none() {
        return Err(ExecutorError::Unsupported {
            what: "replaying an order of arrivals, when all ranks make each step together,".into(),
            hint: "leave out `--replay-order`, or use a `staleness` above 0 or `backup_workers`".into(),
        });
    }
    // Spans are kept of steps that all ranks make together.
    let timeline = folder.map(|folder| folder.join("timeline")).filter(|_| compiled.pacing.is_none());
    let mut job = TrainingJob { timeline: timeline.clone().map(absolute).transpose()?, ..job.clone() };
    let files = folder.map(|folder| RunFiles::open(folder, job.start.step())).transpose()?;
    let saving = SavedCheckpoints::prepare(&mut job, folder, steps_per_epoch, mesh.world_size(), Arc::new(SystemDisk))?;
    let first_step = job.start.step();
    let leavers = departure::leavers(&job, &compiled)?;
    let on_divergence = job.on_divergence;
    let mut ranks = Ranks::start(mesh.world_size(), &Job::Train(Box::new(job)), options)?;
    if let Some(folder) = folder {
        let ids: Vec<String> = ranks.process_ids().iter().map(u32::to_string).collect();
        write_whole(&folder.join("ranks").join("pids"), ids.join("\n").as_bytes())?;
    }
    ranks.let_leave(leavers);
    progress(RunEvent::Started { length });
    let mut run = ActiveRun::new(&compiled, bad, files, saving, options.backend, progress);
    run.on_divergence = on_divergence;
    run.outcome.resumed_from_step = first_step;
    run.outcome.first_steps = vec![first_step];
    run.receive_reports(&mut ranks, mesh)?;
    run.outcome.paces = run.paces.take().map(PaceCollector::finish);
    let mut outcome = run.outcome;
    let (checkpoint, measured) = run.saving.map(SavedCheckpoints::finish).transpose()?.unwrap_or_default();
    outcome.checkpoints = measured;
    let stopped_by = ranks.stopped_by();
    ranks.finish()?;
    let made = first_step + outcome.steps.len();
    if let Some(signal) = stopped_by.filter(|_| made < steps) {
        // Under the folder as the caller named it.
        let checkpoint = folder.zip(checkpoint).map(|(folder, _)| folder.join("checkpoints").join(made.to_string()));
        return Err(ExecutorError::Stopped { signal, steps: made, checkpoint });
    }
    outcome.timeline = timeline.map(|folder| read_timeline(&folder, outcome.world_size)).transpose()?;
    Ok(outcome)
}

fn absolute(path: PathBuf) -> Result<PathBuf, ExecutorError> {
    std::path::absolute(&path).map_err(|error| ExecutorError::system(format!("find `{}`", path.display()), error))
}

/// A run whose ranks are at work.
struct ActiveRun<'a> {
    collector: Collector,
    predictions_per_sample: usize,
    files: Option<RunFiles>,
    /// `None` if the run writes no checkpoints.
    saving: Option<SavedCheckpoints>,
    /// The ranks that have not finished.
    running: BTreeSet<usize>,
    /// The ranks that have not left.
    present: BTreeSet<usize>,
    /// By rank: the number of steps that it had started when it was told to start no more.
    held: BTreeMap<usize, usize>,
    /// `None` if all ranks make each step together.
    paces: Option<PaceCollector>,
    on_divergence: OnDivergence,
    outcome: Outcome,
    progress: &'a mut dyn FnMut(RunEvent),
}

impl<'a> ActiveRun<'a> {
    fn new(
        compiled: &Compiled,
        bad: Option<BadSamples>,
        files: Option<RunFiles>,
        saving: Option<SavedCheckpoints>,
        backend: BackendKind,
        progress: &'a mut dyn FnMut(RunEvent),
    ) -> Self {
        let training = &compiled.training;
        let world_size = training.mesh.world_size();
        let outcome = Outcome {
            steps: Vec::new(),
            evaluations: Vec::new(),
            arenas: vec![Bytes::ZERO; training.mesh.stage_count()],
            timeline: None,
            first_steps: Vec::new(),
            resumed_from_step: 0,
            restarts: 0,
            world_size,
            backend,
            cycle: compiled.cycle,
            paces: None,
            checkpoints: Vec::new(),
            departures: Vec::new(),
            references: References::new(world_size),
        };
        let workers = departure::workers(compiled);
        let collector = Collector::new(world_size, training.predictions, training.samples, bad);
        let per_worker = |pacing: Pacing| PaceCollector::new(training.samples / pacing.workers.max(1));
        Self {
            paces: compiled.pacing.map(per_worker),
            collector: if workers.is_empty() { collector } else { collector.with_workers(&workers) },
            predictions_per_sample: training.predictions / training.samples.max(1),
            files,
            saving,
            running: (0..world_size).collect(),
            present: (0..world_size).collect(),
            held: BTreeMap::new(),
            on_divergence: OnDivergence::End,
            outcome,
            progress,
        }
    }

    /// Receives the ranks' reports until all ranks have finished.
    fn receive_reports(&mut self, ranks: &mut Ranks, mesh: &Mesh) -> Result<(), ExecutorError> {
        while !self.running.is_empty() {
            let (rank, report) = match ranks.next()? {
                News::Report(rank, report) => (rank, report),
                News::Left { ranks: gone, lost, cause } => {
                    self.leave(&gone, (lost, &cause), mesh)?;
                    self.stop_once_held(ranks)?;
                    continue;
                }
            };
            match report {
                Report::Steps(reports) => {
                    for report in reports {
                        if let Some(paces) = self.paces.as_mut().filter(|_| mesh.stage_of(Rank(rank)) == 0) {
                            paces.step(rank, &report);
                        }
                        self.outcome.references.add(rank, report.step, report.reference);
                        if let Some(metrics) = self.collector.step(rank, report) {
                            self.finish_step(metrics)?;
                        }
                    }
                }
                Report::Evaluation(report) => {
                    let evaluation = self.collector.evaluation(rank, report, self.predictions_per_sample);
                    self.finish_evaluation(evaluation)?;
                }
                Report::Scores(report) => self.collector.scores(report),
                Report::CheckpointWritten { step } => {
                    self.saving.as_mut().expect(ONLY_SAVING).add_written(rank, step)?;
                }
                Report::CheckpointPart { step, scaler, times } => {
                    self.saving.as_mut().expect(ONLY_SAVING).add_part(rank, step, scaler, times)?;
                }
                Report::Held { started } => {
                    self.held.insert(rank, started);
                    self.stop_once_held(ranks)?;
                }
                Report::Turns { turns, staleness } => {
                    self.paces.as_mut().into_iter().for_each(|paces| paces.turns(rank, &turns, &staleness));
                }
                Report::Finished { arena } => {
                    let stage = mesh.stage_of(Rank(rank));
                    self.outcome.arenas[stage] = self.outcome.arenas[stage].max(arena);
                    self.running.remove(&rank);
                }
                Report::Kernel { .. }
                | Report::Paces(_)
                | Report::Progress(_)
                | Report::Speed(_)
                | Report::Exchange { .. }
                | Report::Overheads(_)
                | Report::Reference(_) => return Err(ExecutorError::unexpected_report("a measurement while it trains", rank)),
                Report::AskedToStop { .. } | Report::Starved(_) | Report::Sent { .. } | Report::Failed { .. } => {
                    unreachable!("invariant: `Ranks::next` takes these")
                }
            }
        }
        Ok(())
    }

    /// Once all ranks have reported how many steps they started, tells them after which step to
    /// stop.
    fn stop_once_held(&mut self, ranks: &mut Ranks) -> Result<(), ExecutorError> {
        let hold = self.present.iter().all(|rank| self.held.contains_key(rank));
        if self.held.is_empty() || !hold {
            return Ok(());
        }
        let held = std::mem::take(&mut self.held);
        ranks.stop_after(held.into_values().max().expect("invariant: some rank holds"))
    }

    /// Continues without the ranks of a worker.
    fn leave(&mut self, gone: &[usize], (lost, cause): (usize, &str), mesh: &Mesh) -> Result<(), ExecutorError> {
        self.running.retain(|rank| !gone.contains(rank));
        self.present.retain(|rank| !gone.contains(rank));
        let first = Rank(*gone.first().expect("invariant: a worker has ranks"));
        let worker = mesh.coordinates(first).along(Axis::Data);
        let step = self.outcome.resumed_from_step + self.outcome.steps.len();
        let departure = Departure { worker, step, cause: format!("rank {lost} {cause}") };
        (self.progress)(RunEvent::Left(departure.clone()));
        self.outcome.departures.push(departure);
        for metrics in self.collector.leave(gone) {
            self.finish_step(metrics)?;
        }
        let evaluated = self.collector.finished_evaluations(self.predictions_per_sample);
        evaluated.into_iter().try_for_each(|evaluation| self.finish_evaluation(Some(evaluation)))?;
        self.saving.as_mut().map_or(Ok(()), |saving| saving.leave(gone))
    }

    fn finish_step(&mut self, metrics: StepMetrics) -> Result<(), ExecutorError> {
        if !metrics.loss.is_finite() && self.on_divergence == OnDivergence::End {
            return Err(ExecutorError::Diverged { step: metrics.step, loss: metrics.loss });
        }
        self.files.as_mut().map(|files| files.write_step(&metrics)).transpose()?;
        self.outcome.steps.push(metrics);
        (self.progress)(RunEvent::Step(metrics));
        Ok(())
    }

    fn finish_evaluation(&mut self, evaluation: Option<Evaluation>) -> Result<(), ExecutorError> {
        // An evaluation split without samples has no loss.
        let Some(evaluation) = evaluation.filter(|evaluation| evaluation.samples > 0) else { return Ok(()) };
        if !evaluation.loss.is_finite() && self.on_divergence == OnDivergence::End {
            return Err(ExecutorError::Diverged { step: evaluation.step, loss: evaluation.loss });
        }
        self.files.as_mut().map(|files| files.write_evaluation(&evaluation)).transpose()?;
        self.outcome.evaluations.push(evaluation.clone());
        (self.progress)(RunEvent::Evaluation(evaluation));
        Ok(())
    }
}
