//! Finds the most probable values, and the residuals of rows that were held out of the fit.

use super::cases::{Case, Quantity};
use super::linear::{HUBER, Jacobian, Linear, NOISE, folds, normal_factor, robust_weights, solve};
use super::parameters::{Parameter, parameters, total_offset};
use super::{FitError, Progress};
use crate::run::Run;
use foretell_simulator::gpu::Profiles;
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Result of a fit. Residuals are logarithms of predicted over measured, by index of the case.
#[derive(Debug)]
pub struct Fit {
    /// The fitted values and their shared factors.
    pub(super) parameters: Vec<Parameter>,
    /// Fitted value of each parameter.
    pub values: Vec<f64>,
    /// Residual of each measured case.
    pub residuals: BTreeMap<usize, f64>,
    /// Residual of each case when its fold of rows is held out: the error to expect of other rows
    /// of the same sources.
    pub without_row: BTreeMap<usize, f64>,
    /// Residual of each case when its fold of groups is held out.
    pub without_group: BTreeMap<usize, f64>,
    /// Residual of each case when its source is held out.
    pub without_source: BTreeMap<usize, f64>,
    /// Residual of each case when all cases on its device are held out.
    pub without_device: BTreeMap<usize, f64>,
    /// Logarithm of value over prior of each parameter, without its shared factors.
    pub offsets: Vec<f64>,
    /// Slopes by parameter. Rows are indices of the measured cases.
    pub(super) jacobian: Jacobian,
}

/// The weight of a group is its number of rows to this power: rows of a group have less information
/// than as many rows of different groups.
const GROUP_POWER: f64 = 0.7;
/// The same power for a source. The score is a mean over sources.
const SOURCE_POWER: f64 = 0.9;
/// Largest number of Gauss-Newton steps.
const ITERATIONS: usize = 5;
/// Number of folds that rows or groups are dealt to. Each fold is held out once.
const FOLDS: usize = 20;
/// Difference of logarithms over which slopes are measured.
const DIFFERENCE: f64 = 0.05;
/// Slopes below this are not recomputed.
const NEGLIGIBLE: f64 = 0.015;
/// Largest change of an offset in one step.
const LARGEST_STEP: f64 = 0.7;

/// Fits the values that a quantity depends on.
///
/// # Errors
/// [`FitError::NotPositiveDefinite`] if the values are not determined.
pub fn fit(cases: &[Case], quantity: Quantity, profiles: &Profiles, progress: Progress<'_>) -> Result<Fit, FitError> {
    let problem = Problem::new(cases, quantity, profiles);
    let Problem { parameters, weights, .. } = &problem;
    let mut state = problem.start();
    progress(&format!(
        "{quantity:?}: {} values, {} rows of {} kinds, loss {:.2}",
        parameters.iter().filter(|parameter| !parameter.is_tied()).count(),
        problem.measured.len(),
        problem.first_of_kind.len(),
        state.loss
    ));
    let mut slopes: Vec<Vec<(usize, f64)>> = Vec::new();
    let mut jacobian = Jacobian::new();
    for iteration in 0..=ITERATIONS {
        // Slopes change most in the first steps.
        if iteration <= 1 || iteration == 3 {
            slopes = problem.slopes(&state, &slopes);
        }
        jacobian = problem.by_parameter(&slopes);
        if iteration == ITERATIONS {
            break;
        }
        let row_weights = robust_weights(&state.residuals, weights);
        let factor = normal_factor(&jacobian, &row_weights, parameters)?;
        let mut gradient: Vec<f64> =
            parameters.iter().zip(&state.offsets).map(|(parameter, offset)| offset * parameter.precision()).collect();
        for (index, column) in jacobian.iter().enumerate() {
            gradient[index] += column.iter().map(|(row, slope)| row_weights[*row] * slope * state.residuals[*row]).sum::<f64>();
        }
        let (improved, share) = problem.step(&mut state, &solve(&factor, &gradient));
        progress(&format!("  {iteration}: loss {:.2}, step {share:.2}", state.loss));
        if !improved {
            break;
        }
    }
    problem.finish(state, jacobian)
}

/// The measured cases of a fit and its parameters.
pub(super) struct Problem<'a> {
    cases: &'a [Case],
    quantity: Quantity,
    /// For each row of the fit, the index of its case and its measurement.
    pub(super) measured: Vec<(usize, f64)>,
    /// Weight of each row.
    pub(super) weights: Vec<f64>,
    pub(super) parameters: Vec<Parameter>,
    /// For each kind of row, its first case. Rows of a kind have equal predictions.
    first_of_kind: Vec<usize>,
    /// Kind of each row.
    kinds: Vec<usize>,
}

/// A point in the space of the fitted values.
pub(super) struct State {
    /// Run of each kind, with the values set.
    runs: Vec<Run>,
    /// Logarithm of the prediction of each kind.
    predicted: Vec<f64>,
    /// Residual of each row.
    pub(super) residuals: Vec<f64>,
    /// Offset of each parameter.
    pub(super) offsets: Vec<f64>,
    loss: f64,
}

