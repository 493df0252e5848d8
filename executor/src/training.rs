//! A rank's training run: compile the plan, allocate and fill the arenas, then run step after step.

use crate::clock;
use crate::data::{Dataset, Split};
use crate::error::ExecutorError;
use crate::hyperparameters::hyperparameters;
use crate::initialise::initialise;
use crate::interpreter::{Interpreter, RawSpan, StepRequest};
use crate::job::{EvaluationReport, Report, StepReport, TrainingJob};
use crate::member::Member;
use crate::recording::SpanRecorder;
use crate::samples::Samples;
use foretell_models::GraphOptions;
use foretell_program::{Compiled, MetricKind, PlanError, compile};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a rank reports its steps: often enough to follow a run.
const REPORT_INTERVAL: Duration = Duration::from_millis(200);

/// The steps whose instructions are timed, if spans are kept: the first, which warms up, and enough
/// for stable medians. On a GPU a timed step is slower than others.
const TIMED_STEPS: usize = 21;

/// Index of the training Program in the interpreter.
const TRAINING: usize = 0;
/// Index of the evaluation Program in the interpreter.
const EVALUATION: usize = 1;

/// Trains as one rank of a run.
pub(crate) fn train(member: &Member, job: &TrainingJob) -> Result<(), ExecutorError> {
    let compiled = compile(&job.model, &job.name, &job.plan)?;
    let dataset = Arc::new(Dataset::open(&job.data, &job.model.sample(), job.seed)?);
    let mesh = compiled.training.mesh.clone();
    let coordinates = mesh.coordinates(member.rank);
    let memory_before = member.device.as_ref().map(|driver| driver.memory()).transpose()?;
    let arenas = member.arenas(compiled.arena_of(member.rank), compiled.host_arena_of(member.rank))?;
    let arena = &arenas.device;
    // Initial values depend on the parameters' names, shapes and distributions, not on the batch.
    let graph = job.model.graph(&job.name, &GraphOptions::ONE).map_err(PlanError::from)?;
    let samples = Samples { dataset: Arc::clone(&dataset), split: Split::Training, indices: Vec::new() };
    let programs = [&compiled.training, &compiled.evaluation];
    let interpreter = Interpreter::start(&programs, member.rank, &arenas, Arc::clone(&member.transport), Arc::new(samples))?;
    // After the interpreter's start, which may clear the arena.
    initialise(compiled.training.list_of(member.rank), &graph, mesh.stage_at(coordinates), coordinates, &arenas, job.seed)?;
    let (upcoming, unsent, sent) = (None, Vec::new(), Instant::now());
    let mut run = TrainingRun { member, job, compiled: &compiled, dataset, interpreter, upcoming, unsent, sent };
    run.train()?;
    if let (Some(driver), Some((free_before, total))) = (arena.driver(), memory_before) {
        // For the rank's log: all memory in use on the GPU, beside the predicted arena. `before` is
        // what the driver, its context and other processes held before the arena was allocated.
        let (free, _) = driver.memory()?;
        let (arena, used, before) = (arena.size().count(), total - free, total - free_before);
        eprintln!("GPU memory: arena {arena}, in use {used}, before {before}, all {total} bytes");
    }
    member.control.send(&Report::Finished { arena: arena.size() })?;
    Ok(())
}

/// A training run in progress.
struct TrainingRun<'a> {
    member: &'a Member,
    job: &'a TrainingJob,
    compiled: &'a Compiled,
    dataset: Arc<Dataset>,
    interpreter: Interpreter,
    /// The samples of a future step, and that step's number. They may be prepared already.
    upcoming: Option<(usize, Arc<Samples>)>,
    /// Steps that are not yet reported to the launcher.
    unsent: Vec<StepReport>,
    /// The time of the last report.
    sent: Instant,
}

