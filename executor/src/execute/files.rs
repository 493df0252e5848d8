//! The files of a run's folder that grow while the run goes.

use super::{Evaluation, StepMetrics};
use crate::error::ExecutorError;
use crate::files::write_whole;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// `metrics.jsonl` and `evaluation.jsonl`.
pub(super) struct RunFiles {
    metrics: LineFile,
    evaluation: LineFile,
}

impl RunFiles {
    /// Opens both files in `folder`. They keep the lines of the steps before `first_step`, which a
    /// resumed run made earlier.
    pub(super) fn open(folder: &Path, first_step: usize) -> Result<Self, ExecutorError> {
        std::fs::create_dir_all(folder)
            .map_err(|error| ExecutorError::system(format!("make the folder `{}`", folder.display()), error))?;
        Ok(Self {
            metrics: LineFile::open(folder.join("metrics.jsonl"), first_step)?,
            evaluation: LineFile::open(folder.join("evaluation.jsonl"), first_step)?,
        })
    }

    pub(super) fn write_step(&mut self, metrics: &StepMetrics) -> Result<(), ExecutorError> {
        self.metrics.write(metrics)
    }

    pub(super) fn write_evaluation(&mut self, evaluation: &Evaluation) -> Result<(), ExecutorError> {
        self.evaluation.write(evaluation)
    }
}

/// Whether a line is whole, and of a step before `first_step`.
fn is_before(line: &str, first_step: usize) -> bool {
    /// The part of a line that is needed.
    #[derive(Deserialize)]
    struct Line {
        step: usize,
    }
    line.ends_with('\n') && serde_json::from_str(line).is_ok_and(|line: Line| line.step < first_step)
}

/// A file with one JSON document per line. Each line is written at once, so that the file can be
/// followed.
struct LineFile {
    path: PathBuf,
    file: File,
}

impl LineFile {
    fn open(path: PathBuf, first_step: usize) -> Result<Self, ExecutorError> {
        let old = std::fs::read_to_string(&path).unwrap_or_default();
        let kept: String = old.split_inclusive('\n').filter(|line| is_before(line, first_step)).collect();
        write_whole(&path, kept.as_bytes())?;
        let file = OpenOptions::new()
            .append(true)
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
