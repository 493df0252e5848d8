//! Errors of exports.

use miette::Diagnostic;
use thiserror::Error;

/// An error that prevents an export.
#[derive(Clone, Debug, PartialEq, Eq, Error, Diagnostic)]
pub enum ExportError {
    /// The timeline belongs to another Program.
    #[error("the timeline of rank {rank} is not one of this Program: it has {spans} spans for {instructions} instructions")]
    #[diagnostic(code(export::unmatched))]
    Unmatched {
        /// First rank whose timeline does not match.
        rank: usize,
        /// Number of spans in its timeline.
        spans: usize,
        /// Number of instructions in its list.
        instructions: usize,
    },
    /// A rank sends to itself or to a rank that does not exist, or uses a group or peer that its
    /// list does not have.
    #[error("rank {rank}, instruction {instruction}: {reason}")]
    #[diagnostic(code(export::malformed))]
    Malformed {
        /// The rank.
        rank: usize,
        /// Index of the instruction in its list.
        instruction: usize,
        /// What is wrong with the instruction.
        reason: &'static str,
    },
    /// The ranks' devices do not form a product of dimensions. ASTRA-sim's analytical network
    /// supports only those.
    #[error("the topology `{topology}` cannot be an ASTRA-sim network of {ranks} ranks: {reason}")]
    #[diagnostic(code(export::irregular), help("{hint}"))]
    Irregular {
        /// Name of the topology.
        topology: String,
        /// Number of ranks.
        ranks: usize,
        /// Why not.
        reason: &'static str,
        /// What to change.
        hint: &'static str,
    },
}
