//! Errors of models: unknown names and sizes that contradict each other.

use miette::Diagnostic;
use thiserror::Error;

/// Why a model cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, Error, Diagnostic)]
pub enum ModelError {
    /// No such name in the zoo.
    #[error("no model is called `{name}`")]
    #[diagnostic(code(model::unknown), help("{hint}"))]
    Unknown {
        /// The name that was asked for.
        name: String,
        /// The names that exist.
        hint: String,
    },
    /// Sizes that contradict each other, or that are too large.
    #[error("model `{name}`: {reason}")]
    #[diagnostic(code(model::inconsistent), help("{hint}"))]
    Inconsistent {
        /// The model's name.
        name: String,
        /// The sizes and the contradiction.
        reason: String,
        /// How to resolve it.
        hint: String,
    },
}
