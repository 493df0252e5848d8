//! Checkpoints: the state of training in files that know no layout.
//!
//! `checkpoints/STEP/` has `model.safetensors` and `optimizer.safetensors`, with whole tensors
//! under their public names, and `state.json` ([`CheckpointState`]) with everything else. STEP is
//! the number of steps that were made.
//!
//! Every rank copies the pieces that it saves (`CheckpointWriter`) and continues training; a thread
//! writes the copy into the files of a folder with a temporary name. When all ranks have reported,
//! the launcher adds the checksums and renames the folder (`commit`). So a folder whose name is a
//! number holds a complete checkpoint, unless the disk damaged it, which [`last_whole`] detects.

mod commit;
mod finding;
mod layout;
mod loading;
mod state;
mod weights;
mod writer;

pub use crate::checkpoint_error::CheckpointError;
pub use crate::job::Scaler;
pub use finding::{FoundCheckpoint, last_whole};
pub use loading::check_start;
pub use state::{CheckpointState, DataPosition, FileState};
pub use weights::{InitialWeights, folder_of_weights};

pub(crate) use commit::{CheckpointFolder, Commit, describe, require_space};
pub(crate) use layout::CheckpointLayout;
pub(crate) use loading::StateSource;
pub(crate) use writer::{CheckpointWriter, Staging};

/// The weights.
pub(crate) const MODEL_FILE: &str = "model.safetensors";
/// The file of the optimizer's state of each parameter.
pub(crate) const OPTIMIZER_FILE: &str = "optimizer.safetensors";
/// The low-rank adapters, as `peft` names them. Only runs with adapters have it.
pub(crate) const ADAPTER_FILE: &str = "adapter_model.safetensors";
/// The sizes of the adapters, as `peft` reads them.
pub(crate) const ADAPTER_CONFIG: &str = "adapter_config.json";
/// Everything else.
pub(crate) const STATE_FILE: &str = "state.json";
