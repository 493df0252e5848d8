//! Profiles of software stacks: how a framework uses devices and links. A profile must not know
//! models or layouts.

mod costs;
mod limits;
mod memory_rules;
mod run_defaults;

use super::category::Category;
use super::cluster::Cluster;
use super::format::ProductFormat;
use super::workload::{Fp8Scaling, Workload};
pub use costs::{AttentionKind, CommunicationCosts, HostCosts, MemoryBoundCosts, ProductCosts};
pub use limits::StackLimits;
pub use memory_rules::MemoryRules;
pub use run_defaults::RunDefaults;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::BTreeMap;

/// On devices without measured kernels or runs, the interval's bounds are raised to this power,
/// until `fitted.yaml` has the interval of left-out devices. An assumption.
const ESTIMATED_DEVICE: f64 = 1.4;

/// Least slow end of the interval if a profile stands in for operators that were not traced. Such
/// jobs are users' own runs, which nobody tuned (`UNTUNED` in `traced/machine.rs`, with kernels
/// that were not measured).
const STAND_IN: f64 = 2.0;

/// Returns the bound of an interval with two independent causes, from the bound due to each cause.
fn wider(one: f64, other: f64) -> f64 {
    let (one, other) = (one.ln(), other.ln());
    (one.hypot(other)).copysign(one).exp()
}

fn yes() -> bool {
    true
}

/// Profile of a software stack. In `profiles/stacks` the keys of the flattened parts stand
/// side by side.
#[derive(Clone, Debug, Deserialize)]
pub struct StackProfile {
    /// Group of stacks of similar design. A fit assumes that they deviate similarly from their
    /// priors.
    pub family: String,
    /// Name of another stack profile of the same software, run differently. The two deviate even
    /// more similarly.
    #[serde(default)]
    pub variant_of: Option<String>,
    /// What the framework's current release can run. `None` if no limits are known.
    #[serde(default)]
    pub limits: Option<StackLimits>,
    /// Settings of a run that does not state them.
    #[serde(flatten)]
    pub defaults: RunDefaults,
    /// Costs of matrix products.
    #[serde(flatten)]
    pub products: ProductCosts,
    /// The keys of the stack's operator tables ([`foretell_models::operator_tables`]): `framework`,
    /// `version`, and whatever else a plan does not state. Steps that were traced are predicted
    /// from these tables, and all others from this profile. `None` without tables.
    #[serde(default)]
    pub tables: Option<BTreeMap<String, String>>,
    /// Implementation of attention.
    pub attention: AttentionKind,
    /// Scale of attention whose keys or queries are a part of the sequence, if the stack has other
    /// kernels for it: PyTorch's context parallelism runs cuDNN's.
    #[serde(default)]
    pub parted_attention: Option<f64>,
    /// Costs of kernels that are bound by memory.
    #[serde(flatten)]
    pub memory_bound: MemoryBoundCosts,
    /// Costs of the host.
    #[serde(flatten)]
    pub host: HostCosts,
    /// Costs of collectives and messages.
    #[serde(flatten)]
    pub communication: CommunicationCosts,
    /// True if context parallelism gives each rank equal work on a causal sequence in every order
    /// that a layout names: one part from the beginning and one from the end (Megatron Core,
    /// torchtitan). Our own executor follows the layout's order; if the parts are contiguous, its
    /// last rank has the most work.
    #[serde(default = "yes")]
    pub balances_parts: bool,
    /// Differences between the stack's memory and the Program's.
    pub memory: MemoryRules,
    /// 10th and 90th percentile of a measurement over its prediction, from the rows that the stack
    /// was fitted on.
    pub spread: [f64; 2],
    /// Source of the figures.
    pub source: String,
    /// True if the stack was fitted on too few measured runs.
    #[serde(default)]
    pub estimated: bool,
    /// Keys that match no field. Serde cannot refuse them in a struct with flattened parts.
    #[serde(flatten)]
    unknown: BTreeMap<String, IgnoredAny>,
}

impl StackProfile {
    /// Returns a key of the profile's text that matches no field, or `None`.
    pub(super) fn unknown_key(&self) -> Option<&str> {
        self.unknown.keys().next().map(String::as_str)
    }

    /// Returns the profile as it applies to a run. `unseen` is the interval of stacks without
    /// fitted runs.
    #[must_use]
    pub fn applied(mut self, workload: &Workload, unseen: [f64; 2]) -> Self {
        if workload.fp8_scaling == Fp8Scaling::Row {
            // The scale of a row needs the whole row, so torchao's recipes gather parameters in
            // sixteen bits.
            self.communication.narrow_gather = false;
        }
        if workload.has_unknown_stack {
            self.spread = unseen;
        }
        if self.tables.is_some() {
            self.spread[1] = self.spread[1].max(STAND_IN);
        }
        self
    }

    /// Returns the interval of a run on these clusters. It is wider if too few runs were fitted on
    /// one of their devices.
    pub fn spread_on<'a>(&self, clusters: impl Iterator<Item = &'a Cluster>) -> [f64; 2] {
        let unseen = clusters.filter(|cluster| cluster.gpu.unseen);
        unseen.fold(self.spread, |[low, high], cluster| match cluster.gpu.spread {
            Some([other_low, other_high]) => [wider(low, other_low), wider(high, other_high)],
            None => self.spread.map(|ratio| ratio.powf(ESTIMATED_DEVICE)),
        })
    }

    /// Returns the ratio of the product efficiency that the stack's kernels reach to that in the
    /// device's profile.
    pub fn product_share(&self, device: &str, format: ProductFormat, scaling: Fp8Scaling) -> f64 {
        let by_row = scaling == Fp8Scaling::Row && format == ProductFormat::Fp8;
        let row_share = if by_row { self.products.scaled_by_row } else { 1.0 };
        let device_share = self.products.product.get(device).copied().unwrap_or(1.0);
        self.products.product_scale * device_share * self.format_share(format) * row_share
    }

    /// Returns the factor on product efficiency in a format.
    pub fn format_share(&self, format: ProductFormat) -> f64 {
        self.products.format.get(&format).copied().unwrap_or(1.0)
    }

    /// Returns the ratio of the bytes that the stack's kernels of a category move to the Program's
    /// bytes. 0 if they are fused away.
    pub fn traffic_share(&self, category: Category) -> f64 {
        self.memory_bound.traffic.get(&category).copied().unwrap_or(1.0)
    }

    /// Returns the number of kernels that the host launches for an instruction of a category.
    pub fn launches(&self, category: Category) -> f64 {
        self.host.launches.get(&category).copied().unwrap_or(1.0)
    }
}
