//! Operators: loops, and which of them walks which dimension of which operand. All that sharding needs to know is here.

use super::{OperatorKind, TensorId};

/// An operator's place in [`Graph::operators`](super::Graph::operators).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OperatorId(pub usize);

/// A loop's place in [`Operator::loops`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LoopId(pub usize);

/// Which of its kernel's sizes a loop multiplies into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extent {
    /// Samples, positions: the rows of a product or a norm; elements of an element-wise operator.
    Rows,
    /// Columns of a product.
    Columns,
    /// The summed dimension of a product; input channels of a convolution.
    Contracted,
    /// Features of a norm, classes of a loss, channels that are not summed over.
    Features,
    /// Positions within a group, sequence or image.
    Positions,
    /// Attention heads; of keys and values where these have fewer.
    Heads,
    /// Query heads of each key head.
    Group,
    /// Positions that are attended to.
    Keys,
    /// Tensors that one is split into.
    Parts,
    /// Rows of an embedding's table.
    Vocabulary,
    /// Experts of a mixture.
    Experts,
}

/// A loop dimension of an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop {
    /// What a person calls it.
    pub name: &'static str,
    /// Its size over all ranks.
    pub extent: usize,
    /// Which of the kernel's sizes it multiplies into.
    pub role: Extent,
    /// Whether ranks may share it out. Where an output lacks it, what they make are partial sums.
    pub shardable: bool,
}

/// The loop that every operator calls the same, and that data parallelism shares out.
pub const BATCH: &str = "batch";

/// The loop that every operator on sequences calls the same, and that context and sequence parallelism share out.
pub const SEQUENCE: &str = "sequence";

/// The loop over experts, that expert parallelism shares out.
pub const EXPERTS: &str = "experts";

/// An operator's use of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Operand {
    /// Which tensor.
    pub tensor: TensorId,
    /// For each of its dimensions the loop that walks it; `None` where every rank needs (or makes) all of it.
    pub axes: Vec<Option<LoopId>>,
}

/// How tokens are shared out to the slots of a mixture's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// Experts that a token is sent to.
    pub top: usize,
    /// Slots of an expert for each sample. A rank's samples share theirs.
    pub per_sample: usize,
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
