//! Choosing the strategies of a graph, operator by operator in the graph's order. Gradient
//! operators share the strategy of their forward operator.

use super::requests::Requests;
use super::rules::{Rules, is_positional_along_one_axis};
use super::sums::Sums;
use super::tensor::TensorRule;
use super::{Sharding, Strategy, checks, order};
use crate::mesh::{Axis, StageMesh};
use crate::placement::{Placement, Placements};
use crate::plan::{Layout, PlanError};
use foretell_models::{EXPERTS, Extent, Graph, Kernel, Operand, Operator, OperatorId, Role};

pub(super) fn choose(graph: &Graph, mesh: &StageMesh, layout: &Layout) -> Result<Sharding, PlanError> {
    let rules = Rules::new(graph, mesh, layout);
    let requests = Requests::resolve(&rules, &layout.operators)?;
    let mut chooser = Chooser {
        rules,
        requests,
        sharding: Sharding { order: order::zigzag(graph, layout), ..Sharding::replicated(graph) },
        is_placed: vec![false; graph.tensors.len()],
        has_gradient: vec![false; graph.tensors.len()],
    };
    for index in 0..graph.operators.len() {
        chooser.operator(OperatorId(index))?;
    }
    let Chooser { rules, sharding, .. } = chooser;
    checks::tensor_is_used(&rules, &sharding)?;
    checks::axis_is_used(&rules, &sharding, Axis::Context, "context", "sequence")?;
    checks::axis_is_used(&rules, &sharding, Axis::Expert, "expert", EXPERTS)?;
    Ok(sharding)
}

/// The sharding of a graph under construction.
struct Chooser<'a> {
    rules: Rules<'a>,
    requests: Requests,
    sharding: Sharding,
    /// By tensor: whether it is a parameter or an input whose placements are chosen.
    is_placed: Vec<bool>,
    /// By tensor: whether it is the gradient of a parameter to which an operator has contributed.
    has_gradient: Vec<bool>,
}

impl Chooser<'_> {
    /// Chooses the strategy of an operator, and the placements of its outputs and of the parameters
    /// and inputs that it is the first to read.
    fn operator(&mut self, id: OperatorId) -> Result<(), PlanError> {
        let graph = self.rules.graph;
        let operator = &graph.operators[id.0];
        let strategy = match operator.forward {
            Some(forward) => self.sharding.strategies[forward.0],
            None => self.strategy(id, operator)?,
        };
        if matches!(operator.kind, Kernel::Add { .. }) {
            self.sharding.fixed[id.0] = self.sums().common_partial_sum(operator);
        }
        self.sharding.strategies[id.0] = strategy;
        self.sharding.rings[id.0] = match operator.forward {
            Some(forward) if operator.is_attention() => self.sharding.rings[forward.0],
            Some(_) => None,
            None => self.rules.ring(operator, strategy),
        };
        for input in &operator.inputs {
            self.place_input(input, strategy);
        }
        for output in &operator.outputs {
            let produced = self.sharding.output_placements(id, output);
            self.check_gradient(output, produced)?;
            self.sharding.produced[output.tensor.0] = produced;
            self.sharding.settled[output.tensor.0] = self.sums().settled(output.tensor, produced);
        }
        Ok(())
    }

    /// The strategy of a forward operator, or of a gradient operator without one.
    fn strategy(&self, id: OperatorId, operator: &Operator) -> Result<Strategy, PlanError> {
        let rules = &self.rules;
        let mut strategy = rules.without_tensor(operator)?;
        if let Some(requested) = self.requests.of(id) {
            strategy.set(Axis::Tensor, requested);
        } else if rules.mesh.size(Axis::Tensor) > 1 {
            let followed = match self.sums().loop_of_gradient_sum(operator) {
                Some(chosen) => Some(chosen),
                None => self.tensor_rule().tensor_loop(operator)?,
            };
            let mut chosen = followed.filter(|&walked| rules.can_add_tensor(operator, walked, &strategy));
            let is_positional = is_positional_along_one_axis(operator) && operator.positional_role() == Some(Extent::Positions);
            if chosen.is_none() && rules.sequence_parallel && !is_positional {
                chosen = rules.sequence_loop(operator, rules.sequence_parts());
            }
            strategy.set(Axis::Tensor, chosen);
        }
        Ok(strategy)
    }

    /// Places a parameter, running statistics or an input that no earlier operator read.
    fn place_input(&mut self, input: &Operand, strategy: Strategy) {
        let role = &self.rules.graph.tensor(input.tensor).role;
        let is_kept = matches!(role, Role::Parameter(_) | Role::Running | Role::Constant(_) | Role::Input(_));
        if !is_kept || std::mem::replace(&mut self.is_placed[input.tensor.0], true) {
            return;
        }
        let mut placements = strategy.placements(input, Placement::Replicate);
        if matches!(role, Role::Input(_)) {
            // Whole samples are loaded. An operator that reads a part of a sample slices it.
            let others = Axis::WITHIN_STAGE.iter().filter(|axis| !Axis::BATCH.contains(axis));
            placements = others.fold(placements, |loaded, &axis| loaded.with(axis, Placement::Replicate));
        }
        self.sharding.settled[input.tensor.0] = placements;
    }

    /// Refuses a second contribution to a parameter's gradient with other placements than the
    /// first.
    fn check_gradient(&mut self, output: &Operand, produced: Placements) -> Result<(), PlanError> {
        let Role::ParameterGradient(parameter) = self.rules.graph.tensor(output.tensor).role else { return Ok(()) };
        let is_first = !std::mem::replace(&mut self.has_gradient[output.tensor.0], true);
        if is_first || self.sharding.produced[output.tensor.0] == produced {
            return Ok(());
        }
        Err(checks::contradicting_gradients(&self.rules.graph.tensor(parameter).name))
    }

    fn sums(&self) -> Sums<'_> {
        Sums { rules: &self.rules, requests: &self.requests, sharding: &self.sharding }
    }

    fn tensor_rule(&self) -> TensorRule<'_> {
        TensorRule { rules: &self.rules, sharding: &self.sharding, is_placed: &self.is_placed }
    }
}
