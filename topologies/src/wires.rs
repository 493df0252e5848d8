//! NVLinks between the devices of a node whose pairs have different numbers of them, as in a DGX-1.
//!
//! [`Wires`] knows pairs and their rates. It must not know routes or collectives.

use foretell_units::BytesPerSecond;
use std::sync::Arc;

/// The number of links between each two devices of a node.
#[derive(Debug, Clone, PartialEq)]
pub struct Wires {
    /// A row for each device: its number of links to each other device.
    pub(crate) counts: Arc<[Vec<usize>]>,
    /// Rate between two devices without a link, one way: that of PCIe.
    pub(crate) unlinked: BytesPerSecond,
}

impl Wires {
    /// Rate of a flow from one device to another, one way. `bandwidth` is the rate of all links of
    /// the device that has the most.
    pub fn rate(&self, from: usize, to: usize, bandwidth: BytesPerSecond) -> BytesPerSecond {
        let most = self.counts.iter().map(|row| row.iter().sum::<usize>()).max();
        match (self.counts.get(from).and_then(|row| row.get(to)), most) {
            (Some(&wires), Some(most)) if wires > 0 => bandwidth * (wires as f64 / most as f64),
            _ => self.unlinked,
        }
    }
}
