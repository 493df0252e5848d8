//! Linear attention: the causal convolution before it, the scan, and the norm after it.

use super::{GraphBuilder, dimension, operand, shardable, walk};
use crate::graph::{BATCH, Dimension, Extent, Initialisation, Loop, LoopId, SEQUENCE, TensorId};
use crate::kernel::{Kernel, PlannedKind, Scan, ScanRule};
use crate::storage::Storage;

/// A loop that ranks do not shard.
fn whole(one: &Dimension, role: Extent) -> Loop {
    Loop { shardable: false, ..shardable(one, role) }
}

/// The loops over samples and positions. A position needs those before it, so ranks shard samples
/// alone.
fn sequence_loops(dimensions: &[Dimension], role: Extent) -> Vec<Loop> {
    debug_assert!(dimensions[0].name == BATCH && dimensions[1].name == SEQUENCE);
    vec![shardable(&dimensions[0], Extent::Rows), whole(&dimensions[1], role)]
}

impl GraphBuilder {
    /// Adds a causal convolution of each feature of x `[batch, sequence, features..]`. Each feature
    /// has `taps` weights of its own, one of which is the bias if there is one. The activation
    /// after it is part of its kernel (`causal_conv1d`).
    pub(crate) fn causal_convolution(&mut self, name: &str, x: TensorId, taps: usize, initial: Initialisation) -> TensorId {
        let dimensions = self.dimensions(x);
        let features = &dimensions[2..];
        let window = dimension("window", taps);
        let shape = vec![features.iter().map(|feature| feature.extent).product(), taps];
        let weight = self.parameter(format!("{name}.weight"), [features, &[window]].concat(), shape, initial);
        let mut loops = sequence_loops(&dimensions, Extent::Rows);
        loops.extend(features.iter().map(|feature| shardable(feature, Extent::Columns)));
        loops.push(whole(&window, Extent::Contracted));
        let [all, weights] = [walk(0, dimensions.len()), walk(2, features.len() + 1)];
        let inputs = vec![(x, all.clone()), (weight, weights)];
        self.planned(name, PlannedKind::GroupedConvolution, loops, inputs, (dimensions, all))
    }

    /// Adds a scan over keys and queries `[batch, sequence, heads, features]`, values `[batch,
    /// sequence, heads, group, features]`, controls `[batch, sequence, heads, group, controls]` and
    /// strengths `[batch, sequence, heads, group]`, if the rule has them. The result has the shape
    /// of the values.
    pub(crate) fn scan(
        &mut self,
        name: &str,
        [keys, values]: [TensorId; 2],
        [controls, strengths]: [Option<TensorId>; 2],
        rule: ScanRule,
        chunk: usize,
        initial: Initialisation,
    ) -> TensorId {
        let [key, value] = [keys, values].map(|tensor| self.dimensions(tensor));
        let key_dimension = key[3].extent / 2;
        let [control, scalar] = [("controls", rule.controls(key_dimension)), ("scalars", rule.scalars(key_dimension))]
            .map(|(name, size)| dimension(name, size));
        let mut loops = sequence_loops(&value, Extent::Positions);
        loops.extend([shardable(&value[2], Extent::Heads), shardable(&value[3], Extent::Group)]);
        let half = dimension(key[3].name, key[3].extent / 2);
        loops.extend([whole(&half, Extent::Features), whole(&value[4], Extent::Columns)]);
        loops.extend([Loop { name: "keys_and_queries", ..whole(&key[3], Extent::Parts) }]);
        let mut further = |dimension: &Dimension| {
            loops.push(whole(dimension, Extent::Parts));
            Some(LoopId(loops.len() - 1))
        };
        let [control_axis, scalar_axis] = [&control, &scalar].map(|dimension| (dimension.extent > 0).then(|| further(dimension)));
        let both = Some(LoopId(6));
        let [batch, sequence, heads, group, _, features] = [0, 1, 2, 3, 4, 5].map(|index| Some(LoopId(index)));
        let of_values = vec![batch, sequence, heads, group, features];
        let mut inputs = vec![operand(keys, vec![batch, sequence, heads, both]), operand(values, of_values.clone())];
        if let Some((controls, axis)) = controls.zip(control_axis) {
            inputs.push(operand(controls, vec![batch, sequence, heads, group, axis]));
        }
        if let Some(axis) = scalar_axis {
            let shape = vec![value[2].extent * value[3].extent, scalar.extent];
            let scalars = self.parameter(format!("{name}.scalars"), vec![value[2], value[3], scalar], shape, initial);
            inputs.push(operand(scalars, vec![heads, group, axis]));
        }
        inputs.extend(strengths.map(|strengths| operand(strengths, vec![batch, sequence, heads, group])));
        let y = self.activation(name, value, Storage::Precision);
        let sizes = Scan { rule, batch: 0, positions: 0, key_heads: 0, group: 0, key_dimension: 0, value_dimension: 0, chunk };
        self.operator(name, Kernel::Scan(sizes), loops, inputs, vec![operand(y, of_values)]);
        y
    }

