//! Norms over the last dimension, or the last few together.

use super::{GraphBuilder, dimension, operand, shardable, walk};
use crate::graph::{Extent, Initialisation, Loop, LoopId, TensorId};
use crate::kernel::{Epsilon, Kernel};
use crate::storage::Storage;

impl GraphBuilder {
    /// Adds layer normalisation over the last dimension.
    pub(crate) fn layer_norm(&mut self, name: &str, x: TensorId, epsilon: Epsilon) -> TensorId {
        let features = *self.dimensions(x).last().expect("invariant: a tensor has dimensions");
        let parameter = |initialisation, part: &str, builder: &mut Self| {
            builder.parameter(format!("{name}.{part}"), vec![features], vec![features.extent], initialisation)
        };
        let scale = parameter(Initialisation::Ones, "weight", self);
        let shift = parameter(Initialisation::Zeros, "bias", self);
        self.layer_norm_with(name, x, epsilon, [scale, shift])
    }

    /// As [`GraphBuilder::layer_norm`], with scale and shift that exist.
    pub(crate) fn layer_norm_with(
        &mut self,
        name: &str,
        x: TensorId,
        epsilon: Epsilon,
        [scale, shift]: [TensorId; 2],
    ) -> TensorId {
        let dimensions = self.dimensions(x);
        let row_count = dimensions.len() - 1;
        let features = dimensions[row_count];
        let mut loops: Vec<Loop> = dimensions[..row_count].iter().map(|dimension| shardable(dimension, Extent::Rows)).collect();
        loops.push(Loop { shardable: false, ..shardable(&features, Extent::Features) });
        let all = walk(0, dimensions.len());
        let feature = vec![Some(LoopId(row_count))];
        let mut saved_dimensions = dimensions[..row_count].to_vec();
        saved_dimensions.push(dimension("moments", 2));
        let mut saved_axes = walk(0, row_count);
        saved_axes.push(None);
        let y = self.activation(name, dimensions, Storage::Precision);
        let saved = self.activation(&format!("{name}.saved"), saved_dimensions, Storage::Single);
        self.operator(
            name,
            Kernel::LayerNorm { rows: 0, features: 0, epsilon },
            loops,
            vec![operand(x, all.clone()), operand(scale, feature.clone()), operand(shift, feature)],
            vec![operand(y, all), operand(saved, saved_axes)],
        );
        y
    }

    /// Adds the division of the last dimension by its root mean square.
    pub(crate) fn rms_norm(&mut self, name: &str, x: TensorId, epsilon: Epsilon) -> TensorId {
        self.rms_norm_over(name, x, epsilon, 1)
    }

    /// As [`GraphBuilder::rms_norm`], over the last `normed` dimensions together.
    pub(crate) fn rms_norm_over(&mut self, name: &str, x: TensorId, epsilon: Epsilon, normed: usize) -> TensorId {
        let dimensions = self.dimensions(x);
        let features = dimensions[dimensions.len() - normed..].to_vec();
        let shape = vec![features.iter().map(|feature| feature.extent).product()];
        let scale = self.parameter(format!("{name}.weight"), features, shape, Initialisation::Ones);
        self.rms_norm_with(name, x, epsilon, scale)
    }

    /// As [`GraphBuilder::rms_norm_over`], over the dimensions of a scale that exists.
    pub(crate) fn rms_norm_with(&mut self, name: &str, x: TensorId, epsilon: Epsilon, scale: TensorId) -> TensorId {
        let dimensions = self.dimensions(x);
        let row_count = dimensions.len() - self.dimensions(scale).len();
        let mut loops: Vec<Loop> = dimensions[..row_count].iter().map(|dimension| shardable(dimension, Extent::Rows)).collect();
        let features = dimensions[row_count..].iter();
        loops.extend(features.map(|feature| Loop { shardable: false, ..shardable(feature, Extent::Features) }));
        let all = walk(0, dimensions.len());
        let rows = walk(0, row_count);
        let saved = dimensions[..row_count].to_vec();
        let y = self.activation(name, dimensions, Storage::Precision);
        let saved = self.activation(&format!("{name}.saved"), saved, Storage::Single);
        self.operator(
            name,
            Kernel::RmsNorm { rows: 0, features: 0, epsilon },
            loops,
            vec![operand(x, all.clone()), operand(scale, all[row_count..].to_vec())],
            vec![operand(y, all), operand(saved, rows)],
        );
        y
    }
}
