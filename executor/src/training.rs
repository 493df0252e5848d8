//! A rank's training run: compile, lay out the arena, start, then step after step.

use crate::clock;
use crate::data::{Dataset, Split};
use crate::error::ExecutorError;
use crate::hyperparameters::hyperparameters;
use crate::initialise::initialise;
use crate::interpreter::{Interpreter, RawSpan, StepRequest};
use crate::job::{EvaluationReport, Report, StepReport, TrainingJob};
use crate::member::Member;
use crate::recording::Recording;
use crate::samples::Samples;
use foretell_models::GraphOptions;
use foretell_program::{Compiled, compile};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a rank reports its steps: often enough to follow a run.
const REPORT_INTERVAL: Duration = Duration::from_millis(200);

/// Steps whose instructions are timed where that costs time, on a GPU: the first, which warms up, and enough for steady medians.
const TIMED_STEPS: usize = 21;

const TRAINING: usize = 0;
const EVALUATION: usize = 1;

/// Trains as one rank of a run.
pub(crate) fn train(member: &Member, job: &TrainingJob) -> Result<(), ExecutorError> {
    let compiled = compile(&job.model, &job.name, &job.plan)?;
    let dataset = Arc::new(Dataset::open(&job.data, &job.model.sample(), job.seed)?);
    let mesh = compiled.training.mesh.clone();
    let coordinates = mesh.coordinates(member.rank);
    // What the driver, its context and other processes hold of the GPU before anything is allocated.
    let before = member.device.as_ref().map(|driver| driver.memory()).transpose()?;
    let arenas = member.arenas(compiled.arena_of(member.rank), compiled.host_arena_of(member.rank))?;
    let arena = &arenas.device;
    // Initial values need names, shapes and distributions of parameters, which do not depend on the batch.
    let graph = job.model.graph(&job.name, &GraphOptions::ONE).map_err(foretell_program::PlanError::from)?;
    let samples = Samples { dataset: Arc::clone(&dataset), split: Split::Training, indices: Vec::new() };
    let programs = [&compiled.training, &compiled.evaluation];
    let interpreter = Interpreter::start(&programs, member.rank, &arenas, Arc::clone(&member.transport), Arc::new(samples))?;
    // After the start, which may clear the arena.
    initialise(compiled.training.list_of(member.rank), &graph, mesh.stage_at(coordinates), coordinates, &arenas, job.seed)?;
    let mut run = TrainingRun {
        member,
        job,
        compiled: &compiled,
        dataset,
        interpreter,
        upcoming: None,
        unsent: Vec::new(),
        sent: Instant::now(),
    };
    run.steps()?;
    if let (Some(driver), Some((free_before, all))) = (arena.driver(), before) {
        // Into the rank's log: what the whole GPU has in use, beside the arena that was foretold.
        let (free, _) = driver.memory()?;
        let (arena, used, held) = (arena.size().count(), all - free, all - free_before);
        eprintln!("GPU memory: arena {arena}, in use {used}, before {held}, all {all} bytes");
    }
    member.control.send(&Report::Finished { arena: arena.size() })?;
    Ok(())
}

struct TrainingRun<'a> {
    member: &'a Member,
    job: &'a TrainingJob,
    compiled: &'a Compiled,
    dataset: Arc<Dataset>,
    interpreter: Interpreter,
    /// The samples of a step to come, with its number.
    upcoming: Option<(usize, Arc<Samples>)>,
    /// Steps that the launcher has not heard of yet.
    unsent: Vec<StepReport>,
    sent: Instant,
}

impl TrainingRun<'_> {
    fn steps(&mut self) -> Result<(), ExecutorError> {
        let per_epoch = self.dataset.steps_per_epoch(self.job.plan.global_batch)?;
        let total = self.job.length.steps(per_epoch)?;
        let mut recording = Recording::new(self.compiled.training.list_of(self.member.rank).instructions.len());
        let mut order = self.dataset.epoch_order(0);
        for step in 0..total {
            let (epoch, within) = (step / per_epoch, step % per_epoch);
            if within == 0 {
                order = self.dataset.epoch_order(epoch as u64);
            }
            let batch = self.job.plan.global_batch;
            // The first of an epoch are not known before that begins.
            let next = (step + 1 < total && within + 1 < per_epoch).then(|| order.batch(within + 1, batch)).transpose()?;
            self.step(step, order.batch(within, batch)?, next, &mut recording)?;
            if self.job.evaluate && (within + 1 == per_epoch || step + 1 == total) {
                self.evaluate(step, epoch)?;
            }
        }
        self.send_steps()?;
        match &self.job.timeline {
            Some(folder) => recording.write(&folder.join(format!("{}.json", self.member.rank.0)), self.member.rank),
            None => Ok(()),
        }
    }

    fn samples(&self, indices: Vec<usize>) -> Samples {
        Samples { dataset: Arc::clone(&self.dataset), split: Split::Training, indices }
    }

    /// `next` are the samples of the step after it, if that is known.
    fn step(
        &mut self,
        step: usize,
        indices: Vec<usize>,
        next: Option<Vec<usize>>,
        recording: &mut Recording,
    ) -> Result<(), ExecutorError> {
        let start = clock::now();
        let hyperparameters = hyperparameters(&self.job.plan, self.job.seed, step);
        let samples = match self.upcoming.take() {
            Some((known, samples)) if known == step => samples,
            _ => Arc::new(self.samples(indices)),
        };
        let next = next.map(|indices| Arc::new(self.samples(indices)));
        self.upcoming = next.clone().map(|samples| (step + 1, samples));
        let is_timed = self.job.timeline.is_some() && step < TIMED_STEPS;
        self.interpreter.run(StepRequest { program: TRAINING, samples, next, hyperparameters, is_timed })?;
        let metrics = self.interpreter.metrics(TRAINING, &self.compiled.training.mesh, self.member.rank)?;
        let spans: Vec<RawSpan> = self.interpreter.spans(TRAINING)?;
        let end = clock::now();
        if !spans.is_empty() {
            recording.add(step, start, end, spans);
        }
        let learning_rate = f64::from(hyperparameters.learning_rate).into();
        let metrics = metrics.into_iter().map(|(kind, value)| (kind, value.into())).collect();
        self.unsent.push(StepReport { step, start, end, learning_rate, metrics });
        if self.sent.elapsed() > REPORT_INTERVAL { self.send_steps() } else { Ok(()) }
    }

    fn send_steps(&mut self) -> Result<(), ExecutorError> {
        self.sent = Instant::now();
        Ok(self.member.control.send(&Report::Steps(std::mem::take(&mut self.unsent)))?)
    }

    /// The loss and the right predictions over all evaluation samples.
    fn evaluate(&mut self, step: usize, epoch: usize) -> Result<(), ExecutorError> {
        self.send_steps()?;
        let global_batch = self.job.plan.global_batch;
        let mut metrics: Vec<(foretell_program::MetricKind, f64)> = Vec::new();
        for batch in 0..self.dataset.evaluation_batches(global_batch) {
            let indices = self.dataset.evaluation_indices(batch, global_batch)?;
            let samples = Samples { dataset: Arc::clone(&self.dataset), split: Split::Evaluation, indices };
            let hyperparameters = hyperparameters(&self.job.plan, self.job.seed, step);
            let samples = Arc::new(samples);
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
