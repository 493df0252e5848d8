//! The launcher's view of the checkpoints of a run: which ranks have written their parts, and the
//! thread that completes a checkpoint.

use crate::checkpoint::{CheckpointError, CheckpointFolder, CheckpointLayout, CheckpointState, Commit, FileState, Scaler};
use crate::disk::Disk;
use crate::error::ExecutorError;
use crate::job::{Checkpoints, PartTimes, TrainingJob};
use foretell_models::{GraphOptions, WeightLayout};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

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
    /// By number of steps: the parts of checkpoints that are not complete yet.
    parts: BTreeMap<usize, Parts>,
    /// The thread that completes a checkpoint.
    committing: Option<JoinHandle<Result<(PathBuf, MeasuredCheckpoint), CheckpointError>>>,
    /// The last complete checkpoint.
    pub(super) last: Option<PathBuf>,
    /// The costs of the complete checkpoints.
    measured: Vec<MeasuredCheckpoint>,
}

/// The cost of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredCheckpoint {
    /// The number of steps that were made before it.
    pub step: usize,
    /// The time that the next step waited for it, on the rank that waited longest.
    pub seconds: f64,
    /// The time from the end of the checkpoint's step until the checkpoint was complete.
    pub write_seconds: f64,
}

/// A thread that computes checksums.
type Describing = JoinHandle<Result<Vec<(&'static str, FileState)>, CheckpointError>>;

#[derive(Default)]
struct Parts {
    /// The ranks that have written their part into the files.
    written: BTreeSet<usize>,
    /// The ranks whose part is on storage.
    synced: BTreeSet<usize>,
    /// The thread that computes the files' checksums, once all ranks have written.
    describing: Option<Describing>,
    scaler: Option<Scaler>,
    /// The longest time for which a step waited.
    save: f64,
    /// When the first rank began.
    started: Option<Instant>,
}

impl SavedCheckpoints {
    /// Prepares the folder of a run's checkpoints and names it in the job. Returns `None` if the
    /// job writes no checkpoints or the run has no folder.
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
        let (job, parts, committing, last, measured) = (job.clone(), BTreeMap::new(), None, None, Vec::new());
        let present = (0..world_size).collect();
        Ok(Some(Self { job, folder, sizes, adapted, steps_per_epoch, present, world_size, parts, committing, last, measured }))
    }

    /// Notes that a rank has written its part of the checkpoint after `step` steps.
    pub(super) fn add_written(&mut self, rank: usize, step: usize) -> Result<(), ExecutorError> {
        self.parts.entry(step).or_default().written.insert(rank);
        self.describe(step)
    }

    /// Notes that a rank's part of the checkpoint after `step` steps is on storage.
    pub(super) fn add_part(
        &mut self,
        rank: usize,
        step: usize,
        scaler: Option<Scaler>,
        times: PartTimes,
    ) -> Result<(), ExecutorError> {
        let parts = self.parts.entry(step).or_default();
        parts.synced.insert(rank);
        parts.scaler = parts.scaler.or(scaler);
        parts.save = parts.save.max(times.save.into());
        // Clocks of different machines cannot be compared, but durations can.
        let since = Duration::try_from_secs_f64(times.total.into()).unwrap_or_default();
        let began = Instant::now().checked_sub(since);
        parts.started = [parts.started, began].into_iter().flatten().min();
        self.complete(step)
    }

    /// Notes that some ranks have left. They have nothing to save.
    pub(super) fn leave(&mut self, ranks: &[usize]) -> Result<(), ExecutorError> {
        self.present.retain(|rank| !ranks.contains(rank));
        let steps: Vec<usize> = self.parts.keys().copied().collect();
        steps.into_iter().try_for_each(|step| {
            self.describe(step)?;
            self.complete(step)
        })
    }

    /// Starts a thread that computes the files' checksums if all ranks have written, while ranks
    /// still wait for storage.
    fn describe(&mut self, step: usize) -> Result<(), ExecutorError> {
        let Some(parts) = self.parts.get_mut(&step) else { return Ok(()) };
        if parts.describing.is_none() && self.present.is_subset(&parts.written) {
            let (folder, names) = (self.folder.clone(), self.sizes.iter().map(|(name, _)| *name).collect::<Vec<_>>());
            parts.describing = Some(start_thread(move || folder.describe(step, &names))?);
        }
        Ok(())
    }

    /// Starts a thread that completes a checkpoint if the parts of all ranks are on storage.
    fn complete(&mut self, step: usize) -> Result<(), ExecutorError> {
        let Some(parts) = self.parts.get_mut(&step).filter(|parts| self.present.is_subset(&parts.synced)) else { return Ok(()) };
        let (scaler, seconds, started) = (parts.scaler, parts.save, parts.started);
        let describing = parts.describing.take();
        self.parts.remove(&step);
        self.wait()?;
        let state = CheckpointState { scaler, ..CheckpointState::new(&self.job, step, self.steps_per_epoch, self.world_size) };
        let (sizes, adapted) = (self.sizes.clone(), self.adapted.clone());
        let folder = self.folder.clone();
        self.committing = Some(start_thread(move || {
            let names: Vec<&'static str> = sizes.iter().map(|(name, _)| *name).collect();
            let files = match describing.map(JoinHandle::join) {
                Some(Ok(files)) => files?,
                // If the thread panicked, it has reported that itself.
                Some(Err(_)) | None => folder.describe(step, &names)?,
            };
            let path = Commit { folder, state, sizes, files, adapted }.run()?;
            let write_seconds = started.map_or(0.0, |started| started.elapsed().as_secs_f64());
            Ok((path, MeasuredCheckpoint { step, seconds, write_seconds }))
        })?);
        Ok(())
    }

    /// Waits until every checkpoint is complete. Returns the last one, and the cost of each.
    pub(super) fn finish(mut self) -> Result<(Option<PathBuf>, Vec<MeasuredCheckpoint>), ExecutorError> {
        self.wait()?;
        Ok((self.last.take(), std::mem::take(&mut self.measured)))
    }

    /// Waits for the checkpoint that is being completed.
    pub(super) fn wait(&mut self) -> Result<(), ExecutorError> {
        let Some(thread) = self.committing.take() else { return Ok(()) };
        let whole = thread.join().map_err(|panic| ExecutorError::panicked("checkpoint", panic.as_ref()))?;
        let (path, measured) = whole?;
        self.last = Some(path);
        self.measured.push(measured);
        Ok(())
    }
}

/// Starts a thread that completes a checkpoint.
fn start_thread<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>, ExecutorError> {
    let thread = std::thread::Builder::new().name("checkpoint".into()).spawn(body);
    thread.map_err(|error| ExecutorError::system("start the thread that completes a checkpoint", error))
}

impl Drop for SavedCheckpoints {
    fn drop(&mut self) {
        // A failed run is resumed from its last checkpoint, so complete that one first. Its error
        // is dropped: the run's own error comes first.
        let _ = self.wait();
    }
}
