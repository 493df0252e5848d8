//! The launcher's part of writing checkpoints: the folder, and the commit that completes a
//! checkpoint.

use super::layout::CheckpointLayout;
use super::state::{CheckpointState, FileState, hexadecimal};
use super::{ADAPTER_CONFIG, STATE_FILE};
use crate::checkpoint_error::CheckpointError;
use crate::disk::Disk;
use crate::regular;
use crate::whole_file::remove_abandoned;
use foretell_program::Lora;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The bytes of a file that are read and hashed in one piece.
const HASHED_BYTES: usize = 1 << 20;

/// The folder in which a checkpoint is written until it is complete.
pub(super) fn partial_folder(folder: &Path, step: usize) -> PathBuf {
    folder.join(format!(".{step}.partial"))
}

/// A run's folder of checkpoints.
#[derive(Clone, Debug)]
pub(crate) struct CheckpointFolder {
    pub(crate) path: PathBuf,
    /// The number of checkpoints to keep; `None` keeps all.
    pub(crate) keep: Option<usize>,
    pub(crate) disk: Arc<dyn Disk>,
}

/// A checkpoint that all ranks have written.
#[derive(Clone, Debug)]
pub(crate) struct Commit {
    pub(crate) folder: CheckpointFolder,
    pub(crate) state: CheckpointState,
    /// The expected sizes of its files.
    pub(crate) sizes: Vec<(&'static str, u64)>,
    /// Size and checksum of each of its files.
    pub(crate) files: Vec<(&'static str, FileState)>,
    /// The linear layers that have an adapter, each with whether its weight is transposed.
    pub(crate) adapted: Vec<(String, bool)>,
}

impl CheckpointFolder {
    /// Makes the folder, removes what an interrupted run left there, and refuses a disk without
    /// space for one checkpoint.
    pub(crate) fn prepare(self, layout: &CheckpointLayout) -> Result<Self, CheckpointError> {
        let path = &self.path;
        let refused = |error| CheckpointError::write(path, error);
        self.disk.create_folder(path).map_err(refused)?;
        // Without this, a power cut could lose the folder with every checkpoint in it.
        if let Some(run) = path.parent() {
            self.disk.sync_folder(run).map_err(refused)?;
            // Best effort: the folder above may not be readable.
            let _ = run.parent().map(|above| self.disk.sync_folder(above));
        }
        for entry in std::fs::read_dir(path).map_err(refused)?.flatten() {
            let name = entry.file_name();
            let parts: Vec<&str> = name.to_str().unwrap_or_default().split('.').collect();
            if let ["", step, "partial" | "replaced" | "removed"] = parts[..]
                && step.parse::<usize>().is_ok()
            {
                self.disk.remove_folder(&entry.path()).map_err(|error| CheckpointError::write(&entry.path(), error))?;
            }
        }
        // A run that was killed during the test below leaves its temporary file.
        remove_abandoned(path).map_err(refused)?;
        tempfile::Builder::new().prefix(".foretell-").tempfile_in(path).map_err(refused)?;
        require_space(&*self.disk, path, layout.bytes())?;
        Ok(self)
    }

    /// The sizes and checksums of the files of a checkpoint that is not complete yet.
    pub(crate) fn describe(
        &self,
        step: usize,
        names: &[&'static str],
    ) -> Result<Vec<(&'static str, FileState)>, CheckpointError> {
        let partial = partial_folder(&self.path, step);
        let describe = |name: &'static str| {
            let path = partial.join(name);
            let file = describe(&path).map_err(|error| CheckpointError::read(&path, error))?;
            Ok((name, file))
        };
        let describe = &describe;
        std::thread::scope(|scope| {
            let threads: Vec<_> = names.iter().map(|&name| scope.spawn(move || describe(name))).collect();
            let panicked = || CheckpointError::read(&partial, std::io::Error::other("a thread panicked"));
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(panicked()))).collect()
        })
    }

    /// The step numbers of the folder's checkpoints, complete or damaged, the largest first.
    pub(super) fn steps(path: &Path) -> Vec<usize> {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        let step = |entry: std::fs::DirEntry| {
            let name = entry.file_name().into_string().ok()?;
            name.parse::<usize>().ok().filter(|step| step.to_string() == name)
        };
        let mut steps: Vec<usize> = entries.filter_map(step).collect();
        steps.sort_unstable_by(|left, right| right.cmp(left));
        steps
    }
}

/// Refuses to begin a checkpoint if the disk has less free space than it needs.
pub(crate) fn require_space(disk: &dyn Disk, folder: &Path, needed: u64) -> Result<(), CheckpointError> {
    match disk.free(folder) {
        Some(free) if free < needed => Err(CheckpointError::DiskFull { folder: folder.into(), free, needed }),
        _ => Ok(()),
    }
}

