//! Collectives: what they do, what they are for, and how an all-reduce is made.
//!
//! The lowest vocabulary of communication: placements, plans and instructions all use it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A collective operation of a group of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Collective {
    /// Every member receives the sum.
    AllReduce,
    /// Every member receives its own part of the sum.
    ReduceScatter,
    /// Every member receives the parts of all members.
    AllGather,
    /// Every member sends a different part to every other member.
    AllToAll,
    /// Every member sends its buffer to the next member; the last sends to the first.
    Shift,
}

impl Collective {
    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all_reduce",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::AllGather => "all_gather",
            Collective::AllToAll => "all_to_all",
            Collective::Shift => "shift",
        }
    }
}

/// The purpose of a collective.
///
/// Frameworks overlap some of these with kernels and not others ([`crate::Overlap`]), and some
/// reduce gradients in a number format of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveRole {
    /// Activations of operators that are sharded over `tensor`.
    Tensor,
    /// Keys and values of other parts of a sequence.
    Context,
    /// Tokens on their way to experts and back.
    Expert,
    /// Gradients, and sums over gradients.
    Gradients,
    /// Parameters that kernels are about to read.
    Parameters,
}

/// The algorithm of all-reduces. Collectives of other kinds use rings or messages between all
/// pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveAlgorithm {
    /// The fastest algorithm for each size and group.
    #[default]
    Automatic,
    /// Rings: a reduce-scatter, then an all-gather (Patarasuk and Yuan 2009).
    Ring,
    /// Up and down two binary trees (Sanders, Speck and Traeff 2009): fewer steps, for many ranks
    /// and few bytes.
    Tree,
}

impl CollectiveAlgorithm {
    /// Every algorithm.
    pub const ALL: [Self; 3] = [Self::Automatic, Self::Ring, Self::Tree];

    /// Whether the choice is left open.
    pub fn is_automatic(&self) -> bool {
        *self == Self::Automatic
    }

    /// The name in plan files.
    pub const fn name(self) -> &'static str {
        match self {
            CollectiveAlgorithm::Automatic => "automatic",
            CollectiveAlgorithm::Ring => "ring",
            CollectiveAlgorithm::Tree => "tree",
        }
    }
}
