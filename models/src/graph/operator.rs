//! Operators: loops, and which of them walks which dimension of which operand.

use super::loops::{Loop, LoopId};
use super::tensor::TensorId;
use crate::kernel::Kernel;

/// Index of an operator in [`Graph::operators`](super::Graph::operators).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OperatorId(pub usize);

/// An operator's use of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Operand {
    /// The tensor.
    pub tensor: TensorId,
    /// The loop that walks each of the tensor's dimensions. `None` for a dimension that every rank
    /// reads or writes in full.
    pub axes: Vec<Option<LoopId>>,
}

/// The pass that an operator belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// From inputs to the loss.
    Forward,
    /// From the loss to gradients of activations. Earlier stages of a pipeline wait for it.
    InputGradient,
    /// Gradients of parameters. Only the optimizer waits for it.
    WeightGradient,
}

/// A node of the graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Operator {
    /// Name of its module as users of the model know it, such as `layer1.0.conv1`.
    pub name: String,
    /// The computation. Its sizes are 0, and the slots of a mixture those for one sample:
    /// [`Operator::kernel`] sets the sizes of one rank.
    pub kind: Kernel,
    /// Loop dimensions.
    pub loops: Vec<Loop>,
    /// Tensors that are read, in the order of the kernel.
    pub inputs: Vec<Operand>,
    /// Tensors that are written, in the order of the kernel.
    pub outputs: Vec<Operand>,
    /// Index of its block. A pipeline cuts between blocks, and recomputation repeats whole blocks.
    pub block: usize,
    /// The pass that it belongs to.
    pub pass: Pass,
    /// For a gradient operator: the forward operator whose loops, and thus sharding, it shares.
    pub forward: Option<OperatorId>,
}

impl Operator {
    /// Returns the extents of the loops over all ranks.
    pub fn extents(&self) -> Vec<usize> {
        self.loops.iter().map(|dimension| dimension.extent).collect()
    }

    /// Returns the loop of a name.
    pub fn find_loop(&self, name: &str) -> Option<LoopId> {
        self.loops.iter().position(|dimension| dimension.name == name).map(LoopId)
    }
}