impl Commit {
    /// The files of a checkpoint, with their sizes.
    pub(crate) fn sizes(layout: &CheckpointLayout) -> Vec<(&'static str, u64)> {
        layout.files.iter().map(|(name, file)| (*name, file.bytes)).collect()
    }

    /// Completes the checkpoint: adds `state.json` with the checksums, syncs, and gives the folder
    /// its final name. Then removes the oldest checkpoints beyond the number to keep.
    pub(crate) fn run(mut self) -> Result<PathBuf, CheckpointError> {
        let (folder, disk, step) = (self.folder.path, self.folder.disk, self.state.step);
        let partial = partial_folder(&folder, step);
        if let Some(lora) = &self.state.plan.training.lora {
            let path = partial.join(ADAPTER_CONFIG);
            let text = serde_json::to_vec_pretty(&adapter_config(lora, &self.adapted));
            let text = text.map_err(|error| CheckpointError::write(&path, error.into()))?;
            write_synced(&*disk, &path, &text)?;
        }
        for ((name, bytes), (_, file)) in self.sizes.into_iter().zip(self.files) {
            if file.bytes != bytes {
                let path = partial.join(name);
                let reason = format!("it has {} bytes instead of {bytes}", file.bytes);
                return Err(CheckpointError::Damaged { path, reason, hint: "give a folder that all nodes share with `--run`" });
            }
            self.state.files.insert(name.into(), file);
        }
        let path = partial.join(STATE_FILE);
        let text = self.state.to_text().map_err(|error| CheckpointError::write(&path, error.into()))?;
        write_synced(&*disk, &path, &text)?;
        let whole = folder.join(step.to_string());
        let replaced = folder.join(format!(".{step}.replaced"));
        let rename = || -> std::io::Result<()> {
            disk.sync_folder(&partial)?;
            // A damaged checkpoint of an earlier attempt may occupy the name.
            if whole.exists() {
                disk.rename(&whole, &replaced)?;
            }
            disk.rename(&partial, &whole)?;
            disk.sync_folder(&folder)?;
            if replaced.exists() { disk.remove_folder(&replaced) } else { Ok(()) }
        };
        rename().map_err(|error| CheckpointError::write(&whole, error))?;
        let older = CheckpointFolder::steps(&folder).into_iter().filter(|&other| other < step);
        for old in older.skip(self.folder.keep.unwrap_or(usize::MAX).saturating_sub(1)) {
            remove(&*disk, &folder, old)?;
        }
        Ok(whole)
    }
}

/// Writes and syncs a small file of a checkpoint. It needs no temporary name: the folder gets its
/// final name last.
fn write_synced(disk: &dyn Disk, path: &Path, text: &[u8]) -> Result<(), CheckpointError> {
    let write = |file: File| disk.write_at(&file, text, 0).and_then(|()| disk.sync(&file));
    disk.open(path).and_then(write).map_err(|error| CheckpointError::write(path, error))
}

/// Returns the contents of `adapter_config.json`, from which `peft` loads adapters.
fn adapter_config(lora: &Lora, adapted: &[(String, bool)]) -> serde_json::Value {
    let layers: Vec<&str> = adapted.iter().map(|(name, _)| name.as_str()).collect();
    serde_json::json!({
        "peft_type": "LORA",
        "task_type": null,
        "base_model_name_or_path": null,
        "inference_mode": true,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": layers,
        "fan_in_fan_out": adapted.iter().any(|(_, is_transposed)| *is_transposed),
    })
}

/// Removes a checkpoint. Renames it first, so that an interrupted removal never leaves part of it
/// under a checkpoint's name.
fn remove(disk: &dyn Disk, folder: &Path, step: usize) -> Result<(), CheckpointError> {
    let (path, removed) = (folder.join(step.to_string()), folder.join(format!(".{step}.removed")));
    disk.rename(&path, &removed).and_then(|()| disk.remove_folder(&removed)).map_err(|error| CheckpointError::write(&path, error))
}

/// The size and checksum of a regular file.
pub(crate) fn describe(path: &Path) -> std::io::Result<FileState> {
    let (mut file, _) = regular::open(path)?;
    let (mut hash, mut bytes) = (Sha256::new(), 0);
    let mut part = vec![0; HASHED_BYTES];
    loop {
        let read = match file.read(&mut part) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        hash.update(&part[..read]);
        bytes += read as u64;
    }
    Ok(FileState { bytes, sha256: hexadecimal(&hash.finalize()) })
}
