//! A rank's training run: compile the plan, allocate and fill the arenas, then run step after step.

use crate::arena::Arenas;
use crate::batches::BatchSequence;
use crate::checkpoint::{CheckpointLayout, CheckpointWriter, StateSource};
use crate::clock;
use crate::data::{Dataset, PADDING, Split};
use crate::departure;
use crate::error::ExecutorError;
use crate::hyperparameters::hyperparameters;
use crate::initialise::initialise;
use crate::interpreter::{Interpreter, RawSpan, StepRequest};
use crate::job::{Checkpoints, EvaluationReport, Report, ScoreReport, StepReport, TrainingJob};
use crate::log::log;
use crate::member::Member;
use crate::recording::SpanRecorder;
use crate::reference::ReferenceKernel;
use crate::samples::{Samples, WorkerPool};
use crate::server::{self, ServerRun};
use crate::state::RankState;
use foretell_models::{GraphOptions, InputKind};
use foretell_program::{Compiled, MetricKind, Operation, Program, Rank, RunLength, compile};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a rank reports its steps: often enough to follow a run.
const REPORT_INTERVAL: Duration = Duration::from_millis(200);

/// The steps whose instructions are timed, if spans are kept: the first, which warms up, and enough
/// for stable medians. On a GPU a timed step is slower than others.
const TIMED_STEPS: usize = 21;

/// The most scores in one message: some ten megabytes of text.
const MOST_SCORES: usize = 1 << 20;

/// Index of the evaluation Program in the interpreter. Those of the steps follow it.
const EVALUATION: usize = 0;
/// Index of the first step's Program in the interpreter.
const FIRST_STEP: usize = 1;

/// Trains as one rank of a run.
pub(crate) fn train(member: &Member, job: &TrainingJob) -> Result<(), ExecutorError> {
    let compiled = compile(&job.model, &job.name, &job.plan)?;
    let dataset = Arc::new(Dataset::open_with(&job.data, &job.model.sample(), job.seed, &job.input)?);
    let memory_before = member.device.as_ref().map(|driver| driver.memory()).transpose()?;
    let arenas = member.arenas(compiled.arena_of(member.rank), compiled.host_arena_of(member.rank))?;
    let arena = &arenas.device;
    // Initial values depend on the parameters' names, shapes and distributions, not on the batch.
    let graph = job.plan.training.graph(&job.model, &job.name, &GraphOptions::ONE)?;
    let samples = Arc::new(Samples::new(Arc::clone(&dataset), Split::Training, 0, Vec::new()));
    let programs: Vec<&Program> = std::iter::once(&compiled.evaluation).chain(compiled.step_programs()).collect();
    let start = || Interpreter::start(&programs, member.rank, &arenas, Arc::clone(&member.transport), Arc::clone(&samples));
    // A server's sessions have interpreters of their own.
    let pacing = compiled.pacing.filter(|_| server::serves(&compiled, member.rank));
    let interpreter = if pacing.is_some() { None } else { Some(start()?) };
    if let Some(interpreter) = interpreter.as_ref().filter(|_| compiled.pacing.is_some()) {
        // Only the launcher decides whether the loss of a rank ends the run.
        interpreter.outlive_peers();
    }
    // After the interpreter's start, which may clear the arena.
    let state = RankState::new(&compiled.training, &graph, member.rank);
    initialise(&state, &arenas, &StateSource::open(job, &graph)?, job.seed)?;
    let saving = RankState::new(&compiled.saving, &graph, member.rank);
    let writer = |checkpoints: &Checkpoints| {
        let layout = CheckpointLayout::new(&graph, &job.plan)?;
        let first = departure::first_to_stay(&compiled);
        CheckpointWriter::new(&checkpoints.folder, layout, &saving, (member, first))
    };
    let checkpoints = job.checkpoints.as_ref().map(writer).transpose()?;
    let steps_per_epoch = dataset.steps_per_epoch(job.plan.global_batch)?;
    let length = RunLength { steps: job.length.steps(steps_per_epoch)?, steps_per_epoch };
    if let Some(pacing) = pacing {
        let evaluation = (dataset.evaluation_batches(compiled.evaluation.samples), dataset.len(Split::Evaluation));
        ServerRun { member, job, compiled: &compiled, pacing, arenas: &arenas, checkpoints, samples, length, evaluation }
            .run()?;
    } else if let Some(interpreter) = interpreter {
        let workers = match dataset.workers(&job.input, job.cores_per_rank) {
            0 => None,
            count => Some(WorkerPool::start(count, &member.cpus)?),
        };
        let images = programs.iter().map(|program| image_positions(program, member.rank)).collect();
        let mut run = TrainingRun {
            member,
            job,
            compiled: &compiled,
            dataset,
            interpreter,
            arenas: &arenas,
            checkpoints,
            workers,
            images,
            upcoming: VecDeque::new(),
            unsent: Vec::new(),
            sent: Instant::now(),
            length,
            // On a GPU, a CPU kernel's time would say nothing about the step.
            reference: (job.timeline.is_some() && member.device.is_none()).then(ReferenceKernel::new),
        };
        run.train()?;
    }
    if let (Some(driver), Some((free_before, total))) = (arena.driver(), memory_before) {
        // For the rank's log: all memory in use on the GPU, beside the predicted arena. `before` is
        // what the driver, its context and other processes held before the arena was allocated.
        let (free, _) = driver.memory()?;
        let (arena, used, before) = (arena.size().count(), total - free, total - free_before);
        log(&format!("GPU memory: arena {arena}, in use {used}, before {before}, all {total} bytes"));
    }
    member.control.send(&Report::Finished { arena: arena.size() })?;
    Ok(())
}

