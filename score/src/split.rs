//! Which rows parameters may be fitted on, and which are kept to be scored: declared in `tests/published/split.yaml`, by a hash of the row's
//! name, so that nobody chooses.

use crate::row::Row;
use serde::{Deserialize, Serialize};
use thiserror::Error;

const LIBRARY: &str = include_str!("../../tests/published/split.yaml");

/// What a row is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// Parameters may be fitted on it.
    Fit,
    /// It is kept from fitting.
    Score,
}

/// The declared split: `fit` of `parts` by the hash.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Split {
    /// How many parts rows are shared out to.
    parts: u64,
    /// How many of those are for fitting: the first.
    fit: u64,
}

/// Why the split's file cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("tests/published/split.yaml: {0}")]
pub struct SplitError(String);

impl Split {
    /// The project's.
    ///
    /// # Errors
    /// [`SplitError`], which a test excludes.
    pub fn library() -> Result<Self, SplitError> {
        let split: Self = serde_saphyr::from_str(LIBRARY).map_err(|error| SplitError(error.to_string()))?;
        if split.parts == 0 || split.fit > split.parts {
            return Err(SplitError(format!("{} of {} parts are no share", split.fit, split.parts)));
        }
        Ok(split)
    }

    /// What a row is for.
    pub fn part(&self, row: &Row) -> Part {
        if hash(&row.row_id) % self.parts < self.fit { Part::Fit } else { Part::Score }
    }
}

/// FNV-1a (Fowler, Noll and Vo), whose low bits are then mixed: names that differ in the last digit fall anywhere.
fn hash(name: &str) -> u64 {
    let sum = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    sum ^ (sum >> 29) ^ (sum >> 43)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_declared_share_of_rows_is_for_fitting() {
        let split = Split::library().expect("sound");
        let part = |number: usize| split.part(&Row { row_id: format!("source-{number:04}"), ..Row::default() });
        let fit = (0..10_000).filter(|&number| part(number) == Part::Fit).count();
        let share = split.fit as f64 / split.parts as f64;
        assert!((fit as f64 / 10_000.0 - share).abs() < 0.03, "{fit} of 10000");
    }
}
