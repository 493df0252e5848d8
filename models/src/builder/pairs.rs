//! Operators of models that compare every sample of a batch with every other, and convolutions over
//! positions. They are planned and simulated only.

use super::{GraphBuilder, dimension, shardable, walk};
use crate::graph::{Dimension, Extent, Loop, LoopId, TensorId};
use crate::kernel::PlannedKind;

/// A loop that no rank shards.
fn whole(one: &Dimension, role: Extent) -> Loop {
    Loop { shardable: false, ..shardable(one, role) }
}

impl GraphBuilder {
    /// Adds a convolution of x `[batch, positions, in_channels]` with a weight `[out, in_channels,
    /// window]`. Zeros on both sides let every `stride`-th position have a result. Ranks shard
    /// samples alone.
    pub(crate) fn convolution_of_positions(&mut self, name: &str, x: TensorId, weight: TensorId, stride: usize) -> TensorId {
        let (own, weights) = (self.dimensions(x), self.dimensions(weight));
        let positions = dimension("sequence", own[1].extent.div_ceil(stride));
        // Sizes that are too large are refused when the graph is complete.
        let multiply_adds = weights.iter().fold(positions.extent, |product, weight| product.saturating_mul(weight.extent));
        let mut loops = vec![shardable(&own[0], Extent::Rows)];
        loops.extend(own[1..].iter().chain(&weights).chain([&positions]).map(|dimension| whole(dimension, Extent::Parts)));
        loops.push(whole(&dimension("multiply_adds", multiply_adds), Extent::Contracted));
        let at = |loops: &[usize]| loops.iter().map(|&index| Some(LoopId(index))).collect::<Vec<_>>();
        let inputs = vec![(x, at(&[0, 1, 2])), (weight, at(&[3, 4, 5]))];
        let result = (vec![own[0], positions, weights[0]], at(&[0, 6, 3]));
        self.planned(name, PlannedKind::GroupedConvolution, loops, inputs, result)
    }

    /// Adds the rows of x `[batch, features]`, each divided by its length.
    pub(crate) fn unit_rows(&mut self, name: &str, x: TensorId) -> TensorId {
        let dimensions = self.dimensions(x);
        let loops = vec![shardable(&dimensions[0], Extent::Rows), whole(&dimensions[1], Extent::Features)];
        self.planned(name, PlannedKind::Function, loops, vec![(x, walk(0, 2))], (dimensions, walk(0, 2)))
    }

    /// Adds the products of each row `[batch, features]` with each row of `others`
    /// `[batch, features]`: `[batch, others]`. Ranks that shard the samples need all of `others`.
    pub(crate) fn similarities(&mut self, name: &str, rows: TensorId, others: TensorId) -> TensorId {
        let own = self.dimensions(rows);
        let compared = dimension("others", self.dimensions(others)[0].extent);
        let loops = vec![shardable(&own[0], Extent::Rows), whole(&compared, Extent::Columns), whole(&own[1], Extent::Contracted)];
        let at = |loops: [usize; 2]| loops.map(|index| Some(LoopId(index))).to_vec();
        let inputs = vec![(rows, at([0, 2])), (others, at([1, 2]))];
        self.planned(name, PlannedKind::MatrixProduct, loops, inputs, (vec![own[0], compared], at([0, 1])))
    }

    /// Adds an operator of `kind` on x `[batch, features]` and a trained number `[1]`.
    fn with_number(&mut self, name: &str, kind: PlannedKind, x: TensorId, number: TensorId) -> TensorId {
        let dimensions = self.dimensions(x);
        let one = self.dimensions(number)[0];
        let loops =
            vec![shardable(&dimensions[0], Extent::Rows), whole(&dimensions[1], Extent::Features), whole(&one, Extent::Parts)];
        let inputs = vec![(x, walk(0, 2)), (number, walk(2, 1))];
        self.planned(name, kind, loops, inputs, (dimensions, walk(0, 2)))
    }

    /// Adds x `[batch, features]` times a trained number.
    pub(crate) fn scaled(&mut self, name: &str, x: TensorId, number: TensorId) -> TensorId {
        self.with_number(name, PlannedKind::Combination, x, number)
    }

    /// Adds x `[batch, features]` plus a trained number.
    pub(crate) fn shifted(&mut self, name: &str, x: TensorId, number: TensorId) -> TensorId {
        self.with_number(name, PlannedKind::Sum, x, number)
    }

    /// Adds a learned row `[features]` as the only position of each sample:
    /// `[batch, 1, features]`.
    pub(crate) fn row_of_each_sample(&mut self, name: &str, batch: usize, row: TensorId) -> TensorId {
        let features = self.dimensions(row)[0];
        let [batch, position] = [dimension(crate::graph::BATCH, batch), dimension("sequence", 1)];
        let loops = vec![shardable(&batch, Extent::Rows), whole(&position, Extent::Parts), shardable(&features, Extent::Rows)];
        let inputs = vec![(row, walk(2, 1))];
        self.planned(name, PlannedKind::Rearrangement, loops, inputs, (vec![batch, position, features], walk(0, 3)))
    }
}
