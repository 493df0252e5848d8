//! Failures of commands: one sentence for the user, and the exit status.

use foretell_executor::ExecutorError;
use foretell_planner::PlannerError;
use foretell_program::PlanError;
use foretell_simulator::SimulationError;
use schemars::JsonSchema;
use serde::Serialize;
use std::fmt;
use std::path::Path;

/// Why a command failed.
#[derive(Debug)]
pub enum Failure {
    /// The input is wrong. The message says where, and how to fix it.
    Input(String),
    /// The input is right, but the command could not be carried out.
    Undone(String),
    /// The search ran, and found no layout.
    Unplanned(PlannerError),
    /// A signal stopped the command.
    Stopped {
        /// The signal's number.
        signal: u8,
        /// The state that the command left, and how to continue.
        message: String,
    },
}

/// The document of any command that fails.
#[derive(Debug, Serialize, JsonSchema)]
pub struct FailureAnswer {
    /// The failure.
    error: ErrorDocument,
}

/// A failure.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Error")]
struct ErrorDocument {
    /// `input`: the input is wrong; `undone`: it could not be done; `stopped`: a signal ended it.
    /// From `serve` and `mcp` also `cancelled`, `time`, `memory` and `busy`.
    code: String,
    /// What happened.
    message: String,
    /// How to fix it.
    hint: Option<String>,
    /// The file that is wrong.
    file: Option<String>,
    /// The line of the file.
    line: Option<usize>,
}

impl FailureAnswer {
    /// The document of a failure that has a code of its own.
    pub fn new(code: &str, message: impl Into<String>, hint: Option<&str>) -> Self {
        let hint = hint.map(str::to_owned);
        Self { error: ErrorDocument { code: code.into(), message: message.into(), hint, file: None, line: None } }
    }
}

impl Failure {
    /// The exit status of wrong input.
    pub const INPUT: u8 = 2;
    const UNDONE: u8 = 1;

    /// An error in a file's content. The message names the file.
    pub fn in_file(path: &Path, error: &dyn fmt::Display) -> Self {
        Failure::Input(format!("{}: {error}", path.display()))
    }

    /// The failure as JSON: what happened, how to fix it, and where.
    pub fn document(&self) -> FailureAnswer {
        let code = match self {
            Failure::Input(_) => "input",
            Failure::Undone(_) | Failure::Unplanned(_) => "undone",
            Failure::Stopped { .. } => "stopped",
        };
        let text = self.to_string();
        let (text, hint) = text.split_once("; hint: ").map_or((text.as_str(), None), |(text, hint)| (text, Some(hint)));
        let (place, message) = text.split_once(": ").map_or((None, text), |(place, rest)| match read_place(place) {
            Some(place) => (Some(place), rest),
            None => (None, text),
        });
        let (file, line) = place.map_or((None, None), |(file, line)| (Some(file), line));
        let owned = |text: &str| text.to_owned();
        FailureAnswer {
            error: ErrorDocument {
                code: code.into(),
                message: message.into(),
                hint: hint.map(owned),
                file: file.map(owned),
                line,
            },
        }
    }

    /// The exit status.
    pub fn status(&self) -> u8 {
        match self {
            Failure::Input(_) => Self::INPUT,
            Failure::Undone(_) | Failure::Unplanned(_) => Self::UNDONE,
            // As shells have it for a process that a signal ended.
            Failure::Stopped { signal, .. } => 128_u8.saturating_add(*signal),
        }
    }
}

/// Reads the place at the head of a message: a file that exists, with or without line and column.
fn read_place(text: &str) -> Option<(&str, Option<usize>)> {
    let text = text.trim_matches('`');
    if Path::new(text).is_file() {
        return Some((text, None));
    }
    let mut parts = text.rsplitn(3, ':');
    let (column, line, file) = (parts.next()?, parts.next()?, parts.next()?);
    column.parse::<usize>().ok()?;
    Path::new(file).is_file().then(|| (file, line.parse().ok()))
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Input(message) | Failure::Undone(message) | Failure::Stopped { message, .. } => formatter.write_str(message),
            Failure::Unplanned(error) => error.fmt(formatter),
        }
    }
}

/// Error types that always mean wrong input.
macro_rules! input {
    ($($error:ty),*) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Failure::Input(error.to_string())
            }
        })*
    };
}
input!(PlanError, foretell_models::ModelError, foretell_topologies::TopologyError, foretell_planner::FixedError);

/// Error types that never mean wrong input.
macro_rules! undone {
    ($($error:ty),*) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Failure::Undone(error.to_string())
            }
        })*
    };
}
undone!(SimulationError, foretell_reports::ReportError, foretell_export::ExportError);

impl From<PlannerError> for Failure {
    fn from(error: PlannerError) -> Self {
        match error {
            PlannerError::Model(_) | PlannerError::NoLayout { .. } | PlannerError::Objective { .. } => {
                Failure::Input(error.to_string())
            }
            PlannerError::OutOfMemory { .. } | PlannerError::OutOfTime { .. } | PlannerError::Simulation(_) => {
                Failure::Unplanned(error)
            }
        }
    }
}

impl From<ExecutorError> for Failure {
    fn from(error: ExecutorError) -> Self {
        match &error {
            ExecutorError::Stopped { signal, .. } => {
                Failure::Stopped { signal: u8::try_from(*signal).unwrap_or_default(), message: error.to_string() }
            }
            ExecutorError::Checkpoint(cause) if cause.is_input() => Failure::Input(error.to_string()),
            ExecutorError::Plan(_) | ExecutorError::Data(_) | ExecutorError::Unsupported { .. } => {
                Failure::Input(error.to_string())
            }
            _ => Failure::Undone(error.to_string()),
        }
    }
}

impl From<foretell_lab::LabError> for Failure {
    fn from(error: foretell_lab::LabError) -> Self {
        use foretell_lab::LabError;
        match error {
            LabError::Unsupported { .. } | LabError::Topology(_) | LabError::NoSuchNode { .. } => {
                Failure::Input(error.to_string())
            }
            _ => Failure::Undone(error.to_string()),
        }
    }
}
