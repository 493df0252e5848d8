//! An event of a trace. It must not know its meaning.

use serde::Deserialize;
use serde_json::Value;

/// One event. Times are in microseconds.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Event {
    #[serde(default)]
    pub(super) ph: String,
    #[serde(default)]
    pub(super) cat: String,
    #[serde(default)]
    pub(super) name: String,
    #[serde(default)]
    pub(super) pid: Value,
    #[serde(default)]
    pub(super) tid: Value,
    #[serde(default)]
    pub(super) ts: f64,
    #[serde(default)]
    pub(super) dur: f64,
    #[serde(default)]
    pub(super) args: Value,
}

impl Event {
    /// Start and end in nanoseconds from the trace's base.
    pub(super) fn span(&self) -> (u64, u64) {
        // A cast from a float saturates. An event does not end before it starts, even if `dur` is
        // negative.
        let start = (self.ts * 1e3).round() as u64;
        (start, start.max(((self.ts + self.dur) * 1e3).round() as u64))
    }
}