impl<'a> Problem<'a> {
    pub(super) fn new(cases: &'a [Case], quantity: Quantity, profiles: &Profiles) -> Self {
        let measured: Vec<(usize, f64)> =
            cases.iter().enumerate().filter_map(|(index, case)| Some((index, case.measured(quantity)?))).collect();
        let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
        let mut first_of_kind: Vec<usize> = Vec::new();
        let mut kinds: Vec<usize> = Vec::new();
        for (index, _) in &measured {
            let key = match quantity {
                Quantity::Step => cases[*index].kind.as_str(),
                // Rows of equal runs may print different kinds of memory figures, so each row is a
                // kind.
                Quantity::Memory => cases[*index].row.row_id.as_str(),
            };
            kinds.push(*numbers.entry(key).or_insert_with(|| {
                first_of_kind.push(*index);
                first_of_kind.len() - 1
            }));
        }
        let weights = weights(cases, &measured);
        let parameters = parameters(cases, quantity, profiles);
        Self { cases, quantity, measured, weights, parameters, first_of_kind, kinds }
    }

    fn start(&self) -> State {
        let runs: Vec<Run> = self.first_of_kind.iter().map(|index| self.cases[*index].run.clone()).collect();
        self.state(runs, vec![0.0; self.parameters.len()])
    }

    /// Returns the state at the values that `value_of` returns, and at the priors of all others.
    pub(super) fn state_at(&self, value_of: impl Fn(&Parameter) -> Option<f64>) -> State {
        let mut runs: Vec<Run> = self.first_of_kind.iter().map(|index| self.cases[*index].run.clone()).collect();
        let mut offsets = vec![0.0; self.parameters.len()];
        for (index, parameter) in self.parameters.iter().enumerate() {
            let Some(value) = value_of(parameter).filter(|value| *value > 0.0) else { continue };
            let own = (value / parameter.prior).ln();
            // A tied value has the offset of its factor.
            offsets[parameter.factor.unwrap_or(index)] = own;
            for run in runs.iter_mut().filter(|run| parameter.affects(run)) {
                parameter.set(run, value);
            }
        }
        self.state(runs, offsets)
    }

    fn state(&self, runs: Vec<Run>, offsets: Vec<f64>) -> State {
        let predicted: Vec<f64> = (0..runs.len()).into_par_iter().map(|kind| self.predict(kind, &runs[kind])).collect();
        let residuals: Vec<f64> =
            self.measured.iter().zip(&self.kinds).map(|((_, measured), kind)| predicted[*kind] - measured.ln()).collect();
        let loss = self.loss(&residuals, &offsets);
        State { runs, predicted, residuals, offsets, loss }
    }

    /// Returns the logarithm of a kind's prediction.
    fn predict(&self, kind: usize, run: &Run) -> f64 {
        self.cases[self.first_of_kind[kind]].predicted(run, self.quantity).map_or(0.0, f64::ln)
    }

    fn loss(&self, residuals: &[f64], offsets: &[f64]) -> f64 {
        let row = |(residual, weight): (&f64, &f64)| {
            let scaled = residual / (HUBER * NOISE);
            weight * HUBER * HUBER * ((1.0 + scaled * scaled).sqrt() - 1.0)
        };
        let prior = |(parameter, offset): (&Parameter, &f64)| 0.5 * offset * offset * parameter.precision();
        residuals.iter().zip(&self.weights).map(row).sum::<f64>() + self.parameters.iter().zip(offsets).map(prior).sum::<f64>()
    }

    /// Returns the value of a parameter at these offsets.
    pub(super) fn value(&self, index: usize, offsets: &[f64]) -> f64 {
        let parameter = &self.parameters[index];
        let value = parameter.prior * total_offset(&self.parameters, offsets, index).exp();
        value.clamp(parameter.bounds[0], parameter.bounds[1])
    }

    /// Moves the state along a Gauss-Newton step, shortened until the loss falls. Returns whether
    /// to continue, and the share of the step that was taken or tried last.
    fn step(&self, state: &mut State, step: &[f64]) -> (bool, f64) {
        let mut share = 1.0;
        while share >= 0.05 {
            let moved = |((parameter, offset), step): ((&Parameter, &f64), &f64)| {
                let moved = (offset - share * step).clamp(offset - LARGEST_STEP, offset + LARGEST_STEP);
                let [least, most] = parameter.bounds.map(|bound| (bound / parameter.prior).ln());
                moved.clamp(least, most)
            };
            let offsets: Vec<f64> = self.parameters.iter().zip(&state.offsets).zip(step).map(moved).collect();
            let mut runs = state.runs.clone();
            for (index, parameter) in self.parameters.iter().enumerate() {
                let value = self.value(index, &offsets);
                for run in runs.iter_mut().filter(|run| parameter.affects(run)) {
                    parameter.set(run, value);
                }
            }
            let tried = self.state(runs, offsets);
            if tried.loss < state.loss {
                let gain = state.loss - tried.loss;
                *state = tried;
                return (gain > 0.002 * state.loss, share);
            }
            share *= 0.4;
        }
        (false, share)
    }

