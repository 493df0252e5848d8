//! Training by other frameworks on this machine's processors: with `calibrate --stack` the
//! framework times its own operators, `execute` trains with it, and `check` compares the two. The
//! framework runs in the user's Python (`foretell.trace.measure` and `foretell.trace.train`), which
//! reads a request from a file and writes its answer to another.

mod calibrate;
mod check;
mod execute;

pub use calibrate::calibrate;
pub use check::{FrameworkCheck, check, is_of_framework};
pub use execute::execute;

use crate::failure::{Failure, code};
use crate::inputs;
use crate::plan_file::LoadedPlan;
use foretell_models::operator_tables::TableSizes;
use foretell_program::traced::wanted_key;
use foretell_topologies::Architecture;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The Python interpreter that runs the framework by default.
pub const PYTHON: &str = "python3";

/// A request to a framework to measure or train a step.
#[derive(Clone, Debug, Serialize)]
struct Request {
    /// The entries of the operator table's key.
    key: BTreeMap<String, String>,
    /// The sizes of the model and its batch, by symbol.
    sizes: BTreeMap<String, f64>,
    /// Layers of every stack.
    layers: usize,
    /// Number of processes.
    ranks: usize,
    /// Threads of each process.
    threads: usize,
    /// Micro-batches of a step.
    micro_batches: usize,
    /// The optimizer: `adamw` or `sgd`.
    optimizer: String,
    /// Steps that are trained.
    steps: usize,
}

impl Request {
    /// The request for a plan whose stack has operator tables.
    fn of(loaded: &LoadedPlan, steps: usize) -> Result<Self, Failure> {
        let (plan, model) = (&loaded.plan, &loaded.model.model);
        let stack = plan.stack.name();
        let Some(tables) = &inputs::stack(stack)?.tables else {
            let message = format!("`stack: {stack}` is not run here: the operators of its framework were not traced");
            return Err(Failure::input(code::PLAN_CONTRADICTION, message)
                .hint("use `stack: hf-trainer`, or `stack: foretell` for our own executor")
                .in_file(&loaded.path));
        };
        if loaded.topology.devices().any(|device| loaded.topology.device_kind(device).architecture != Architecture::Cpu) {
            let message = format!("`stack: {stack}` is run on processors only");
            return Err(Failure::input(code::PLAN_CONTRADICTION, message).hint("use `topology: local`").in_file(&loaded.path));
        }
        let refused = |reason: String| {
            Failure::input(code::PLAN_CONTRADICTION, format!("`stack: {stack}` does not run {reason}")).in_file(&loaded.path)
        };
        let key = wanted_key(plan, model, tables).map_err(|untraced| refused(untraced.reason))?;
        let sizes = TableSizes::of_model(model, plan.layout.micro_batch)
            .ok_or_else(|| refused(format!("models of the family `{}`", model.family())))?;
        let rank = plan.training.lora.as_ref().map_or(0, |lora| lora.rank);
        let sizes = sizes.with("r", rank);
        let ranks = plan.layout.data;
        if ranks > 1 && plan.layout.zero > 0 {
            return Err(refused("sharded parameters on processors: Accelerate has DDP alone there".into()).hint("use `zero: 0`"));
        }
        Ok(Self {
            key,
            layers: sizes.layers,
            sizes: sizes.symbols,
            ranks,
            threads: (foretell_executor::machine::core_count() / ranks).max(1),
            micro_batches: plan.micro_batches()?,
            optimizer: plan.optimizer.name().to_owned(),
            steps,
        })
    }
}

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
