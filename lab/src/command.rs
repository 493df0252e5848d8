//! A command line as data that can be printed and run.

use crate::error::LabError;
use std::fmt;
use std::process::Stdio;

/// A program with its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// `ip` or `tc`.
    pub program: &'static str,
    /// The arguments.
    pub arguments: Vec<String>,
}

impl Command {
    /// Splits `arguments` at white space.
    pub(crate) fn new(program: &'static str, arguments: &str) -> Self {
        Self { program, arguments: arguments.split_whitespace().map(str::to_owned).collect() }
    }

    /// Runs the command and waits for its end. Its output is shown only in an error.
    pub(crate) fn run(&self) -> Result<(), LabError> {
        let failed = |reason: String| LabError::Command { command: self.to_string(), reason };
        let output = std::process::Command::new(self.program)
            .args(&self.arguments)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| failed(error.to_string()))?;
        if output.status.success() {
            return Ok(());
        }
        let message = String::from_utf8_lossy(&output.stderr);
        Err(failed(message.lines().next().map_or_else(|| output.status.to_string(), str::to_owned)))
    }
}

impl fmt::Display for Command {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} {}", self.program, self.arguments.join(" "))
    }
}
