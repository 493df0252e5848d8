//! Errors of data. Every message names the data or the file, says what is wrong, and ends in a
//! hint.
//!
//! This module knows no formats: the readers describe the problem.

use miette::Diagnostic;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why data could not be opened, or a batch could not be made from it.
#[derive(Clone, Debug, PartialEq, Eq, Error, Diagnostic)]
pub enum DataError {
    /// There is nothing at the path.
    #[error("there is no file or folder `{}`", .path.display())]
    #[diagnostic(code(data::not_found), help("the data is `digits`, `text`, `synthetic`, or the path of a file or folder"))]
    NotFound {
        /// The path that was asked for.
        path: PathBuf,
    },
    /// The file cannot be read.
    #[error("cannot read `{}`: {reason}", .path.display())]
    #[diagnostic(code(data::unreadable), help("check that it is a regular file that you may read"))]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The operating system's reason, or ours.
        reason: String,
    },
    /// The file cannot be written.
    #[error("cannot write `{}`: {reason}", .path.display())]
    #[diagnostic(code(data::unwritable), help("check that the folder is yours and that the disk has room"))]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        reason: String,
    },
    /// The content is not valid in its format.
    #[error("`{name}` {problem}")]
    #[diagnostic(code(data::malformed), help("{hint}"))]
    Malformed {
        /// The file, folder or shipped data.
        name: String,
        /// The problem, as the rest of a sentence that begins with the name.
        problem: String,
        /// The solution.
        hint: String,
    },
    /// The data is valid, but this model cannot be trained on it.
    #[error("the data `{name}` does not fit the model: {problem}")]
    #[diagnostic(code(data::unsuitable), help("{hint}"))]
    Unsuitable {
        /// The file, folder or shipped data.
        name: String,
        /// The misfit.
        problem: String,
        /// The solution.
        hint: String,
    },
    /// The global batch is zero, or larger than the split allows.
    #[error("a global batch of {global_batch} cannot be drawn from {samples} samples")]
    #[diagnostic(code(data::global_batch), help("use a global batch from 1 to {samples}, or larger data such as `synthetic`"))]
    GlobalBatch {
        /// The global batch that was asked for.
        global_batch: usize,
        /// The number of samples.
        samples: usize,
    },
    /// A step or an evaluation batch beyond the end of its epoch.
    #[error("batch {batch} was asked for but the epoch has {batches}")]
    #[diagnostic(code(data::batch_out_of_range), help("batches count from 0 in each epoch"))]
    BatchOutOfRange {
        /// The batch that was asked for.
        batch: usize,
        /// The number of batches.
        batches: usize,
    },
    /// A sample beyond the end of its split.
    #[error("sample {index} was asked for but the split has {samples}")]
    #[diagnostic(code(data::sample_out_of_range), help("take indices from the data's own batches"))]
    SampleOutOfRange {
        /// The sample that was asked for.
        index: usize,
        /// The number of samples.
        samples: usize,
    },
    /// A buffer that is not exactly as long as the samples.
    #[error("a buffer of {given} elements was given where {samples} samples need {needed}")]
    #[diagnostic(code(data::buffer_size), help("size it from `sample_size`"))]
    BufferSize {
        /// Elements of the buffer.
        given: usize,
        /// Samples asked for.
        samples: usize,
        /// Elements that they need.
        needed: usize,
    },
    /// Images were asked of token data, or tokens of image data.
    #[error("{asked} were asked of data opened for {opened_for}")]
    #[diagnostic(code(data::wrong_kind), help("ask for what the data was opened for"))]
    WrongKind {
        /// The kind that was asked for.
        asked: &'static str,
        /// The kind that the data was opened for.
        opened_for: &'static str,
    },
}

impl DataError {
    /// The content of `name` is not valid in its format.
    pub(crate) fn malformed(name: &str, problem: impl Into<String>, hint: impl Into<String>) -> Self {
        DataError::Malformed { name: name.to_owned(), problem: problem.into(), hint: hint.into() }
    }

    /// The data `name` is valid, but not for this model.
    pub(crate) fn unsuitable(name: &str, problem: impl Into<String>, hint: impl Into<String>) -> Self {
        DataError::Unsuitable { name: name.to_owned(), problem: problem.into(), hint: hint.into() }
    }

    /// The operating system's error for `path`.
    pub(crate) fn io(path: &Path, error: &std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::NotFound => DataError::NotFound { path: path.to_path_buf() },
            _ => DataError::Unreadable { path: path.to_path_buf(), reason: error.to_string() },
        }
    }
}
