//! The declared rows, ready to be simulated with any values.

use foretell_score::{Part, Prepared, Row, Run, Split, prepare, published, stated_memory};
use foretell_simulator::gpu::Profiles;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Rows of a group that are fitted on at most.
const MOST_OF_GROUP: usize = 10;

/// Sources of no more rows are fitted on whole.
const SMALL_SOURCE: usize = 30;

/// A declared row.
pub struct Case {
    pub row: Row,
    pub run: Run,
    pub prepared: Arc<Prepared>,
    /// Rows that tell the same: a model on a device by a framework in a format.
    pub group: String,
    /// What is foretold of it depends on nothing else: rows that were measured several times have it in common.
    pub kind: String,
}

/// What is foretold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// Seconds of a step.
    Step,
    /// Bytes of a device.
    Memory,
}

impl Case {
    /// What was measured.
    pub fn measured(&self, quantity: Quantity) -> Option<f64> {
        match quantity {
            Quantity::Step => self.row.step_seconds().filter(|_| !self.row.quality.starts_with(['C', 'D'])),
            Quantity::Memory => self.row.memory_bytes(),
        }
    }

    /// What is foretold with the values of `run`.
    pub fn predicted(&self, run: &Run, quantity: Quantity) -> Option<f64> {
        match quantity {
            Quantity::Step => self.prepared.predict(run).ok().map(|predicted| predicted.step.value()),
            Quantity::Memory => Some(stated_memory(&self.row, &run.stack, &self.prepared.memory(run))),
        }
    }
}

/// All declared rows that can be simulated and were measured. Rows of one model and plan share their Programs.
pub fn declared(profiles: &Profiles) -> Result<Vec<Case>, Box<dyn std::error::Error>> {
    let split = Split::library()?;
    let runs: Vec<(Row, Run)> = published()?
        .into_iter()
        .filter(|row| split.part(row) == Part::Fit)
        .filter(|row| row.step_seconds().is_some() || row.memory_bytes().is_some())
        .filter_map(|row| Run::of(&row, profiles).ok().map(|run| (row, run)))
        .collect();
    // Of a group that tells the same the first few are enough.
    let group = |row: &Row, run: &Run| format!("{} {} {} {} {}", row.table, row.model, row.gpu, row.framework, run.format);
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let mut of_source: BTreeMap<String, usize> = BTreeMap::new();
    runs.iter().for_each(|(row, _)| *of_source.entry(row.table.clone()).or_default() += 1);
    let mut is_wanted = |row: &Row, run: &Run| {
        let count = counts.entry(group(row, run)).or_default();
        *count += 1;
        *count <= MOST_OF_GROUP || of_source[&row.table] <= SMALL_SOURCE
    };
    let runs: Vec<(Row, Run)> = runs.into_iter().filter(|(row, run)| is_wanted(row, run)).collect();
    let memory = |run: &Run| (!run.recompute_is_stated).then_some((run.cluster.gpu.memory, run.format));
    let key = |run: &Run| format!("{:?} {:?} {:?}", run.model, run.plan, memory(run));
    let mut distinct: BTreeMap<String, &Run> = BTreeMap::new();
    for (_, run) in &runs {
        distinct.entry(key(run)).or_insert(run);
    }
    let prepared: BTreeMap<String, Arc<Prepared>> =
        distinct.into_par_iter().filter_map(|(key, run)| prepare(run).ok().map(|prepared| (key, Arc::new(prepared)))).collect();
    let case = |(row, run): (Row, Run)| {
        let prepared = prepared.get(&key(&run))?.clone();
        let group = group(&row, &run);
        let kind = format!("{} {:?} {:?} {} {:?}", key(&run), run.clusters(), run.stack, run.format, run.workload());
        Some(Case { row, run, prepared, group, kind })
    };
    Ok(runs.into_iter().filter_map(case).collect())
}
