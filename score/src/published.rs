//! The published rows that come with the project, and their split into rows for fitting and
//! held-out rows.
//!
//! `tests/published/split.yaml` declares the split. It is by whole groups, the rows of a source with
//! one model on one device, since a row says nearly all about its neighbours. A hash of the group's
//! name decides, so nobody can choose favourable rows.

use crate::row::{Row, read_rows};
use crate::table::TableError;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;
use thiserror::Error;

const ROWS: &str = include_str!("../../tests/published/runs.csv");
const SPLIT: &str = include_str!("../../tests/published/split.yaml");

/// Returns the project's own rows of measured runs.
///
/// # Errors
/// [`TableError`] if the compiled-in table is malformed. A test excludes this.
pub fn published() -> Result<Vec<Row>, TableError> {
    read_rows(ROWS)
}

/// Names of the project's own rows, with the source and the group of each.
static GROUPS: LazyLock<BTreeMap<String, (String, String)>> = LazyLock::new(|| {
    let rows = published().unwrap_or_default();
    rows.into_iter().map(|row| (row.row_id.clone(), (row.table.clone(), group(&row)))).collect()
});

/// Returns the name of the group that a row belongs to: rows of one source, model and device.
fn group(row: &Row) -> String {
    format!("{}|{}|{}", row.table, row.model, row.gpu)
}

/// What a row is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Subset {
    /// Profile values may be fitted on the row.
    Fit,
    /// The row is held out from fitting.
    Score,
}

/// The declared split: of each source's groups, in the order of a hash of their names, the first
/// `fit` of `parts` are for fitting, rounded up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// The groups for fitting.
    fitted: BTreeSet<String>,
}

/// Contents of `split.yaml`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Shares {
    parts: usize,
    fit: usize,
}

/// An error in the file that declares the split.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("tests/published/split.yaml: {0}")]
pub struct SplitError(String);

impl Split {
    /// Returns the project's split.
    ///
    /// # Errors
    /// [`SplitError`] if the compiled-in file is malformed. A test excludes this.
    pub fn library() -> Result<Self, SplitError> {
        let shares: Shares = serde_saphyr::from_str(SPLIT).map_err(|error| SplitError(error.to_string()))?;
        let Shares { parts, fit } = shares;
        if parts == 0 || fit > parts {
            return Err(SplitError(format!("`fit: {fit}` must be at most `parts: {parts}`, and that at least 1")));
        }
        let mut of_source: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (source, group) in GROUPS.values() {
            of_source.entry(source).or_default().insert(group);
        }
        let mut fitted = BTreeSet::new();
        for groups in of_source.into_values() {
            let mut groups: Vec<&str> = groups.into_iter().collect();
            groups.sort_by_key(|group| (hash(group), *group));
            let count = (groups.len() * fit).div_ceil(parts);
            fitted.extend(groups.into_iter().take(count).map(String::from));
        }
        Ok(Self { fitted })
    }

    /// Returns what a row is used for. Rows of other tables than the project's are fitted nowhere.
    pub fn subset(&self, row: &Row) -> Subset {
        let group = GROUPS.get(&row.row_id).map(|(_, group)| group);
        if group.is_some_and(|group| self.fitted.contains(group)) { Subset::Fit } else { Subset::Score }
    }
}

/// FNV-1a (Fowler, Noll and Vo), with the high bits folded into the low ones. Without that, names
/// that differ only in the last digit are distributed unevenly.
fn hash(name: &str) -> u64 {
    let sum = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    sum ^ (sum >> 29) ^ (sum >> 43)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_declared_share_of_each_sources_groups_is_for_fitting() {
        let split = Split::library().expect("sound");
        let mut subsets: BTreeMap<(String, String), BTreeSet<Subset>> = BTreeMap::new();
        for row in published().expect("sound") {
            subsets.entry((row.table.clone(), group(&row))).or_default().insert(split.subset(&row));
        }
        assert!(subsets.values().all(|subsets| subsets.len() == 1), "a group is on both sides");
        let sources: BTreeSet<&str> = subsets.keys().map(|(source, _)| source.as_str()).collect();
        for source in sources {
            let own = || subsets.iter().filter(|((table, _), _)| table == source);
            let fit = own().filter(|(_, subsets)| subsets.contains(&Subset::Fit)).count();
            assert_eq!(fit, (own().count() * 2).div_ceil(5), "{source}");
        }
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
