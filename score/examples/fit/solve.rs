//! The most probable values, and what they foretell of rows that are left out.

use crate::cases::{Case, Quantity};
use crate::linear::{HUBER, Linear, NOISE, folds, normal, robust, solve};
use crate::parameters::{Owner, Parameter, moved, parameters};
use foretell_score::Run;
use foretell_simulator::gpu::Profiles;
use rayon::prelude::*;
use std::collections::BTreeMap;

/// What was found.
pub struct Fit {
    pub parameters: Vec<Parameter>,
    /// Of each parameter.
    pub values: Vec<f64>,
    /// Of each case that was measured, by its place: the logarithm of predicted over measured.
    pub residuals: BTreeMap<usize, f64>,
    /// The same where the case alone is left out of the fit: what to expect of other rows of the same sources.
    pub without_row: BTreeMap<usize, f64>,
    /// The same where the case's group is.
    pub left_out: BTreeMap<usize, f64>,
    /// The same where its whole source is.
    pub without_source: BTreeMap<usize, f64>,
    /// Of each parameter the logarithm of what it was moved by.
    pub offsets: Vec<f64>,
    /// For each parameter the rows that it moves, by their places among those that were measured, and by how much for each e-fold.
    pub jacobian: Vec<Vec<(usize, f64)>>,
}

/// Rows of a group tell less than as many of different groups: they count as this power of their number.
const GROUP_POWER: f64 = 0.5;
/// The same for rows of a source: the score is a mean over sources.
const SOURCE_POWER: f64 = 0.9;
const ITERATIONS: usize = 5;
/// Parts that rows or groups are cut into, each of which is left out once.
const FOLDS: usize = 20;
/// How far a logarithm is moved to find a derivative.
const DIFFERENCE: f64 = 0.05;

/// Fits the values that determine a quantity.
pub fn fit(cases: &[Case], quantity: Quantity, profiles: &Profiles) -> Result<Fit, Box<dyn std::error::Error>> {
    let measured: Vec<(usize, f64)> =
        cases.iter().enumerate().filter_map(|(place, case)| Some((place, case.measured(quantity)?))).collect();
    let parameters = parameters(cases, quantity, profiles);
    let weights = weights(cases, &measured);
    // Rows of one kind are foretold once. Each row's kind, and each kind's first case.
    let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
    let mut firsts: Vec<usize> = Vec::new();
    let mut kinds: Vec<usize> = Vec::new();
    for (place, _) in &measured {
        // Memory figures are of several kinds.
        let key = if quantity == Quantity::Step { cases[*place].kind.as_str() } else { cases[*place].row.row_id.as_str() };
        kinds.push(*numbers.entry(key).or_insert_with(|| {
            firsts.push(*place);
            firsts.len() - 1
        }));
    }
    let mut runs: Vec<Run> = firsts.iter().map(|place| cases[*place].run.clone()).collect();
    let predict = |kind: usize, run: &Run| cases[firsts[kind]].predicted(run, quantity).map_or(0.0, f64::ln);
    let all = |runs: &[Run]| -> Vec<f64> { (0..runs.len()).into_par_iter().map(|kind| predict(kind, &runs[kind])).collect() };
    let of_rows = |predicted: &[f64]| -> Vec<f64> {
        measured.iter().zip(&kinds).map(|((_, measured), kind)| predicted[*kind] - measured.ln()).collect()
    };
    let set = |runs: &mut [Run], offsets: &[f64]| {
        for (place, parameter) in parameters.iter().enumerate() {
            let offset = moved(&parameters, offsets, place);
            for run in runs.iter_mut().filter(|run| parameter.concerns(run)) {
                parameter.set(run, (parameter.prior * offset.exp()).min(parameter.most));
            }
        }
    };
    let loss = |residuals: &[f64], offsets: &[f64]| {
        let row = |(residual, weight): (&f64, &f64)| {
            let scaled = residual / (HUBER * NOISE);
            weight * HUBER * HUBER * ((1.0 + scaled * scaled).sqrt() - 1.0)
        };
        let prior = |(parameter, offset): (&Parameter, &f64)| 0.5 * (offset / parameter.spread).powi(2);
        residuals.iter().zip(&weights).map(row).sum::<f64>() + parameters.iter().zip(offsets).map(prior).sum::<f64>()
    };
    let mut offsets = vec![0.0; parameters.len()];
    let mut predicted = all(&runs);
    let mut residuals = of_rows(&predicted);
    let mut best = loss(&residuals, &offsets);
    eprintln!("{quantity:?}: {} values, {} rows of {} kinds, loss {best:.2}", parameters.len(), measured.len(), firsts.len());
    let mut system = None;
    let mut slopes: Vec<Vec<(usize, f64)>> = Vec::new();
    for iteration in 0..=ITERATIONS {
        // Found once more when the first steps are made, and of what matters alone.
        if iteration <= 1 || iteration == 3 {
            slopes = slopes_of(&parameters, &runs, &predicted, &offsets, &slopes, &predict);
        }
        let jacobian = by_parameter(&slopes, &kinds, parameters.len());
        let row_weights = robust(&residuals, &weights);
        if iteration == ITERATIONS {
            system = Some(jacobian);
            break;
        }
        let factor = normal(&jacobian, &row_weights, &parameters)?;
        let jacobian = system.insert(jacobian);
        let mut gradient: Vec<f64> =
            parameters.iter().zip(&offsets).map(|(one, offset)| offset / (one.spread * one.spread)).collect();
        for (place, column) in jacobian.iter().enumerate() {
            gradient[place] += column.iter().map(|(row, slope)| row_weights[*row] * slope * residuals[*row]).sum::<f64>();
        }
        let step = solve(&factor, &gradient);
        let mut share = 1.0;
        let improved = loop {
            let moved_by = |((parameter, offset), step): ((&Parameter, &f64), &f64)| {
                let tried = (offset - share * step).clamp(offset - 0.7, offset + 0.7);
                tried.min((parameter.most / parameter.prior).ln())
            };
            let tried: Vec<f64> = parameters.iter().zip(&offsets).zip(&step).map(moved_by).collect();
            let mut moved = runs.clone();
            set(&mut moved, &tried);
            let found = all(&moved);
            let errors = of_rows(&found);
            let value = loss(&errors, &tried);
            if value < best {
                let gain = best - value;
                (runs, predicted, residuals, offsets, best) = (moved, found, errors, tried, value);
                break gain > 0.002 * best;
            }
            share *= 0.4;
            if share < 0.05 {
                break false;
            }
        };
        eprintln!("  {iteration}: loss {best:.2}, step {share:.2}");
        if !improved {
            break;
        }
    }
    let jacobian = system.unwrap_or_default();
    let linear =
        Linear { parameters: &parameters, jacobian: &jacobian, weights: &weights, residuals: &residuals, offsets: &offsets };
    let without = |folds: Vec<usize>| -> Result<BTreeMap<usize, f64>, Box<dyn std::error::Error>> {
        let found = linear.left_out(&folds)?;
        Ok(measured.iter().zip(found).map(|((place, _), residual)| (*place, residual)).collect())
    };
    let named = |by: &dyn Fn(&Case) -> String| measured.iter().map(|(place, _)| by(&cases[*place])).collect::<Vec<_>>();
    // Names begin with the source, so that every fold has as much of each.
    let left_out = without(folds(&named(&|case| case.group.clone()), FOLDS))?;
    let without_row = without(folds(&named(&|case| format!("{} {}", case.row.table, case.row.row_id)), FOLDS))?;
    let without_source = without(folds(&named(&|case| case.row.table.clone()), usize::MAX))?;
    let value = |(place, parameter): (usize, &Parameter)| {
        (parameter.prior * moved(&parameters, &offsets, place).exp()).min(parameter.most)
    };
    let values = parameters.iter().enumerate().map(value).collect();
    let residuals = measured.iter().zip(residuals).map(|((place, _), residual)| (*place, residual)).collect();
    Ok(Fit { parameters, values, residuals, without_row, left_out, without_source, offsets, jacobian })
}

