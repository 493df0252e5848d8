//! The values that a run starts with: those of a checkpoint or of a file of weights.

use super::layout::{OUTER_PARAMETER, OUTER_VELOCITY, PARAMETER, RESIDUAL, name_of_state};
use super::state::CheckpointState;
use super::weights::{Heads, InitialWeights, Matching, StoredTensor, TensorFiles, folder_of_weights};
use super::{MODEL_FILE, OPTIMIZER_FILE, STATE_FILE};
use crate::checkpoint_error::CheckpointError;
use crate::job::{Start, TrainingJob};
use foretell_models::{Graph, GraphOptions, Tensor};
use foretell_program::{Lora, StateValue};
use std::ops::Range;
use std::path::Path;

/// Checks, before anything is written, that a job can start from the checkpoint or weights that it
/// names.
///
/// # Errors
/// [`ExecutorError`](crate::ExecutorError) if the checkpoint or the weights cannot be read, or
/// belong to another model or run.
pub fn check_start(job: &TrainingJob) -> Result<InitialWeights, crate::ExecutorError> {
    let graph = job.plan.training.graph(&job.model, &job.name, &GraphOptions::ONE)?;
    let source = StateSource::open(job, &graph)?;
    match (source.weights, source.checkpoint) {
        (Some((files, matching)), None) => {
            matching.check_finite(&files)?;
            Ok(matching.found)
        }
        _ => Ok(InitialWeights::default()),
    }
}

/// Where a run's initial state comes from.
pub(crate) struct StateSource {
    /// The weights; `None` if all are initialised at random.
    weights: Option<(TensorFiles, Matching)>,
    /// The checkpoint to resume from.
    checkpoint: Option<OpenCheckpoint>,
    /// Whether the plan scales the loss.
    scales_loss: bool,
}

/// The parts of a checkpoint beside the weights.
struct OpenCheckpoint {
    optimizer: TensorFiles,
    state: CheckpointState,
}

impl StateSource {
    /// Opens the checkpoint or weights that a job starts from, if any.
    pub(crate) fn open(job: &TrainingJob, graph: &Graph) -> Result<Self, CheckpointError> {
        let scales_loss = job.plan.scales_loss();
        match &job.start {
            Start::Fresh => Ok(Self::fresh()),
            Start::Weights(path) => Self::of_weights(path, graph, Heads::MayDiffer),
            Start::Checkpoint { path, .. } => {
                let state = CheckpointState::read(&path.join(STATE_FILE))?;
                state.check(path, job)?;
                let files = TensorFiles::open_with_adapters(&path.join(MODEL_FILE), graph)?;
                let matching = Matching::new(&files, graph, Heads::MustMatch)?;
                let optimizer = TensorFiles::open(&path.join(OPTIMIZER_FILE))?;
                let checkpoint = Some(OpenCheckpoint { optimizer, state });
                Ok(Self { weights: Some((files, matching)), checkpoint, scales_loss })
            }
        }
    }

    /// The adapters of the checkpoint that `weights` are part of; `None` for other weights.
    pub(crate) fn adapters(weights: &Path) -> Result<Option<Lora>, CheckpointError> {
        let state = folder_of_weights(weights).join(STATE_FILE);
        if !state.is_file() {
            return Ok(None);
        }
        Ok(CheckpointState::read(&state)?.plan.training.lora)
    }

    /// Opens weights for a model that is not trained. Refuses weights that are not finite.
    pub(crate) fn finite_weights(path: &Path, graph: &Graph) -> Result<Self, CheckpointError> {
        let source = Self::of_weights(path, graph, Heads::MustMatch)?;
        if let Some((files, matching)) = &source.weights {
            matching.check_finite(files)?;
        }
        Ok(source)
    }

    fn of_weights(path: &Path, graph: &Graph, heads: Heads) -> Result<Self, CheckpointError> {
        let files = TensorFiles::open_with_adapters(path, graph)?;
        let matching = Matching::new(&files, graph, heads)?;
        Ok(Self { weights: Some((files, matching)), checkpoint: None, scales_loss: false })
    }

    /// The source of a run that starts without checkpoint or weights.
    pub(crate) fn fresh() -> Self {
        Self { weights: None, checkpoint: None, scales_loss: false }
    }

    /// A replica's values of a tensor; `None` if it starts with its usual initial values.
    pub(crate) fn stored(
        &self,
        tensor: &Tensor,
        value: StateValue,
        replica: usize,
    ) -> Result<Option<StoredValues<'_>>, CheckpointError> {
        let mut parts = Vec::new();
        for public in tensor.public_tensors() {
            let of_replica = |state: &str, replica: usize| {
                self.checkpoint.as_ref()?.optimizer.find(&name_of_state(&public.name, state, replica))
            };
            let of_optimizer = |state: &str| {
                // All replicas of a synchronous run share one state.
                let were_apart = self.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.state.plan.replicas() > 1);
                of_replica(state, if were_apart { replica } else { 0 })
            };
            let of_model = || self.weights.as_ref().and_then(|(files, matching)| files.find(matching.stored.get(&public.name)?));
            let stored = match value {
                // Hidden matrices and other parameters have states of different names. A file has
                // only one of the two.
                StateValue::Optimizer(number) => self.checkpoint.as_ref().and_then(|checkpoint| {
                    let names = [true, false].map(|is_hidden_matrix| checkpoint.state.optimizer.state_names(is_hidden_matrix));
                    names.iter().find_map(|names| of_optimizer(names.get(number)?))
                }),
                StateValue::OuterVelocity => of_optimizer(OUTER_VELOCITY),
                StateValue::Residual => of_replica(RESIDUAL, replica),
                StateValue::Parameter | StateValue::Master if replica > 0 => of_optimizer(PARAMETER).or_else(of_model),
                StateValue::OuterParameter => of_optimizer(OUTER_PARAMETER).or_else(of_model),
                StateValue::Parameter | StateValue::Master | StateValue::Running => of_model(),
            };
            let Some(stored) = stored else { return Ok(None) };
            parts.push((public.elements, stored));
        }
        Ok(Some(StoredValues { parts }))
    }

    /// Fills the control of the update: with `initial`, then with the checkpoint's loss scaling and
    /// its count of updates, if there is one.
    pub(crate) fn control(&self, initial: &[f32], control: &mut [f32]) {
        control[..initial.len()].copy_from_slice(initial);
        let Some(OpenCheckpoint { state, .. }) = &self.checkpoint else { return };
        let usual = super::Scaler::of_control(control);
        let scaler = match state.scaler {
            Some(scaler) if self.scales_loss && state.plan.scales_loss() => scaler,
            // Unless both runs scale the loss, scaling starts fresh and only the count of updates
            // is kept.
            Some(scaler) => super::Scaler { updates: scaler.updates, ..usual },
            // A run without a control made an update in every step.
            None => super::Scaler { updates: state.step as f32, ..usual },
        };
        scaler.put_into(control);
    }
}

/// The values of a whole tensor in files, in the order of its public form.
pub(crate) struct StoredValues<'a> {
    /// The stored tensors that make up the whole one, each with the range of elements that it
    /// holds.
    parts: Vec<(Range<usize>, StoredTensor<'a>)>,
}

impl StoredValues<'_> {
    /// Reads the elements from `first` on.
    pub(crate) fn read(&self, first: usize, values: &mut [f32]) -> Result<(), CheckpointError> {
        let end = first + values.len();
        for (elements, part) in &self.parts {
            let (from, until) = (elements.start.max(first), elements.end.min(end));
            if from < until {
                part.read(from - elements.start, &mut values[from - first..until - first])?;
            }
        }
        Ok(())
    }
}
