//! What is refused of a layout once all operators are shared out.

use super::{Chooser, Strategy, is_product};
use crate::mesh::Axis;
use crate::placement::Placements;
use crate::plan::PlanError;
use foretell_models::{Extent, Operator, Pass, Role, TensorId};

impl Chooser<'_> {
    /// Refuses a parameter whose gradient one operator leaves in parts and another whole: their sum would be neither.
    pub(super) fn gradients_agree(&mut self, tensor: TensorId, produced: Placements) -> Result<(), PlanError> {
        let Role::ParameterGradient(parameter) = self.graph.tensor(tensor).role else { return Ok(()) };
        let has_some = std::mem::replace(&mut self.has_gradient[tensor.0], true);
        if !has_some || self.sharding.produced[tensor.0] == produced {
            return Ok(());
        }
        Err(PlanError::Invalid {
            field: "layout",
            reason: format!(
                "`{}` is used by several operators, which this layout shares out in different ways",
                self.graph.tensor(parameter).name
            ),
            hint:
                "use sizes of `tensor` and `context` that divide every sequence, or leave `sequence_parallel` and `context` out"
                    .into(),
        })
    }

    /// Refuses ranks along an axis that would all do the same, since the model has no loop for it.
    pub(super) fn axis_is_used(&self, axis: Axis, field: &'static str, what: &str) -> Result<(), PlanError> {
        let divisor = self.mesh.size(axis);
        let is_used = |(operator, strategy): (&Operator, &Strategy)| {
            strategy.get(axis).is_some_and(|one| operator.loops[one.0].name == what)
        };
        if divisor == 1 || self.graph.operators.iter().zip(&self.sharding.strategies).any(is_used) {
            return Ok(());
        }
        Err(PlanError::Invalid {
            field,
            reason: format!("`{}` has no {what} that {divisor} ranks could share out", self.graph.name),
            hint: format!("use `{field}: 1`, or a size that divides the model's"),
        })
    }

    /// Refuses ranks along `tensor` that would all do the same, since nothing of the model could be shared out among them.
    pub(super) fn tensor_is_used(&self) -> Result<(), PlanError> {
        let divisor = self.mesh.size(Axis::Tensor);
        let is_used = self.sharding.strategies.iter().any(|strategy| strategy.get(Axis::Tensor).is_some());
        if divisor == 1 || is_used {
            return Ok(());
        }
        let products = self.graph.operators.iter().filter(|operator| is_product(operator) && operator.pass == Pass::Forward);
        let mut columns = products.flat_map(|operator| operator.loops.iter().map(move |one| (operator, one)));
        let found = columns
            .find(|(_, one)| one.role == Extent::Columns && one.shardable && !one.extent.is_multiple_of(divisor))
            .map(|(operator, one)| (format!("`{}` of `{}`", one.name, operator.name), one.extent));
        match found {
            Some((what, value)) => Err(PlanError::Indivisible {
                what,
                value,
                by: "tensor".into(),
                divisor,
                hint: format!("nor does any other width of `{}`: use `tensor: 1`, or what divides {value}", self.graph.name),
            }),
            None => Err(PlanError::Invalid {
                field: "tensor",
                reason: format!("`{}` has no width that {divisor} ranks could share out", self.graph.name),
                hint: "use `tensor: 1`".into(),
            }),
        }
    }
}
