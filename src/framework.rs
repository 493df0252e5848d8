//! Training by other frameworks on this machine's processors: with `calibrate --stack` the
//! framework times its own operators, `execute` trains with it, and `check` compares the two. The
//! framework runs in the user's Python (`foretell.trace.measure` and `foretell.trace.train`), which
//! reads a request from a file and writes its answer to another.

mod calibrate;
mod check;
mod execute;
mod request;

pub use calibrate::calibrate;
pub use check::{FrameworkCheck, check, is_of_framework};
pub use execute::{CHECKPOINTS, execute, refuse_options, saves};

use crate::failure::{Failure, code};
use request::Request;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The Python interpreter that runs the framework by default.
pub const PYTHON: &str = "python3";

/// Runs a module of the Python package on a request, and returns its answer.
fn ask<T: DeserializeOwned>(python: &Path, module: &str, request: &Request) -> Result<T, Failure> {
    let system = |error: std::io::Error| Failure::undone(code::SYSTEM, format!("files for Python cannot be written: {error}"));
    let folder = tempfile::tempdir().map_err(system)?;
    let (question, answer) = (folder.path().join("request.json"), folder.path().join("answer.json"));
    let text = serde_json::to_vec(request).map_err(|error| Failure::undone(code::SYSTEM, error.to_string()))?;
    std::fs::write(&question, text).map_err(system)?;
    let mut command = Command::new(python);
    command.args(["-m", module]).args([&question, &answer]).env("OMP_NUM_THREADS", request.threads.to_string());
    let name = python.display();
    let output = command.output().map_err(|error| {
        let hint = "name a Python that has the framework with `--python`";
        Failure::undone(code::FRAMEWORK, format!("`{name}` cannot be started: {error}")).hint(hint)
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
        let hint = "name a Python that has `foretell`, `torch` and the framework with `--python`, such as venv/bin/python";
        return Err(Failure::undone(code::FRAMEWORK, format!("`{name} -m {module}` failed: {last}")).hint(hint));
    }
    let text = std::fs::read(&answer).map_err(system)?;
    serde_json::from_slice(&text)
        .map_err(|error| Failure::undone(code::FRAMEWORK, format!("the answer of `{name} -m {module}` is damaged: {error}")))
}

/// The Python interpreter: the stated one, or the default.
fn python(stated: Option<&PathBuf>) -> &Path {
    stated.map_or(Path::new(PYTHON), PathBuf::as_path)
}

/// Totals of a run of the framework.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct TrainedSteps {
    /// The duration of each measured step on the slowest rank, in seconds.
    pub step_seconds: Vec<f64>,
    /// The most bytes of tensors that each rank held at the same time.
    pub peak_bytes: Vec<u64>,
    /// The time of each operator in a step, by name, in seconds.
    pub operators: BTreeMap<String, f64>,
    /// The loss of each step.
    pub loss: Vec<f64>,
    /// Versions of the packages that trained.
    pub versions: BTreeMap<String, String>,
}
