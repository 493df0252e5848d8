//! Why a model cannot be built, in words for who wrote it.

use thiserror::Error;

/// Why a model cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ModelError {
    /// No such name in the zoo.
    #[error("no model is called `{name}`; hint: {hint}")]
    Unknown {
        /// What was asked for.
        name: String,
        /// Names that do exist.
        hint: String,
    },
    /// Sizes that contradict each other.
    #[error("model `{name}`: {reason}; hint: {hint}")]
    Inconsistent {
        /// The model.
        name: String,
        /// What contradicts what.
        reason: String,
        /// The mend.
        hint: String,
    },
}
