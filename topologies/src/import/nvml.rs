//! The topology `local-gpus`: GPUs from NVML (queried by the executor) and NICs from Linux.

use super::choose_nics::{Nic, choose};
use super::link_rates::OF_A_LANE;
use super::nccl::device_of;
use super::{Discovered, Joined, Machine};
use crate::device::LEFT_BY_THE_PROTOCOL;

/// Converts the facts to a machine. All GPUs are assumed to be equal. Notes say if their names or
/// links differ.
pub(super) fn read(found: &Discovered) -> Machine {
    let mut notes = vec!["found by NVML".to_owned()];
    let first = found.gpus.first();
    let same = |found: &super::DiscoveredGpu| Some(&found.name) == first.map(|gpu| &gpu.name);
    if !found.gpus.iter().all(same) {
        notes.push("GPUs of several kinds are all taken for the first".into());
    }
    let most = found.gpus.iter().map(|gpu| gpu.links).max().unwrap_or(0);
    if found.gpus.iter().any(|gpu| gpu.links != most) {
        notes.push(format!("not every GPU has {most} NVLinks up"));
    }
    let links = most;
    let is_switched = found.gpus.iter().any(|gpu| gpu.links_into_switches > 0);
    let joined = match (links, is_switched) {
        (0, _) => Joined::Pcie,
        (_, true) => Joined::Switch(links),
        (_, false) => Joined::Mesh(links),
    };
    let pcie = first.and_then(|gpu| gpu.pcie).and_then(|(generation, lanes)| {
        let lane = OF_A_LANE.get((generation as usize).checked_sub(1)?)?;
        Some(format!("{:.1}GB/s", lane * f64::from(lanes) * LEFT_BY_THE_PROTOCOL))
    });
    let rates = found.port_rates.iter().filter_map(|rate| rate.split_whitespace().next()?.parse().ok());
    let nic = |(index, rate): (usize, f64)| Nic {
        name: format!("port {index} of {rate} Gbit/s"),
        rate: Some(rate),
        is_beside_gpu: None,
        is_virtual: false,
    };
    let nics = choose(&rates.enumerate().map(nic).collect::<Vec<_>>());
    notes.extend(nics.note);
    Machine {
        gpus: found.gpus.len(),
        device: first.and_then(|gpu| device_of(&format!("0x{:04x}", gpu.pci_device))),
        seen: first.map(|gpu| format!("{}, PCI device 0x{:04x}", gpu.name, gpu.pci_device)),
        joined,
        pcie,
        nics: nics.count,
        nic_bandwidth: nics.rate.map(|rate| format!("{rate}Gbit/s")),
        notes,
    }
}
