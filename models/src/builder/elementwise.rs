//! Element-wise operators, and dropout.

use super::{GraphBuilder, operand, shardable, walk};
use crate::dropout::{Dropout, DropoutRate};
use crate::graph::{Extent, Loop, TensorId};
use crate::kernel::Kernel;
use crate::storage::Storage;

impl GraphBuilder {
    fn elementwise(&mut self, name: &str, kind: Kernel, inputs: &[TensorId]) -> TensorId {
        let dimensions = self.dimensions(*inputs.first().expect("invariant: an operator has an input"));
        let loops = dimensions.iter().map(|dimension| shardable(dimension, Extent::Rows)).collect();
        let all = walk(0, dimensions.len());
        let y = self.activation(name, dimensions, Storage::Precision);
        let inputs = inputs.iter().map(|&input| operand(input, all.clone())).collect();
        self.operator(name, kind, loops, inputs, vec![operand(y, all)]);
        y
    }

    pub(crate) fn relu(&mut self, name: &str, x: TensorId) -> TensorId {
        self.elementwise(name, Kernel::Relu { elements: 0 }, &[x])
    }

    pub(crate) fn gelu(&mut self, name: &str, x: TensorId) -> TensorId {
        self.elementwise(name, Kernel::Gelu { elements: 0 }, &[x])
    }

    /// Adds `y = x / √square`.
    pub(crate) fn scale(&mut self, name: &str, x: TensorId, square: usize) -> TensorId {
        self.elementwise(name, Kernel::Scale { elements: 0, times: 1, square }, &[x])
    }

    pub(crate) fn multiply(&mut self, name: &str, a: TensorId, b: TensorId) -> TensorId {
        self.elementwise(name, Kernel::Multiply { elements: 0 }, &[a, b])
    }

    pub(crate) fn gelu_exact(&mut self, name: &str, x: TensorId) -> TensorId {
        self.elementwise(name, Kernel::GeluExact { elements: 0 }, &[x])
    }

    /// Adds `y = gate · σ(gate) · x`.
    pub(crate) fn silu_multiply(&mut self, name: &str, gate: TensorId, x: TensorId) -> TensorId {
        self.elementwise(name, Kernel::SiluMultiply { elements: 0 }, &[gate, x])
    }

    pub(crate) fn add(&mut self, name: &str, a: TensorId, b: TensorId) -> TensorId {
        self.elementwise(name, Kernel::Add { elements: 0 }, &[a, b])
    }

    /// Adds dropout of x `[batch, sequence, features]` or `[batch, features]`. Returns x itself if
    /// nothing is dropped. Ranks may shard the sequence, or the features if there is no sequence.
    pub(crate) fn dropout(&mut self, name: &str, x: TensorId, rate: DropoutRate) -> TensorId {
        let Some(site) = self.dropout_site(rate) else { return x };
        let dimensions = self.dimensions(x);
        let loops = dimensions
            .iter()
            .enumerate()
            .map(|(index, dimension)| match index {
                0 => shardable(dimension, Extent::Rows),
                1 => shardable(dimension, Extent::Positions),
                _ => Loop { shardable: false, ..shardable(dimension, Extent::Features) },
            })
            .collect();
        let all = walk(0, dimensions.len());
        let y = self.activation(name, dimensions, Storage::Precision);
        let sizes =
            Dropout { first_sample: 0, samples: 0, positions: 0, features: 0, parts: 1, sample_parts: 1, zigzag: None, site };
        self.operator(name, Kernel::Dropout(sizes), loops, vec![operand(x, all.clone())], vec![operand(y, all)]);
        y
    }
}
