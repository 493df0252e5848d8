//! The published rows that are part of the project, and their split into rows for fitting and
//! held-out rows.
//!
//! `tests/published/split.yaml` declares the split. Nearly equal rows stay together: all rows of a
//! source on one model and one kind of device. A hash of these names decides, so nobody can choose
//! favourable rows.

use crate::row::{Row, read_rows};
use crate::table::TableError;
use miette::Diagnostic;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::LazyLock;
use thiserror::Error;

const ROWS: &str = include_str!("../data/runs.csv");
const SPLIT: &str = include_str!("../data/split.yaml");

/// Returns the project's own rows of measured runs.
///
/// # Errors
/// [`TableError`] if the compiled-in table is malformed. A test excludes this.
pub fn published() -> Result<Vec<Row>, TableError> {
    read_rows(ROWS)
}

/// Names of the project's own rows.
static NAMES: LazyLock<BTreeSet<String>> =
    LazyLock::new(|| published().expect("invariant: the compiled-in table is sound").into_iter().map(|row| row.row_id).collect());

/// What a row is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Subset {
    /// Profile values may be fitted on the row.
    Fit,
    /// The row is held out from fitting.
    Score,
}

/// The declared split: groups of rows are hashed into `parts` parts; the first `fit` of them are
/// for fitting. A group is a source's rows on one model and one kind of device.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Split {
    parts: u64,
    fit: u64,
}

/// An error in the file that declares the split.
#[derive(Clone, Debug, PartialEq, Eq, Error, Diagnostic)]
#[diagnostic(code(published::split))]
#[error("tests/published/split.yaml: {0}")]
pub struct SplitError(String);

impl Split {
    /// Returns the project's split.
    ///
    /// # Errors
    /// [`SplitError`] if the compiled-in file is malformed. A test excludes this.
    pub fn library() -> Result<Self, SplitError> {
        let split: Self = serde_saphyr::from_str(SPLIT).map_err(|error| SplitError(error.to_string()))?;
        if split.parts == 0 || split.fit > split.parts {
            return Err(SplitError(format!(
                "`fit: {}` must be at most `parts: {}`, and that at least 1",
                split.fit, split.parts
            )));
        }
        Ok(split)
    }

    /// Returns what a row is used for. Only rows of the project's tables are used for fitting.
    pub fn subset(&self, row: &Row) -> Subset {
        if self.is_for_fitting(&group(row)) && NAMES.contains(&row.row_id) { Subset::Fit } else { Subset::Score }
    }

    fn is_for_fitting(&self, group: &str) -> bool {
        hash(group) % self.parts < self.fit
    }
}

/// Source, model and device of a row, with the device's normalised name, since sources spell it in
/// several ways.
fn group(row: &Row) -> String {
    let device = row.cells.get("gpu_norm").unwrap_or(&row.gpu);
    format!("{} {} {device}", row.table, row.model)
}

/// FNV-1a (Fowler, Noll and Vo), with the high bits folded into the low ones. Without that, names
/// that differ only in the last digit are distributed unevenly.
pub(crate) fn hash(name: &str) -> u64 {
    let sum = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    sum ^ (sum >> 29) ^ (sum >> 43)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names;
    use std::collections::BTreeMap;

    #[test]
    fn the_declared_share_of_groups_is_for_fitting() {
        let split = Split::library().expect("sound");
        let fit = (0..10_000).filter(|number| split.is_for_fitting(&format!("source-{number:04}"))).count();
        let share = split.fit as f64 / split.parts as f64;
        assert!((fit as f64 / 10_000.0 - share).abs() < 0.03, "{fit} of 10000");
    }

    #[test]
    fn near_twins_are_on_one_side() {
        let split = Split::library().expect("sound");
        let mut sides = BTreeMap::new();
        for row in published().expect("sound") {
            let side = split.subset(&row);
            // The profile's name is another way to tell that two devices are of one kind.
            let devices = names::node_kinds(&row);
            if devices.is_empty() {
                continue;
            }
            let group = (row.table.clone(), row.model.clone(), devices);
            let first = *sides.entry(group.clone()).or_insert(side);
            assert_eq!(side, first, "{} of {group:?}", row.row_id);
        }
        let fitted = sides.values().filter(|side| **side == Subset::Fit).count();
        assert!(fitted > 0 && fitted < sides.len(), "{fitted} of {} groups", sides.len());
    }

    #[test]
    fn rows_of_other_tables_are_never_for_fitting() {
        let split = Split::library().expect("sound");
        let own = published().expect("sound");
        let fitted: Vec<&Row> = own.iter().filter(|row| split.subset(row) == Subset::Fit).collect();
        assert!(!fitted.is_empty());
        for row in fitted {
            let other = Row { row_id: format!("{}-again", row.row_id), ..row.clone() };
            assert_eq!(split.subset(&other), Subset::Score, "{}", other.row_id);
        }
    }
}
