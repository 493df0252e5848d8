//! Scores of rows that a fit leaves out: refits without all rows of a source, a device, a stack or
//! a model, and simulates these rows with the refit's values.
//!
//! The fit is linearised once, at the library's values. Each refit solves its own robust normal
//! equations, which needs no simulation; its left-out rows are then simulated with the values
//! found.

use super::cases::{Case, Quantity, declared};
use super::linear::{Linear, Refit, folds};
use super::parameters::{Owner, Parameter};
use super::report::{Found, Support, by_equal_sources, interval, stack_interval, yaml};
use super::solve::Problem;
use super::{FitError, Progress};
use crate::published::Split;
use crate::row::Row;
use crate::run::Run;
use crate::scoring::{ScoredRow, Scores, score};
use foretell_simulator::gpu::Profiles;
use std::collections::{BTreeMap, BTreeSet};

/// The name that a row is left out by, its source, and the logarithm of measured over predicted.
type LeftOutRow<'a> = (&'a str, &'a str, f64);

/// Number of folds that the groups are distributed over, for the intervals of stacks.
const GROUP_FOLDS: usize = 20;

/// Which rows a refit leaves out together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaveOut {
    /// All rows of the source.
    Source,
    /// All rows on the device, from every source.
    Device,
    /// All rows under the stack.
    Stack,
    /// All rows of the model.
    Model,
}

impl LeaveOut {
    /// Returns the name that a row is left out by: of its source, device, stack or model.
    fn key(self, row: &Row, run: &Run) -> String {
        match self {
            LeaveOut::Source => row.table.clone(),
            LeaveOut::Device => run.cluster.device.clone(),
            LeaveOut::Stack => run.stack_name.clone(),
            LeaveOut::Model => row.model.to_lowercase(),
        }
    }
}

/// Scores rows, each with values that were fitted without its source, device, stack or model. If
/// that one has no rows in the fit, the library's values are used.
///
/// # Errors
/// [`FitError`] if a compiled-in file is malformed, or a refit has no solution.
pub fn score_left_out(rows: &[Row], split: &Split, by: LeaveOut, progress: Progress<'_>) -> Result<Scores, FitError> {
    let (library, priors) = (Profiles::library()?, Profiles::priors()?);
    let cases = declared(&priors)?;
    progress(&format!("{} rows of the fit are compiled", cases.len()));
    let (names, profiles) = refits(&cases, library, &priors, by, progress)?;
    // The rows of each refit; rows without a refit come last.
    let mut parts: Vec<Vec<usize>> = vec![Vec::new(); names.len() + 1];
    for (index, row) in rows.iter().enumerate() {
        let key = Run::of(row, library).ok().map(|run| by.key(row, &run));
        let place = key.and_then(|key| names.iter().position(|name| *name == key)).unwrap_or(names.len());
        parts[place].push(index);
    }
    let mut scored: BTreeMap<usize, ScoredRow> = BTreeMap::new();
    for (place, part) in parts.iter().enumerate().filter(|(_, part)| !part.is_empty()) {
        let chosen: Vec<Row> = part.iter().map(|&index| rows[index].clone()).collect();
        let scores = score(&chosen, split, profiles.get(place).unwrap_or(library));
        scored.extend(part.iter().copied().zip(scores.rows));
        progress(&format!("{} rows without {} are scored", part.len(), names.get(place).map_or("anything", String::as_str)));
    }
    // No row took part in the fit of the values it was predicted with.
    Ok(Scores::of(scored.into_values().collect(), None, library.fitted_values()))
}

