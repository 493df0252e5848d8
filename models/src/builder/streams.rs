//! Operators on several residual streams `[batch, sequence, streams, hidden]`, which are planned
//! and simulated only. Ranks may shard all dimensions except the streams.

use super::{GraphBuilder, shardable};
use crate::graph::{Dimension, Extent, Loop, LoopId, TensorId};
use crate::kernel::PlannedKind;

/// A loop that no rank shards.
fn whole(one: &Dimension, role: Extent) -> Loop {
    Loop { shardable: false, ..shardable(one, role) }
}

fn at(loops: &[usize]) -> Vec<Option<LoopId>> {
    loops.iter().map(|&index| Some(LoopId(index))).collect()
}

impl GraphBuilder {
    /// Loops over batch, sequence and features of streams, then over their number.
    fn stream_loops(&self, x: TensorId, role: Extent) -> (Vec<Dimension>, Vec<Loop>) {
        let own = self.dimensions(x);
        let mut loops: Vec<Loop> = [own[0], own[1], own[3]].iter().map(|dimension| shardable(dimension, Extent::Rows)).collect();
        loops.push(whole(&own[2], role));
        (own, loops)
    }

    /// Adds x `[batch, sequence, hidden]` as the first of the streams, before `others`.
    pub(crate) fn stacked(&mut self, name: &str, x: TensorId, others: TensorId) -> TensorId {
        let (own, mut loops) = self.stream_loops(others, Extent::Parts);
        let all = Dimension { extent: own[2].extent + 1, ..own[2] };
        loops.push(whole(&all, Extent::Parts));
        let inputs = vec![(x, at(&[0, 1, 2])), (others, at(&[0, 1, 3, 2]))];
        let result = (vec![own[0], own[1], all, own[3]], at(&[0, 1, 4, 2]));
        self.planned(name, PlannedKind::Rearrangement, loops, inputs, result)
    }

    /// Adds sums of the streams by `weights` `[batch, sequence, streams, predicted]`.
    pub(crate) fn mixed_streams(&mut self, name: &str, x: TensorId, weights: TensorId) -> TensorId {
        let (own, mut loops) = self.stream_loops(x, Extent::Contracted);
        let predicted = Dimension { name: own[2].name, ..self.dimensions(weights)[3] };
        loops.push(whole(&predicted, Extent::Columns));
        let inputs = vec![(x, at(&[0, 1, 3, 2])), (weights, at(&[0, 1, 3, 4]))];
        let result = (vec![own[0], own[1], predicted, own[3]], at(&[0, 1, 4, 2]));
        self.planned(name, PlannedKind::Combination, loops, inputs, result)
    }

    /// Adds the streams with `innovation` `[batch, sequence, hidden]` added to each by its weight
    /// `[batch, sequence, streams]`.
    pub(crate) fn corrected_streams(&mut self, name: &str, x: TensorId, innovation: TensorId, weights: TensorId) -> TensorId {
        let (own, loops) = self.stream_loops(x, Extent::Rows);
        let inputs = vec![(x, at(&[0, 1, 3, 2])), (innovation, at(&[0, 1, 2])), (weights, at(&[0, 1, 3]))];
        self.planned(name, PlannedKind::Combination, loops, inputs, (own, at(&[0, 1, 3, 2])))
    }

    /// Adds the streams with y `[batch, sequence, hidden]` added to them.
    pub(crate) fn added_to_streams(&mut self, name: &str, x: TensorId, y: TensorId) -> TensorId {
        let (own, loops) = self.stream_loops(x, Extent::Rows);
        let inputs = vec![(x, at(&[0, 1, 3, 2])), (y, at(&[0, 1, 2]))];
        self.planned(name, PlannedKind::Sum, loops, inputs, (own, at(&[0, 1, 3, 2])))
    }

    /// Adds x `[batch, sequence, hidden]` times a scale `[hidden]`.
    pub(crate) fn scaled_features(&mut self, name: &str, x: TensorId, scale: TensorId) -> TensorId {
        let own = self.dimensions(x);
        let loops = own.iter().map(|dimension| shardable(dimension, Extent::Rows)).collect();
        let inputs = vec![(x, at(&[0, 1, 2])), (scale, at(&[2]))];
        self.planned(name, PlannedKind::Combination, loops, inputs, (own, at(&[0, 1, 2])))
    }
}
