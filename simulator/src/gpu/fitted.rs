//! The file of fitted values, which replace the priors in the other profile files.

use serde::Deserialize;
use std::collections::BTreeMap;

/// Least number of measured runs with which a device or a stack counts as fitted.
pub(super) const FITTED_ROWS: usize = 3;

/// Contents of `profiles/fitted.yaml`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Fitted {
    /// Number of values that the fit chose. The others follow, since stacks share factors.
    #[serde(default)]
    pub(super) free_values: usize,
    pub(super) stacks: BTreeMap<String, FittedStack>,
    /// Number of measured runs on each device.
    pub(super) devices: BTreeMap<String, usize>,
    /// Values of the network by name.
    pub(super) network: BTreeMap<String, f64>,
    /// 10th and 90th percentile of measured over predicted for sources that are held out entirely.
    #[serde(default)]
    pub(super) unseen: Option<[f64; 2]>,
    /// The same when all rows on a device are held out.
    #[serde(default)]
    pub(super) unseen_device: Option<[f64; 2]>,
}

/// Fitted values of a stack.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FittedStack {
    /// Number of measured runs.
    pub(super) rows: usize,
    pub(super) values: BTreeMap<String, f64>,
    /// 10th and 90th percentile of measured over predicted.
    pub(super) spread: [f64; 2],
}
