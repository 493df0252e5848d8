//! The files of a run's folder that grow while the run goes.

use super::{Evaluation, StepMetrics};
use crate::error::ExecutorError;
use crate::files::write_whole;
use crate::regular;
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

/// Whether a line is complete, and of a step before `first_step`.
fn is_before(line: &str, first_step: usize) -> bool {
    /// The part of a line that is needed.
    #[derive(Deserialize)]
    struct Line {
        step: usize,
    }
    line.ends_with('\n') && serde_json::from_str(line).is_ok_and(|line: Line| line.step < first_step)
}

/// The longest `metrics.jsonl` or `evaluation.jsonl` that a resumed run reads: some four million
/// steps.
const MOST_LINES: u64 = 1 << 30;

/// A file with one JSON document per line. Each line is written as soon as it is known, so that the
/// file can be followed, and completely or not at all.
struct LineFile {
    path: PathBuf,
    file: File,
    /// The length of all complete lines.
    length: u64,
}

impl LineFile {
    fn open(path: PathBuf, first_step: usize) -> Result<Self, ExecutorError> {
        let old = match regular::read(&path, MOST_LINES) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(ExecutorError::system(format!("read `{}`", path.display()), error)),
        };
        let kept: String = old.split_inclusive('\n').filter(|line| is_before(line, first_step)).collect();
        write_whole(&path, kept.as_bytes())?;
        let file = OpenOptions::new()
            .append(true)
            .open(&path)
            .map_err(|error| ExecutorError::system(format!("write `{}`", path.display()), error))?;
        Ok(Self { path, file, length: kept.len() as u64 })
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

    /// A limit on file sizes stands for a full disk: the kernel writes the part that fits. The
    /// limit is that of a whole process, so the test runs itself again as a child.
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
        let mut lines = LineFile::open(path, 0).unwrap();
        let limit = rustix::process::Rlimit { current: Some(20), maximum: Some(20) };
        rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).unwrap();
        // SAFETY: the handler is one that the system has. Without it the signal ends the process.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        (0..2).for_each(|_| lines.write("whole").unwrap());
        let error = lines.write("cut in the middle").unwrap_err();
        assert!(error.to_string().contains("lines.jsonl"), "{error}");
    }
}
