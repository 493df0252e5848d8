//! What communication gets of the rate that a link states.

use foretell_program::{Exchange, Profile, Reach};
use foretell_topologies::{LinkClass, Topology};

/// What exchanges get of a link's stated rate, where no sample says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkEfficiency {
    /// A device's ports. Default 0.8: nccl-tests' bus bandwidth is 235 of 300 GB/s on a DGX A100,
    /// 360 of 450 on an H100.
    pub device: f64,
    /// The memory of a host. Default 1: the stated rate is already that of copies.
    pub host_memory: f64,
    /// A network interface. Default 0.92: 23 of 25 GB/s of an HDR port, and 0.94 for TCP's frames
    /// on Ethernet.
    pub nic: f64,
    /// A switch's uplinks. Default 0.92, since what passes them are the same frames.
    pub switch: f64,
}

impl Default for LinkEfficiency {
    fn default() -> Self {
        Self { device: 0.8, host_memory: 1.0, nic: 0.92, switch: 0.92 }
    }
}

impl LinkEfficiency {
    /// Every link gives what it states.
    pub const IDEAL: Self = Self { device: 1.0, host_memory: 1.0, nic: 1.0, switch: 1.0 };

    /// What a profile's largest message made of each class of link, where one crossed it; the
    /// default for the others. The route's slowest link of the class is the one that bounded it.
    pub(crate) fn measured(profile: &Profile, topology: &Topology) -> Self {
        let efficiency = |reach, class| {
            let messages = profile.exchanges.iter().filter(|one| one.exchange == Exchange::SendReceive && one.reach == reach);
            let largest = messages.max_by_key(|message| message.bytes)?;
            let rates = topology.links().iter().filter(|link| link.class == class).map(|link| link.bandwidth.value());
            let slowest = rates.fold(f64::INFINITY, f64::min);
            let rate = largest.bytes as f64 / largest.time.median.value();
            // Below half of the rate something else was the bound: a processor, or a narrower link.
            Some(rate / slowest).filter(|share| (0.5..=1.0).contains(share))
        };
        let assumed = Self::default();
        Self {
            nic: efficiency(Reach::Switch, LinkClass::Nic).unwrap_or(assumed.nic),
            switch: efficiency(Reach::Fabric, LinkClass::Switch).unwrap_or(assumed.switch),
            ..assumed
        }
    }

    /// That of a link of a class.
    pub fn of(&self, class: LinkClass) -> f64 {
        match class {
            LinkClass::Device => self.device,
            LinkClass::HostMemory => self.host_memory,
            LinkClass::Nic => self.nic,
            LinkClass::Switch => self.switch,
        }
    }
}
