//! NVLinks of a node in which pairs of devices have different numbers of links, as in a DGX-1.
//!
//! [`Wires`] knows pairs and their rates. It must not know routes or collectives.

use foretell_units::BytesPerSecond;
use std::sync::Arc;

/// The number of links between each two devices of a node.
#[derive(Debug, Clone, PartialEq)]
pub struct Wires {
    /// A row for each device: its number of links to each other device.
    pub(crate) counts: Arc<[Vec<usize>]>,
    /// Rate between two devices without a link, one way: by default that of PCIe.
    pub(crate) unlinked: BytesPerSecond,
}

impl Wires {
    /// Rate at which a device sends to `others` together, one way. `bandwidth` is the rate of all
    /// links of the device that has the most.
    pub fn rate(&self, from: usize, others: &[usize], bandwidth: BytesPerSecond) -> BytesPerSecond {
        let most = self.counts.iter().map(|row| row.iter().sum::<usize>()).max();
        let row = self.counts.get(from).map_or(&[][..], Vec::as_slice);
        let wires: usize = others.iter().filter_map(|&other| row.get(other)).sum();
        match most {
            Some(most) if wires > 0 => bandwidth * (wires as f64 / most as f64),
            _ => self.unlinked,
        }
    }
}
