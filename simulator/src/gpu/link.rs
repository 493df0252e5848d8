//! Profiles of links: between the devices of a node, and between nodes.

use super::defaults::one;
use foretell_units::{BytesPerSecond, Seconds};
use serde::Deserialize;
use std::collections::BTreeMap;

/// Profile of the link between the devices of a node.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkProfile {
    /// Bus bandwidth (as nccl-tests define it) of long ring collectives, by number of members. For
    /// a number without an entry, the next smaller entry applies.
    pub ring: BTreeMap<usize, BytesPerSecond>,
    /// Bus bandwidth of an all-reduce in the switch (NVLS) among all devices of a node. `None` if
    /// the switch cannot reduce.
    #[serde(default)]
    pub in_switch: Option<BytesPerSecond>,
    /// Rate from one device to one other device.
    pub point_to_point: BytesPerSecond,
    /// Rate from one device to all other devices together.
    pub all_to_all: BytesPerSecond,
    /// Number of devices that the link joins, if it spans several hosts.
    #[serde(default)]
    pub domain: Option<usize>,
    /// Time from the call of a collective to its first byte, in addition to NCCL's latency
    /// constants.
    pub launch: Seconds,
    /// Factor on NCCL's latency constants.
    #[serde(default = "one")]
    pub latency_scale: f64,
    /// Source of the figures.
    pub source: String,
}

impl LinkProfile {
    /// Multiplies all rates.
    pub(crate) fn scale(&mut self, factor: f64) {
        let rates = self.ring.values_mut().chain(&mut self.in_switch).chain([&mut self.point_to_point, &mut self.all_to_all]);
        rates.for_each(|rate| *rate = *rate * factor);
    }
}

/// Profile of the network between nodes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkProfile {
    /// Share of the data sheet's rate that long messages reach.
    pub efficiency: f64,
    /// Factor on NCCL's network latency constants.
    pub latency_scale: f64,
    /// Ratio of a hop's latency to that on InfiniBand.
    #[serde(default = "one")]
    pub hop: f64,
    /// Highest rate that a node reaches, if its processors limit it.
    #[serde(default)]
    pub most: Option<BytesPerSecond>,
    /// Source of the figures.
    pub source: String,
}

impl NetworkProfile {
    /// Returns the ratio of a hop's latency to NCCL's constant.
    pub fn latency(&self) -> f64 {
        self.latency_scale * self.hop
    }
}
