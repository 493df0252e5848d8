//! Finding the checkpoint to resume from.

use super::commit::{CheckpointFolder, describe};
use super::state::CheckpointState;
use super::{ADAPTER_FILE, MODEL_FILE, OPTIMIZER_FILE, STATE_FILE};
use crate::checkpoint_error::CheckpointError;
use std::path::{Path, PathBuf};

/// A complete checkpoint.
#[derive(Debug)]
pub struct FoundCheckpoint {
    /// Its folder.
    pub path: PathBuf,
    /// Its `state.json`.
    pub state: CheckpointState,
    /// The errors of later checkpoints that are damaged.
    pub damaged: Vec<CheckpointError>,
}

/// Finds the last checkpoint in a run's folder whose files have their checksums.
///
/// # Errors
/// [`CheckpointError`] if there is none, or if a newer version of Foretell wrote it.
pub fn last_whole(run: &Path) -> Result<FoundCheckpoint, CheckpointError> {
    let folder = run.join("checkpoints");
    let mut damaged = Vec::new();
    for step in CheckpointFolder::steps(&folder) {
        let path = folder.join(step.to_string());
        match read_whole(&path) {
            Ok(state) => return Ok(FoundCheckpoint { path, state, damaged }),
            Err(error @ CheckpointError::Newer { .. }) => return Err(error),
            Err(error) => damaged.push(error),
        }
    }
    match damaged.into_iter().next() {
        None => Err(CheckpointError::None { folder: run.into() }),
        Some(damage) => Err(CheckpointError::Damaged {
            path: folder,
            reason: damage.to_string(),
            hint: "no checkpoint is whole; train again, or take weights from elsewhere with `--init`",
        }),
    }
}

/// Reads a checkpoint's state and verifies the checksums of its files.
fn read_whole(path: &Path) -> Result<CheckpointState, CheckpointError> {
    let state = CheckpointState::read(&path.join(STATE_FILE))?;
    let check = |name: &str| -> Result<(), CheckpointError> {
        let path = path.join(name);
        let found = describe(&path).map_err(|error| CheckpointError::read(&path, error))?;
        let reason = match state.files.get(name) {
            Some(written) if *written == found => return Ok(()),
            Some(written) if written.bytes != found.bytes => {
                format!("it has {} bytes instead of {}", found.bytes, written.bytes)
            }
            Some(written) => format!("its SHA-256 is {} instead of {}", found.sha256, written.sha256),
            None => "`state.json` does not name it".into(),
        };
        Err(CheckpointError::Damaged { path, reason, hint: "the checkpoint before it may be whole" })
    };
    // The checksums take most of the time that resuming takes.
    let mut names = vec![MODEL_FILE, OPTIMIZER_FILE];
    names.extend(state.plan.training.lora.is_some().then_some(ADAPTER_FILE));
    let check = &check;
    std::thread::scope(|scope| {
        let threads: Vec<_> = names.into_iter().map(|name| scope.spawn(move || check(name))).collect();
        threads.into_iter().try_for_each(|thread| {
            let panicked = || CheckpointError::read(path, std::io::Error::other("the thread that checks it panicked"));
            thread.join().unwrap_or_else(|_| Err(panicked()))
        })
    })?;
    Ok(state)
}
