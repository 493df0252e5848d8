//! Construction of graphs: one method for each operator, so that the code of a family reads like
//! the model. This file has what the methods share; the files below have the methods, by kind of
//! operator. The builder knows no models.

mod attention;
mod elementwise;
mod images;
mod linear_attention;
mod loss;
mod mixture;
mod norms;
mod pairs;
mod planned;
mod products;
mod recurrence;
mod sequences;
mod streams;
mod vision;

pub(crate) use attention::AttentionKind;
pub(crate) use images::Mode;
pub(crate) use mixture::MixtureShape;

use crate::dropout::{DropoutRate, DropoutSite};
use crate::graph::{
    Block, Dimension, Extent, Graph, Initialisation, InputKind, Loop, LoopId, Operand, Operator, OperatorId, Parameter, Pass,
    Role, Tensor, TensorId,
};
use crate::kernel::Kernel;
use crate::storage::Storage;

/// The batch that a graph is built for, and how its samples are grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphOptions {
    /// Samples in the batch.
    pub batch: usize,
    /// Groups of samples that share batch-norm statistics. Divides `batch`.
    pub normalization_groups: usize,
    /// Whether the graph is for evaluation: batch norm uses running statistics, and nothing is
    /// dropped.
    pub inference: bool,
    /// Ranks that shard the vocabulary from the embedding to the loss, if their number divides it.
    /// 1 for none.
    pub vocabulary_parts: usize,
}

impl GraphOptions {
    /// One sample on one rank, for training.
    pub const ONE: GraphOptions = GraphOptions { batch: 1, normalization_groups: 1, inference: false, vocabulary_parts: 1 };
}

/// Makes a dimension.
pub(crate) fn dimension(name: &'static str, extent: usize) -> Dimension {
    Dimension { name, extent }
}

/// Name of the dimension over a language model's tokens. Tensor parallelism shards it from the
/// embedding to the loss.
pub(crate) const VOCABULARY: &str = "vocabulary";

/// A graph under construction.
pub(crate) struct GraphBuilder {
    graph: Graph,
    /// Groups of samples that share batch-norm statistics.
    normalization_groups: usize,
    /// Ranks that shard a vocabulary, if their number divides it.
    vocabulary_parts: usize,
    /// Whether the graph is for evaluation.
    inference: bool,
    /// Number of dropouts so far.
    dropout_sites: usize,
}

impl GraphBuilder {
    pub(crate) fn new(name: &str, options: &GraphOptions) -> Self {
        let GraphOptions { batch, normalization_groups, vocabulary_parts, inference } = *options;
        let graph = Graph {
            name: name.into(),
            tensors: Vec::new(),
            operators: Vec::new(),
            blocks: Vec::new(),
            batch,
            predictions_per_sample: 1,
            tokens_per_sample: None,
        };
        Self { graph, normalization_groups, vocabulary_parts, inference, dropout_sites: 0 }
    }

    /// Starts the next block. Operators that are added from here on belong to it.
    pub(crate) fn block(&mut self, name: impl Into<String>, recomputable: bool) {
        self.graph.blocks.push(Block { name: name.into(), recomputable });
    }

    /// Returns the graph.
    pub(crate) fn finish(self, predictions_per_sample: usize, tokens_per_sample: Option<usize>) -> Graph {
        Graph { predictions_per_sample, tokens_per_sample, ..self.graph }
    }

    fn tensor(&mut self, name: impl Into<String>, role: Role, dimensions: Vec<Dimension>, storage: Storage) -> TensorId {
        self.graph.tensors.push(Tensor { name: name.into(), role, dimensions, storage });
        TensorId(self.graph.tensors.len() - 1)
    }

    fn activation(&mut self, name: &str, dimensions: Vec<Dimension>, storage: Storage) -> TensorId {
        self.tensor(name, Role::Activation, dimensions, storage)
    }

