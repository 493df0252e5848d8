//! The loop dimensions of operators.

/// Index of a loop in [`Operator::loops`](super::Operator::loops).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LoopId(pub usize);

/// The size of an operator's kernel that a loop contributes to. The size is the product of the
/// loops with the same role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extent {
    /// Samples and positions: rows of a product or a norm, elements of an element-wise operator.
    Rows,
    /// Columns of a product.
    Columns,
    /// Dimension that a product sums over, and input channels of a convolution.
    Contracted,
    /// Features of a norm, classes of a loss, and channels that are not summed over.
    Features,
    /// Positions of a group, a sequence or an image.
    Positions,
    /// Attention heads; with grouped queries, the heads of keys and values.
    Heads,
    /// Query heads of each key head.
    Group,
    /// Positions of keys and values.
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
    /// Name for people and plan files.
    pub name: &'static str,
    /// Size over all ranks.
    pub extent: usize,
    /// Size of the kernel that it contributes to.
    pub role: Extent,
    /// Whether ranks may shard it. Outputs in which it does not appear are then partial sums.
    pub shardable: bool,
}

/// Name of the loop over samples in every operator. Data parallelism shards it.
pub const BATCH: &str = "batch";

/// Name of the loop over positions in every operator on sequences. Context and sequence parallelism
/// shard it.
pub const SEQUENCE: &str = "sequence";

/// Name of the loop over experts. Expert parallelism shards it.
pub const EXPERTS: &str = "experts";
