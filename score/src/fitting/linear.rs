//! The linearised fit: logarithms of predictions change by their slopes, so refits without some of
//! the rows need no simulation. Also has the normal equations that every fit solves.

use super::FitError;
use super::parameters::Parameter;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// Standard deviation of a row's logarithmic residual: measurement noise and unmodelled effects.
pub const NOISE: f64 = 0.015;
/// Residuals beyond this many standard deviations have a linear instead of a quadratic loss.
pub const HUBER: f64 = 0.7;

/// A refit has converged when no residual moves by more than this.
const CONVERGED: f64 = 5e-4;
/// Largest number of reweighted iterations in a refit.
const ITERATIONS: usize = 40;

type Matrix = Vec<Vec<f64>>;

/// For each parameter, the rows that it moves, with the slope of each: the change of the logarithm
/// of the prediction per change of the logarithm of the value.
pub type Jacobian = Vec<Vec<(usize, f64)>>;

/// Returns the Cholesky factor of the matrix of the normal equations with the priors.
pub fn normal_factor(jacobian: &Jacobian, weights: &[f64], parameters: &[Parameter]) -> Result<Matrix, FitError> {
    let count = parameters.len();
    let mut matrix = vec![vec![0.0; count]; count];
    let mut by_row: BTreeMap<usize, Vec<(usize, f64)>> = BTreeMap::new();
    for (index, column) in jacobian.iter().enumerate() {
        for (row, slope) in column {
            by_row.entry(*row).or_default().push((index, *slope));
        }
    }
    for (row, slopes) in &by_row {
        for (one, slope) in slopes {
            for (other, other_slope) in slopes {
                matrix[*one][*other] += weights[*row] * slope * other_slope;
            }
        }
    }
    for (index, parameter) in parameters.iter().enumerate() {
        matrix[index][index] += parameter.precision();
    }
    cholesky(matrix)
}

fn cholesky(mut matrix: Matrix) -> Result<Matrix, FitError> {
    for row in 0..matrix.len() {
        for column in 0..=row {
            let sum: f64 = (0..column).map(|inner| matrix[row][inner] * matrix[column][inner]).sum();
            let rest = matrix[row][column] - sum;
            matrix[row][column] = match row == column {
                true if rest <= 0.0 => return Err(FitError::NotPositiveDefinite),
                true => rest.sqrt(),
                false => rest / matrix[column][column],
            };
        }
    }
    Ok(matrix)
}

/// Solves the normal equations, given their Cholesky factor.
pub fn solve(factor: &Matrix, right: &[f64]) -> Vec<f64> {
    let mut solution = right.to_vec();
    for row in 0..solution.len() {
        let sum: f64 = (0..row).map(|column| factor[row][column] * solution[column]).sum();
        solution[row] = (solution[row] - sum) / factor[row][row];
    }
    for row in (0..solution.len()).rev() {
        let sum: f64 = (row + 1..solution.len()).map(|column| factor[column][row] * solution[column]).sum();
        solution[row] = (solution[row] - sum) / factor[row][row];
    }
    solution
}

/// Returns the weights for which weighted least squares has the gradient of the robust loss at
/// `residuals`.
pub fn robust_weights(residuals: &[f64], weights: &[f64]) -> Vec<f64> {
    let weight =
        |(residual, weight): (&f64, &f64)| weight / (NOISE * NOISE) / (1.0 + (residual / (HUBER * NOISE)).powi(2)).sqrt();
    residuals.iter().zip(weights).map(weight).collect()
}

/// Returns the fold of each name. Equal names have the same fold; distinct names, in alphabetical
/// order, are distributed over `count` folds in turn.
pub fn folds(names: &[String], count: usize) -> Vec<usize> {
    let distinct: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    let folds: BTreeMap<&str, usize> = distinct.into_iter().enumerate().map(|(index, name)| (name, index % count)).collect();
    names.iter().map(|name| folds[name.as_str()]).collect()
}

/// A fit, linearised at its solution.
pub struct Linear<'a> {
    pub parameters: &'a [Parameter],
    pub jacobian: &'a Jacobian,
    /// Weight of each row.
    pub weights: &'a [f64],
    /// Logarithm of predicted over measured, of each row.
    pub residuals: &'a [f64],
    /// Logarithm of value over prior, of each parameter.
    pub offsets: &'a [f64],
}

impl Linear<'_> {
    /// Returns the residual of each row when its fold is held out.
    ///
    /// Each refit computes the robust weights again. The weights of the complete fit depend on the
    /// residuals of the held-out rows; with them, errors would be a tenth too small.
    pub fn held_out(&self, folds: &[usize]) -> Result<Vec<f64>, FitError> {
        let refits = self.refits(folds)?;
        Ok(folds.iter().enumerate().map(|(row, fold)| refits[*fold].residuals[row]).collect())
    }

    /// Returns the refit without each fold.
    pub fn refits(&self, folds: &[usize]) -> Result<Vec<Refit>, FitError> {
        // Residuals at the prior.
        let mut unfitted = self.residuals.to_vec();
        for (column, offset) in self.jacobian.iter().zip(self.offsets) {
            column.iter().for_each(|(row, slope)| unfitted[*row] -= slope * offset);
        }
        let count = folds.iter().max().map_or(0, |last| last + 1);
        (0..count).into_par_iter().map(|fold| self.without(fold, folds, &unfitted)).collect()
    }

    /// Returns the refit when one fold is held out.
    fn without(&self, held_out: usize, folds: &[usize], unfitted: &[f64]) -> Result<Refit, FitError> {
        let weights: Vec<f64> =
            self.weights.iter().zip(folds).map(|(weight, fold)| if *fold == held_out { 0.0 } else { *weight }).collect();
        let mut refit = Refit { offsets: self.offsets.to_vec(), residuals: self.residuals.to_vec() };
        for _ in 0..ITERATIONS {
            let weights = robust_weights(&refit.residuals, &weights);
            let factor = normal_factor(self.jacobian, &weights, self.parameters)?;
            let gradient =
                |column: &Vec<(usize, f64)>| column.iter().map(|(row, slope)| weights[*row] * slope * unfitted[*row]).sum();
            // `solve` returns a step against the gradient.
            refit.offsets = solve(&factor, &self.jacobian.iter().map(gradient).collect::<Vec<f64>>());
            refit.offsets.iter_mut().for_each(|offset| *offset = -*offset);
            let mut refitted = unfitted.to_vec();
            for (column, offset) in self.jacobian.iter().zip(&refit.offsets) {
                column.iter().for_each(|(row, slope)| refitted[*row] += slope * offset);
            }
            let change = refitted.iter().zip(&refit.residuals).map(|(left, right)| (left - right).abs()).fold(0.0, f64::max);
            refit.residuals = refitted;
            if change < CONVERGED {
                break;
            }
        }
        Ok(refit)
    }
}

/// A fit without some of the rows.
pub struct Refit {
    /// Logarithm of value over prior, of each parameter.
    pub offsets: Vec<f64>,
    /// Logarithm of predicted over measured, of each row.
    pub residuals: Vec<f64>,
}
