//! Placements: how a tensor is distributed over each axis of the mesh, in DTensor's words, and the
//! table of conversions between them.
//!
//! All communication within a stage is a conversion from the placement in which a producer leaves a
//! tensor to the one in which a consumer reads it. Data, tensor and sequence parallelism are
//! choices of placements; this module does not know their names.

mod moves;

pub use moves::{Action, Move, moves};

use crate::collective::Collective;
use crate::mesh::{Axis, Coordinates, StageMesh};

/// The placement of a tensor along one axis of the mesh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Placement {
    /// Every rank has the whole tensor.
    #[default]
    Replicate,
    /// Each rank has an equal part of this dimension.
    Shard(usize),
    /// Each rank has one term of a sum: the tensor is the sum over the ranks.
    Partial,
}

/// The placements of a tensor along every axis within a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Placements([Placement; 5]);

impl Placements {
    /// The placement along an axis; [`Placement::Replicate`] along the pipeline.
    pub fn get(&self, axis: Axis) -> Placement {
        self.0.get(axis.index()).copied().unwrap_or_default()
    }

    /// These placements with another one along `axis`.
    pub fn with(mut self, axis: Axis, placement: Placement) -> Self {
        if let Some(own) = self.0.get_mut(axis.index()) {
            *own = placement;
        }
        self
    }

    /// The axes along which the tensor is a partial sum.
    pub fn partial_axes(&self) -> impl Iterator<Item = Axis> + '_ {
        Axis::WITHIN_STAGE.into_iter().filter(|&axis| self.get(axis) == Placement::Partial)
    }

    /// Whether the tensor is a partial sum along any axis.
    pub fn is_partial(&self) -> bool {
        self.partial_axes().next().is_some()
    }

    /// The placements after every partial sum has been added up: whole along those axes.
    pub fn summed(&self) -> Self {
        self.partial_axes().fold(*self, |summed, axis| summed.with(axis, Placement::Replicate))
    }

    /// The axes that shard any dimension of the tensor.
    pub fn sharded_axes(&self) -> impl Iterator<Item = Axis> + '_ {
        Axis::WITHIN_STAGE.into_iter().filter(|&axis| matches!(self.get(axis), Placement::Shard(_)))
    }

    /// Whether an axis with smaller parts than `axis` also shards `dimension`.
    pub fn is_cut_finer(&self, axis: Axis, dimension: usize) -> bool {
        Axis::WITHIN_STAGE
            .iter()
            .take_while(|&&within| within != axis)
            .any(|&finer| self.get(finer) == Placement::Shard(dimension))
    }

    /// The first index of a rank's shard in a tensor of this shape, by dimension.
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

    /// The shape of one rank's shard of a tensor of this shape.
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

/// The operation that converts one placement along an axis into another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conversion {
    /// Nothing: the placements are equal.
    None,
    /// A collective over the axis.
    Collective {
        /// The kind of collective.
        kind: Collective,
        /// The dimension that the input is sharded along (all-to-all, all-gather).
        from: usize,
        /// The dimension that the output is sharded along (all-to-all, reduce-scatter).
        to: usize,
    },
    /// Each rank keeps its part of this dimension. No communication.
    Slice(usize),
    /// There is no conversion: a whole or sharded tensor never becomes a partial sum.
    Impossible,
}

/// The conversion between two placements along one axis: the table of all communication within a
/// stage.
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
