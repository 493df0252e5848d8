//! Scores of rows that a fit leaves out: a refit without all rows of a source, a device, a stack or
//! a model, and a full simulation of these with the values of the refit.
//!
//! The fit is linearised at the library's values, once. Each refit then solves its own robust
//! normal equations, which takes no simulation, and its rows are simulated with the values found.

use super::cases::{Case, Quantity, declared};
use super::linear::{Refit, folds};
use super::parameters::factors;
use super::report::{Support, joined, yaml};
use super::solve::{LeftOut, Problem};
use super::{FitError, Progress};
use crate::published::Split;
use crate::row::Row;
use crate::run::Run;
use crate::scoring::{ScoredRow, Scores, score};
use foretell_simulator::gpu::{Factors, Profiles};
use std::collections::{BTreeMap, BTreeSet};

/// What a refit leaves out at once.
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
    /// Returns what a row belongs to.
    fn key(self, row: &Row, run: &Run) -> String {
        match self {
            LeaveOut::Source => row.table.clone(),
            LeaveOut::Device => run.cluster.device.clone(),
            LeaveOut::Stack => run.stack_name.clone(),
            LeaveOut::Model => row.model.to_lowercase(),
        }
    }
}

/// Scores rows, each with values that were fitted without what it belongs to. A row that belongs to
/// nothing in the fit has the values of `library`, at which the fit is linearised.
///
/// # Errors
/// [`FitError`] if a compiled-in file is malformed, or a refit has no solution.
pub fn score_left_out(
    rows: &[Row],
    split: &Split,
    library: &Profiles,
    by: LeaveOut,
    progress: Progress<'_>,
) -> Result<Scores, FitError> {
    let priors = Profiles::priors()?;
    let cases = declared(&priors)?;
    progress(&format!("{} rows of the fit are compiled", cases.len()));
    let (names, profiles) = refits(&cases, library, by, progress)?;
    // Rows by the refit that leaves them out; those without one last.
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
    // No row had a part in the fit of its values.
    Ok(Scores::of(scored.into_values().collect(), None, library.factors().count()))
}

/// Returns the names of all that is left out, and the profiles without each.
fn refits(
    cases: &[Case],
    library: &Profiles,
    by: LeaveOut,
    progress: Progress<'_>,
) -> Result<(Vec<String>, Vec<Profiles>), FitError> {
    let keys: Vec<String> = cases.iter().map(|case| by.key(&case.row, &case.run)).collect();
    let names: Vec<String> = keys.iter().cloned().collect::<BTreeSet<_>>().into_iter().collect();
    let mut found: BTreeMap<&String, Factors> = BTreeMap::new();
    let mut time_left_out = None;
    for quantity in [Quantity::Step, Quantity::Memory] {
        let problem = Problem::new(cases, quantity);
        let offsets = problem.parameters.iter().map(|parameter| parameter.offset_in(library.factors())).collect();
        let state = problem.state(offsets);
        let jacobian = problem.by_parameter(&problem.slopes(&state, &[]));
        let linear = problem.linear(&state, &jacobian);
        let own: Vec<String> = problem.measured.iter().map(|(index, _)| keys[*index].clone()).collect();
        // Folds are in alphabetical order. A name without rows of this quantity has none to leave
        // out.
        let refits = linear.refits(&folds(&own, usize::MAX))?;
        let refits: BTreeMap<String, Refit> = own.into_iter().collect::<BTreeSet<_>>().into_iter().zip(refits).collect();
        for name in &names {
            let offsets = refits.get(name).map_or(state.offsets.as_slice(), |refit| refit.offsets.as_slice());
            let others = found.remove(name).unwrap_or_default();
            found.insert(name, joined(others, factors(&problem.parameters, offsets)));
        }
        progress(&format!("{quantity:?}: {} refits of {} values", refits.len(), problem.parameters.len()));
        if quantity == Quantity::Step {
            time_left_out = Some(LeftOut::of(&problem, &linear)?);
        }
    }
    let Some(left_out) = time_left_out else { return Ok((Vec::new(), Vec::new())) };
    let profiles = |(name, factors): (&&String, &Factors)| {
        // Neither values nor intervals know the rows that are left out.
        let support = Support::of(cases, &left_out, &|case| by.key(&case.row, &case.run) != **name);
        Ok(Profiles::with_fitted(&yaml(factors, &support))?)
    };
    let profiles: Vec<Profiles> = found.iter().map(profiles).collect::<Result<_, FitError>>()?;
    Ok((names, profiles))
}
