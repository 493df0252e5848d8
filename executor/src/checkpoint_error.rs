//! Errors of checkpoints and of files of weights.

use miette::Diagnostic;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The newest format of checkpoints that this version knows, which is the one that it writes.
pub(crate) const FORMAT: u64 = 1;

/// The reason why a checkpoint or a file of weights cannot be used or written.
#[derive(Debug, Error, Diagnostic)]
pub enum CheckpointError {
    /// There is no checkpoint to resume from.
    #[error("`{}` has no whole checkpoint", folder.display())]
    #[diagnostic(code(checkpoint::none), help("a run writes one every `--save-every` steps and at its end"))]
    None {
        /// The run's folder.
        folder: PathBuf,
    },
    /// A newer version wrote the checkpoint.
    #[error("the checkpoint `{}` has format {format}, and this version of Foretell knows formats up to {FORMAT}", path.display())]
    #[diagnostic(code(checkpoint::newer), help("use the version that wrote it"))]
    Newer {
        /// The checkpoint's folder.
        path: PathBuf,
        /// The format's number.
        format: u64,
    },
    /// A file is not in its format, or its contents differ from what was written.
    #[error("`{}` is damaged: {reason}", path.display())]
    #[diagnostic(code(checkpoint::damaged), help("{hint}"))]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with the file.
        reason: String,
        /// What to do instead.
        hint: &'static str,
    },
    /// The tensors belong to another model.
    #[error("`{}` does not have the weights of `{model}`: {reason}", path.display())]
    #[diagnostic(code(checkpoint::other_model), help("{hint}"))]
    OtherModel {
        /// The file, or the folder of files.
        path: PathBuf,
        /// The model's name.
        model: String,
        /// The first difference.
        reason: String,
        /// What to do instead.
        hint: String,
    },
    /// The checkpoint belongs to a run with other settings.
    #[error("the checkpoint `{}` cannot be gone on from: {reason}", path.display())]
    #[diagnostic(code(checkpoint::other_run), help("{hint}"))]
    OtherRun {
        /// The checkpoint's folder.
        path: PathBuf,
        /// The difference.
        reason: String,
        /// What to do instead.
        hint: String,
    },
    /// A weight is not a finite number.
    #[error("`{}`: `{tensor}` has a value that is {value}", path.display())]
    #[diagnostic(code(checkpoint::not_finite), help("use weights from before training diverged"))]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor's public name.
        tensor: String,
        /// NaN or an infinity.
        value: f32,
    },
    /// The disk has too little space.
    #[error("`{}` has {free} bytes free, but a checkpoint takes {needed}", folder.display())]
    #[diagnostic(
        code(checkpoint::disk_full),
        help("free some, keep fewer with `--keep`, give another folder with `--run`, or use `--save-every never`")
    )]
    DiskFull {
        /// The folder of the checkpoints.
        folder: PathBuf,
        /// The free bytes of its file system.
        free: u64,
        /// The bytes of a checkpoint.
        needed: u64,
    },
    /// A file cannot be read.
    #[error("`{}` cannot be read: {source}", path.display())]
    #[diagnostic(code(checkpoint::read), help("give a file or folder of safetensors that you may read"))]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file cannot be written.
    #[error("`{}` cannot be written: {source}", path.display())]
    #[diagnostic(code(checkpoint::write), help("{hint}"))]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
        /// What to do instead.
        hint: &'static str,
    },
    /// A part of the state has no place in a checkpoint's files.
    #[error("{value} has no place in a checkpoint")]
    #[diagnostic(code(checkpoint::no_place), help("this is a fault in Foretell: please report it"))]
    NoPlace {
        /// The value.
        value: String,
    },
    /// A rank does not see the folder of the checkpoints.
    #[error("`{}` is not on this rank's machine", folder.display())]
    #[diagnostic(
        code(checkpoint::not_shared),
        help("give a folder that all nodes share with `--run`, or use `--save-every never`")
    )]
    NotShared {
        /// The folder.
        folder: PathBuf,
    },
}

impl CheckpointError {
    pub(super) fn read(path: &Path, source: std::io::Error) -> Self {
        CheckpointError::Read { path: path.into(), source }
    }

    pub(super) fn write(path: &Path, source: std::io::Error) -> Self {
        let hint = match source.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
                "free some space; the checkpoints before this one are whole, so `--resume` goes on from the last of them"
            }
            _ => "give a folder that you may write to with `--run`, or use `--save-every never`",
        };
        CheckpointError::Write { path: path.into(), source, hint }
    }

    /// Whether the user's input is at fault, rather than the machine or Foretell.
    pub fn is_input(&self) -> bool {
        !matches!(
            self,
            CheckpointError::DiskFull { .. }
                | CheckpointError::Write { .. }
                | CheckpointError::NotShared { .. }
                | CheckpointError::NoPlace { .. }
        )
    }
}
