//! The choices of `tensor` for each operator of a model, for a search of the best ones: the graph
//! that the compiler would lay out, and for each operator the loops that
//! [`Layout::operators`](crate::Layout::operators) could name.
//!
//! The choices are the compiler's own ([`crate::strategy`]). This module knows no costs.

use crate::compile::training_graph;
use crate::mesh::{Axis, StageMesh};
use crate::placement::Placement;
use crate::plan::{Plan, PlanError, ShardedPart};
use crate::strategy::{Strategy, choices};
use foretell_models::{Graph, Model, Operand, OperatorId, TensorId};

/// One way to shard an operator over `tensor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The part of the operator that is sharded.
    pub part: ShardedPart,
    strategy: Strategy,
}

/// A model's graph with gradients on a plan's mesh, and the choices for its operators.
#[derive(Clone, Debug)]
pub struct Choices {
    /// The graph of one micro-batch over all ranks of the stage.
    pub graph: Graph,
    /// The mesh of the first stage, with equal numbers of samples on all ranks.
    pub mesh: StageMesh,
    /// The choices of each operator. Empty for gradients, which are sharded as their forward
    /// operators are, and for operators for which a plan cannot choose a loop.
    pub of_operator: Vec<Vec<Choice>>,
}

impl Choices {
    /// The choices under a plan; its own `layout.operators` is ignored. Groups that share batch
    /// statistics are as large as when `tensor` shards samples.
    ///
    /// # Errors
    /// As [`crate::compile()`].
    pub fn new(model: &Model, name: &str, plan: &Plan) -> Result<Self, PlanError> {
        let mut sharding_samples = plan.clone();
        let stages = plan.mesh()?;
        let samples = stages.stage(0).samples_at_once() / stages.stage(0).batch_parts();
        let ranks = stages.stage(0).size(Axis::Tensor);
        let can_shard_samples = ranks > 1 && samples.is_multiple_of(ranks);
        sharding_samples.layout.operators = can_shard_samples.then_some(("*", ShardedPart::Batch)).into_iter().collect();
        let (graph, mesh) = training_graph(model, name, &sharding_samples)?;
        let of_operator = choices(&graph, &mesh, &plan.layout)?;
        let of_operator = of_operator
            .into_iter()
            .map(|all| all.into_iter().map(|(part, strategy)| Choice { part, strategy }).collect())
            .collect();
        Ok(Self { graph, mesh, of_operator })
    }

    /// The number of ranks of `tensor`.
    pub fn ranks(&self) -> usize {
        self.mesh.size(Axis::Tensor)
    }

    /// The extents of an operator's loops, or of its gradients' loops, on one rank.
    pub fn local_extents(&self, id: OperatorId, choice: Choice) -> Vec<usize> {
        choice.strategy.local_extents(&self.graph.operators[id.0], &self.mesh)
    }

    /// The shape of a tensor on one rank before `tensor` shards it: sharded along samples only.
    pub fn shape_without_tensor(&self, tensor: TensorId) -> Vec<usize> {
        let dimensions = &self.graph.tensor(tensor).dimensions;
        let is_batch = |name: &str| name == foretell_models::BATCH;
        dimensions
            .iter()
            .map(|dimension| if is_batch(dimension.name) { dimension.extent / self.mesh.batch_parts() } else { dimension.extent })
            .collect()
    }
}

impl Choice {
    /// The placement along `tensor` in which the operator, or a gradient of it, reads an input.
    pub fn wanted(&self, operand: &Operand) -> Placement {
        self.strategy.placements(operand, Placement::Replicate).get(Axis::Tensor)
    }

    /// The placement along `tensor` in which the operator leaves an output.
    pub fn produced(&self, operand: &Operand) -> Placement {
        self.strategy.placements(operand, Placement::Partial).get(Axis::Tensor)
    }

    /// The axes along which the operator leaves an output as a partial sum.
    pub fn partial_axes(&self, operand: &Operand) -> Vec<Axis> {
        self.strategy.placements(operand, Placement::Partial).partial_axes().collect()
    }
}