    /// Adds a norm of x over its last two dimensions, with a scale for each element of its last
    /// three: as in Mamba-2, each group is normalised separately.
    pub(crate) fn group_norm(&mut self, name: &str, x: TensorId) -> TensorId {
        self.scaled_norm(name, x, PlannedKind::Normalisation, [2, 3])
    }

    /// Adds a norm of x over its last dimension, with a scale for each element of its last `scaled`
    /// and without a shift. With 0 it has no scale.
    pub(crate) fn feature_norm(&mut self, name: &str, x: TensorId, scaled: usize) -> TensorId {
        self.scaled_norm(name, x, PlannedKind::FeatureNorm, [1, scaled])
    }

    /// Adds a norm of x over its last `normed` dimensions, with a scale for each element of its
    /// last `scaled`.
    fn scaled_norm(&mut self, name: &str, x: TensorId, kind: PlannedKind, [normed, scaled]: [usize; 2]) -> TensorId {
        let dimensions = self.dimensions(x);
        let [rows, scaled] = [normed, scaled].map(|last| dimensions.len() - last);
        let mut loops: Vec<Loop> = dimensions[..rows].iter().map(|dimension| shardable(dimension, Extent::Rows)).collect();
        loops.extend(dimensions[rows..].iter().map(|dimension| whole(dimension, Extent::Features)));
        let all = walk(0, dimensions.len());
        let mut inputs = vec![(x, all.clone())];
        if scaled < dimensions.len() {
            let shape = vec![dimensions[scaled..].iter().map(|dimension| dimension.extent).product()];
            let scale = self.parameter(format!("{name}.weight"), dimensions[scaled..].to_vec(), shape, Initialisation::Ones);
            inputs.push((scale, all[scaled..].to_vec()));
        }
        self.planned(name, kind, loops, inputs, (dimensions, all))
    }

    /// Adds `y = x · σ(gate)`, with x and gate of the same shape.
    pub(crate) fn gate(&mut self, name: &str, x: TensorId, gate: TensorId) -> TensorId {
        self.elementwise_planned(name, PlannedKind::Combination, &[x, gate])
    }

    /// Adds `y = x · σ(x)`.
    pub(crate) fn silu(&mut self, name: &str, x: TensorId) -> TensorId {
        self.elementwise_planned(name, PlannedKind::Function, &[x])
    }

    /// Adds `y = max(0, x)²`.
    pub(crate) fn squared_relu(&mut self, name: &str, x: TensorId) -> TensorId {
        self.elementwise_planned(name, PlannedKind::Function, &[x])
    }

    fn elementwise_planned(&mut self, name: &str, kind: PlannedKind, inputs: &[TensorId]) -> TensorId {
        let dimensions = self.dimensions(inputs[0]);
        let loops = dimensions.iter().map(|dimension| shardable(dimension, Extent::Rows)).collect();
        let all = walk(0, dimensions.len());
        let inputs = inputs.iter().map(|&tensor| (tensor, all.clone())).collect();
        self.planned(name, kind, loops, inputs, (dimensions, all))
    }
}
