//! A choice for each of several variables such that a sum of costs is least, where each cost depends on few of them.
//!
//! The placement of operators is such a problem: a variable is an operator, a cost what it takes itself or what the exchange of a tensor between those
//! that make and read it takes. It must not know what variables stand for.

use foretell_units::{Bytes, Picoseconds};
use std::ops::Add;
use thiserror::Error;

/// What is to be little: time, and where that is the same, memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cost {
    /// Time.
    pub time: Picoseconds,
    /// Memory.
    pub memory: Bytes,
}

impl Cost {
    /// Nothing.
    pub const ZERO: Self = Self { time: Picoseconds::ZERO, memory: Bytes::ZERO };

    /// Of what cannot be: more than any sum of what can.
    pub const IMPOSSIBLE: Self = Self { time: Picoseconds(u64::MAX), memory: Bytes::ZERO };

    /// Whether it can be.
    pub fn is_possible(self) -> bool {
        self.time.0 < u64::MAX
    }
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            // Saturates, so that what is impossible stays so.
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
    /// One for each combination of their values, the last variable's varying fastest.
    pub costs: Vec<Cost>,
}

impl Factor {
    /// A factor whose cost is asked for every combination of values.
    pub fn tabulate(sizes: &[usize], scope: Vec<usize>, mut cost: impl FnMut(&[usize]) -> Cost) -> Self {
        let own: Vec<usize> = scope.iter().map(|&variable| sizes[variable]).collect();
        let costs = combinations(&own).map(|values| cost(&values)).collect();
        Self { scope, costs }
    }

    /// The cost of an assignment of all variables.
    pub fn cost(&self, sizes: &[usize], assignment: &[usize]) -> Cost {
        let index = self.scope.iter().fold(0, |index, &variable| index * sizes[variable] + assignment[variable]);
        self.costs[index]
    }
}

/// Variables with a number of values each, and costs that add up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problem {
    /// How many values each variable has: at least one.
    pub sizes: Vec<usize>,
    /// The costs.
    pub factors: Vec<Factor>,
}

/// By which way a solution was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Variables were eliminated one by one, all of them.
    Elimination,
    /// What could not be eliminated was solved as an integer program.
    IntegerProgram,
}

/// The least cost, and values that have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Solution {
    /// The value of each variable.
    pub values: Vec<usize>,
    /// The cost.
    pub cost: Cost,
    /// How it was found.
    pub method: Method,
}

/// Why there is no solution.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SolveError {
    /// No combination of values can be.
    #[error("no combination of choices can be laid out")]
    Impossible,
    /// The integer program was not solved.
    #[error("the integer program of what could not be eliminated was not solved: {0}")]
    IntegerProgram(String),
}

impl Problem {
    /// The cost of an assignment.
    pub fn cost(&self, assignment: &[usize]) -> Cost {
        self.factors.iter().map(|factor| factor.cost(&self.sizes, assignment)).sum()
    }
}

/// Every combination of values of variables of these sizes, the last varying fastest; one, of no values, where there are no variables.
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
