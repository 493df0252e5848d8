//! The target of the loss: label smoothing and weights of classes, as PyTorch's `CrossEntropyLoss`
//! has them.
//!
//! A forward graph is built with plain cross-entropy. This pass replaces it, so families and
//! evaluation do not know of targets.

use crate::graph::{Dimension, Graph, LoopId, Operand, Role, Tensor, TensorId};
use crate::kernel::{Kernel, Smoothing};
use crate::storage::Storage;
use std::sync::Arc;

/// Name of the sum of the labels' weights, by which a weighted loss is divided.
pub const WEIGHT: &str = "weight";

/// The target of the loss, beside the labels.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LossTarget {
    /// The part of each target that is spread over all classes.
    pub smoothing: Smoothing,
    /// The weight of each class; empty if all have weight 1.
    pub weights: Arc<[f32]>,
}

impl LossTarget {
    /// Whether the loss is plain cross-entropy.
    pub fn is_plain(&self) -> bool {
        self.smoothing == Smoothing::default() && self.weights.is_empty()
    }

    /// Returns a forward graph with this target. The classes must not be sharded: the graph is
    /// built with one vocabulary part.
    pub fn apply(&self, mut graph: Graph) -> Graph {
        if self.is_plain() {
            return graph;
        }
        for index in 0..graph.operators.len() {
            if matches!(graph.operators[index].kind, Kernel::CrossEntropy { .. }) {
                self.replace(&mut graph, index);
            }
        }
        graph
    }

    /// Replaces one cross-entropy.
    fn replace(&self, graph: &mut Graph, index: usize) {
        let operator = &graph.operators[index];
        let classes = LoopId(operator.loops.len() - 1);
        let (name, extent) = (operator.loops[classes.0].name, operator.loops[classes.0].extent);
        let weights = if self.weights.is_empty() { vec![1.0; extent].into() } else { Arc::clone(&self.weights) };
        let mut tensor = |name: &str, role, dimensions| {
            graph.tensors.push(Tensor { name: name.into(), role, dimensions, storage: Storage::Single });
            TensorId(graph.tensors.len() - 1)
        };
        let constant = tensor("class weights", Role::Constant(weights), vec![Dimension { name, extent }]);
        let sum = tensor(WEIGHT, Role::Sum, Vec::new());
        let operator = &mut graph.operators[index];
        operator.kind = Kernel::WeightedCrossEntropy { rows: 0, classes: 0, smoothing: self.smoothing };
        operator.inputs.push(Operand { tensor: constant, axes: vec![Some(classes)] });
        operator.outputs.push(Operand { tensor: sum, axes: Vec::new() });
    }
}
