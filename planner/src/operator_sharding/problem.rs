//! The problem of choosing a value for each of several variables so that a sum of costs is minimal.
//! Each cost depends on few variables..
//!
//! Sharding operators is such a problem. A variable is an operator, its value a sharding. A cost is
//! that of the operator itself, or of converting a tensor between the operators that make and read
//! it. This module does not know operators.

use foretell_units::{Bytes, Picoseconds};
use miette::Diagnostic;
use std::ops::Add;
use thiserror::Error;

/// A quantity to minimise: time and, among equal times, memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cost {
    /// Time.
    pub time: Picoseconds,
    /// Memory.
    pub memory: Bytes,
}

impl Cost {
    /// No cost.
    pub const ZERO: Self = Self { time: Picoseconds::ZERO, memory: Bytes::ZERO };

    /// The cost of an impossible combination, greater than any sum of possible ones.
    pub const IMPOSSIBLE: Self = Self { time: Picoseconds(u64::MAX), memory: Bytes::ZERO };

    /// Returns `true` for every cost but [`Self::IMPOSSIBLE`].
    pub fn is_possible(self) -> bool {
        self.time.0 < u64::MAX
    }
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            // Picoseconds saturate, so an impossible cost stays impossible.
            time: self.time + other.time,
            memory: Bytes::new(self.memory.count().saturating_add(other.memory.count())),
        }
    }
}

impl std::iter::Sum for Cost {
    fn sum<Costs: Iterator<Item = Self>>(costs: Costs) -> Self {
        costs.fold(Self::ZERO, Add::add)
    }
}

/// A cost that depends on some variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Factor {
    /// The variables, each once.
    pub scope: Vec<usize>,
    /// The cost of each combination of their values. The last variable's value varies fastest.
    pub costs: Vec<Cost>,
}

impl Factor {
    /// Creates a factor by calling `cost` with every combination of values. `sizes` has the number
    /// of values of every variable.
    pub fn tabulate(sizes: &[usize], scope: Vec<usize>, mut cost: impl FnMut(&[usize]) -> Cost) -> Self {
        let own: Vec<usize> = scope.iter().map(|&variable| sizes[variable]).collect();
        let costs = combinations(&own).map(|values| cost(&values)).collect();
        Self { scope, costs }
    }

    /// Returns the cost of an assignment of values to all variables.
    pub fn cost(&self, sizes: &[usize], assignment: &[usize]) -> Cost {
        let index = self.scope.iter().fold(0, |index, &variable| index * sizes[variable] + assignment[variable]);
        self.costs[index]
    }
}

/// Variables, and costs that add up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problem {
    /// Number of values of each variable; at least 1.
    pub sizes: Vec<usize>,
    /// The costs.
    pub factors: Vec<Factor>,
}

impl Problem {
    /// Returns the cost of an assignment of values to all variables.
    pub fn cost(&self, assignment: &[usize]) -> Cost {
        self.factors.iter().map(|factor| factor.cost(&self.sizes, assignment)).sum()
    }
}

/// How a solution was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// All variables were eliminated one by one.
    Elimination,
    /// Variables whose elimination needs too large tables were left to an integer program.
    IntegerProgram,
}

/// An assignment with the least cost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Solution {
    /// Value of each variable.
    pub values: Vec<usize>,
    /// Cost of the assignment.
    pub cost: Cost,
    /// How it was found.
    pub method: Method,
}

/// Why a problem has no solution.
#[derive(Clone, Debug, PartialEq, Eq, Error, Diagnostic)]
pub enum SolveError {
    /// Every combination of values is impossible.
    #[error("no combination of operator shardings can be laid out")]
    #[diagnostic(code(operator_sharding::impossible))]
    Impossible,
    /// The integer program was not solved. Contains the solver's message.
    #[error("the integer program of operator shardings was not solved: {0}")]
    #[diagnostic(code(operator_sharding::integer_program))]
    IntegerProgram(String),
}

/// Returns every combination of values of variables with these numbers of values, the last varying
/// fastest. Without variables there is one combination, of no values.
pub(super) fn combinations(sizes: &[usize]) -> impl Iterator<Item = Vec<usize>> {
    let count: usize = sizes.iter().product();
    (0..count).map(|number| {
        let mut rest = number;
        let mut values: Vec<usize> = sizes
            .iter()
            .rev()
            .map(|&size| {
                let value = rest % size;
                rest /= size;
                value
            })
            .collect();
        values.reverse();
        values
    })
}
