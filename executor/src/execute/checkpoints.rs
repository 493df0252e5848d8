//! The launcher's view of the checkpoints of a run: which ranks have written their parts, and the
//! thread that makes a checkpoint whole.

use crate::checkpoint::{CheckpointError, CheckpointFolder, CheckpointLayout, CheckpointState, Commit, Scaler};
use crate::disk::Disk;
use crate::error::ExecutorError;
use crate::job::{Checkpoints, TrainingJob};
use foretell_models::{GraphOptions, WeightLayout};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

/// The checkpoints of a run.
pub(super) struct SavedCheckpoints {
    job: TrainingJob,
    folder: CheckpointFolder,
    sizes: Vec<(&'static str, u64)>,
    /// The linear layers that have an adapter, each with whether its weight is transposed.
    adapted: Vec<(String, bool)>,
    steps_per_epoch: usize,
    /// The ranks that have not left.
    present: BTreeSet<usize>,
    world_size: usize,
    /// By number of steps: the parts of checkpoints that are not yet whole.
    parts: BTreeMap<usize, Parts>,
    /// The thread that makes a checkpoint whole.
    committing: Option<JoinHandle<Result<PathBuf, CheckpointError>>>,
    /// The last checkpoint that is whole.
    pub(super) last: Option<PathBuf>,
}

#[derive(Default)]
struct Parts {
    /// The ranks that have written theirs.
    written: BTreeSet<usize>,
    scaler: Option<Scaler>,
}

impl SavedCheckpoints {
    /// Prepares the folder of a run's checkpoints and names it in the job. Without a folder for the
    /// run there are none.
    pub(super) fn prepare(
        job: &mut TrainingJob,
        run: Option<&Path>,
        steps_per_epoch: usize,
        world_size: usize,
        disk: Arc<dyn Disk>,
    ) -> Result<Option<Self>, ExecutorError> {
        let (Some(checkpoints), Some(run)) = (job.checkpoints.take(), run) else { return Ok(None) };
        let graph = job.plan.training.graph(&job.model, &job.name, &GraphOptions::ONE)?;
        let layout = CheckpointLayout::new(&graph, &job.plan)?;
        let folder = super::absolute(run.join("checkpoints"))?;
        job.checkpoints = Some(Checkpoints { folder: folder.clone(), ..checkpoints.clone() });
        let folder = CheckpointFolder { path: folder, keep: checkpoints.keep, disk }.prepare(&layout)?;
        let sizes = Commit::sizes(&layout);
        let lora = job.plan.training.lora.as_ref();
        let layers = lora.map(|lora| lora.layers(&graph)).into_iter().flatten();
        let adapted = layers.map(|(name, weight)| (name.to_owned(), weight == WeightLayout::InOut)).collect();
        let (job, parts, committing, last) = (job.clone(), BTreeMap::new(), None, None);
        let present = (0..world_size).collect();
        Ok(Some(Self { job, folder, sizes, adapted, steps_per_epoch, present, world_size, parts, committing, last }))
    }

    /// Notes that a rank has written its part of the checkpoint after `step` steps. Once all have,
    /// a thread makes it whole.
    pub(super) fn add_part(&mut self, rank: usize, step: usize, scaler: Option<Scaler>) -> Result<(), ExecutorError> {
        let parts = self.parts.entry(step).or_default();
        parts.written.insert(rank);
        parts.scaler = parts.scaler.or(scaler);
        self.complete(step)
    }

    /// Notes that some ranks have left, which have nothing to save.
    pub(super) fn leave(&mut self, ranks: &[usize]) -> Result<(), ExecutorError> {
        self.present.retain(|rank| !ranks.contains(rank));
        let steps: Vec<usize> = self.parts.keys().copied().collect();
        steps.into_iter().try_for_each(|step| self.complete(step))
    }

    /// Has a thread make a checkpoint whole if all ranks have written their parts.
    fn complete(&mut self, step: usize) -> Result<(), ExecutorError> {
        let Some(parts) = self.parts.get(&step).filter(|parts| self.present.is_subset(&parts.written)) else { return Ok(()) };
        let scaler = parts.scaler;
        self.parts.remove(&step);
        self.wait()?;
        let state = CheckpointState { scaler, ..CheckpointState::new(&self.job, step, self.steps_per_epoch, self.world_size) };
        let (sizes, adapted) = (self.sizes.clone(), self.adapted.clone());
        let commit = Commit { folder: self.folder.clone(), state, sizes, adapted };
        let thread = std::thread::Builder::new().name("checkpoint".into()).spawn(move || commit.run());
        self.committing =
            Some(thread.map_err(|error| ExecutorError::system("start the thread that completes a checkpoint", error))?);
        Ok(())
    }

    /// Waits until every checkpoint is whole. Returns the last one.
    pub(super) fn finish(mut self) -> Result<Option<PathBuf>, ExecutorError> {
        self.wait()?;
        Ok(self.last.take())
    }

    /// Waits for the checkpoint that is being made whole.
    pub(super) fn wait(&mut self) -> Result<(), ExecutorError> {
        let Some(thread) = self.committing.take() else { return Ok(()) };
        let whole = thread.join().map_err(|panic| ExecutorError::panicked("checkpoint", panic.as_ref()))?;
        self.last = Some(whole?);
        Ok(())
    }
}

impl Drop for SavedCheckpoints {
    fn drop(&mut self) {
        // A run that fails goes on from its last checkpoint, so that one is completed first. The
        // run's own error comes before that of the checkpoint.
        let _ = self.wait();
    }
}
