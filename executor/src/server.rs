//! A parameter server's run: it serves its workers up to each step after which all ranks evaluate
//! or save, and then does its own part of that.

use crate::arena::Arenas;
use crate::checkpoint::CheckpointWriter;
use crate::error::ExecutorError;
use crate::hyperparameters::hyperparameters;
use crate::job::{EvaluationReport, Report, StepReport, TrainingJob};
use crate::member::Member;
use crate::samples::Samples;
use crate::serving::{Sessions, Turns, with_sessions};
use foretell_program::{Compiled, Pacing, Rank, RunLength};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A server's run.
pub(crate) struct ServerRun<'a> {
    pub(crate) member: &'a Member,
    pub(crate) job: &'a TrainingJob,
    pub(crate) compiled: &'a Compiled,
    pub(crate) pacing: Pacing,
    pub(crate) arenas: &'a Arenas,
    /// Writes this rank's part of checkpoints; `None` if the run writes none.
    pub(crate) checkpoints: Option<CheckpointWriter<'a>>,
    /// No samples: servers load none.
    pub(crate) samples: Arc<Samples>,
    pub(crate) length: RunLength,
    /// The number of batches of an evaluation, and of its samples.
    pub(crate) evaluation: (usize, usize),
}

/// Whether a rank serves workers that go at their own pace.
pub(crate) fn serves(compiled: &Compiled, rank: Rank) -> bool {
    compiled.sessions.first().is_some_and(|session| !session.send.list_of(rank).instructions.is_empty())
}

impl ServerRun<'_> {
    /// Serves all steps, then reports the order of arrivals.
    pub(crate) fn run(mut self) -> Result<(), ExecutorError> {
        let (job, length, pacing) = (self.job, self.length, self.pacing);
        let replay = job.replay.as_ref().map(|order| order.get(&self.member.rank.0).cloned().unwrap_or_default());
        let turns = Turns::new(pacing, job.start.step(), replay);
        // Each update counts as one step of the optimizer, whatever step the workers are in.
        let of_update = |step: usize, version: usize| {
            let step = pacing.step_of_update(step, version);
            let usual = hyperparameters(&job.plan, job.seed, step, length);
            crate::backend::Hyperparameters { step: version as u64 + 1, ..usual }
        };
        let (member, arenas, sessions) = (self.member, self.arenas, &self.compiled.sessions);
        let samples = Arc::clone(&self.samples);
        with_sessions((member, arenas), (sessions, &turns), &samples, &of_update, |sessions| self.all_steps(sessions))?;
        if let Some(checkpoints) = &mut self.checkpoints {
            checkpoints.wait()?;
        }
        let (turns, staleness) = turns.record();
        Ok(member.control.send(&Report::Turns { turns, staleness })?)
    }

    fn all_steps(&mut self, sessions: &Sessions<'_>) -> Result<(), ExecutorError> {
        let (job, length) = (self.job, self.length);
        let (mut next, mut saved) = (job.start.step(), job.start.step());
        while next < length.steps {
            let is_common = |&step: &usize| job.evaluates_after(step, length) || job.saves_after(step, length);
            let until = (next..length.steps).find(is_common).map_or(length.steps, |step| step + 1);
            let made = sessions.serve(next..until, |step| self.report_step(step))?;
            if made == until && made > next {
                if job.evaluates_after(made - 1, length) {
                    self.evaluate(made - 1, sessions)?;
                }
                if job.saves_after(made - 1, length) {
                    self.save(made)?;
                    saved = made;
                }
            }
            next = made;
            // The launcher has stopped the run early.
            if made < until {
                break;
            }
        }
        if next > saved { self.save(next) } else { Ok(()) }
    }

    /// Reports a step that all workers have made. The workers report its times.
    fn report_step(&self, step: usize) -> Result<(), ExecutorError> {
        let rate = self.job.plan.learning_rate_at(step, self.length);
        let learning_rate = f64::from(rate).into();
        let (metrics, bad_samples) = (Vec::new(), BTreeSet::new());
        let report = StepReport { step, start: 0, end: 0, learning_rate, metrics, bad_samples, reference: None };
        Ok(self.member.control.send(&Report::Steps(vec![report]))?)
    }

    /// Has workers evaluate, with the parameters that they pull before each batch.
    fn evaluate(&self, step: usize, sessions: &Sessions<'_>) -> Result<(), ExecutorError> {
        let (batches, samples) = self.evaluation;
        (0..batches).try_for_each(|_| sessions.send_parameters())?;
        let (epoch, metrics, bad_samples) = (step / self.length.steps_per_epoch, Vec::new(), BTreeSet::new());
        let report = EvaluationReport { step, epoch, samples, own_samples: 0, metrics, bad_samples };
        Ok(self.member.control.send(&Report::Evaluation(report))?)
    }

    fn save(&mut self, step: usize) -> Result<(), ExecutorError> {
        self.checkpoints.as_mut().map_or(Ok(()), |checkpoints| checkpoints.save(step, self.arenas))
    }
}
