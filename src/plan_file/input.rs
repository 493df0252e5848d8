//! The input pipeline that a plan file states, with the bounds of `execute`'s options.

use foretell_units::diagnostic::Mistake;
use foretell_units::{Bytes, Seconds};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use std::ops::RangeInclusive;

/// The input pipeline of a rank. Costs that the file does not state are measured: by `execute` on
/// its data, otherwise by the calibration.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Input {
    /// Size of a sample in storage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_sample: Option<Bytes>,
    /// Time that one worker takes to read, decode and augment a sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode: Option<Seconds>,
    /// Number of workers per rank: 0 to 1024.
    #[serde(default = "one_worker", deserialize_with = "workers")]
    pub workers: usize,
    /// Batches that may be ready or in preparation at the same time: 1 to 1024.
    #[serde(default = "two_batches", deserialize_with = "prefetch")]
    pub prefetch: usize,
}

/// The most workers of a rank, and the most batches ahead, on the command line and in files. A
/// prediction simulates each.
pub const MOST_AHEAD: u16 = 1024;

fn one_worker() -> usize {
    1
}

/// PyTorch's default prefetch factor.
fn two_batches() -> usize {
    2
}

fn workers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    within(deserializer, "workers", 0..=usize::from(MOST_AHEAD))
}

fn prefetch<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    within(deserializer, "prefetch", 1..=usize::from(MOST_AHEAD))
}

/// Reads a number, and refuses one outside of `range`.
fn within<'de, D: Deserializer<'de>>(deserializer: D, field: &str, range: RangeInclusive<usize>) -> Result<usize, D::Error> {
    let number = usize::deserialize(deserializer)?;
    if range.contains(&number) {
        return Ok(number);
    }
    let hint = format!("write a whole number from {} to {}", range.start(), range.end());
    Err(Mistake::new(format!("`input.{field}` is {number}"), hint).into_serde())
}
