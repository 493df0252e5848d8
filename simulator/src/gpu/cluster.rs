//! Devices, links and a network together.

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
    /// Number of devices that the link joins. A node in this sense is a rack where the link spans
    /// one.
    pub devices_per_node: usize,
    /// Rate of a node to others by the data sheet, one way.
    pub node_rate: BytesPerSecond,
    /// Durations on a changed machine, over the usual ones.
    pub paces: ClusterPaces,
}

/// Durations on a machine of a what-if question, over the usual ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClusterPaces {
    /// The host's time of an operator.
    pub host: f64,
    /// The time of a kernel.
    pub kernels: f64,
}

impl ClusterPaces {
    /// Those of the usual machine.
    pub const USUAL: Self = Self { host: 1.0, kernels: 1.0 };
}

impl Cluster {
    /// Returns the rate to other nodes that long messages of a whole node reach.
    pub fn reached_node_rate(&self) -> BytesPerSecond {
        let rate = self.node_rate * self.network.efficiency;
        self.network.most.filter(|most| *most < rate).unwrap_or(rate)
    }

    /// Returns the share of that rate that one device has, in bytes per second.
    pub(super) fn network_rate_of_device(&self) -> f64 {
        self.reached_node_rate().value() / self.devices_per_node as f64
    }
}
