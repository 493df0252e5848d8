//! The best way to shard each operator over `tensor`, for models that are no stack of equal blocks.
//!
//! Convolutions have most of the arithmetic and few parameters; products have most parameters and
//! little arithmetic. So convolutions are better sharded by samples, and products by features, over
//! the same ranks (Krizhevsky 2014). Where to switch depends on the devices, the links, the sizes,
//! and the conversions between operators that are sharded differently.
//!
//! [`choose`] prices every operator in every sharding that the compiler can lay out, and every
//! conversion between two operators by the compiler's own steps, forward and backward. Then
//! [`solve`] finds the cheapest combination: by dynamic programming or, where that needs too large
//! tables, as an integer program. For these prices the answer is exact.
//!
//! Prices do not include overlap. Since gradient reductions may overlap with the backward pass, the
//! problem is solved for three prices of reductions. The answer with the least time is returned,
//! counted as if the backward pass hid as much of the reductions as it can. A search still compares
//! it with the compiler's usual sharding by simulation. It must not know the search: it answers for
//! one mesh and one micro-batch.

mod conversions;
mod costs;
mod eliminate;
mod families;
mod integer;
mod patterns;
mod prices;
mod problem;
#[cfg(test)]
mod tests;

pub use eliminate::{LARGEST_TABLE, solve};
pub(crate) use families::with_sharded_operators;
pub use problem::{Cost, Factor, Method, Problem, Solution, SolveError};

use costs::Costs;
use foretell_models::{Graph, Model, Operator, OperatorId, Pass, SEQUENCE};
use foretell_program::{Choices, Layout, OperatorPatterns, Plan, PlanError, ShardedPart};
use foretell_simulator::{CostModel, Oversubscription, SimulationError};
use foretell_topologies::Topology;
use foretell_units::{Picoseconds, Seconds};
use miette::Diagnostic;
use prices::PricingContext;
use thiserror::Error;

/// Prices of a gradient reduction for which the problem is solved, in thousandths of its time: full
/// price, partly hidden behind the backward pass, and almost completely hidden.
const REDUCTION_PRICES: [u64; 3] = [1000, 300, 1];

/// The most combinations of choices for which a conversion is priced. A tensor with many readers,
/// such as the input of queries, keys and values in a traced step, may have more; then the
/// compiler's rule decides.
const LARGEST_CONVERSION: usize = 1 << 14;

/// A plan whose operators are to be sharded.
#[derive(Clone, Copy, Debug)]
pub struct ShardingRequest<'a> {
    /// Model of the plan.
    pub model: &'a Model,
    /// Name of the model.
    pub name: &'a str,
    /// Nodes, devices and links.
    pub topology: &'a Topology,
    /// Cost model of the simulator.
    pub costs: &'a CostModel,
    /// The plan. Its `layout.operators` is ignored.
    pub plan: &'a Plan,
    /// Whether several ranks may share a device.
    pub oversubscription: Oversubscription,
}

/// The best sharding of a plan's operators.
#[derive(Clone, Debug, PartialEq)]
pub struct OperatorSharding {
    /// The plan's `layout.operators`.
    pub operators: OperatorPatterns,
    /// Estimated step time: work and exposed communication, one after the other.
    pub seconds: Seconds,
    /// How it was found.
    pub method: Method,
    /// Number of operators that were sharded.
    pub count: usize,
}

/// Why operators were not sharded.
#[derive(Clone, Debug, PartialEq, Error, Diagnostic)]
pub enum ShardingError {
    /// The plan cannot be laid out, however its operators are sharded.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Plan(#[from] PlanError),
    /// Communication could not be priced.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Simulation(#[from] SimulationError),
    /// No combination was found.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Solve(#[from] SolveError),
}

/// Returns `true` if choosing the sharding of each operator may pay for a model. For stacks of
/// equal blocks and for operators on sequences the compiler's rule is known to be best.
pub fn applies(graph: &Graph) -> bool {
    let has_sequence = graph.operators.iter().any(|operator| operator.find_loop(SEQUENCE).is_some());
    !has_sequence && !is_stack_of_equal_blocks(graph)
}

/// Returns `true` if a model has recomputable blocks and all of them have the same operators with
/// the same loops.
pub fn is_stack_of_equal_blocks(graph: &Graph) -> bool {
    let of_block = |block: usize| {
        let own = graph.operators.iter().filter(move |operator| operator.block == block);
        own.map(|operator| (std::mem::discriminant(&operator.kind), &operator.loops)).collect::<Vec<_>>()
    };
    let mut repeated = (0..graph.blocks.len()).filter(|&block| graph.blocks[block].recomputable).map(of_block);
    let first = repeated.next();
    first.is_some_and(|first| repeated.all(|other| other == first))
}

/// Chooses how `tensor` shards each operator of a plan. Returns `None` if `tensor` has one rank, if
/// nothing is worth sharding, if some operator offers no choice, or if a conversion has too many
/// combinations.
///
/// # Errors
/// [`ShardingError`] if the plan cannot be laid out, communication cannot be priced, or no
/// combination is found.
pub fn choose(request: &ShardingRequest<'_>) -> Result<Option<OperatorSharding>, ShardingError> {
    let plan =
        Plan { layout: Layout { operators: OperatorPatterns::default(), ..request.plan.layout.clone() }, ..request.plan.clone() };
    let choices = Choices::new(request.model, request.name, &plan)?;
    let has_choices = |(operator, choices): (&Operator, &Vec<_>)| operator.pass != Pass::Forward || !choices.is_empty();
    if choices.ranks() == 1 || !choices.graph.operators.iter().zip(&choices.of_operator).all(has_choices) {
        return Ok(None);
    }
    if costs::largest_table(&choices) > LARGEST_CONVERSION {
        return Ok(None);
    }
    let mesh = plan.mesh()?;
    let context = PricingContext {
        mesh: &mesh,
        precision: plan.storage(),
        topology: request.topology,
        costs: request.costs,
        oversubscription: request.oversubscription,
    };
    let costs = Costs::new(&choices, &plan, &context)?;
    let mut best: Option<(Picoseconds, Solution)> = None;
    for thousandths in REDUCTION_PRICES {
        let solution = solve(&costs.problem(thousandths), LARGEST_TABLE)?;
        let total = costs.total(&solution.values);
        let hidden = if plan.overlap.gradients { total.backward } else { Picoseconds::ZERO };
        let time = total.work + total.reduction.saturating_sub(hidden);
        if best.as_ref().is_none_or(|(least, _)| time < *least) {
            best = Some((time, solution));
        }
    }
    let is_whole = |(id, value): (&OperatorId, &usize)| choices.of_operator[id.0][*value].part == ShardedPart::Whole;
    let best = best.filter(|(_, solution)| !costs.operators.iter().zip(&solution.values).all(is_whole));
    Ok(best.map(|(time, solution)| OperatorSharding {
        operators: patterns::patterns(&choices, &costs.operators, &solution.values),
        seconds: time.into(),
        method: solution.method,
        count: costs.operators.len(),
    }))
}
