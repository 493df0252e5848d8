//! The file of fitted values, which replace the priors in the other profile files.

use serde::Deserialize;
use std::collections::BTreeMap;

/// A device or a stack with fewer measured runs counts as not fitted.
pub(super) const FITTED_ROWS: usize = 3;

/// Contents of `profiles/fitted.yaml`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Fitted {
    /// Number of values that the fit chose. Stacks share these factors, so the other values follow
    /// from them.
    #[serde(default)]
    pub(super) free_values: usize,
    pub(super) stacks: BTreeMap<String, FittedStack>,
    /// Number of measured runs on each device.
    pub(super) devices: BTreeMap<String, usize>,
    /// Values of the network by name.
    pub(super) network: BTreeMap<String, f64>,
    /// 10th and 90th percentile of a measurement over its prediction, when each source in turn is
    /// left out of the fit.
    #[serde(default)]
    pub(super) unseen: Option<[f64; 2]>,
    /// 10th and 90th percentile of a measurement over its prediction, when each device in turn is
    /// left out of the fit.
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
    /// 10th and 90th percentile of a measurement over its prediction.
    pub(super) spread: [f64; 2],
}
