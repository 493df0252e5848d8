//! Exact solution as an integer program, for variables with too many neighbours to eliminate.
//!
//! The program has a binary variable for each value of each variable, and a continuous one between
//! 0 and 1 for each combination of a factor's values, constrained to agree with the binary ones.
//! This is the form of Alpa's sharding problem (Zheng et al. 2022). Memory does not break ties
//! here.

use super::problem::{Factor, SolveError, combinations};
use microlp::{ComparisonOp, OptimizationDirection, Problem as LinearProgram, Variable};

/// Writes the best values of the `remaining` variables into `values`.
pub(super) fn solve(sizes: &[usize], factors: &[Factor], remaining: &[usize], values: &mut [usize]) -> Result<(), SolveError> {
    let mut problem = LinearProgram::new(OptimizationDirection::Minimize);
    // The solver's tolerances are absolute, so times are scaled relative to the largest.
    let possible = factors.iter().flat_map(|factor| &factor.costs).filter(|cost| cost.is_possible());
    let unit = possible.map(|cost| cost.time.0).max().unwrap_or(1).max(1) as f64 / 1e4;
    let mut of_value: Vec<Vec<Variable>> = vec![Vec::new(); sizes.len()];
    for &variable in remaining {
        of_value[variable] = (0..sizes[variable]).map(|_| problem.add_binary_var(0.0)).collect();
        let all: Vec<(Variable, f64)> = of_value[variable].iter().map(|&value| (value, 1.0)).collect();
        problem.add_constraint(&all, ComparisonOp::Eq, 1.0);
    }
    for factor in factors.iter().filter(|factor| !factor.scope.is_empty()) {
        let own: Vec<usize> = factor.scope.iter().map(|&scoped| sizes[scoped]).collect();
        let combinations: Vec<(Vec<usize>, Variable)> = combinations(&own)
            .zip(&factor.costs)
            .filter(|(_, cost)| cost.is_possible())
            .map(|(values, cost)| (values, problem.add_var(cost.time.0 as f64 / unit, (0.0, 1.0))))
            .collect();
        for (place, &variable) in factor.scope.iter().enumerate() {
            for (value, &chosen) in of_value[variable].iter().enumerate() {
                let with_value =
                    combinations.iter().filter(|(values, _)| values[place] == value).map(|&(_, combination)| (combination, 1.0));
                let terms: Vec<(Variable, f64)> = with_value.chain([(chosen, -1.0)]).collect();
                problem.add_constraint(&terms, ComparisonOp::Eq, 0.0);
            }
        }
    }
    let outcome = problem.solve().map_err(|error| match error {
        microlp::Error::Infeasible => SolveError::Impossible,
        other => SolveError::IntegerProgram(other.to_string()),
    })?;
    let solution = outcome.into_solution().map_err(|_| SolveError::IntegerProgram("the solver gave up".into()))?;
    for &variable in remaining {
        let chosen = of_value[variable].iter().position(|&value| solution.var_value(value) > 0.5);
        values[variable] = chosen.ok_or_else(|| SolveError::IntegerProgram("its values are not whole".into()))?;
    }
    Ok(())
}
