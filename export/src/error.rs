//! Why something cannot be exported.

use thiserror::Error;

/// Why something cannot be exported.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ExportError {
    /// A timeline that is not one of the Program.
    #[error("the timeline of rank {rank} is not one of this Program: it has {spans} spans for {instructions} instructions")]
    Unmatched {
        /// The rank.
        rank: usize,
        /// Spans that it has.
        spans: usize,
        /// Instructions that its list has.
        instructions: usize,
    },
    /// A communication of a rank with itself, with nobody, or of a group that the rank's list does not have.
    #[error("rank {rank}, instruction {instruction}: {reason}")]
    Malformed {
        /// The rank.
        rank: usize,
        /// The instruction's place in its list.
        instruction: usize,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A topology that is no product of dimensions, which is all that ASTRA-sim's analytical networks can be.
    #[error("`{topology}` cannot be an ASTRA-sim network for {ranks} ranks: {reason}")]
    Irregular {
        /// Its name.
        topology: String,
        /// The ranks.
        ranks: usize,
        /// Why not.
        reason: &'static str,
    },
}
