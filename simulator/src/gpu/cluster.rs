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
