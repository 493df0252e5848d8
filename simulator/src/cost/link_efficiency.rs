//! The share of the stated rate of a link that communication reaches.

use foretell_program::{Exchange, Profile, Reach};
use foretell_topologies::{LinkClass, Topology};

/// The share of a link's stated rate that communication reaches if no sample covers it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkEfficiency {
    /// Ports of a device. Default 0.8: the bus bandwidth of nccl-tests is 235 of 300 GB/s on a DGX
    /// A100 and 360 of 450 GB/s on an H100.
    pub device: f64,
    /// Memory of a host. Default 1: the stated rate is already that of copies.
    pub host_memory: f64,
    /// Network interfaces. Default 0.92: an HDR port reaches 23 of 25 GB/s, and TCP on Ethernet
    /// reaches 0.94 of the rate because of frame headers.
    pub nic: f64,
    /// Uplinks of a switch. Default 0.92, since they carry the same frames.
    pub switch: f64,
}

impl Default for LinkEfficiency {
    fn default() -> Self {
        Self { device: 0.8, host_memory: 1.0, nic: 0.92, switch: 0.92 }
    }
}

impl LinkEfficiency {
    /// Every link reaches its stated rate.
    pub const IDEAL: Self = Self { device: 1.0, host_memory: 1.0, nic: 1.0, switch: 1.0 };

    /// Returns the efficiency of the largest message in a profile on network interfaces and on
    /// switches. Classes of links without such a message keep the default. Efficiency is relative
    /// to the slowest link of the class in the topology.
    pub(crate) fn measured(profile: &Profile, topology: &Topology) -> Self {
        let efficiency = |reach, class| {
            let messages =
                profile.exchanges.iter().filter(|exchange| exchange.exchange == Exchange::SendReceive && exchange.reach == reach);
            let largest = messages.max_by_key(|message| message.bytes)?;
            let rates = topology.links().iter().filter(|link| link.class == class).map(|link| link.bandwidth.value());
            let slowest = rates.fold(f64::INFINITY, f64::min);
            let rate = largest.bytes as f64 / largest.time.median.value();
            // A message below half the rate has another bottleneck: a processor or a narrower link.
            // So its efficiency is not used.
            Some(rate / slowest).filter(|share| (0.5..=1.0).contains(share))
        };
        let assumed = Self::default();
        Self {
            nic: efficiency(Reach::Switch, LinkClass::Nic).unwrap_or(assumed.nic),
            switch: efficiency(Reach::Fabric, LinkClass::Switch).unwrap_or(assumed.switch),
            ..assumed
        }
    }

    /// Returns the efficiency of a class of links.
    pub fn of(&self, class: LinkClass) -> f64 {
        match class {
            LinkClass::Device => self.device,
            LinkClass::HostMemory => self.host_memory,
            LinkClass::Nic => self.nic,
            LinkClass::Switch => self.switch,
        }
    }
}
