//! Errors of exports.

use thiserror::Error;

/// An error that prevents an export.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ExportError {
    /// The timeline belongs to another Program.
    #[error("the timeline of rank {rank} is not one of this Program: it has {spans} spans for {instructions} instructions")]
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
    Malformed {
        /// The rank.
        rank: usize,
        /// Index of the instruction in its list.
        instruction: usize,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The ranks' devices do not form a product of dimensions. ASTRA-sim's analytical network
    /// supports only those.
    #[error("the topology `{topology}` cannot be an ASTRA-sim network of {ranks} ranks: {reason}")]
    Irregular {
        /// Name of the topology.
        topology: String,
        /// Number of ranks.
        ranks: usize,
        /// Why not, with a hint.
        reason: &'static str,
    },
}
