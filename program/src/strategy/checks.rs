//! Layouts that are refused once all strategies are chosen.

use super::rules::Rules;
use super::{Sharding, Strategy, is_product};
use crate::mesh::Axis;
use crate::plan::PlanError;
use foretell_models::{Extent, Operator, Pass};

/// The error for a parameter to whose gradient several operators contribute in different
/// placements, so that the contributions cannot be added.
pub(super) fn contradicting_gradients(parameter: &str) -> PlanError {
    PlanError::Invalid {
        field: "layout",
        reason: format!("several operators use `{parameter}`, and this layout shards them in different ways"),
        hint: "use sizes of `tensor` and `context` that divide every sequence, or leave `sequence_parallel` and `context` out"
            .into(),
    }
}

/// Refuses an axis whose ranks would all compute the same, since no operator has a shardable loop
/// called `name`.
pub(super) fn axis_is_used(
    rules: &Rules<'_>,
    sharding: &Sharding,
    axis: Axis,
    field: &'static str,
    name: &str,
) -> Result<(), PlanError> {
    let ranks = rules.mesh.size(axis);
    let shards_loop = |(operator, strategy): (&Operator, &Strategy)| {
        strategy.get(axis).is_some_and(|walked| operator.loops[walked.0].name == name)
    };
    if ranks == 1 || rules.graph.operators.iter().zip(&sharding.strategies).any(shards_loop) {
        return Ok(());
    }
    Err(PlanError::Invalid {
        field,
        reason: format!("`{}` has no {name} that {ranks} ranks can shard", rules.graph.name),
        hint: format!("use `{field}: 1`, or a size that divides the model's"),
    })
}

/// Refuses a `tensor` axis whose ranks would all compute the same, since it shards no operator.
pub(super) fn tensor_is_used(rules: &Rules<'_>, sharding: &Sharding) -> Result<(), PlanError> {
    let graph = rules.graph;
    let ranks = rules.mesh.size(Axis::Tensor);
    if ranks == 1 || sharding.strategies.iter().any(|strategy| strategy.get(Axis::Tensor).is_some()) {
        return Ok(());
    }
    let products = graph.operators.iter().filter(|operator| is_product(operator) && operator.pass == Pass::Forward);
    let mut columns = products.flat_map(|operator| operator.loops.iter().map(move |dimension| (operator, dimension)));
    let indivisible = columns
        .find(|(_, column)| column.role == Extent::Columns && column.shardable && !column.extent.is_multiple_of(ranks))
        .map(|(operator, column)| (format!("`{}` of `{}`", column.name, operator.name), column.extent));
    match indivisible {
        Some((what, value)) => Err(PlanError::Indivisible {
            what,
            value,
            by: "tensor".into(),
            divisor: ranks,
            hint: format!("no width of `{}` is: use `tensor: 1`, or a divisor of {value}", graph.name),
        }),
        None => Err(PlanError::Invalid {
            field: "tensor",
            reason: format!("`{}` has no width that {ranks} ranks can shard", graph.name),
            hint: "use `tensor: 1`".into(),
        }),
    }
}