/// Returns the names of all that is left out, and the profiles of each refit.
fn refits(
    cases: &[Case],
    library: &Profiles,
    priors: &Profiles,
    by: LeaveOut,
    progress: Progress<'_>,
) -> Result<(Vec<String>, Vec<Profiles>), FitError> {
    let keys: Vec<String> = cases.iter().map(|case| by.key(&case.row, &case.run)).collect();
    let names: Vec<String> = keys.iter().cloned().collect::<BTreeSet<_>>().into_iter().collect();
    let mut problems = Vec::new();
    for quantity in [Quantity::Step, Quantity::Memory] {
        let problem = Problem::new(cases, quantity, priors);
        let state = problem.state_at(|parameter| library_value(parameter, library));
        let jacobian = problem.by_parameter(&problem.slopes(&state, &[]));
        let linear = Linear {
            parameters: &problem.parameters,
            jacobian: &jacobian,
            weights: &problem.weights,
            residuals: &state.residuals,
            offsets: &state.offsets,
        };
        // Folds are in the order of `names`. A name without rows of this quantity has no fold.
        let own: Vec<String> = problem.measured.iter().map(|(index, _)| keys[*index].clone()).collect();
        let of_fold: Vec<Refit> = linear.refits(&folds(&own, usize::MAX))?;
        let found: Vec<&String> = own.iter().collect::<BTreeSet<_>>().into_iter().collect();
        let refits: BTreeMap<String, Refit> = found.into_iter().cloned().zip(of_fold).collect();
        progress(&format!("{quantity:?}: {} refits of {} values", refits.len(), problem.parameters.len()));
        let groups: Vec<String> = problem.measured.iter().map(|(index, _)| cases[*index].group.clone()).collect();
        let without_group = linear.held_out(&folds(&groups, GROUP_FOLDS))?;
        let without_group = problem.measured.iter().map(|(index, _)| *index).zip(without_group).collect();
        problems.push((problem, state, refits, without_group));
    }
    let [(time, time_state, time_refits, without_group), (memory, memory_state, memory_refits, _)] = problems.as_slice() else {
        return Ok((Vec::new(), Vec::new()));
    };
    // For each row of the fit, the logarithm of measured over predicted in the refit that leaves it
    // out.
    let left_out: Vec<LeftOutRow<'_>> = time
        .measured
        .iter()
        .enumerate()
        .filter_map(|(row, (index, _))| {
            let refit = time_refits.get(&keys[*index])?;
            Some((keys[*index].as_str(), cases[*index].row.table.as_str(), -refit.residuals[row]))
        })
        .collect();
    let mut profiles = Vec::with_capacity(names.len());
    for name in &names {
        let values = |problem: &Problem<'_>, refit: Option<&Refit>, offsets: &[f64]| -> Vec<f64> {
            let offsets = refit.map_or(offsets, |refit| refit.offsets.as_slice());
            (0..problem.parameters.len()).map(|index| problem.value(index, offsets)).collect()
        };
        let time_values = values(time, time_refits.get(name), &time_state.offsets);
        let memory_values = values(memory, memory_refits.get(name), &memory_state.offsets);
        let found = [
            Found { parameters: &time.parameters, values: &time_values },
            Found { parameters: &memory.parameters, values: &memory_values },
        ];
        let mut support = support(time, cases, &keys, name, (&left_out, without_group), library);
        if by == LeaveOut::Device {
            (support.unseen, support.unseen_device) = (library.unseen, support.unseen);
        }
        profiles.push(Profiles::with_fitted(&yaml(&found, &support, priors))?);
    }
    Ok((names, profiles))
}

/// Returns a parameter's value in the library.
fn library_value(parameter: &Parameter, library: &Profiles) -> Option<f64> {
    match &parameter.owner {
        Owner::Stack(name) => library.stack(name).ok()?.value(&parameter.name),
        Owner::Network => library.network_value(&parameter.name),
        Owner::Family(_) | Owner::AllStacks => None,
    }
}

/// Returns the support of the values that were fitted without `name`. Intervals for unseen stacks
/// and devices come from the rows of the other names, each predicted without its own name.
fn support(
    time: &Problem<'_>,
    cases: &[Case],
    keys: &[String],
    name: &str,
    (left_out, without_group): (&[LeftOutRow<'_>], &BTreeMap<usize, f64>),
    library: &Profiles,
) -> Support {
    let kept = || time.measured.iter().map(|(index, _)| *index).filter(|index| keys[*index] != name).map(|index| &cases[index]);
    // The residuals of rows that are left out have no part in any interval.
    let residuals: BTreeMap<usize, f64> =
        without_group.iter().filter(|(index, _)| keys[**index] != name).map(|(index, residual)| (*index, *residual)).collect();
    let all = by_equal_sources(cases, &residuals);
    let of_stack = |stack: &str| {
        let own = residuals.iter().filter(|(index, _)| cases[**index].run.stack_name == stack);
        let own: Vec<f64> = own.map(|(_, residual)| -residual).collect();
        (stack.to_string(), (own.len(), stack_interval(&own, &all)))
    };
    let on = |case: &Case, device: &str| case.run.clusters().any(|cluster| cluster.device == device);
    let others: Vec<&LeftOutRow<'_>> = left_out.iter().filter(|(key, ..)| *key != name).collect();
    let mut of_source: BTreeMap<&str, f64> = BTreeMap::new();
    others.iter().for_each(|(_, source, _)| *of_source.entry(source).or_default() += 1.0);
    let unseen = interval(others.iter().map(|(_, source, ratio)| (*ratio, 1.0 / of_source[source])).collect());
    Support {
        stacks: library.stack_names().filter(|stack| library.is_stack(stack)).map(of_stack).collect(),
        devices: library.gpu_names().map(|device| (device.to_string(), kept().filter(|case| on(case, device)).count())).collect(),
        unseen,
        unseen_device: library.unseen_device.unwrap_or(unseen),
    }
}
