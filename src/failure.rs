//! Failures of commands: a diagnostic for the user, and the exit status.

pub mod code;
#[cfg(not(target_family = "wasm"))]
mod execution;
mod fault;
mod terminal;
pub mod usage;

use code::Code;
use foretell_planner::{PlanJobError, PlannerError};
use foretell_program::PlanError;
use foretell_simulator::{PlanPredictionError, SimulationError};
use foretell_units::diagnostic::{help, one_line, place};
use miette::Diagnostic;
use schemars::JsonSchema;
use serde::Serialize;
use std::fmt;
use std::path::Path;

pub use fault::Fault;
pub use terminal::{Colours, in_terminal};

/// Why a command failed.
#[derive(Debug)]
pub enum Failure {
    /// The input is wrong. The fault says where, and how to fix it.
    Input(Box<Fault>),
    /// The input is right, but the command failed.
    Undone(Box<Fault>),
    /// The search found no layout.
    Unplanned(PlannerError),
    /// A signal stopped the command.
    Stopped {
        /// The signal's number.
        signal: u8,
        /// The state that the command left, and how to continue.
        fault: Box<Fault>,
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
    /// `input`: the input is wrong; `undone`: the command failed; `stopped`: a signal ended it.
    /// From `serve` and `mcp` also `cancelled`, `time`, `memory` and `busy`.
    code: String,
    /// The diagnostic's code, such as `topology::unknown_name`: the page of errors lists them.
    diagnostic: Option<String>,
    /// What happened.
    message: String,
    /// How to fix it.
    hint: Option<String>,
    /// The file that is wrong.
    file: Option<String>,
    /// The line of the file.
    line: Option<usize>,
    /// The column of the line, in characters.
    column: Option<usize>,
}

impl FailureAnswer {
    /// The document of a failure with its own code.
    pub fn new(code: &str, message: impl Into<String>, hint: Option<&str>) -> Self {
        let (code, message, hint) = (code.into(), message.into(), hint.map(str::to_owned));
        Self { error: ErrorDocument { code, diagnostic: None, message, hint, file: None, line: None, column: None } }
    }
}

impl Failure {
    /// The exit status of wrong input.
    pub const INPUT: u8 = 2;
    const UNDONE: u8 = 1;

    /// A fault of the input.
    pub fn input(code: Code, message: impl Into<String>) -> Self {
        Failure::Input(Fault::new(code, message).into())
    }

    /// A fault of something else than the input.
    pub fn undone(code: Code, message: impl Into<String>) -> Self {
        Failure::Undone(Fault::new(code, message).into())
    }

    /// A fault of the input that another crate found.
    pub fn of_input(error: impl Diagnostic + Send + Sync + 'static) -> Self {
        Failure::Input(Fault::of(error).into())
    }

    /// A fault of something else than the input that another crate found.
    pub fn of_undone(error: impl Diagnostic + Send + Sync + 'static) -> Self {
        Failure::Undone(Fault::of(error).into())
    }

    /// Sets the hint, in place of the fault's own.
    pub fn hint(self, hint: impl Into<String>) -> Self {
        self.with(|fault| fault.hint(hint))
    }

    /// Adds the file that is wrong, unless the fault has a place.
    pub fn in_file(self, path: &Path) -> Self {
        self.with(|fault| fault.in_file(path))
    }

    /// Puts the subject of the message before it, such as an option.
    pub fn about(self, subject: &str) -> Self {
        self.with(|fault| fault.about(subject))
    }

    /// The same failure as a failure of the input, with that exit status.
    pub fn into_input(self) -> Self {
        match self {
            Failure::Input(fault) | Failure::Undone(fault) | Failure::Stopped { fault, .. } => Failure::Input(fault),
            Failure::Unplanned(error) => Failure::of_input(error),
        }
    }

    fn with(self, change: impl FnOnce(Fault) -> Fault) -> Self {
        match self {
            Failure::Input(fault) => Failure::Input(change(*fault).into()),
            Failure::Undone(fault) => Failure::Undone(change(*fault).into()),
            Failure::Unplanned(error) => Failure::Undone(change(Fault::of(error)).into()),
            Failure::Stopped { signal, fault } => Failure::Stopped { signal, fault: change(*fault).into() },
        }
    }

    /// The diagnostic of the failure.
    pub fn diagnostic(&self) -> &dyn Diagnostic {
        match self {
            Failure::Input(fault) | Failure::Undone(fault) | Failure::Stopped { fault, .. } => &**fault,
            Failure::Unplanned(error) => error,
        }
    }

    /// The failure in one line, for notes and tables.
    pub fn one_line(&self) -> String {
        one_line(self.diagnostic())
    }

    /// The failure as JSON: what happened, how to fix it, and where.
    pub fn document(&self) -> FailureAnswer {
        let code = match self {
            Failure::Input(_) => "input",
            Failure::Undone(_) | Failure::Unplanned(_) => "undone",
            Failure::Stopped { .. } => "stopped",
        };
        let diagnostic = self.diagnostic();
        let place = place(diagnostic);
        let position = place.as_ref().and_then(|place| place.position);
        FailureAnswer {
            error: ErrorDocument {
                code: code.into(),
                diagnostic: diagnostic.code().map(|code| code.to_string()),
                message: diagnostic.to_string(),
                hint: help(diagnostic),
                file: place.and_then(|place| place.file),
                line: position.map(|(line, _)| line),
                column: position.map(|(_, column)| column),
            },
        }
    }

    /// The exit status.
    pub fn status(&self) -> u8 {
        match self {
            Failure::Input(_) => Self::INPUT,
            Failure::Undone(_) | Failure::Unplanned(_) => Self::UNDONE,
            // As shells report a process that a signal ended.
            Failure::Stopped { signal, .. } => 128_u8.saturating_add(*signal),
        }
    }
}

impl fmt::Display for Failure {
    /// The message only.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.diagnostic(), formatter)
    }
}

/// Error types that always mean wrong input.
macro_rules! input {
    ($($error:ty),*) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Failure::of_input(error)
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
                Failure::of_undone(error)
            }
        })*
    };
}
undone!(SimulationError, foretell_reports::ReportError, foretell_export::ExportError);

impl From<PlanPredictionError> for Failure {
    fn from(error: PlanPredictionError) -> Self {
        match error {
            PlanPredictionError::Simulation(_) | PlanPredictionError::Untraced(_) | PlanPredictionError::Measured => {
                Failure::of_undone(error)
            }
            error => Failure::of_input(error),
        }
    }
}

impl From<PlanJobError> for Failure {
    fn from(error: PlanJobError) -> Self {
        match error {
            PlanJobError::Search(error) => error.into(),
            PlanJobError::NoSizeFits => Failure::of_undone(error),
            error => Failure::of_input(error),
        }
    }
}

impl From<PlannerError> for Failure {
    fn from(error: PlannerError) -> Self {
        match error {
            PlannerError::Model(_) | PlannerError::NoLayout { .. } | PlannerError::Objective { .. } => Failure::of_input(error),
            PlannerError::OutOfMemory { .. } | PlannerError::OutOfTime { .. } | PlannerError::Simulation(_) => {
                Failure::Unplanned(error)
            }
        }
    }
}
