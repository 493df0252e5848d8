//! The fit of profile values on measured rows, and scores of rows that were left out of a fit.
//!
//! Every value has a prior: the value in the profile files, with a spread by kind of value. The fit
//! finds the most probable values of devices, network and stacks together, by the Gauss-Newton
//! method on logarithms. Residuals count with a pseudo-Huber loss, so outliers do not dominate.
//! Values stay inside physical bounds. A stack with few rows stays near its prior.
//!
//! The nouns: a [`Case`] is a row of the fit, compiled. A [`Fit`] has the values, and the residuals
//! of rows held out by row, by group and by source. [`score_left_out`] refits without a source, a
//! device, a stack or a model, and scores that one's rows. It must not use `fitted.yaml` for the
//! rows that it leaves out, except as the point of the linearisation.

mod cases;
mod leave_out;
mod linear;
mod parameters;
mod report;
mod solve;

pub use cases::{Case, Quantity, declared};
pub use leave_out::{LeaveOut, score_left_out};
pub use report::{fit_json, print_fit, print_memory_fit, yaml_of_fit};
pub use solve::{Fit, fit};

use crate::published::SplitError;
use crate::table::TableError;
use foretell_simulator::gpu::ProfileError;
use miette::Diagnostic;
use thiserror::Error;

/// Receives a line about the progress of a fit.
pub type Progress<'a> = &'a (dyn Fn(&str) + Sync);

/// An error of a fit.
#[derive(Clone, Debug, PartialEq, Eq, Error, Diagnostic)]
pub enum FitError {
    /// The normal equations have no solution.
    #[error("the normal equations of the fit are not positive definite")]
    #[diagnostic(code(fit::not_positive_definite))]
    NotPositiveDefinite,
    /// The compiled-in table is malformed.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Table(#[from] TableError),
    /// The compiled-in split is malformed.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Split(#[from] SplitError),
    /// Profiles cannot be read with the fitted values.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Profiles(#[from] ProfileError),
}
