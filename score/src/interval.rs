//! Which runs the interval of a prediction was derived from, and how many measurements are inside.
//! It must not know tables of rows.

use crate::prediction::StepPrediction;
use crate::row::Row;
use crate::run::Run;
use schemars::JsonSchema;
use serde::Serialize;

/// The runs that the interval of a prediction was derived from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum IntervalBasis {
    /// Runs of the same stack, and of the same device.
    Known,
    /// Stacks that a fit left out: too few runs of the stack were fitted.
    UnknownStack,
    /// Devices that a fit left out: too few runs on the device were fitted.
    UnknownDevice,
    /// The framework's own operators.
    Traced,
    /// Users' own jobs, which are rarely tuned as published runs are.
    UsersJob,
}

impl IntervalBasis {
    /// Returns the basis of a row's prediction.
    pub(crate) fn of(row: &Row, run: &Run, is_traced: bool) -> Self {
        if is_traced {
            Self::Traced
        } else if is_users_job(row) {
            Self::UsersJob
        } else if run.clusters().any(|cluster| cluster.gpu.unseen) {
            Self::UnknownDevice
        } else if run.stack.estimated || run.plan.workload.unknown_stack {
            Self::UnknownStack
        } else {
            Self::Known
        }
    }

    /// Returns the basis in words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Known => "known stack and device",
            Self::UnknownStack => "unknown stack",
            Self::UnknownDevice => "unknown device",
            Self::Traced => "traced operators",
            Self::UsersJob => "users' own jobs by profile",
        }
    }

    /// Returns the 80 % interval of a prediction, in seconds.
    pub(crate) fn interval(self, prediction: &StepPrediction) -> [f64; 2] {
        let [p10, p90] = [prediction.p10.value(), prediction.p90.value()];
        match self {
            // At least as wide as the profile's interval.
            Self::UsersJob => {
                let step = prediction.step.value();
                [p10.min(step * USERS_SPREAD[0]), p90.max(step * USERS_SPREAD[1])]
            }
            _ => [p10, p90],
        }
    }

    /// Returns the bases in the order of tables.
    pub(crate) const fn all() -> [Self; 5] {
        [Self::Known, Self::UnknownStack, Self::UnknownDevice, Self::Traced, Self::UsersJob]
    }
}

/// A measurement over its prediction by a profile, of users' own jobs: 10th and 90th percentile
/// over the sources of the users' table, each counted once (28 November 2026). Users' jobs are
/// rarely tuned, and the reasons why they are slow are rarely stated.
const USERS_SPREAD: [f64; 2] = [0.8, 2.0];

/// Whether a row states how a user trained (`method`), as rows from users' threads do.
fn is_users_job(row: &Row) -> bool {
    row.cells.get("method").is_some_and(|method| !method.is_empty())
}

/// Share of measurements inside their 80 % intervals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Coverage {
    /// Measured rows.
    pub rows: usize,
    /// Share of all rows.
    pub inside_interval: f64,
    /// Mean of the shares of the sources.
    pub macro_inside_interval: f64,
}

impl Coverage {
    /// The coverage in words.
    pub(crate) fn line(&self, basis: IntervalBasis) -> String {
        let Self { rows, inside_interval, macro_inside_interval } = self;
        format!(
            "{}: {:.0} % of the measurements are inside the 80 % interval (every source counts alike; {:.0} % of {rows} rows)",
            basis.words(),
            100.0 * macro_inside_interval,
            100.0 * inside_interval
        )
    }
}
