//! Shared by the whole-system tests: a temporary folder in which they run the program.

#![allow(dead_code)] // Each test file uses only a part.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A temporary folder, removed when the value is dropped.
pub struct Scratch {
    folder: tempfile::TempDir,
}

/// The result of a training run.
pub struct Trained {
    /// The loss of each step.
    pub losses: Vec<f64>,
    /// The gradient norm of each step.
    pub gradient_norms: Vec<f64>,
    /// The largest arena of each stage, in bytes.
    pub arenas: Vec<u64>,
    /// The whole answer of `foretell execute --json`.
    pub document: Value,
}

impl Scratch {
    pub fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a folder for the test") }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file and returns its path.
    pub fn file(&self, name: &str, contents: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, contents).expect("the folder can be written to");
        path
    }

    /// A command that runs the program in this folder.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_foretell"));
        command.args(arguments).current_dir(self.folder.path());
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("the program starts")
    }

    /// Runs a command that must succeed. Returns the JSON document that it prints.
    pub fn json(&self, arguments: &[&str]) -> Value {
        let output = self.run(&[arguments, &["--json"]].concat());
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("standard output is one JSON document")
    }

    /// Executes a plan for a number of steps, with more arguments.
    pub fn train(&self, plan: &str, steps: usize, seed: u64, more: &[&str]) -> Trained {
        let plan = self.file("plan.yaml", plan);
        let (steps, seed) = (steps.to_string(), seed.to_string());
        let basic = ["execute", "--plan", text(&plan), "--steps", &steps, "--seed", &seed, "--oversubscribe", "--no-evaluation"];
        let document = self.json(&[&basic[..], more].concat());
        let numbers = |key: &str| document[key].as_array().expect("a list").clone();
        Trained {
            losses: numbers("loss").iter().filter_map(Value::as_f64).collect(),
            gradient_norms: numbers("gradient_norm").iter().filter_map(Value::as_f64).collect(),
            arenas: numbers("peak_memory_bytes").iter().filter_map(Value::as_u64).collect(),
            document: document.clone(),
        }
    }

    /// Returns the predicted peak memory in bytes, indexed like [`Trained::arenas`].
    pub fn predicted_memory(&self, plan: &str) -> Vec<u64> {
        let plan = self.file("plan.yaml", plan);
        let document = self.json(&["simulate", "--plan", text(&plan), "--oversubscribe"]);
        document["peak_memory_bytes"].as_array().expect("a list").iter().filter_map(Value::as_u64).collect()
    }
}

pub fn text(path: &Path) -> &str {
    path.to_str().expect("test paths are UTF-8")
}
