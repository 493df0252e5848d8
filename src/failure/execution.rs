//! Failures of operations on this machine: training, data and labs.

use super::{Failure, Fault};
use foretell_executor::ExecutorError;
use foretell_executor::data::{AugmentationError, EmptyDataName};
use foretell_lab::LabError;
use miette::Diagnostic;
use std::error::Error;

impl From<ExecutorError> for Failure {
    fn from(error: ExecutorError) -> Self {
        match &error {
            ExecutorError::Stopped { signal, .. } => Failure::Stopped {
                signal: u8::try_from(*signal).expect("invariant: signals have small numbers"),
                fault: Fault::of(error).into(),
            },
            ExecutorError::Checkpoint(cause) if cause.is_input() => Failure::of_input(error),
            ExecutorError::Plan(_) | ExecutorError::Data(_) | ExecutorError::Unsupported { .. } => Failure::of_input(error),
            _ => Failure::of_undone(error),
        }
    }
}

impl From<LabError> for Failure {
    fn from(error: LabError) -> Self {
        match error {
            LabError::Unsupported { .. } | LabError::Topology(_) | LabError::NoSuchNode { .. } => Failure::of_input(error),
            _ => Failure::of_undone(error),
        }
    }
}

/// The error of an option's value, if the value describes data.
pub(super) fn of_data_option<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a dyn Diagnostic> {
    let augmentation = error.downcast_ref::<AugmentationError>().map(|error| error as &dyn Diagnostic);
    augmentation.or_else(|| error.downcast_ref::<EmptyDataName>().map(|error| error as &dyn Diagnostic))
}
