//! Element-wise operators, and dropout.

use super::{GraphBuilder, operand, shardable, walk};
use crate::dropout::DropoutRate;
use crate::graph::{Extent, Loop, OperatorKind, TensorId};
use crate::storage::Storage;

impl GraphBuilder {
    fn elementwise(&mut self, name: &str, kind: OperatorKind, inputs: &[TensorId]) -> TensorId {
        let dimensions = self.dimensions(*inputs.first().expect("invariant: an operator has an input"));
        let loops = dimensions.iter().map(|one| shardable(one, Extent::Rows)).collect();
        let all = walk(0, dimensions.len());
        let y = self.activation(name, dimensions, Storage::Precision);
        let inputs = inputs.iter().map(|&input| operand(input, all.clone())).collect();
        self.operator(name, kind, loops, inputs, vec![operand(y, all)]);
        y
    }

    pub(crate) fn relu(&mut self, name: &str, x: TensorId) -> TensorId {
        self.elementwise(name, OperatorKind::Relu, &[x])
    }

    pub(crate) fn gelu(&mut self, name: &str, x: TensorId) -> TensorId {
        self.elementwise(name, OperatorKind::Gelu, &[x])
    }

    /// Adds `y = x / √square`.
    pub(crate) fn scale(&mut self, name: &str, x: TensorId, square: usize) -> TensorId {
        self.elementwise(name, OperatorKind::Scale { times: 1, square }, &[x])
    }

    pub(crate) fn multiply(&mut self, name: &str, a: TensorId, b: TensorId) -> TensorId {
        self.elementwise(name, OperatorKind::Multiply, &[a, b])
    }

    pub(crate) fn gelu_exact(&mut self, name: &str, x: TensorId) -> TensorId {
        self.elementwise(name, OperatorKind::GeluExact, &[x])
    }

    /// Adds `y = gate · σ(gate) · x`.
    pub(crate) fn silu_multiply(&mut self, name: &str, gate: TensorId, x: TensorId) -> TensorId {
        self.elementwise(name, OperatorKind::SiluMultiply, &[gate, x])
    }

    pub(crate) fn add(&mut self, name: &str, a: TensorId, b: TensorId) -> TensorId {
        self.elementwise(name, OperatorKind::Add, &[a, b])
    }

    /// Adds dropout of x `[batch, sequence, features]` or `[batch, features]`. Returns x itself if
    /// nothing is dropped. Ranks may shard the sequence, or the features if there is no sequence.
    pub(crate) fn dropout(&mut self, name: &str, x: TensorId, rate: DropoutRate) -> TensorId {
        let Some(site) = self.dropout_site(rate) else { return x };
        let dimensions = self.dimensions(x);
        let loops = dimensions
            .iter()
            .enumerate()
            .map(|(index, one)| match index {
                0 => shardable(one, Extent::Rows),
                1 => shardable(one, Extent::Positions),
                _ => Loop { shardable: false, ..shardable(one, Extent::Features) },
            })
            .collect();
        let all = walk(0, dimensions.len());
        let y = self.activation(name, dimensions, Storage::Precision);
        self.operator(name, OperatorKind::Dropout(site), loops, vec![operand(x, all.clone())], vec![operand(y, all)]);
        y
    }
}
