//! Operators that are planned and simulated only ([`PlannedKind`]).

use super::{GraphBuilder, dimension, operand, shardable};
use crate::graph::{Dimension, Extent, Loop, LoopId, Operand, TensorId};
use crate::kernel::{Kernel, MOST_PLANNED_READS, Planned, PlannedKind};
use crate::storage::Storage;

/// The loops that walk an operand.
type Axes = Vec<Option<LoopId>>;

impl GraphBuilder {
    /// Adds planned work. `inputs` are tensors with their axes; `result` has the dimensions and the
    /// axes of the result. Loops of the role [`Extent::Parts`] count for operands, but not for
    /// arithmetic.
    pub(crate) fn planned(
        &mut self,
        name: &str,
        kind: PlannedKind,
        loops: Vec<Loop>,
        inputs: Vec<(TensorId, Axes)>,
        result: (Vec<Dimension>, Axes),
    ) -> TensorId {
        self.planned_as(name, kind, loops, inputs, result, Storage::Precision)
    }

    /// As [`GraphBuilder::planned`], with the storage of the result.
    pub(crate) fn planned_as(
        &mut self,
        name: &str,
        kind: PlannedKind,
        loops: Vec<Loop>,
        inputs: Vec<(TensorId, Axes)>,
        (dimensions, axes): (Vec<Dimension>, Axes),
        storage: Storage,
    ) -> TensorId {
        let y = self.activation(name, dimensions, storage);
        let inputs: Vec<Operand> = inputs.into_iter().map(|(tensor, axes)| operand(tensor, axes)).collect();
        let reads = [0; MOST_PLANNED_READS];
        let work = Planned { kind, gradient: false, summed: false, reads, written: 0, steps: 0 };
        self.operator(name, Kernel::Planned(work), loops, inputs, vec![operand(y, axes)]);
        y
    }

    /// Adds heads whose features are those of `shared` `[batch, sequence, features]`, the same for
    /// all heads, followed by each head's own features in x `[batch, sequence, heads.., features]`.
    pub(crate) fn share_among_heads(&mut self, name: &str, shared: TensorId, x: TensorId) -> TensorId {
        let own = self.dimensions(x);
        let [first, last] = [self.dimensions(shared)[2], own[own.len() - 1]];
        let rows = own.len() - 1;
        let whole = |dimension: &Dimension| Loop { shardable: false, ..shardable(dimension, Extent::Parts) };
        let both = dimension(last.name, first.extent + last.extent);
        let mut loops: Vec<Loop> = own[..rows].iter().map(|dimension| shardable(dimension, Extent::Rows)).collect();
        loops.extend([whole(&first), whole(&last), whole(&both)]);
        let row_axes = super::walk(0, rows);
        let with = |feature: usize| [row_axes.clone(), vec![Some(LoopId(rows + feature))]].concat();
        let inputs = vec![(shared, vec![Some(LoopId(0)), Some(LoopId(1)), Some(LoopId(rows))]), (x, with(1))];
        let dimensions = [&own[..rows], &[both]].concat();
        self.planned(name, PlannedKind::ShareAmongHeads, loops, inputs, (dimensions, with(2)))
    }

    /// Adds x `[batch, sequence, features]` with its features split into two dimensions.
    pub(crate) fn regrouped(&mut self, name: &str, x: TensorId, features: &[Dimension; 2]) -> TensorId {
        let own = self.dimensions(x);
        let whole = |dimension: &Dimension| Loop { shardable: false, ..shardable(dimension, Extent::Parts) };
        let mut loops: Vec<Loop> = own[..2].iter().map(|dimension| shardable(dimension, Extent::Rows)).collect();
        loops.extend([&own[2], &features[0], &features[1]].map(whole));
        let axes = |features: &[usize]| [&[0, 1], features].concat().iter().map(|&index| Some(LoopId(index))).collect();
        let dimensions = [&own[..2], features].concat();
        self.planned(name, PlannedKind::Reshape, loops, vec![(x, axes(&[2]))], (dimensions, axes(&[3, 4])))
    }

    /// Adds the features of one layer of x `[batch, sequence, layers, features]`.
    pub(crate) fn without_layers(&mut self, name: &str, x: TensorId) -> TensorId {
        let own = self.dimensions(x);
        let mut loops: Vec<Loop> = own.iter().map(|dimension| shardable(dimension, Extent::Rows)).collect();
        loops[2] = Loop { shardable: false, ..shardable(&own[2], Extent::Parts) };
        let axes = |axes: &[usize]| axes.iter().map(|&index| Some(LoopId(index))).collect();
        let dimensions = vec![own[0], own[1], own[3]];
        self.planned(name, PlannedKind::Slice, loops, vec![(x, axes(&[0, 1, 2, 3]))], (dimensions, axes(&[0, 1, 3])))
    }

    /// Adds `σ(gate) · x` of x `[batch, sequence, features]` and a gate `[batch, sequence, 1]`.
    pub(crate) fn gate_rows(&mut self, name: &str, x: TensorId, gate: TensorId) -> TensorId {
        let dimensions = self.dimensions(x);
        let one = self.dimensions(gate)[2];
        let whole = |dimension: &Dimension, role| Loop { shardable: false, ..shardable(dimension, role) };
        let mut loops: Vec<Loop> = dimensions[..2].iter().map(|dimension| shardable(dimension, Extent::Rows)).collect();
        loops.extend([whole(&dimensions[2], Extent::Features), whole(&one, Extent::Parts)]);
        let axes = |last: usize| vec![Some(LoopId(0)), Some(LoopId(1)), Some(LoopId(last))];
        let inputs = vec![(x, axes(2)), (gate, axes(3))];
        self.planned(name, PlannedKind::GateRows, loops, inputs, (dimensions, axes(2)))
    }
}
