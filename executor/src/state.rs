//! The state of training in a rank's memory: which elements of the model's tensors each buffer
//! holds, and their indices in the whole tensors, in the model's own and in the public order.
//!
//! Initial values, checkpoints and their loading share this description. A [`Piece`] is a run of a
//! shard's elements in a buffer; a [`Shard`] finds these elements in the whole tensor. This module
//! reads and writes no files.

mod pieces;
mod shard;

pub(crate) use pieces::{Piece, RankState};
pub(crate) use shard::{ElementOrder, Line, Shard};
