//! The graph: tensors with named dimensions, and operators with loop dimensions, as an einsum has them.
//!
//! An operator says which loop walks which dimension of which operand. That is all a compiler needs to know in order to shard it:
//! a mesh axis laid along a loop shards every dimension that the loop walks, replicates the operands that it does not touch, and
//! leaves partial sums in an output that it does not appear in. The graph knows no devices and no plans.

mod kind;
mod loops;
mod lowering;
mod operator;
mod tensor;

pub use kind::OperatorKind;
pub use loops::{BATCH, EXPERTS, Extent, Loop, LoopId, SEQUENCE, Slots};
pub use operator::{Operand, Operator, OperatorId, Pass};
pub use tensor::{Dimension, Initialisation, InputKind, Parameter, PublicTensor, Role, Tensor, TensorId};

use foretell_units::Flops;

/// A pipeline's smallest unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// What a person calls it: `layer 3`, `head`.
    pub name: String,
    /// Whether full recomputation may drop its activations and make them again.
    pub recomputable: bool,
}

/// A model for one (global) batch of a given size, forward only or with its gradients ([`crate::differentiate`]).
#[derive(Clone, Debug, PartialEq)]
pub struct Graph {
    /// The model's name.
    pub name: String,
    /// All tensors.
    pub tensors: Vec<Tensor>,
    /// All operators, each after those whose outputs it reads.
    pub operators: Vec<Operator>,
    /// The blocks, in order.
    pub blocks: Vec<Block>,
    /// Samples in the batch that the shapes are for.
    pub batch: usize,
    /// Predictions a sample makes: 1 for a class per image, the sequence's length for a language model.
    pub predictions_per_sample: usize,
    /// Tokens in a sample, if it is a sequence.
    pub tokens_per_sample: Option<usize>,
}

impl Graph {
    /// The tensor of an id.
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.0]
    }

    /// The trained tensors, in the order in which the model declares them.
    pub fn parameters(&self) -> impl Iterator<Item = (TensorId, &Tensor)> {
        self.tensors
            .iter()
            .enumerate()
            .filter(|(_, tensor)| matches!(tensor.role, Role::Parameter(_)))
            .map(|(index, tensor)| (TensorId(index), tensor))
    }

    /// The number of trained values.
    pub fn parameter_count(&self) -> usize {
        self.parameters().map(|(_, tensor)| tensor.elements()).sum()
    }

    /// The arithmetic of one pass over the batch that counts for model FLOPs utilisation (see [`crate::Kernel::model_flops`]).
    pub fn model_flops(&self) -> Flops {
        self.operators.iter().map(|operator| operator.kernel(&operator.extents()).model_flops()).sum()
    }
}
