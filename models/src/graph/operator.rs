//! Operators: loops, and which of them walks which dimension of which operand. All that sharding needs to know is here.

use super::kind::OperatorKind;
use super::loops::{Loop, LoopId};
use super::tensor::TensorId;

/// An operator's place in [`Graph::operators`](super::Graph::operators).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OperatorId(pub usize);

/// An operator's use of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Operand {
    /// Which tensor.
    pub tensor: TensorId,
    /// For each of its dimensions the loop that walks it; `None` where every rank needs (or makes) all of it.
    pub axes: Vec<Option<LoopId>>,
}

/// When an operator runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// From inputs to loss.
    Forward,
    /// From the loss to the gradients of activations: on the path between stages.
    InputGradient,
    /// The gradients of parameters: nobody waits for them but the optimizer.
    WeightGradient,
}

/// A node of the graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Operator {
    /// The module it belongs to, as its users know it: `layer1.0.conv1`.
    pub name: String,
    /// What it computes.
    pub kind: OperatorKind,
    /// Its loop dimensions.
    pub loops: Vec<Loop>,
    /// What it reads, in its kernel's order.
    pub inputs: Vec<Operand>,
    /// What it writes, in its kernel's order.
    pub outputs: Vec<Operand>,
    /// The block it belongs to: the unit between which a pipeline may cut, and that recomputation repeats.
    pub block: usize,
    /// When it runs.
    pub pass: Pass,
    /// For a gradient operator the forward operator whose loops (and so whose sharding) it shares.
    pub forward: Option<OperatorId>,
}

impl Operator {
    /// The full extents of the loops.
    pub fn extents(&self) -> Vec<usize> {
        self.loops.iter().map(|one| one.extent).collect()
    }

    /// The loop of a name.
    pub fn find_loop(&self, name: &str) -> Option<LoopId> {
        self.loops.iter().position(|one| one.name == name).map(LoopId)
    }
}
