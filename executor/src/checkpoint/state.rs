//! `state.json`: the part of a checkpoint that is not tensors.

use crate::checkpoint_error::{CheckpointError, FORMAT};
use crate::data::InputOptions;
use crate::files::read_description;
use crate::job::{Length, Scaler, TrainingJob};
use foretell_models::{Model, Optimizer};
use foretell_program::{Plan, RunLength, StateValue};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::Path;

/// Zeros in place of a checksum.
const NO_CHECKSUM: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// Bytes as hexadecimal digits.
pub(super) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The contents of `state.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointState {
    /// The SHA-256 of the document, taken with 64 zeros as the value of this field, in hexadecimal
    /// digits. Empty in the checkpoints of earlier versions.
    #[serde(default)]
    pub checksum: String,
    /// The number of the format.
    pub format: u64,
    /// The version of Foretell that wrote it.
    pub foretell: String,
    /// The number of steps that were made.
    pub step: usize,
    /// The seed of everything random. Dropout and the order of samples follow from it and the step.
    pub seed: u64,
    /// The next sample.
    pub position: DataPosition,
    /// The data source, as given to `--data`.
    pub data: String,
    /// How samples are read.
    #[serde(default)]
    pub input: InputOptions,
    /// The length of the run, as requested.
    pub length: Length,
    /// The learning rate of the last step.
    pub learning_rate: f32,
    /// The optimizer, whose values are in `optimizer.safetensors`.
    pub optimizer: Optimizer,
    /// The state of loss scaling and clipping; `None` if the plan has neither.
    pub scaler: Option<Scaler>,
    /// The model's name.
    pub name: String,
    /// The model.
    pub model: Model,
    /// The plan that the run was trained by. The files do not depend on its layout.
    pub plan: Plan,
    /// The number of ranks.
    pub world_size: usize,
    /// The checkpoint's other files, by name.
    pub files: BTreeMap<String, FileState>,
}

/// A place in the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataPosition {
    /// The epoch, counted from 0.
    pub epoch: usize,
    /// The number of steps of the epoch that were made.
    pub step: usize,
    /// The number of samples of the epoch that were used.
    pub samples: usize,
}

/// A file of a checkpoint, as it was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileState {
    /// Its size.
    pub bytes: u64,
    /// The SHA-256 of its contents, in hexadecimal digits.
    pub sha256: String,
}

impl CheckpointState {
    /// The state after `step` steps of a job. `files` are added when they are written.
    pub(crate) fn new(job: &TrainingJob, step: usize, steps_per_epoch: usize, world_size: usize) -> Self {
        let (epoch, within) = (step / steps_per_epoch.max(1), step % steps_per_epoch.max(1));
        // `steps` fails only for a length that is refused before the first step, so no checkpoint
        // has the fallback.
        let length = RunLength { steps: job.length.steps(steps_per_epoch).unwrap_or(step), steps_per_epoch };
        Self {
            checksum: String::new(),
            format: FORMAT,
            foretell: env!("CARGO_PKG_VERSION").into(),
            step,
            seed: job.seed,
            position: DataPosition { epoch, step: within, samples: within * job.plan.global_batch },
            data: job.data.to_string(),
            input: job.input,
            length: job.length,
            learning_rate: job.plan.learning_rate_at(step.saturating_sub(1), length),
            optimizer: job.plan.optimizer,
            scaler: None,
            name: job.name.clone(),
            model: job.model.clone(),
            plan: job.plan.clone(),
            world_size,
            files: BTreeMap::new(),
        }
    }

    /// The text of `state.json`, with its checksum.
    pub(super) fn to_text(&self) -> serde_json::Result<Vec<u8>> {
        let text = serde_json::to_string_pretty(&Self { checksum: NO_CHECKSUM.into(), ..self.clone() })?;
        Ok(text.replacen(NO_CHECKSUM, &hexadecimal(&Sha256::digest(&text)), 1).into_bytes())
    }

    /// Reads `state.json` in a checkpoint's folder.
    pub(super) fn read(path: &Path) -> Result<Self, CheckpointError> {
        /// The one field that every format has.
        #[derive(Deserialize)]
        struct Version {
            format: u64,
        }
        let text = read_description(path).map_err(|error| CheckpointError::read(path, error))?;
        let malformed = |error: serde_json::Error| CheckpointError::Damaged {
            path: path.into(),
            reason: error.to_string(),
            hint: "the checkpoint before it may be whole",
        };
        let Version { format } = serde_json::from_slice(&text).map_err(malformed)?;
        if format > FORMAT {
            let path = path.parent().unwrap_or(path).into();
            return Err(CheckpointError::Newer { path, format });
        }
        let state: Self = serde_json::from_slice(&text).map_err(malformed)?;
        // Hash the bytes as read: serialising the state again may give other bytes.
        let without = String::from_utf8_lossy(&text).replacen(&state.checksum, NO_CHECKSUM, 1);
        let found = hexadecimal(&Sha256::digest(&without));
        if !state.checksum.is_empty() && state.checksum != found {
            return Err(CheckpointError::Damaged {
                path: path.into(),
                reason: format!("its SHA-256 is {found} instead of {}", state.checksum),
                hint: "the checkpoint before it may be whole",
            });
        }
        Ok(state)
    }

    /// Checks that a job can resume from this checkpoint.
    pub(crate) fn check(&self, path: &Path, job: &TrainingJob) -> Result<(), CheckpointError> {
        let refuse = |reason: String, hint: &str| Err(CheckpointError::OtherRun { path: path.into(), reason, hint: hint.into() });
        let (own, other) = (self.optimizer, job.plan.optimizer);
        let names = |optimizer: Optimizer| [false, true].map(|is_hidden_matrix| optimizer.state_names(is_hidden_matrix));
        if names(own) != names(other) {
            return refuse(
                format!("its optimizer is `{}`, the plan's `{}`", own.name(), other.name()),
                "use the same optimizer, or start fresh from its weights with `--init`",
            );
        }
        let (own, other) = (self.plan.global_batch, job.plan.global_batch);
        if own != other {
            return refuse(
                format!("its global batch has {own} samples, the plan's {other}"),
                "keep `global_batch`, or start fresh from its weights with `--init`",
            );
        }
        let (own, other) = (self.plan.replicas(), job.plan.replicas());
        // A checkpoint of one replica fits any number: every replica starts from its state.
        if own > 1 && own != other {
            return refuse(
                format!("it has the optimizer states of {own} replicas, the plan's mode keeps {other}"),
                "keep `mode` and the number of replicas, or start fresh from its weights with `--init`",
            );
        }
        let differ = |plan: &Plan| plan.mode.differs_after_exchange(StateValue::Parameter);
        if own > 1 && differ(&self.plan) != differ(&job.plan) {
            return refuse(
                "in only one of its mode and the plan's do replicas keep parameters of their own".into(),
                "keep `mode`, or start fresh from its weights with `--init`",
            );
        }
        if self.seed != job.seed {
            return refuse(
                format!("its seed is {}, not {}", self.seed, job.seed),
                "leave out `--seed`: the order of samples follows from it",
            );
        }
        let data = job.data.to_string();
        if self.data != data {
            return refuse(
                format!("it was trained on `{}`, not on `{data}`", self.data),
                "use the same `--data`, or start fresh from its weights with `--init`",
            );
        }
        Ok(())
    }
}
