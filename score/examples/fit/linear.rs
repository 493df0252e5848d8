//! The linearised fit: logarithms of predictions move by their slopes, so that fitting without some of the rows takes no simulation.

use crate::cases::Case;
use crate::parameters::Parameter;
use crate::solve::Fit;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// The standard deviation of a row's logarithmic residual: noise and what is not modelled.
pub const NOISE: f64 = 0.015;
/// Residuals beyond so many of those count by their magnitude, not its square.
pub const HUBER: f64 = 0.7;

/// Refits of what is left are taken to have settled when no residual moves by more than this.
const SETTLED: f64 = 5e-4;
/// Times that rows are weighed anew in such a refit, at most.
const REFITS: usize = 40;

pub type Matrix = Vec<Vec<f64>>;

/// The Cholesky factor of the normal equations' matrix, priors included.
pub fn normal(
    jacobian: &[Vec<(usize, f64)>],
    weights: &[f64],
    parameters: &[Parameter],
) -> Result<Matrix, Box<dyn std::error::Error>> {
    let count = parameters.len();
    let mut matrix = vec![vec![0.0; count]; count];
    let mut by_row: BTreeMap<usize, Vec<(usize, f64)>> = BTreeMap::new();
    for (place, column) in jacobian.iter().enumerate() {
        for (row, slope) in column {
            by_row.entry(*row).or_default().push((place, *slope));
        }
    }
    for (row, slopes) in &by_row {
        for (one, slope) in slopes {
            for (other, other_slope) in slopes {
                matrix[*one][*other] += weights[*row] * slope * other_slope;
            }
        }
    }
    for (place, parameter) in parameters.iter().enumerate() {
        matrix[place][place] += 1.0 / (parameter.spread * parameter.spread);
    }
    cholesky(matrix)
}

fn cholesky(mut matrix: Matrix) -> Result<Matrix, Box<dyn std::error::Error>> {
    for row in 0..matrix.len() {
        for column in 0..=row {
            let sum: f64 = (0..column).map(|inner| matrix[row][inner] * matrix[column][inner]).sum();
            let rest = matrix[row][column] - sum;
            matrix[row][column] = match row == column {
                true if rest <= 0.0 => return Err("the normal equations are not positive definite".into()),
                true => rest.sqrt(),
                false => rest / matrix[column][column],
            };
        }
    }
    Ok(matrix)
}

pub fn solve(factor: &Matrix, right: &[f64]) -> Vec<f64> {
    let mut found = right.to_vec();
    for row in 0..found.len() {
        let sum: f64 = (0..row).map(|column| factor[row][column] * found[column]).sum();
        found[row] = (found[row] - sum) / factor[row][row];
    }
    for row in (0..found.len()).rev() {
        let sum: f64 = (row + 1..found.len()).map(|column| factor[column][row] * found[column]).sum();
        found[row] = (found[row] - sum) / factor[row][row];
    }
    found
}

/// The weights of squares that pull as the robust loss does at these residuals.
pub fn robust(residuals: &[f64], weights: &[f64]) -> Vec<f64> {
    let weight =
        |(residual, weight): (&f64, &f64)| weight / (NOISE * NOISE) / (1.0 + (residual / (HUBER * NOISE)).powi(2)).sqrt();
    residuals.iter().zip(weights).map(weight).collect()
}

/// The fold of each name: names are dealt out in order, as many to each of `count` folds, or each to one of its own.
pub fn folds(names: &[String], count: usize) -> Vec<usize> {
    let distinct: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    let folds: BTreeMap<&str, usize> = distinct.into_iter().enumerate().map(|(place, name)| (name, place % count)).collect();
    names.iter().map(|name| folds[name.as_str()]).collect()
}

/// A fit, linearised where it ended.
pub struct Linear<'a> {
    pub parameters: &'a [Parameter],
    /// For each parameter the rows that it moves, and by how much.
    pub jacobian: &'a [Vec<(usize, f64)>],
    /// Of rows.
    pub weights: &'a [f64],
    /// Of rows: the logarithm of predicted over measured.
    pub residuals: &'a [f64],
    /// Of parameters.
    pub offsets: &'a [f64],
}

impl Linear<'_> {
    /// The residual of each row where its fold is left out of the fit. Rows are weighed anew in each fit, since their weights know the
    /// residuals of those that are left out: with the weights of the whole fit groups seem to be foretold a tenth better than they are.
    pub fn left_out(&self, folds: &[usize]) -> Result<Vec<f64>, Box<dyn std::error::Error>> {
        // What would be left of each row if no parameter were moved.
        let mut unfitted = self.residuals.to_vec();
        for (column, offset) in self.jacobian.iter().zip(self.offsets) {
            column.iter().for_each(|(row, slope)| unfitted[*row] -= slope * offset);
        }
        let count = folds.iter().max().map_or(0, |last| last + 1);
        let refits: Result<Vec<Vec<f64>>, String> = (0..count)
            .into_par_iter()
            .map(|fold| self.without(fold, folds, &unfitted).map_err(|error| error.to_string()))
            .collect();
        let refits = refits?;
        Ok(folds.iter().enumerate().map(|(row, fold)| refits[*fold][row]).collect())
    }

    /// The residuals of all rows where one fold is left out.
    fn without(&self, fold: usize, folds: &[usize], unfitted: &[f64]) -> Result<Vec<f64>, Box<dyn std::error::Error>> {
        let weights: Vec<f64> =
            self.weights.iter().zip(folds).map(|(weight, of)| if *of == fold { 0.0 } else { *weight }).collect();
        let mut residuals = self.residuals.to_vec();
        for _ in 0..REFITS {
            let weights = robust(&residuals, &weights);
            let factor = normal(self.jacobian, &weights, self.parameters)?;
            let gradient =
                |column: &Vec<(usize, f64)>| column.iter().map(|(row, slope)| weights[*row] * slope * unfitted[*row]).sum();
            let offsets = solve(&factor, &self.jacobian.iter().map(gradient).collect::<Vec<f64>>());
            let mut found = unfitted.to_vec();
            for (column, offset) in self.jacobian.iter().zip(&offsets) {
                column.iter().for_each(|(row, slope)| found[*row] -= slope * offset);
            }
            let moved = found.iter().zip(&residuals).map(|(one, other)| (one - other).abs()).fold(0.0, f64::max);
            residuals = found;
            if moved < SETTLED {
                break;
            }
        }
        Ok(residuals)
    }
}

/// A linearised fit, for studies of what the fit assumes: its parameters, its rows, and the slopes as (row, parameter, slope).
pub fn json(cases: &[Case], fit: &Fit) -> String {
    let parameter = |(one, offset): (&Parameter, &f64)| {
        let Parameter { owner, name, spread, kin, .. } = one;
        serde_json::json!({"owner": format!("{owner:?}"), "name": name, "spread": spread, "kin": kin, "offset": offset})
    };
    let parameters: Vec<_> = fit.parameters.iter().zip(&fit.offsets).map(parameter).collect();
    let row = |(place, residual): (&usize, &f64)| {
        let case = &cases[*place];
        serde_json::json!({"id": case.row.row_id, "source": case.row.table, "group": case.group, "residual": residual})
    };
    let rows: Vec<_> = fit.residuals.iter().map(row).collect();
    let slopes = fit.jacobian.iter().enumerate();
    let slopes: Vec<(usize, usize, f64)> =
        slopes.flat_map(|(parameter, column)| column.iter().map(move |(row, slope)| (*row, parameter, *slope))).collect();
    serde_json::json!({"parameters": parameters, "rows": rows, "slopes": slopes}).to_string()
}
