//! Operators on whole positions of a sequence: prepend one, take the first, split packed
//! projections.

use super::{GraphBuilder, dimension, operand, shardable, walk};
use crate::graph::{Dimension, Extent, Loop, LoopId, TensorId};
use crate::kernel::Kernel;
use crate::storage::Storage;

impl GraphBuilder {
    /// Adds the pixels of x `[batch, height, width, channels]` as a sequence after a learned row.
    /// Returns `[batch, 1 + pixels, channels]`.
    pub(crate) fn prepend(&mut self, name: &str, x: TensorId, row: TensorId) -> TensorId {
        let dimensions = self.dimensions(x);
        let positions = dimensions[1].extent * dimensions[2].extent;
        let loops = vec![
            shardable(&dimensions[0], Extent::Rows),
            Loop { name: "positions", extent: positions, role: Extent::Positions, shardable: false },
            shardable(&dimensions[3], Extent::Features),
        ];
        let [batch, features] = [Some(LoopId(0)), Some(LoopId(2))];
        let y_dimensions = vec![dimensions[0], dimension("sequence", positions + 1), dimension("hidden", dimensions[3].extent)];
        let y = self.activation(name, y_dimensions, Storage::Precision);
        self.operator(
            name,
            Kernel::Prepend { batch: 0, positions: 0, features: 0 },
            loops,
            vec![operand(x, vec![batch, None, None, features]), operand(row, vec![features])],
            vec![operand(y, vec![batch, None, features])],
        );
        y
    }

    /// Adds the first position of x `[batch, sequence, features]`.
    pub(crate) fn first(&mut self, name: &str, x: TensorId) -> TensorId {
        let dimensions = self.dimensions(x);
        let loops = vec![
            shardable(&dimensions[0], Extent::Rows),
            Loop { shardable: false, ..shardable(&dimensions[1], Extent::Positions) },
            shardable(&dimensions[2], Extent::Features),
        ];
        let y = self.activation(name, vec![dimensions[0], dimensions[2]], Storage::Precision);
        let [batch, features] = [Some(LoopId(0)), Some(LoopId(2))];
        self.operator(
            name,
            Kernel::First { batch: 0, positions: 0, features: 0 },
            loops,
            vec![operand(x, vec![batch, Some(LoopId(1)), features])],
            vec![operand(y, vec![batch, features])],
        );
        y
    }

    /// Adds a split of packed `[batch, sequence, projections, heads, head_dimension]` into one
    /// tensor for each projection.
    pub(crate) fn split<const PARTS: usize>(&mut self, name: &str, x: TensorId) -> [TensorId; PARTS] {
        let dimensions = self.dimensions(x);
        let loops = dimensions
            .iter()
            .enumerate()
            .map(|(index, dimension)| match index {
                0 | 1 => shardable(dimension, Extent::Rows),
                2 => Loop { shardable: false, ..shardable(dimension, Extent::Parts) },
                _ => shardable(dimension, Extent::Features),
            })
            .collect();
        let all = walk(0, dimensions.len());
        let axes: Vec<Option<LoopId>> = all.iter().enumerate().filter(|&(index, _)| index != 2).map(|(_, &axis)| axis).collect();
        let part: Vec<Dimension> =
            dimensions.iter().enumerate().filter(|&(index, _)| index != 2).map(|(_, &dimension)| dimension).collect();
        let parts = std::array::from_fn(|index| self.activation(&format!("{name}.{index}"), part.clone(), Storage::Precision));
        let outputs = parts.iter().map(|&tensor| operand(tensor, axes.clone())).collect();
        self.operator(name, Kernel::Split { rows: 0, parts: 0, columns: 0 }, loops, vec![operand(x, all)], outputs);
        parts
    }
}
