//! Placements: how a tensor is shared out along each axis of the mesh, in DTensor's words, and the one table of conversions.
//!
//! All communication within a stage is the conversion between what a producer leaves and what a consumer wants. Data, tensor and
//! sequence parallelism are choices of placements; nothing here knows their names.

mod moves;

pub use moves::{Action, Move, moves};

use crate::collective::Collective;
use crate::mesh::{Axis, Coordinates, StageMesh};

/// How a tensor lies along one axis of the mesh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Placement {
    /// Every rank has all of it.
    #[default]
    Replicate,
    /// Each rank has an equal part of this dimension.
    Shard(usize),
    /// Each rank has a summand.
    Partial,
}

/// How a tensor lies along every axis within a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Placements([Placement; 5]);

impl Placements {
    /// The placement along an axis; along the pipeline a tensor is where its stage is.
    pub fn get(&self, axis: Axis) -> Placement {
        slot(axis).map_or(Placement::Replicate, |slot| self.0[slot])
    }

    /// The same but along one axis.
    pub fn with(mut self, axis: Axis, placement: Placement) -> Self {
        if let Some(slot) = slot(axis) {
            self.0[slot] = placement;
        }
        self
    }

    /// The axes along which it is a sum not yet made.
    pub fn partial_axes(&self) -> impl Iterator<Item = Axis> + '_ {
        Axis::WITHIN_STAGE.into_iter().filter(|&axis| self.get(axis) == Placement::Partial)
    }

    /// The axes that cut it, whichever dimension.
    pub fn sharded_axes(&self) -> impl Iterator<Item = Axis> + '_ {
        Axis::WITHIN_STAGE.into_iter().filter(|&axis| matches!(self.get(axis), Placement::Shard(_)))
    }

    /// Whether an axis that makes smaller parts than `axis` cuts `dimension`, too.
    pub fn is_cut_finer(&self, axis: Axis, dimension: usize) -> bool {
        Axis::WITHIN_STAGE.iter().take_while(|&&one| one != axis).any(|&finer| self.get(finer) == Placement::Shard(dimension))
    }

    /// Where a rank's share of a shape begins, dimension by dimension.
    pub fn local_start(&self, shape: &[usize], mesh: &StageMesh, coordinates: Coordinates) -> Vec<usize> {
        let mut extent = shape.to_vec();
        let mut start = vec![0; shape.len()];
        for &axis in Axis::WITHIN_STAGE.iter().rev() {
            if let Placement::Shard(dimension) = self.get(axis) {
                extent[dimension] /= mesh.size(axis);
                start[dimension] += coordinates.along(axis) * extent[dimension];
            }
        }
        start
    }

    /// One rank's share of a shape.
    pub fn local_shape(&self, shape: &[usize], mesh: &StageMesh) -> Vec<usize> {
        let mut local = shape.to_vec();
        for axis in Axis::WITHIN_STAGE {
            if let Placement::Shard(dimension) = self.get(axis) {
                local[dimension] /= mesh.size(axis);
            }
        }
        local
    }
}

fn slot(axis: Axis) -> Option<usize> {
    Axis::WITHIN_STAGE.iter().position(|&one| one == axis)
}

/// What turns one placement along an axis into another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conversion {
    /// Nothing to do.
    None,
    /// A collective over the axis; the dimension is that which it gathers or scatters.
    Collective {
        /// Which.
        kind: Collective,
        /// The dimension that the input is cut along (all-to-all, all-gather).
        from: usize,
        /// The dimension that the output is cut along (all-to-all, reduce-scatter).
        to: usize,
    },
    /// Each rank keeps its part of a dimension; nothing is sent.
    Slice(usize),
    /// There is none: a whole tensor never becomes a sum of parts.
    Impossible,
}

/// The table of all communication within a stage.
pub fn conversion(from: Placement, to: Placement) -> Conversion {
    use Placement::{Partial, Replicate, Shard};
    match (from, to) {
        (from, to) if from == to => Conversion::None,
        (Partial, Replicate) => Conversion::Collective { kind: Collective::AllReduce, from: 0, to: 0 },
        (Partial, Shard(dimension)) => Conversion::Collective { kind: Collective::ReduceScatter, from: dimension, to: dimension },
        (Shard(dimension), Replicate) => Conversion::Collective { kind: Collective::AllGather, from: dimension, to: dimension },
        (Shard(from), Shard(to)) => Conversion::Collective { kind: Collective::AllToAll, from, to },
        (Replicate, Shard(dimension)) => Conversion::Slice(dimension),
        (Shard(_) | Replicate, Partial) | (Partial, Partial) | (Replicate, Replicate) => Conversion::Impossible,
    }
}
