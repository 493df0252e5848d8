//! Traces of PyTorch's profiler (Kineto, `export_chrome_trace`): one rank's steps as spans of a
//! Program's instructions.
//!
//! The flow: the text → calls of operators with their phase and shape ([`trace`]) → calls of each
//! step assigned to instructions ([`matching`]). A call belongs to an instruction of the same
//! phase, kind of work and shape, in the order in which both ran. This module knows no predictions
//! and no files.

mod calls;
mod event;
mod matching;
mod operators;
mod profile;
mod trace;

pub use matching::{MatchedStep, Unmatched, unmatched};
pub use profile::{TracedMachine, traced_profile};
pub use trace::{KinetoTrace, TraceStep};

use miette::Diagnostic;
use thiserror::Error;

/// Why a trace could not be read.
#[derive(Clone, Debug, PartialEq, Eq, Error, Diagnostic)]
pub enum KinetoError {
    /// The text has another form.
    #[error("this is no trace of PyTorch's profiler: {reason}")]
    #[diagnostic(code(kineto::form), help("give the file that `export_chrome_trace` wrote, unpacked"))]
    Form {
        /// What is wrong with the text.
        reason: String,
    },
    /// There are no operators.
    #[error("the trace has no operators")]
    #[diagnostic(code(kineto::no_operators), help("profile with `ProfilerActivity.CPU` too, which names what kernels belong to"))]
    NoOperators,
    /// Operators have no shapes.
    #[error("the operators of the trace have no shapes")]
    #[diagnostic(code(kineto::no_shapes), help("profile with `record_shapes=True`"))]
    NoShapes,
}
