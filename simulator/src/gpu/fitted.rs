//! The file of fitted values: factors on the priors in the other profile files, each at the level
//! of the hierarchy at which it was fitted.
//!
//! A stack's value is its prior, times the factor of all stacks, times that of its family, times
//! its own. A device's efficiency is its prior, times the factor of its generation. So a stack or a device that nothing was fitted on has what its relatives share.

use super::device::GpuProfile;
use super::link::NetworkProfile;
use super::stack::StackProfile;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Least number of measured runs with which a device or a stack counts as fitted.
pub(super) const FITTED_ROWS: usize = 3;

/// Factors by the name of the value that they multiply.
pub type FactorsByName = BTreeMap<String, f64>;

/// Fitted factors on the priors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Factors {
    /// On the values of every stack.
    pub every_stack: FactorsByName,
    /// On the values of all stacks of a family.
    pub families: BTreeMap<String, FactorsByName>,
    /// On the values of one stack.
    pub stacks: BTreeMap<String, FactorsByName>,
    /// On the efficiencies of all devices of a generation.
    pub generations: BTreeMap<String, FactorsByName>,
    /// On the network's values.
    pub network: FactorsByName,
}

impl Factors {
    /// Returns the number of factors, which is that of the fitted values.
    pub fn count(&self) -> usize {
        let maps = [&self.families, &self.stacks, &self.generations];
        let nested = maps.into_iter().flat_map(|map| map.values());
        nested.chain([&self.every_stack, &self.network]).map(BTreeMap::len).sum()
    }

    /// Multiplies the priors of a stack.
    ///
    /// # Errors
    /// The name of a value that no stack has.
    pub fn apply_to_stack(&self, name: &str, stack: &mut StackProfile) -> Result<(), String> {
        let levels = [Some(&self.every_stack), self.families.get(&stack.family), self.stacks.get(name)];
        multiplied(&levels).try_for_each(|(value, factor)| if stack.scale(value, factor) { Ok(()) } else { Err(value.into()) })
    }

    /// Multiplies the priors of a device.
    ///
    /// # Errors
    /// The name of a value that no device has.
    pub fn apply_to_device(&self, device: &mut GpuProfile) -> Result<(), String> {
        let levels = [self.generations.get(&device.generation)];
        multiplied(&levels)
            .try_for_each(|(value, factor)| if device.scale_value(value, factor) { Ok(()) } else { Err(value.into()) })
    }

    /// Multiplies the priors of the network.
    ///
    /// # Errors
    /// The name of a value that the network has not.
    pub fn apply_to_network(&self, network: &mut NetworkProfile) -> Result<(), String> {
        let levels = [Some(&self.network)];
        multiplied(&levels)
            .try_for_each(|(value, factor)| if network.scale_value(value, factor) { Ok(()) } else { Err(value.into()) })
    }
}

/// Returns the product of the factors of all levels, by value.
fn multiplied<'a>(levels: &'a [Option<&'a FactorsByName>]) -> impl Iterator<Item = (&'a str, f64)> {
    let names: BTreeSet<&str> = levels.iter().copied().flatten().flat_map(|level| level.keys()).map(String::as_str).collect();
    let factor = |name: &str| levels.iter().copied().flatten().filter_map(|level| level.get(name)).product();
    names.into_iter().map(move |name| (name, factor(name)))
}

/// Contents of `profiles/fitted.yaml`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Fitted {
    /// The fitted values.
    pub(super) factors: Factors,
    /// How far off each fitted stack is.
    pub(super) stacks: BTreeMap<String, FittedStack>,
    /// Number of measured runs on each device.
    pub(super) devices: BTreeMap<String, usize>,
    /// 10th and 90th percentile of measured over predicted for sources that are held out entirely,
    /// under stacks that no other source has.
    pub(super) unseen: Option<[f64; 2]>,
    /// The same when all rows on a device are held out.
    pub(super) unseen_device: Option<[f64; 2]>,
}

/// Support of a stack's values.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FittedStack {
    /// Number of measured runs.
    pub(super) rows: usize,
    /// 10th and 90th percentile of measured over predicted.
    pub(super) spread: [f64; 2],
}
