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
/// followed, and is written whole or not at all.
struct LineFile {
    path: PathBuf,
    file: File,
    /// The length of all whole lines.
    length: u64,
}

impl LineFile {
    fn create(path: PathBuf) -> Result<Self, ExecutorError> {
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .and_then(|file| file.set_len(0).map(|()| file))
            .map_err(|error| ExecutorError::system(format!("write `{}`", path.display()), error))?;
        Ok(Self { path, file, length: 0 })
    }

    fn write<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), ExecutorError> {
        let written = serde_json::to_vec(value).map_err(std::io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            let written = self.file.write_all(&line);
            match written {
                Ok(()) => self.length += line.len() as u64,
                // On a full disk a part of the line may have been written. Cutting it off needs no
                // space.
                Err(_) => drop(self.file.set_len(self.length)),
            }
            written
        });
        written.map_err(|error| ExecutorError::system(format!("write `{}`", self.path.display()), error))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

    use super::*;

    /// A limit on file sizes stands for a full disk: the kernel writes the part that fits. The limit
    /// is that of a whole process, so the test runs itself again as a child.
    #[test]
    fn a_line_that_does_not_fit_leaves_only_whole_lines() {
        const PATH: &str = "FORETELL_TEST_LINES";
        let Some(path) = std::env::var_os(PATH).map(PathBuf::from) else {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("lines.jsonl");
            let name = "execute::files::tests::a_line_that_does_not_fit_leaves_only_whole_lines";
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            let output = child.args([name, "--exact"]).env(PATH, &path).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "\"whole\"\n\"whole\"\n");
            return;
        };
        let mut lines = LineFile::create(path).unwrap();
        let limit = rustix::process::Rlimit { current: Some(20), maximum: Some(20) };
        rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).unwrap();
        // SAFETY: the handler is one that the system has. Without it the signal ends the process.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        (0..2).for_each(|_| lines.write("whole").unwrap());
        let error = lines.write("cut in the middle").unwrap_err();
        assert!(error.to_string().contains("lines.jsonl"), "{error}");
    }
}
