//! The files of a run's folder that grow while the run goes.

use super::{Evaluation, StepMetrics};
use crate::error::ExecutorError;
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// `metrics.jsonl` and `evaluation.jsonl`.
pub(super) struct RunFiles {
    metrics: LineFile,
    evaluation: LineFile,
}

impl RunFiles {
    /// Creates both files, empty, in `folder`.
    pub(super) fn create(folder: &Path) -> Result<Self, ExecutorError> {
        std::fs::create_dir_all(folder)
            .map_err(|error| ExecutorError::system(format!("make the folder `{}`", folder.display()), error))?;
        Ok(Self {
            metrics: LineFile::create(folder.join("metrics.jsonl"))?,
            evaluation: LineFile::create(folder.join("evaluation.jsonl"))?,
        })
    }

    pub(super) fn write_step(&mut self, metrics: &StepMetrics) -> Result<(), ExecutorError> {
        self.metrics.write(metrics)
    }

    pub(super) fn write_evaluation(&mut self, evaluation: &Evaluation) -> Result<(), ExecutorError> {
        self.evaluation.write(evaluation)
    }
}

/// A file with one JSON document per line. Each line is written at once, so that the file can be
/// followed.
struct LineFile {
    path: PathBuf,
    file: File,
}

impl LineFile {
    fn create(path: PathBuf) -> Result<Self, ExecutorError> {
        let file = OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(true)
            .open(&path)
            .map_err(|error| ExecutorError::system(format!("write `{}`", path.display()), error))?;
        Ok(Self { path, file })
    }

    fn write<T: Serialize>(&mut self, value: &T) -> Result<(), ExecutorError> {
        let written = serde_json::to_vec(value).map_err(std::io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            self.file.write_all(&line)
        });
        written.map_err(|error| ExecutorError::system(format!("write `{}`", self.path.display()), error))
    }
}
