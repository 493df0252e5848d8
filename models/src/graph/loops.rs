//! The loop dimensions of operators.

/// A loop's place in [`Operator::loops`](super::Operator::loops).
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

/// How tokens are shared out to the slots of a mixture's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// Experts that a token is sent to.
    pub top: usize,
    /// Slots of an expert for each sample. A rank's samples share theirs.
    pub per_sample: usize,
}
