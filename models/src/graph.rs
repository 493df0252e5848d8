//! Graphs: tensors with named dimensions, and operators with loop dimensions, as an einsum has
//! them.
//!
//! An operator states which loop walks which dimension of which operand. A compiler needs no more
//! to shard it. If a mesh axis is laid along a loop, it shards every dimension that the loop walks,
//! replicates the operands that the loop does not touch, and leaves partial sums in an output in
//! which the loop does not appear. A graph knows no devices and no plans.

mod blocks;
mod loops;
mod lowering;
mod matrices;
mod operator;
mod properties;
mod tensor;

pub use loops::{BATCH, EXPERTS, Extent, Loop, LoopId, SEQUENCE};
pub use matrices::HiddenMatrix;
pub use operator::{Operand, Operator, OperatorId, Pass};
pub use tensor::{Dimension, Initialisation, InputKind, Parameter, PublicTensor, Role, Tensor, TensorId};

use foretell_units::Flops;

/// A block: the smallest unit that a pipeline places on a stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Name for people, such as `layer 3` or `head`.
    pub name: String,
    /// Whether full recomputation may drop the block's activations and recompute them.
    pub recomputable: bool,
}

/// A model over one (global) batch, forward only or with its gradients ([`crate::differentiate`]).
#[derive(Clone, Debug, PartialEq)]
pub struct Graph {
    /// The model's name.
    pub name: String,
    /// All tensors, indexed by [`TensorId`].
    pub tensors: Vec<Tensor>,
    /// All operators, indexed by [`OperatorId`]. Each comes after those whose outputs it reads.
    pub operators: Vec<Operator>,
    /// All blocks, in order.
    pub blocks: Vec<Block>,
    /// Samples in the batch that the shapes are for.
    pub batch: usize,
    /// Predictions for each sample: 1 for a class, the sequence's length for a language model.
    pub predictions_per_sample: usize,
    /// Tokens in each sample. `None` if samples are not sequences.
    pub tokens_per_sample: Option<usize>,
}

impl Graph {
    /// Returns the tensor of an id.
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.0]
    }

    /// Returns the parameters, in the order in which the model declares them.
    pub fn parameters(&self) -> impl Iterator<Item = (TensorId, &Tensor)> + Clone {
        self.tensors
            .iter()
            .enumerate()
            .filter(|(_, tensor)| matches!(tensor.role, Role::Parameter(_)))
            .map(|(index, tensor)| (TensorId(index), tensor))
    }

    /// Returns the number of elements of all parameters.
    pub fn parameter_count(&self) -> usize {
        self.parameters().map(|(_, tensor)| tensor.elements()).sum()
    }

    /// Returns the floating-point operations of one pass over the batch that count for model FLOPs
    /// utilisation ([`crate::Kernel::model_flops`]).
    pub fn model_flops(&self) -> Flops {
        self.operators.iter().map(|operator| operator.kernel(&operator.extents()).model_flops()).sum()
    }
}
