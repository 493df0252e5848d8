//! The rows that values may be fitted on, compiled so that they can be predicted with any values.

use super::FitError;
use crate::memory_figure::memory_figure;
use crate::prediction::CompiledRun;
use crate::published::{Split, Subset, hash, published};
use crate::row::Row;
use crate::run::Run;
use foretell_simulator::gpu::Profiles;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The most rows of a group that take part in the fit.
const MOST_OF_GROUP: usize = 16;

/// Of sources with at most this many rows, all rows take part.
const SMALL_SOURCE: usize = 30;

/// A row that takes part in the fit.
#[derive(Debug)]
pub struct Case {
    /// The row.
    pub row: Row,
    /// Its run, with prior values.
    pub run: Run,
    /// Its Programs.
    pub compiled: Arc<CompiledRun>,
    /// Rows with the same group have much the same information: same source, model, device,
    /// framework and format.
    pub group: String,
    /// Rows with the same kind have the same predicted step time, such as repeated measurements.
    pub kind: String,
}

/// The predicted quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// Step time in seconds.
    Step,
    /// Memory of a device in bytes.
    Memory,
}

impl Case {
    /// Returns the measurement, if the row has one that is good enough to fit on.
    pub fn measured(&self, quantity: Quantity) -> Option<f64> {
        match quantity {
            Quantity::Step => self.row.step_seconds().filter(|_| !self.row.quality.starts_with(['C', 'D'])),
            Quantity::Memory => self.row.memory_bytes(),
        }
    }

    /// Predicts the case with the values of `run`.
    pub fn predicted(&self, run: &Run, quantity: Quantity) -> Option<f64> {
        match quantity {
            Quantity::Step => self.compiled.predict(run).ok().map(|prediction| prediction.step.value()),
            Quantity::Memory => Some(memory_figure(&self.row, &run.stack, &self.compiled.memory(run), None)),
        }
    }
}

/// Returns the measured rows of [`Subset::Fit`] that can be simulated and are not in doubt, limited
/// by `MOST_OF_GROUP`.
///
/// # Errors
/// [`FitError`] if a compiled-in file is malformed. A test excludes this.
pub fn declared(profiles: &Profiles) -> Result<Vec<Case>, FitError> {
    let split = Split::library()?;
    let runs: Vec<(Row, Run)> = published()?
        .into_iter()
        .filter(|row| split.subset(row) == Subset::Fit && row.doubt.is_none())
        .filter(|row| row.step_seconds().is_some() || row.memory_bytes().is_some())
        .filter_map(|row| Run::of(&row, profiles).ok().map(|run| (row, run)))
        .collect();
    let runs = limited(runs);
    let mut distinct: BTreeMap<String, &Run> = BTreeMap::new();
    for (_, run) in &runs {
        distinct.entry(run.program_key()).or_insert(run);
    }
    let compiled: BTreeMap<String, Arc<CompiledRun>> = distinct
        .into_par_iter()
        .filter_map(|(key, run)| CompiledRun::new(run).ok().map(|compiled| (key, Arc::new(compiled))))
        .collect();
    let case = |(row, run): (Row, Run)| {
        let key = run.program_key();
        let compiled = compiled.get(&key)?.clone();
        let group = group(&row, &run);
        let clusters: Vec<_> = run.clusters().collect();
        let kind = format!("{key} {clusters:?} {:?} {} {:?}", run.stack, run.format, run.workload);
        Some(Case { row, run, compiled, group, kind })
    };
    Ok(runs.into_iter().filter_map(case).collect())
}

fn group(row: &Row, run: &Run) -> String {
    format!("{} {} {} {} {}", row.table, row.model, row.gpu, row.framework, run.format)
}

/// Keeps [`MOST_OF_GROUP`] rows of each group, and all rows of small sources. The kept rows of a
/// group are those whose names have the lowest hashes: tables are sorted, so the first rows would
/// be alike.
fn limited(mut runs: Vec<(Row, Run)>) -> Vec<(Row, Run)> {
    runs.sort_by_key(|(row, _)| hash(&row.row_id));
    let mut of_source: BTreeMap<String, usize> = BTreeMap::new();
    runs.iter().for_each(|(row, _)| *of_source.entry(row.table.clone()).or_default() += 1);
    let mut of_group: BTreeMap<String, usize> = BTreeMap::new();
    let mut is_kept = |row: &Row, run: &Run| {
        let count = of_group.entry(group(row, run)).or_default();
        *count += 1;
        *count <= MOST_OF_GROUP || of_source[&row.table] <= SMALL_SOURCE
    };
    let mut kept: Vec<_> = runs.into_iter().filter(|(row, run)| is_kept(row, run)).collect();
    kept.sort_by(|(left, _), (right, _)| left.row_id.cmp(&right.row_id));
    kept
}
