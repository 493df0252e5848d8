//! What `tensor` may share out of each operator of a model under a plan, for who looks for the best of it: the graph that the compiler would lay out,
//! and of each operator the loops that [`Layout::operators`](crate::Layout::operators) could name.
//!
//! It is the compiler's own knowledge ([`crate::strategy`]), asked operator by operator. It must not know what anything costs.

use crate::compile::training_graph;
use crate::mesh::{Axis, StageMesh};
use crate::placement::Placement;
use crate::plan::{Plan, PlanError, Share};
use crate::strategy::{Strategy, choices};
use foretell_models::{Graph, Model, Operand, OperatorId, TensorId};

/// One way to share out an operator over `tensor`: by which name, and along which loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The name.
    pub share: Share,
    strategy: Strategy,
}

/// A model's graph with its gradients, as a plan's mesh has it, and the choices for its operators.
#[derive(Clone, Debug)]
pub struct Choices {
    /// The graph of one micro-batch over all ranks of the stage.
    pub graph: Graph,
    /// The mesh of the first stage, with equal shares of the samples.
    pub mesh: StageMesh,
    /// By operator of the forward pass; none for gradients, which are shared out as their forward operators are, and for operators whose
    /// loop is not the plan's to choose.
    pub of_operator: Vec<Vec<Choice>>,
}

impl Choices {
    /// The choices under a plan. Its own `layout.operators` does not count but for the size of the groups that share batch statistics: they are what
    /// they are where `tensor` shares out samples.
    ///
    /// # Errors
    /// As [`crate::compile`].
    pub fn new(model: &Model, name: &str, plan: &Plan) -> Result<Self, PlanError> {
        let mut sharing = plan.clone();
        let stages = plan.mesh()?;
        let samples = stages.stage(0).samples_at_once() / stages.stage(0).batch_parts();
        let shares_batch = samples.is_multiple_of(stages.stage(0).size(Axis::Tensor)) && stages.stage(0).size(Axis::Tensor) > 1;
        sharing.layout.operators = shares_batch.then_some(("*", Share::Batch)).into_iter().collect();
        let (graph, mesh) = training_graph(model, name, &sharing)?;
        let of_operator = choices(&graph, &mesh, &plan.layout)?;
        let of_operator = of_operator
            .into_iter()
            .map(|all| all.into_iter().map(|(share, strategy)| Choice { share, strategy }).collect())
            .collect();
        Ok(Self { graph, mesh, of_operator })
    }

    /// The ranks of `tensor`.
    pub fn ranks(&self) -> usize {
        self.mesh.size(Axis::Tensor)
    }

    /// One rank's extents of the loops of an operator, or of its gradients.
    pub fn local_extents(&self, id: OperatorId, choice: Choice) -> Vec<usize> {
        choice.strategy.local_extents(&self.graph.operators[id.0], &self.mesh)
    }

    /// How a tensor's part lies that no axis but `tensor` cuts otherwise than along samples: its shape on one rank where `tensor` leaves it whole.
    pub fn shape_without_tensor(&self, tensor: TensorId) -> Vec<usize> {
        let dimensions = &self.graph.tensor(tensor).dimensions;
        let is_batch = |name: &str| name == foretell_models::BATCH;
        dimensions.iter().map(|one| if is_batch(one.name) { one.extent / self.mesh.batch_parts() } else { one.extent }).collect()
    }
}

impl Choice {
    /// How the operator, or a gradient of it, must find an input along `tensor`.
    pub fn wanted(&self, operand: &Operand) -> Placement {
        self.strategy.placements(operand, Placement::Replicate).get(Axis::Tensor)
    }

    /// How it leaves an output along `tensor`.
    pub fn produced(&self, operand: &Operand) -> Placement {
        self.strategy.placements(operand, Placement::Partial).get(Axis::Tensor)
    }

    /// The axes along which what it makes of an output are parts of a sum.
    pub fn partial_axes(&self, operand: &Operand) -> Vec<Axis> {
        self.strategy.placements(operand, Placement::Partial).partial_axes().collect()
    }
}
