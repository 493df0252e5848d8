//! What is done to whole positions of a sequence: one put before them, the first taken, packed projections taken apart.

use super::{GraphBuilder, dimension, operand, shared, walk};
use crate::graph::{Dimension, Extent, Loop, LoopId, OperatorKind, TensorId};
use crate::storage::Storage;

impl GraphBuilder {
    /// The pixels of x `[batch, height, width, channels]` as a sequence, after a learned row: `[batch, 1 + pixels, channels]`.
    pub(crate) fn prepend(&mut self, name: &str, x: TensorId, row: TensorId) -> TensorId {
        let dimensions = self.dimensions(x);
        let positions = dimensions[1].extent * dimensions[2].extent;
        let loops = vec![
            shared(&dimensions[0], Extent::Rows),
            Loop { name: "positions", extent: positions, role: Extent::Positions, shardable: false },
            shared(&dimensions[3], Extent::Features),
        ];
        let [batch, features] = [Some(LoopId(0)), Some(LoopId(2))];
        let y_dimensions = vec![dimensions[0], dimension("sequence", positions + 1), dimension("hidden", dimensions[3].extent)];
        let y = self.activation(name, y_dimensions, Storage::Precision);
        self.operator(
            name,
            OperatorKind::Prepend,
            loops,
            vec![operand(x, vec![batch, None, None, features]), operand(row, vec![features])],
            vec![operand(y, vec![batch, None, features])],
        );
        y
    }

    /// The first position of x `[batch, sequence, features]`.
    pub(crate) fn first(&mut self, name: &str, x: TensorId) -> TensorId {
        let dimensions = self.dimensions(x);
        let loops = vec![
            shared(&dimensions[0], Extent::Rows),
            Loop { shardable: false, ..shared(&dimensions[1], Extent::Positions) },
            shared(&dimensions[2], Extent::Features),
        ];
        let y = self.activation(name, vec![dimensions[0], dimensions[2]], Storage::Precision);
        let [batch, features] = [Some(LoopId(0)), Some(LoopId(2))];
        self.operator(
            name,
            OperatorKind::First,
            loops,
            vec![operand(x, vec![batch, Some(LoopId(1)), features])],
            vec![operand(y, vec![batch, features])],
        );
        y
    }

    /// Takes packed `[batch, sequence, projections, heads, head_dimension]` apart, into one tensor a projection.
    pub(crate) fn split<const PARTS: usize>(&mut self, name: &str, x: TensorId) -> [TensorId; PARTS] {
        let dimensions = self.dimensions(x);
        let loops = dimensions
            .iter()
            .enumerate()
            .map(|(index, one)| match index {
                0 | 1 => shared(one, Extent::Rows),
                2 => Loop { shardable: false, ..shared(one, Extent::Parts) },
                _ => shared(one, Extent::Features),
            })
            .collect();
        let whole = walk(0, dimensions.len());
        let axes: Vec<Option<LoopId>> =
            whole.iter().enumerate().filter(|&(index, _)| index != 2).map(|(_, &axis)| axis).collect();
        let part: Vec<Dimension> = dimensions.iter().enumerate().filter(|&(index, _)| index != 2).map(|(_, &one)| one).collect();
        let parts = std::array::from_fn(|index| self.activation(&format!("{name}.{index}"), part.clone(), Storage::Precision));
        let outputs = parts.iter().map(|&tensor| operand(tensor, axes.clone())).collect();
        self.operator(name, OperatorKind::Split, loops, vec![operand(x, whole)], outputs);
        parts
    }
}