    /// Returns the sum over the batch of this name, to which several operators may add.
    fn sum(&mut self, name: &str) -> TensorId {
        let existing = self.graph.tensors.iter().position(|tensor| tensor.role == Role::Sum && tensor.name == name);
        existing.map(TensorId).unwrap_or_else(|| self.tensor(name, Role::Sum, Vec::new(), Storage::Single))
    }

    /// Returns the dimensions of a tensor.
    pub(crate) fn dimensions(&self, tensor: TensorId) -> Vec<Dimension> {
        self.graph.tensor(tensor).dimensions.clone()
    }

    /// Returns how a tensor is stored.
    pub(crate) fn storage(&self, tensor: TensorId) -> Storage {
        self.graph.tensor(tensor).storage
    }

    fn operator(
        &mut self,
        name: &str,
        kind: Kernel,
        loops: Vec<Loop>,
        inputs: Vec<Operand>,
        outputs: Vec<Operand>,
    ) -> OperatorId {
        let block = self.graph.blocks.len().saturating_sub(1);
        self.graph.operators.push(Operator {
            name: name.into(),
            kind,
            loops,
            inputs,
            outputs,
            block,
            pass: Pass::Forward,
            forward: None,
        });
        OperatorId(self.graph.operators.len() - 1)
    }

    /// Adds a tensor that the training data supplies.
    pub(crate) fn input(&mut self, kind: InputKind, dimensions: Vec<Dimension>) -> TensorId {
        let (name, storage) = match kind {
            InputKind::Images => ("images", Storage::Precision),
            InputKind::Features => ("features", Storage::Precision),
            InputKind::Tokens => ("tokens", Storage::Integer),
            InputKind::SourceTokens => ("source_tokens", Storage::Integer),
            InputKind::Labels => ("labels", Storage::Integer),
            InputKind::TokenTypes => ("token_types", Storage::Integer),
            InputKind::Positions { .. } => ("positions", Storage::Integer),
        };
        self.tensor(name, Role::Input(kind), dimensions, storage)
    }

    /// Adds a parameter. Its public form has the dimensions in the order `permutation`, reshaped to
    /// `shape`.
    pub(crate) fn parameter_as(
        &mut self,
        name: String,
        dimensions: Vec<Dimension>,
        initialisation: Initialisation,
        permutation: Vec<usize>,
        shape: Vec<usize>,
    ) -> TensorId {
        self.tensor(
            name,
            Role::Parameter(Parameter { initialisation, permutation, shape, parts: Vec::new() }),
            dimensions,
            Storage::Precision,
        )
    }

    /// Adds a parameter. Its public form has the same elements in the same order, with the shape
    /// `shape`.
    pub(crate) fn parameter(
        &mut self,
        name: String,
        dimensions: Vec<Dimension>,
        shape: Vec<usize>,
        initialisation: Initialisation,
    ) -> TensorId {
        let permutation = (0..dimensions.len()).collect();
        self.parameter_as(name, dimensions, initialisation, permutation, shape)
    }

    /// Returns the site of the model's next dropout, or `None` if nothing is dropped.
    fn dropout_site(&mut self, rate: DropoutRate) -> Option<DropoutSite> {
        if rate.is_none() || self.inference {
            return None;
        }
        self.dropout_sites += 1;
        Some(DropoutSite { rate, site: self.dropout_sites - 1 })
    }

    /// Whether ranks shard a vocabulary of this extent.
    fn shards_vocabulary(&self, extent: usize) -> bool {
        self.vocabulary_parts > 1 && extent.is_multiple_of(self.vocabulary_parts)
    }
}

/// Makes a loop over a dimension that ranks may shard.
fn shardable(dimension: &Dimension, role: Extent) -> Loop {
    Loop { name: dimension.name, extent: dimension.extent, role, shardable: true }
}

/// Returns the axes of dimensions that `count` consecutive loops from `first` walk.
fn walk(first: usize, count: usize) -> Vec<Option<LoopId>> {
    (first..first + count).map(|index| Some(LoopId(index))).collect()
}

fn operand(tensor: TensorId, axes: Vec<Option<LoopId>>) -> Operand {
    Operand { tensor, axes }
}
