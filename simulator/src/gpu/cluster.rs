//! A cluster: devices, links and a network.

use super::device::GpuProfile;
use super::link::{LinkProfile, NetworkProfile};
use foretell_units::BytesPerSecond;

/// A cluster of equal nodes.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// Name of the device's profile.
    pub device: String,
    /// Profile of the devices.
    pub gpu: GpuProfile,
    /// Link between the devices of a node.
    pub link: LinkProfile,
    /// Network between nodes.
    pub network: NetworkProfile,
    /// Number of devices that the link joins. If the link spans a whole rack, the rack counts as
    /// one node.
    pub devices_per_node: usize,
    /// Rate at which a node sends to other nodes by the data sheet.
    pub node_rate: BytesPerSecond,
    /// Ratios of durations on a changed machine to those on the usual one.
    pub paces: ClusterPaces,
}

/// Ratios of durations on the machine of a what-if question to those on the usual machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClusterPaces {
    /// Ratio for the host's time per operator.
    pub host: f64,
    /// Ratio for the time of a kernel.
    pub kernels: f64,
}

impl ClusterPaces {
    /// The ratios of the usual machine, 1.
    pub const USUAL: Self = Self { host: 1.0, kernels: 1.0 };
}

impl Cluster {
    /// Returns the rate to other nodes that a whole node reaches with long messages.
    pub fn reached_node_rate(&self) -> BytesPerSecond {
        let rate = self.node_rate * self.network.efficiency;
        self.network.most.filter(|most| *most < rate).unwrap_or(rate)
    }

    /// Returns one device's share of [`Self::reached_node_rate`], in bytes per second.
    pub(super) fn network_rate_of_device(&self) -> f64 {
        self.reached_node_rate().value() / self.devices_per_node as f64
    }
}