    /// Returns, for each kind, the parameters that change its prediction, with their slopes.
    /// `before` has earlier slopes; negligible ones are reused. Parameters with the same effect
    /// have the same slope.
    pub(super) fn slopes(&self, state: &State, before: &[Vec<(usize, f64)>]) -> Vec<Vec<(usize, f64)>> {
        let of_kind = |(kind, run): (usize, &Run)| {
            let known: BTreeMap<usize, f64> = before.get(kind).into_iter().flatten().copied().collect();
            let mut by_effect: BTreeMap<&str, f64> = BTreeMap::new();
            let mut slopes = Vec::new();
            for (index, parameter) in self.parameters.iter().enumerate() {
                if !parameter.affects(run) {
                    continue;
                }
                let of_effect = by_effect.get(parameter.effect()).copied();
                // A shared factor has the slope of the values that share it; without such a value,
                // 0.
                let slope = if parameter.is_factor() { Some(of_effect.unwrap_or(0.0)) } else { of_effect };
                let negligible = || known.get(&index).copied().filter(|slope| slope.abs() < NEGLIGIBLE);
                let slope = slope.or_else(negligible).unwrap_or_else(|| {
                    let mut other = run.clone();
                    let offset = total_offset(&self.parameters, &state.offsets, index) + DIFFERENCE;
                    parameter.set(&mut other, parameter.prior * offset.exp());
                    (self.predict(kind, &other) - state.predicted[kind]) / DIFFERENCE
                });
                by_effect.insert(parameter.effect(), slope);
                slopes.push((index, slope));
            }
            slopes
        };
        state.runs.par_iter().enumerate().map(of_kind).collect()
    }

    /// Converts slopes by kind into slopes of rows by parameter.
    pub(super) fn by_parameter(&self, slopes: &[Vec<(usize, f64)>]) -> Jacobian {
        let mut jacobian = vec![Vec::new(); self.parameters.len()];
        for (row, kind) in self.kinds.iter().enumerate() {
            let moves = |(index, slope): &&(usize, f64)| slope.abs() > 1e-7 && !self.parameters[*index].is_tied();
            for (index, slope) in slopes[*kind].iter().filter(moves) {
                jacobian[*index].push((row, *slope));
            }
        }
        jacobian
    }

    /// Computes the held-out residuals and returns the fit.
    fn finish(self, state: State, jacobian: Jacobian) -> Result<Fit, FitError> {
        let State { residuals, offsets, .. } = state;
        let linear = Linear {
            parameters: &self.parameters,
            jacobian: &jacobian,
            weights: &self.weights,
            residuals: &residuals,
            offsets: &offsets,
        };
        let by_case = |residuals: Vec<f64>| -> BTreeMap<usize, f64> {
            self.measured.iter().zip(residuals).map(|((index, _), residual)| (*index, residual)).collect()
        };
        // Names start with the source, so every fold has about the same share of each source.
        let held_out = |name: &dyn Fn(&Case) -> String, count: usize| {
            let names: Vec<String> = self.measured.iter().map(|(index, _)| name(&self.cases[*index])).collect();
            linear.held_out(&folds(&names, count)).map(by_case)
        };
        let without_group = held_out(&|case| case.group.clone(), FOLDS)?;
        let without_row = held_out(&|case| format!("{} {}", case.row.table, case.row.row_id), FOLDS)?;
        let without_source = held_out(&|case| case.row.table.clone(), usize::MAX)?;
        let without_device = held_out(&|case| case.run.cluster.device.clone(), usize::MAX)?;
        let values = (0..self.parameters.len()).map(|index| self.value(index, &offsets)).collect();
        let residuals = by_case(residuals);
        Ok(Fit {
            parameters: self.parameters,
            values,
            residuals,
            without_row,
            without_group,
            without_source,
            without_device,
            offsets,
            jacobian,
        })
    }
}

/// Returns the weight of each row, see [`GROUP_POWER`] and [`SOURCE_POWER`].
fn weights(cases: &[Case], measured: &[(usize, f64)]) -> Vec<f64> {
    let mut of_group: BTreeMap<&str, f64> = BTreeMap::new();
    let mut of_source: BTreeMap<&str, f64> = BTreeMap::new();
    for (index, _) in measured {
        *of_group.entry(&cases[*index].group).or_default() += 1.0;
    }
    let group = |index: usize| of_group[cases[index].group.as_str()].powf(GROUP_POWER - 1.0);
    for (index, _) in measured {
        *of_source.entry(&cases[*index].row.table).or_default() += group(*index);
    }
    // A source of ten rows in ten groups has a total weight of ten.
    let source = |index: usize| (of_source[cases[index].row.table.as_str()] / 10.0).powf(SOURCE_POWER - 1.0);
    measured.iter().map(|(index, _)| group(*index) * source(*index)).collect()
}
