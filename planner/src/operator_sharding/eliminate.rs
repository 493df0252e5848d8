//! Exact solution by eliminating variables one by one: nonserial dynamic programming (Bertelè and
//! Brioschi 1972).
//!
//! Eliminating a variable adds up the costs that depend on it and keeps its best value for each
//! combination of its neighbours' values. What remains is one cost on the neighbours. On a
//! series-parallel graph this contracts series and parallel edges until nothing is left, with
//! tables over at most three variables. On other graphs tables may grow. If the next one would
//! exceed a limit, the remaining variables are solved as an integer program ([`super::integer`]).

use super::integer;
use super::problem::{Cost, Factor, Method, Problem, Solution, SolveError, combinations};

/// The most costs in a table when operators are sharded: 64 MiB of 16 bytes each.
pub const LARGEST_TABLE: usize = 1 << 22;

/// A variable that was eliminated.
struct Eliminated {
    variable: usize,
    neighbours: Vec<usize>,
    /// Its best value for each combination of its neighbours' values.
    best: Vec<usize>,
}

/// The variables and costs that remain after some eliminations.
struct Remaining<'a> {
    sizes: &'a [usize],
    /// Indexed by factor number; `None` for a factor that was added into another.
    factors: Vec<Option<Factor>>,
    /// By variable, the numbers of the factors that depend on it, ascending.
    factors_of: Vec<Vec<usize>>,
    /// By variable, the size of the table that its elimination makes; `None` for an eliminated
    /// variable.
    tables: Vec<Option<usize>>,
}

/// Finds an assignment with the least cost. Variables whose elimination would make a table of more
/// than `largest_table` costs are left to an integer program, which does not minimise memory.
///
/// # Errors
/// [`SolveError`] if every assignment is impossible, or the integer program fails.
pub fn solve(problem: &Problem, largest_table: usize) -> Result<Solution, SolveError> {
    let sizes = &problem.sizes;
    let mut remaining = Remaining::new(problem);
    let mut eliminated: Vec<Eliminated> = Vec::new();
    while let Some(variable) = remaining.next(largest_table) {
        eliminated.push(remaining.eliminate(variable));
    }
    let mut values = vec![0; sizes.len()];
    let variables: Vec<usize> = (0..sizes.len()).filter(|&variable| remaining.tables[variable].is_some()).collect();
    let method = if variables.is_empty() {
        Method::Elimination
    } else {
        let factors: Vec<Factor> = remaining.factors.into_iter().flatten().collect();
        integer::solve(sizes, &factors, &variables, &mut values)?;
        Method::IntegerProgram
    };
    for Eliminated { variable, neighbours, best } in eliminated.iter().rev() {
        let index = neighbours.iter().fold(0, |index, &neighbour| index * sizes[neighbour] + values[neighbour]);
        values[*variable] = best[index];
    }
    let cost = problem.cost(&values);
    if cost.is_possible() { Ok(Solution { values, cost, method }) } else { Err(SolveError::Impossible) }
}

impl<'a> Remaining<'a> {
    fn new(problem: &'a Problem) -> Self {
        let sizes = &problem.sizes;
        let mut remaining = Self {
            sizes,
            factors: problem.factors.iter().cloned().map(Some).collect(),
            factors_of: vec![Vec::new(); sizes.len()],
            tables: vec![None; sizes.len()],
        };
        for (number, factor) in problem.factors.iter().enumerate() {
            factor.scope.iter().for_each(|&variable| remaining.factors_of[variable].push(number));
        }
        (0..sizes.len()).for_each(|variable| remaining.measure_table(variable));
        remaining
    }

    /// Returns the variables that share a factor with `variable`, ascending.
    fn neighbours(&self, variable: usize) -> Vec<usize> {
        let factors = self.factors_of[variable].iter().filter_map(|&number| self.factors[number].as_ref());
        let others = factors.flat_map(|factor| factor.scope.iter().copied()).filter(|&factor| factor != variable);
        let mut neighbours: Vec<usize> = others.collect();
        neighbours.sort_unstable();
        neighbours.dedup();
        neighbours
    }

    fn measure_table(&mut self, variable: usize) {
        let neighbours = self.neighbours(variable);
        let table =
            neighbours.iter().try_fold(self.sizes[variable], |product, &variable| product.checked_mul(self.sizes[variable]));
        self.tables[variable] = Some(table.unwrap_or(usize::MAX));
    }

    /// Returns the variable whose elimination makes the smallest table, the first among equals.
    /// `None` if none is left or the table would be too large.
    fn next(&self, largest_table: usize) -> Option<usize> {
        let tables = self.tables.iter().enumerate().filter_map(|(variable, table)| table.map(|table| (table, variable)));
        tables.min().filter(|&(table, _)| table <= largest_table).map(|(_, variable)| variable)
    }

    fn eliminate(&mut self, variable: usize) -> Eliminated {
        let neighbours = self.neighbours(variable);
        let numbers = std::mem::take(&mut self.factors_of[variable]);
        let own: Vec<Factor> = numbers.iter().filter_map(|&number| self.factors[number].take()).collect();
        let (factor, best) = eliminate(self.sizes, variable, &neighbours, &own);
        self.tables[variable] = None;
        let number = self.factors.len();
        self.factors.push(Some(factor));
        for &neighbour in &neighbours {
            self.factors_of[neighbour].retain(|number| !numbers.contains(number));
            self.factors_of[neighbour].push(number);
        }
        neighbours.iter().for_each(|&neighbour| self.measure_table(neighbour));
        Eliminated { variable, neighbours, best }
    }
}

/// Returns the least cost over a variable's values for each combination of its neighbours' values,
/// and the values with that cost.
fn eliminate(sizes: &[usize], variable: usize, neighbours: &[usize], factors: &[Factor]) -> (Factor, Vec<usize>) {
    // The stride of a variable in a factor's costs: the distance between the costs of two
    // successive values. 0 if the factor does not depend on the variable.
    let stride = |factor: &Factor, wanted: usize| {
        let place = factor.scope.iter().position(|&variable| variable == wanted);
        place.map_or(0, |place| factor.scope[place + 1..].iter().map(|&variable| sizes[variable]).product())
    };
    let strides: Vec<(usize, Vec<usize>)> = factors
        .iter()
        .map(|factor| (stride(factor, variable), neighbours.iter().map(|&neighbour| stride(factor, neighbour)).collect()))
        .collect();
    let own_sizes: Vec<usize> = neighbours.iter().map(|&neighbour| sizes[neighbour]).collect();
    let mut costs = Vec::with_capacity(own_sizes.iter().product());
    let mut best = Vec::with_capacity(costs.capacity());
    for values in combinations(&own_sizes) {
        let starts: Vec<usize> =
            strides.iter().map(|(_, strides)| strides.iter().zip(&values).map(|(stride, value)| stride * value).sum()).collect();
        let cost = |value: usize| -> Cost {
            factors
                .iter()
                .zip(&strides)
                .zip(&starts)
                .map(|((factor, (stride, _)), start)| factor.costs[start + stride * value])
                .sum()
        };
        // Ties go to the first value.
        let (value, least) = (1..sizes[variable]).fold((0, cost(0)), |(value, least), other| {
            let next = cost(other);
            if next < least { (other, next) } else { (value, least) }
        });
        costs.push(least);
        best.push(value);
    }
    (Factor { scope: neighbours.to_vec(), costs }, best)
}
