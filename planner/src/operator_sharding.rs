//! How `tensor` had best share out the operators of a model that is no stack of equal blocks: one by one, exactly.
//!
//! Convolutions have most of the work and few parameters, products the parameters and little work; so the one had better share out samples and the
//! other features over the same ranks (Krizhevsky 2014). Which is better where depends on the devices, the links and the sizes, and on what lies between
//! two operators that are shared out differently. [`choose`] prices every operator in every way that the compiler can lay it out, and every conversion
//! between them by the compiler's own moves, forward and backward, and finds the cheapest of all combinations ([`solve`]): by dynamic
//! programming, or what that cannot reach as an integer program. Nothing is bounded or sampled: for the prices the answer is exact.
//!
//! What prices leave out is what runs at the same time. Reductions of gradients may run beside the backward pass; so the problem is solved for three
//! prices of them, and of the answers the one is taken that takes least time with what the backward pass can hide. The simulator has the last word:
//! whoever searches compares a choice with the compiler's usual one.

mod costs;
mod eliminate;
mod families;
mod integer;
mod patterns;
mod prices;
mod problem;
#[cfg(test)]
mod tests;
mod traffic;

pub use eliminate::solve;
pub(crate) use families::with_sharded_operators;
pub use problem::{Cost, Factor, Method, Problem, Solution, SolveError};

/// The largest table that placing operators makes, in costs: 64 MiB of them.
pub const LARGEST_TABLE: usize = eliminate::LARGEST_TABLE;

use costs::Costs;
use foretell_models::{Graph, Model, Operator, OperatorId, Pass, SEQUENCE};
use foretell_program::{Choices, Layout, OperatorShares, Plan, PlanError, Share};
use foretell_simulator::{CostModel, Oversubscription, SimulationError};
use foretell_topologies::Topology;
use foretell_units::{Picoseconds, Seconds};
use prices::Ground;
use thiserror::Error;

/// Thousandths of the time of a reduction that count: all, some of it and, where the backward pass hides all of them, next to nothing.
const REDUCTION_PRICES: [u64; 3] = [1000, 300, 1];

/// What is to be placed where.
#[derive(Clone, Copy, Debug)]
pub struct ShardingRequest<'a> {
    /// The model.
    pub model: &'a Model,
    /// Its name.
    pub name: &'a str,
    /// The devices.
    pub topology: &'a Topology,
    /// What things cost on them.
    pub costs: &'a CostModel,
    /// The plan but for what it says of single operators.
    pub plan: &'a Plan,
    /// Whether several ranks may share a device.
    pub oversubscription: Oversubscription,
}

/// The best placement of operators.
#[derive(Clone, Debug, PartialEq)]
pub struct OperatorSharding {
    /// What to write into the plan's `layout.operators`.
    pub operators: OperatorShares,
    /// About how long a step takes: work and what is waited for, one after the other.
    pub seconds: Seconds,
    /// How it was found.
    pub method: Method,
    /// Operators that were placed.
    pub count: usize,
}

/// Why operators were not placed.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ShardingError {
    /// The plan cannot be laid out, whatever it says of single operators.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Exchanges could not be priced.
    #[error(transparent)]
    Simulation(#[from] SimulationError),
    /// No combination was found.
    #[error(transparent)]
    Solve(#[from] SolveError),
}

/// Whether operators of a model are worth placing one by one: it is not made of equal blocks one after the other, and of no sequences, for whose
/// operators the compiler's rule is the known best.
pub fn applies(graph: &Graph) -> bool {
    let has_sequence = graph.operators.iter().any(|operator| operator.find_loop(SEQUENCE).is_some());
    !has_sequence && !is_stack_of_equal_blocks(graph)
}

/// Whether all blocks that are repeated are alike: the same operators with the same loops.
pub fn is_stack_of_equal_blocks(graph: &Graph) -> bool {
    let of_block = |block: usize| {
        let own = graph.operators.iter().filter(move |operator| operator.block == block);
        own.map(|operator| (std::mem::discriminant(&operator.kind), &operator.loops)).collect::<Vec<_>>()
    };
    let mut repeated = (0..graph.blocks.len()).filter(|&block| graph.blocks[block].recomputable).map(of_block);
    let first = repeated.next();
    first.is_some_and(|first| repeated.all(|other| other == first))
}

/// Places the operators of a model under a plan. `None` where `tensor` has one rank, where nothing is worth sharing out over it, and where an operator's
/// loop is not the plan's to choose.
///
/// # Errors
/// [`ShardingError`] where the plan cannot be laid out, exchanges cannot be priced, or no combination is found.
pub fn choose(request: &ShardingRequest<'_>) -> Result<Option<OperatorSharding>, ShardingError> {
    let plan =
        Plan { layout: Layout { operators: OperatorShares::default(), ..request.plan.layout.clone() }, ..request.plan.clone() };
    let choices = Choices::new(request.model, request.name, &plan)?;
    let has_choices = |(operator, choices): (&Operator, &Vec<_>)| operator.pass != Pass::Forward || !choices.is_empty();
    if choices.ranks() == 1 || !choices.graph.operators.iter().zip(&choices.of_operator).all(has_choices) {
        return Ok(None);
    }
    let mesh = plan.mesh()?;
    let ground = Ground {
        mesh: &mesh,
        precision: plan.storage(),
        topology: request.topology,
        costs: request.costs,
        oversubscription: request.oversubscription,
    };
    let costs = Costs::new(&choices, &plan, &ground)?;
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
    let is_whole = |(id, value): (&OperatorId, &usize)| choices.of_operator[id.0][*value].share == Share::Whole;
    let best = best.filter(|(_, solution)| !costs.operators.iter().zip(&solution.values).all(is_whole));
    Ok(best.map(|(time, solution)| OperatorSharding {
        operators: patterns::patterns(&choices, &costs.operators, &solution.values),
        seconds: time.into(),
        method: solution.method,
        count: costs.operators.len(),
    }))
}
