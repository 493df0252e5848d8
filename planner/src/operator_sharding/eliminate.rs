//! Exact solution by eliminating variables one by one (nonserial dynamic programming; Bertelè and Brioschi 1972).
//!
//! To eliminate a variable is to add up the costs that depend on it and to keep, for each combination of values of its neighbours, the value that is
//! best. One with two neighbours between which a series of operators lies is contracted to one cost between these, and costs between the same two add
//! up: on a series-parallel graph that contracts series and parallels until nothing is left, with tables over no more than three variables. On
//! others tables may grow; where the next would be beyond a limit what is left is solved as an integer program ([`super::integer`]).

use super::integer;
use super::problem::{Cost, Factor, Method, Problem, Solution, SolveError, combinations};

/// The largest table, in costs: 64 MiB of them.
pub(super) const LARGEST_TABLE: usize = 1 << 22;

/// A variable that was eliminated, with its best value for each combination of its neighbours' values.
struct Eliminated {
    variable: usize,
    neighbours: Vec<usize>,
    best: Vec<usize>,
}

/// The costs that are left, and which of them depend on which variable that is left.
struct Left<'a> {
    sizes: &'a [usize],
    /// By number; none where it was added up.
    factors: Vec<Option<Factor>>,
    /// By variable the numbers of the costs that depend on it, ascending.
    of_variable: Vec<Vec<usize>>,
    /// By variable the size of the table that its elimination makes; none where it was eliminated.
    tables: Vec<Option<usize>>,
}

/// Finds the least cost.
///
/// # Errors
/// [`SolveError`] where nothing can be, or the integer program fails.
pub fn solve(problem: &Problem, largest_table: usize) -> Result<Solution, SolveError> {
    let sizes = &problem.sizes;
    let mut left = Left::new(problem);
    let mut eliminated: Vec<Eliminated> = Vec::new();
    while let Some(variable) = left.next(largest_table) {
        eliminated.push(left.eliminate(variable));
    }
    let mut values = vec![0; sizes.len()];
    let remaining: Vec<usize> = (0..sizes.len()).filter(|&variable| left.tables[variable].is_some()).collect();
    let method = if remaining.is_empty() {
        Method::Elimination
    } else {
        let factors: Vec<Factor> = left.factors.into_iter().flatten().collect();
        integer::solve(sizes, &factors, &remaining, &mut values)?;
        Method::IntegerProgram
    };
    for Eliminated { variable, neighbours, best } in eliminated.iter().rev() {
        let index = neighbours.iter().fold(0, |index, &neighbour| index * sizes[neighbour] + values[neighbour]);
        values[*variable] = best[index];
    }
    let cost = problem.cost(&values);
    if cost.is_possible() { Ok(Solution { values, cost, method }) } else { Err(SolveError::Impossible) }
}

impl<'a> Left<'a> {
    fn new(problem: &'a Problem) -> Self {
        let sizes = &problem.sizes;
        let mut left = Self {
            sizes,
            factors: problem.factors.iter().cloned().map(Some).collect(),
            of_variable: vec![Vec::new(); sizes.len()],
            tables: vec![None; sizes.len()],
        };
        for (number, factor) in problem.factors.iter().enumerate() {
            factor.scope.iter().for_each(|&variable| left.of_variable[variable].push(number));
        }
        (0..sizes.len()).for_each(|variable| left.measure(variable));
        left
    }

    /// The variables with which costs are shared, ascending.
    fn neighbours(&self, variable: usize) -> Vec<usize> {
        let factors = self.of_variable[variable].iter().filter_map(|&number| self.factors[number].as_ref());
        let others = factors.flat_map(|factor| factor.scope.iter().copied()).filter(|&one| one != variable);
        let mut neighbours: Vec<usize> = others.collect();
        neighbours.sort_unstable();
        neighbours.dedup();
        neighbours
    }

    fn measure(&mut self, variable: usize) {
        let neighbours = self.neighbours(variable);
        let table = neighbours.iter().try_fold(self.sizes[variable], |product, &one| product.checked_mul(self.sizes[one]));
        self.tables[variable] = Some(table.unwrap_or(usize::MAX));
    }

    /// The variable whose elimination makes the smallest table, of equals the first; `None` where none is left or the table would be too large.
    fn next(&self, largest_table: usize) -> Option<usize> {
        let tables = self.tables.iter().enumerate().filter_map(|(variable, table)| table.map(|table| (table, variable)));
        tables.min().filter(|&(table, _)| table <= largest_table).map(|(_, variable)| variable)
    }

    /// Adds up what depends on a variable, and keeps the least.
    fn eliminate(&mut self, variable: usize) -> Eliminated {
        let neighbours = self.neighbours(variable);
        let numbers = std::mem::take(&mut self.of_variable[variable]);
        let own: Vec<Factor> = numbers.iter().filter_map(|&number| self.factors[number].take()).collect();
        let (factor, best) = eliminate(self.sizes, variable, &neighbours, &own);
        self.tables[variable] = None;
        let number = self.factors.len();
        self.factors.push(Some(factor));
        for &neighbour in &neighbours {
            self.of_variable[neighbour].retain(|number| !numbers.contains(number));
            self.of_variable[neighbour].push(number);
        }
        neighbours.iter().for_each(|&neighbour| self.measure(neighbour));
        Eliminated { variable, neighbours, best }
    }
}

/// The least cost over a variable's values for each combination of its neighbours', and the values.
fn eliminate(sizes: &[usize], variable: usize, neighbours: &[usize], factors: &[Factor]) -> (Factor, Vec<usize>) {
    // How far apart in a factor's list the costs of a variable's next values are.
    let stride = |factor: &Factor, wanted: usize| {
        let place = factor.scope.iter().position(|&one| one == wanted);
        place.map_or(0, |place| factor.scope[place + 1..].iter().map(|&one| sizes[one]).product())
    };
    let strides: Vec<(usize, Vec<usize>)> = factors
        .iter()
        .map(|factor| (stride(factor, variable), neighbours.iter().map(|&one| stride(factor, one)).collect()))
        .collect();
    let own_sizes: Vec<usize> = neighbours.iter().map(|&one| sizes[one]).collect();
    let mut costs = Vec::with_capacity(own_sizes.iter().product());
    let mut best = Vec::with_capacity(costs.capacity());
    for values in combinations(&own_sizes) {
        let starts: Vec<usize> =
            strides.iter().map(|(_, strides)| strides.iter().zip(&values).map(|(stride, value)| stride * value).sum()).collect();
        let cost = |value: usize| -> Cost {
            let each = factors.iter().zip(&strides).zip(&starts);
            each.map(|((factor, (stride, _)), start)| factor.costs[start + stride * value]).sum()
        };
        // Of equals the first.
        let (value, least) = (1..sizes[variable]).fold((0, cost(0)), |(value, least), other| {
            let next = cost(other);
            if next < least { (other, next) } else { (value, least) }
        });
        costs.push(least);
        best.push(value);
    }
    (Factor { scope: neighbours.to_vec(), costs }, best)
}
