//! Failures of commands: one sentence for the user, and the exit status.

use foretell_executor::ExecutorError;
use foretell_planner::PlannerError;
use foretell_program::PlanError;
use foretell_simulator::SimulationError;
use std::fmt;
use std::path::Path;

/// Why a command failed.
#[derive(Debug)]
pub enum Failure {
    /// The input is wrong. The message says where, and how to fix it.
    Input(String),
    /// The input is right, but the command could not be carried out.
    Undone(String),
}

impl Failure {
    /// The exit status of wrong input.
    pub const INPUT: u8 = 2;
    const UNDONE: u8 = 1;

    /// An error in a file's content. The message names the file.
    pub fn in_file(path: &Path, error: &dyn fmt::Display) -> Self {
        Failure::Input(format!("{}: {error}", path.display()))
    }

    /// The exit status.
    pub fn status(&self) -> u8 {
        match self {
            Failure::Input(_) => Self::INPUT,
            Failure::Undone(_) => Self::UNDONE,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Input(message) | Failure::Undone(message) => formatter.write_str(message),
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
            // The search ran, and no layout fits.
            PlannerError::OutOfMemory { .. } | PlannerError::OutOfTime { .. } | PlannerError::Simulation(_) => {
                Failure::Undone(error.to_string())
            }
        }
    }
}

impl From<ExecutorError> for Failure {
    fn from(error: ExecutorError) -> Self {
        match error {
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