fn weights(cases: &[Case], measured: &[(usize, f64)]) -> Vec<f64> {
    let mut of_group: BTreeMap<&str, f64> = BTreeMap::new();
    let mut of_source: BTreeMap<&str, f64> = BTreeMap::new();
    for (place, _) in measured {
        *of_group.entry(&cases[*place].group).or_default() += 1.0;
    }
    let group = |place: usize| of_group[cases[place].group.as_str()].powf(GROUP_POWER - 1.0);
    for (place, _) in measured {
        *of_source.entry(&cases[*place].row.table).or_default() += group(*place);
    }
    // A source of ten rows of different groups counts as ten.
    let source = |place: usize| (of_source[cases[place].row.table.as_str()] / 10.0).powf(SOURCE_POWER - 1.0);
    measured.iter().map(|(place, _)| group(*place) * source(*place)).collect()
}

/// A slope below this is not found again.
const NEGLIGIBLE: f64 = 0.015;

/// For each kind what moves its prediction, and by how much for each e-fold. Values of one effect are moved once.
fn slopes_of(
    parameters: &[Parameter],
    runs: &[Run],
    predicted: &[f64],
    offsets: &[f64],
    before: &[Vec<(usize, f64)>],
    predict: &(dyn Fn(usize, &Run) -> f64 + Sync),
) -> Vec<Vec<(usize, f64)>> {
    let of_kind = |(kind, run): (usize, &Run)| {
        let known: BTreeMap<usize, f64> = before.get(kind).into_iter().flatten().copied().collect();
        let mut by_effect: BTreeMap<&str, f64> = BTreeMap::new();
        let mut found = Vec::new();
        for (place, parameter) in parameters.iter().enumerate() {
            if !parameter.concerns(run) {
                continue;
            }
            let slope = by_effect.get(parameter.effect()).copied();
            let is_common = matches!(parameter.owner, Owner::Family(_) | Owner::Branch(_) | Owner::Generation(_));
            let slope = if is_common { Some(slope.unwrap_or(0.0)) } else { slope };
            let slope =
                slope.or_else(|| known.get(&place).copied().filter(|slope| slope.abs() < NEGLIGIBLE)).unwrap_or_else(|| {
                    let mut other = run.clone();
                    let offset = moved(parameters, offsets, place) + DIFFERENCE;
                    parameter.set(&mut other, parameter.prior * offset.exp());
                    (predict(kind, &other) - predicted[kind]) / DIFFERENCE
                });
            by_effect.insert(parameter.effect(), slope);
            found.push((place, slope));
        }
        found
    };
    runs.par_iter().enumerate().map(of_kind).collect()
}

/// For each parameter the rows that it moves, and by how much.
fn by_parameter(slopes: &[Vec<(usize, f64)>], kinds: &[usize], parameters: usize) -> Vec<Vec<(usize, f64)>> {
    let mut jacobian = vec![Vec::new(); parameters];
    for (row, kind) in kinds.iter().enumerate() {
        for (place, slope) in slopes[*kind].iter().filter(|(_, slope)| slope.abs() > 1e-7) {
            jacobian[*place].push((row, *slope));
        }
    }
    jacobian
}
