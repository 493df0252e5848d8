//! What sizes are where a model file leaves them out.

use serde::{Deserialize, Serialize};

/// The slots of a mixture's experts over what balanced routing needs: a positive, finite number.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct CapacityFactor(f64);

// It is no NaN.
impl Eq for CapacityFactor {}

impl Default for CapacityFactor {
    /// GShard's (Lepikhin et al. 2021) and Switch Transformer's usual factor.
    fn default() -> Self {
        Self(1.25)
    }
}

impl TryFrom<f64> for CapacityFactor {
    type Error = String;

    fn try_from(factor: f64) -> Result<Self, String> {
        if factor > 0.0 && factor <= 1e6 {
            return Ok(Self(factor));
        }
        Err(format!("`capacity_factor` is {factor}; hint: it is a number above 0, such as 1.25"))
    }
}

impl From<CapacityFactor> for f64 {
    fn from(factor: CapacityFactor) -> f64 {
        factor.0
    }
}

pub(super) fn default_theta() -> usize {
    10_000
}

pub(super) fn default_classifier() -> usize {
    4096
}

pub(super) fn is_zero(value: &usize) -> bool {
    *value == 0
}

pub(super) fn default_one() -> usize {
    1
}

pub(super) fn default_moe_theta() -> usize {
    1_000_000
}

pub(super) fn default_buckets() -> usize {
    32
}

pub(super) fn default_max_distance() -> usize {
    128
}

pub(super) fn default_image() -> usize {
    224
}

pub(super) fn default_channels() -> usize {
    3
}

pub(super) fn default_classes() -> usize {
    1000
}

pub(super) fn default_width() -> usize {
    64
}

pub(super) fn default_tied() -> bool {
    true
}
