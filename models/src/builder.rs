//! Building graphs: one method an operator, so that a model file reads like the model.
//! The methods stand by what they are of; here is what all of them need. It must not know any model.

mod attention;
mod elementwise;
mod images;
mod loss;
mod mixture;
mod norms;
mod products;
mod recurrence;
mod sequences;

pub(crate) use attention::AttentionKind;
pub(crate) use images::Mode;
pub(crate) use mixture::MixtureShape;

use crate::dropout::{DropoutRate, DropoutSite};
use crate::graph::{
    Block, Dimension, Extent, Graph, Initialisation, InputKind, Loop, LoopId, Operand, Operator, OperatorId, OperatorKind,
    Parameter, Pass, Role, Tensor, TensorId,
};
use crate::storage::Storage;

/// For what, and for how many samples, a graph is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphOptions {
    /// Samples in the batch.
    pub batch: usize,
    /// Groups of samples that share batch-norm statistics; they divide the batch.
    pub normalization_groups: usize,
    /// Whether batch norm uses running statistics instead of the batch's.
    pub inference: bool,
    /// Ranks that share out the vocabulary, from the embedding to the loss, where it divides by them; 1 for nobody.
    pub vocabulary_parts: usize,
}

impl GraphOptions {
    /// One sample on one rank, with batch statistics.
    pub const ONE: GraphOptions = GraphOptions { batch: 1, normalization_groups: 1, inference: false, vocabulary_parts: 1 };
}

/// A dimension of a name and an extent.
pub(crate) fn dimension(name: &'static str, extent: usize) -> Dimension {
    Dimension { name, extent }
}

/// The dimension of a language model's tokens, which `tensor` shares out from the embedding to the loss.
pub(crate) const VOCABULARY: &str = "vocabulary";

/// A graph under construction.
pub(crate) struct GraphBuilder {
    graph: Graph,
    /// How many groups of samples the batch has for batch normalisation.
    normalization_groups: usize,
    /// Into how many parts a vocabulary is cut where it divides.
    vocabulary_parts: usize,
    /// Whether dropouts drop nothing.
    inference: bool,
    /// How many dropouts there are by now.
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

    /// Starts the next block; what is added from here on belongs to it.
    pub(crate) fn block(&mut self, name: impl Into<String>, recomputable: bool) {
        self.graph.blocks.push(Block { name: name.into(), recomputable });
    }

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

    fn dimensions(&self, tensor: TensorId) -> Vec<Dimension> {
        self.graph.tensor(tensor).dimensions.clone()
    }

    fn operator(
        &mut self,
        name: &str,
        kind: OperatorKind,
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

    pub(crate) fn input(&mut self, kind: InputKind, dimensions: Vec<Dimension>) -> TensorId {
        let (name, storage) = match kind {
            InputKind::Images => ("images", Storage::Precision),
            InputKind::Features => ("features", Storage::Precision),
            InputKind::Tokens => ("tokens", Storage::Integer),
            InputKind::SourceTokens => ("source_tokens", Storage::Integer),
            InputKind::Labels => ("labels", Storage::Integer),
            InputKind::TokenTypes => ("token_types", Storage::Integer),
        };
        self.tensor(name, Role::Input(kind), dimensions, storage)
    }

    /// A parameter whose public form is ours with its dimensions in the order `permutation`, flattened to `shape`.
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

    /// A parameter whose public form has the same elements in the same order, in `shape`.
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

    /// The model's next dropout; none where nothing is dropped, as in evaluation.
    fn dropout_site(&mut self, rate: DropoutRate) -> Option<DropoutSite> {
        if rate.is_none() || self.inference {
            return None;
        }
        self.dropout_sites += 1;
        Some(DropoutSite { rate, site: self.dropout_sites - 1 })
    }

    /// Whether ranks share out a vocabulary (or as many classes).
    fn cuts_vocabulary(&self, extent: usize) -> bool {
        self.vocabulary_parts > 1 && extent.is_multiple_of(self.vocabulary_parts)
    }
}

/// A loop over a dimension that ranks may share out.
fn shared(dimension: &Dimension, role: Extent) -> Loop {
    Loop { name: dimension.name, extent: dimension.extent, role, shardable: true }
}

/// `count` consecutive loops from `first`, one a dimension.
fn walk(first: usize, count: usize) -> Vec<Option<LoopId>> {
    (first..first + count).map(|index| Some(LoopId(index))).collect()
}

fn operand(tensor: TensorId, axes: Vec<Option<LoopId>>) -> Operand {
    Operand { tensor, axes }
}