/// The positions in the global batch of the images that a rank loads, in the order in which it
/// loads them.
fn image_positions(program: &Program, rank: Rank) -> Vec<usize> {
    let coordinates = program.mesh.coordinates(rank);
    let before = program.mesh.stage_at(coordinates).samples_before(coordinates);
    let loads = program.list_of(rank).instructions.iter().filter_map(|instruction| match *instruction.operation {
        Operation::Load { input: InputKind::Images | InputKind::Features, first_sample, samples, .. } => {
            Some(first_sample + before..first_sample + before + samples)
        }
        _ => None,
    });
    loads.flatten().collect()
}

/// The positions of a rank's samples among those of a run of the Program.
fn positions_of(program: &Program, rank: Rank) -> Vec<usize> {
    let coordinates = program.mesh.coordinates(rank);
    let stage = program.mesh.stage_at(coordinates);
    let at_once = stage.samples_at_once().max(1);
    let (before, own) = (stage.samples_before(coordinates), stage.samples(coordinates));
    (0..program.samples / at_once).flat_map(|batch| batch * at_once + before..batch * at_once + before + own).collect()
}

/// A training run in progress.
struct TrainingRun<'a> {
    member: &'a Member,
    job: &'a TrainingJob,
    compiled: &'a Compiled,
    dataset: Arc<Dataset>,
    interpreter: Interpreter,
    arenas: &'a Arenas,
    /// Writes this rank's part of checkpoints; `None` if the run writes none.
    checkpoints: Option<CheckpointWriter<'a>>,
    /// `None`: samples are prepared when they are loaded.
    workers: Option<WorkerPool>,
    /// The positions of the images that this rank loads, by Program.
    images: Vec<Vec<usize>>,
    /// The samples of the next steps, from the next one on. Workers prepare them.
    upcoming: VecDeque<Arc<Samples>>,
    /// Steps that are not yet reported to the launcher.
    unsent: Vec<StepReport>,
    /// The time of the last report.
    sent: Instant,
    length: RunLength,
    /// Shows the machine's pace, in runs whose spans are kept.
    reference: Option<ReferenceKernel>,
}