impl TrainingRun<'_> {
    /// Runs all steps and evaluations, then writes the measured spans.
    fn train(&mut self) -> Result<(), ExecutorError> {
        let per_epoch = self.dataset.steps_per_epoch(self.job.plan.global_batch)?;
        let total = self.job.length.steps(per_epoch)?;
        let mut recorder = SpanRecorder::new(self.compiled.training.list_of(self.member.rank).instructions.len());
        let mut order = self.dataset.epoch_order(0);
        for step in 0..total {
            let (epoch, within) = (step / per_epoch, step % per_epoch);
            if within == 0 {
                order = self.dataset.epoch_order(epoch as u64);
            }
            let batch = self.job.plan.global_batch;
            // Across the end of an epoch the next samples are not known: the order changes.
            let next = (step + 1 < total && within + 1 < per_epoch).then(|| order.batch(within + 1, batch)).transpose()?;
            self.step(step, order.batch(within, batch)?, next, &mut recorder)?;
            if self.job.evaluate && (within + 1 == per_epoch || step + 1 == total) {
                self.evaluate(step, epoch)?;
            }
        }
        self.send_steps()?;
        match &self.job.timeline {
            Some(folder) => recorder.write(&folder.join(format!("{}.json", self.member.rank.0)), self.member.rank),
            None => Ok(()),
        }
    }

    /// Runs one step on the samples at `indices`. `next` has the indices of the step after it, if
    /// they are known.
    fn step(
        &mut self,
        step: usize,
        indices: Vec<usize>,
        next: Option<Vec<usize>>,
        recorder: &mut SpanRecorder,
    ) -> Result<(), ExecutorError> {
        let start = clock::now();
        let hyperparameters = hyperparameters(&self.job.plan, self.job.seed, step);
        let samples = match self.upcoming.take() {
            Some((known, samples)) if known == step => samples,
            _ => Arc::new(self.training_samples(indices)),
        };
        let next = next.map(|indices| Arc::new(self.training_samples(indices)));
        self.upcoming = next.clone().map(|samples| (step + 1, samples));
        let is_timed = self.job.timeline.is_some() && step < TIMED_STEPS;
        self.interpreter.run(StepRequest { program: TRAINING, samples, next, hyperparameters, is_timed })?;
        let metrics = self.interpreter.metrics(TRAINING, &self.compiled.training.mesh, self.member.rank)?;
        let spans: Vec<RawSpan> = self.interpreter.spans(TRAINING)?;
        let end = clock::now();
        if !spans.is_empty() {
            recorder.add(step, start, end, spans);
        }
        let learning_rate = f64::from(hyperparameters.learning_rate).into();
        let metrics = metrics.into_iter().map(|(kind, value)| (kind, value.into())).collect();
        self.unsent.push(StepReport { step, start, end, learning_rate, metrics });
        if self.sent.elapsed() > REPORT_INTERVAL { self.send_steps() } else { Ok(()) }
    }

    fn training_samples(&self, indices: Vec<usize>) -> Samples {
        Samples { dataset: Arc::clone(&self.dataset), split: Split::Training, indices }
    }

    /// Reports all unsent steps to the launcher.
    fn send_steps(&mut self) -> Result<(), ExecutorError> {
        self.sent = Instant::now();
        Ok(self.member.control.send(&Report::Steps(std::mem::take(&mut self.unsent)))?)
    }

    /// Runs the evaluation Program over all evaluation samples and reports this rank's sums of the
    /// metrics.
    fn evaluate(&mut self, step: usize, epoch: usize) -> Result<(), ExecutorError> {
        self.send_steps()?;
        let global_batch = self.job.plan.global_batch;
        let mut metrics: Vec<(MetricKind, f64)> = Vec::new();
        for batch in 0..self.dataset.evaluation_batches(global_batch) {
            let indices = self.dataset.evaluation_indices(batch, global_batch)?;
            let samples = Arc::new(Samples { dataset: Arc::clone(&self.dataset), split: Split::Evaluation, indices });
            let hyperparameters = hyperparameters(&self.job.plan, self.job.seed, step);
            self.interpreter.run(StepRequest { program: EVALUATION, samples, next: None, hyperparameters, is_timed: false })?;
            for (kind, value) in self.interpreter.metrics(EVALUATION, &self.compiled.evaluation.mesh, self.member.rank)? {
                match metrics.iter_mut().find(|(known, _)| *known == kind) {
                    Some(sum) => sum.1 += value,
                    None => metrics.push((kind, value)),
                }
            }
        }
        let metrics = metrics.into_iter().map(|(kind, value)| (kind, value.into())).collect();
        let samples = self.dataset.len(Split::Evaluation);
        Ok(self.member.control.send(&Report::Evaluation(EvaluationReport { step, epoch, samples, metrics }))?)
    }
}