impl TrainingRun<'_> {
    /// Runs all steps and evaluations, then writes the measured spans.
    fn train(&mut self) -> Result<(), ExecutorError> {
        let mut batches = BatchSequence::new(&self.dataset, self.job.plan.global_batch)?;
        let RunLength { steps: total, steps_per_epoch: per_epoch } = self.length;
        let (cycle, first) = (self.compiled.cycle, self.job.start.step());
        let mut recorder = SpanRecorder::new(self.compiled.training.list_of(self.member.rank).instructions.len(), first);
        let (mut made, mut saved) = (first, first);
        for step in first..total {
            // Within a round, replicas differ: a run stops only after one.
            if !self.member.gate.may_start(step)? && step.is_multiple_of(cycle.round_steps()) {
                break;
            }
            // The step's own samples, and those of the steps after it.
            let ahead = self.job.input.prefetch.max(1);
            for upcoming in step + self.upcoming.len()..total.min(step + 1 + ahead) {
                let batch = batches.batch(upcoming)?;
                self.upcoming.push_back(self.samples(FIRST_STEP, batch.epoch, batch.indices));
            }
            let Some(samples) = self.upcoming.pop_front() else { break };
            self.step(step, samples, &mut recorder)?;
            let epoch = step / per_epoch;
            if self.job.evaluates_after(step, self.length) {
                self.evaluate(step, epoch)?;
            }
            made = step + 1;
            if self.job.saves_after(step, self.length) {
                self.save(made)?;
                saved = made;
            }
        }
        self.send_steps()?;
        if made > saved {
            self.save(made)?;
        }
        if let Some(checkpoints) = &mut self.checkpoints {
            checkpoints.wait()?;
        }
        match &self.job.timeline {
            Some(folder) => recorder.write(&folder.join(format!("{}.json", self.member.rank.0)), self.member.rank),
            None => Ok(()),
        }
    }

    /// Starts writing this rank's part of the checkpoint after `step` steps. Reports these steps
    /// first, so that a run that resumes from it has the metrics of all of them.
    fn save(&mut self, step: usize) -> Result<(), ExecutorError> {
        if self.checkpoints.is_some() {
            self.send_steps()?;
        }
        self.checkpoints.as_mut().map_or(Ok(()), |checkpoints| checkpoints.save(step, self.arenas))
    }

    /// The samples of a batch. If there are workers, they begin to prepare them.
    fn samples(&self, program: usize, epoch: u64, indices: Vec<usize>) -> Arc<Samples> {
        let split = if program == EVALUATION { Split::Evaluation } else { Split::Training };
        let samples = Samples::new(Arc::clone(&self.dataset), split, epoch, indices);
        Arc::new(match &self.workers {
            Some(workers) => samples.prepared_by(workers, &self.images[program]),
            None => samples,
        })
    }

    /// Runs one step.
    fn step(&mut self, step: usize, samples: Arc<Samples>, recorder: &mut SpanRecorder) -> Result<(), ExecutorError> {
        let reference = self.reference.as_mut().map(ReferenceKernel::time).transpose()?;
        let start = clock::now();
        let hyperparameters = hyperparameters(&self.job.plan, self.job.seed, step, self.length);
        let own = Arc::clone(&samples);
        let number = self.compiled.cycle.program_of_step(step);
        let program = FIRST_STEP + number;
        // Samples are staged for one Program, so pass the next ones only if the next step runs the
        // same Program.
        let is_same = self.compiled.cycle.program_of_step(step + 1) == number;
        let next = self.upcoming.front().filter(|_| is_same).cloned();
        let is_timed = self.job.timeline.is_some() && step < self.job.start.step() + TIMED_STEPS;
        self.interpreter.run(StepRequest { program, samples, next, hyperparameters, is_timed })?;
        let metrics = self.interpreter.metrics(program, &self.compiled.training.mesh, self.member.rank)?;
        let spans: Vec<RawSpan> = self.interpreter.spans(program)?;
        let end = clock::now();
        // A Timeline belongs to one Program: that of the usual steps. A server of frozen parameters
        // has no instructions in it.
        let is_idle = self.compiled.training.list_of(self.member.rank).instructions.is_empty();
        if number == 0 && (is_idle || !spans.is_empty()) {
            recorder.add(step, start, end, spans);
        }
        let learning_rate = f64::from(hyperparameters.learning_rate).into();
        let metrics = metrics.into_iter().map(|(kind, value)| (kind, value.into())).collect();
        let bad_samples = self.bad_samples(Split::Training, &own);
        self.unsent.push(StepReport { step, start, end, learning_rate, metrics, bad_samples, reference });
        if self.sent.elapsed() > REPORT_INTERVAL { self.send_steps() } else { Ok(()) }
    }

    /// The samples of a batch that this rank had to replace. Their names go to the rank's log.
    fn bad_samples(&self, split: Split, samples: &Samples) -> BTreeSet<usize> {
        let bad = samples.replaced();
        for &index in &bad {
            let name = self.dataset.sample_name(split, index);
            log(&format!("bad sample: `{name}` cannot be used; another took its place"));
        }
        bad
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
        let at_once = self.compiled.evaluation.samples;
        let mut metrics: Vec<(MetricKind, f64)> = Vec::new();
        let batches = self.dataset.evaluation_batches(at_once);
        let (mut upcoming, mut bad_samples, mut own_samples) = (VecDeque::new(), BTreeSet::new(), 0);
        let positions = positions_of(&self.compiled.evaluation, self.member.rank);
        for batch in 0..batches {
            for ahead in batch + upcoming.len()..batches.min(batch + 1 + self.job.input.prefetch) {
                let indices = self.dataset.evaluation_indices(ahead, at_once)?;
                let own = positions.iter().filter(|&&position| indices.get(position).is_some_and(|&index| index != PADDING));
                own_samples += own.count();
                upcoming.push_back(self.samples(EVALUATION, 0, indices));
            }
            let Some(samples) = upcoming.pop_front() else { break };
            let hyperparameters = hyperparameters(&self.job.plan, self.job.seed, step, self.length);
            let own = Arc::clone(&samples);
            self.interpreter.run(StepRequest { program: EVALUATION, samples, next: None, hyperparameters, is_timed: false })?;
            bad_samples.extend(self.bad_samples(Split::Evaluation, &own));
            for (kind, value) in self.interpreter.metrics(EVALUATION, &self.compiled.evaluation.mesh, self.member.rank)? {
                match metrics.iter_mut().find(|(known, _)| *known == kind) {
                    Some(sum) => sum.1 += value,
                    None => metrics.push((kind, value)),
                }
            }
            let scores = self.interpreter.scores(EVALUATION, &self.compiled.evaluation.mesh, self.member.rank)?;
            let samples_at_once = MOST_SCORES / scores.first().map_or(1, |sample| sample.len().max(1));
            for part in scores.chunks(samples_at_once.max(1)) {
                let samples = part.iter().map(|sample| sample.iter().map(|score| score.to_bits()).collect()).collect();
                self.member.control.send(&Report::Scores(ScoreReport { step, samples }))?;
            }
        }
        let metrics = metrics.into_iter().map(|(kind, value)| (kind, value.into())).collect();
        let samples = self.dataset.len(Split::Evaluation);
        Ok(self.member.control.send(&Report::Evaluation(EvaluationReport {
            step,
            epoch,
            samples,
            own_samples,
            metrics,
            bad_samples,
        }))?)
    }
}
