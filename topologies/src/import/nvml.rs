//! The topology `local-gpus`: GPUs from NVML (queried by the executor) and NICs from Linux.

use super::nccl::device_of;
use super::{Discovered, Joined, Machine};

/// Rate of a PCIe lane in GB/s, one way, by generation from 1 (PCI-SIG: 2.5 to 64 GT/s less the
/// encoding).
const OF_A_LANE: [f64; 6] = [0.25, 0.5, 0.985, 1.969, 3.938, 7.563];
/// Share of that rate left by packet overhead: 25 of 31.5 GB/s.
const LEFT_BY_THE_PROTOCOL: f64 = 0.8;
/// First NVLink generation with twice the rate per link (Blackwell's data sheet: 1.8 TB/s in both
/// directions over 18 links).
const DOUBLED: u32 = 5;

/// Converts the facts to a machine. All GPUs are assumed equal; a note says if their links differ.
pub(super) fn read(found: &Discovered) -> Machine {
    let mut notes = vec!["found by NVML".to_owned()];
    let first = found.gpus.first();
    let same = |one: &super::DiscoveredGpu| Some(&one.name) == first.map(|gpu| &gpu.name);
    if !found.gpus.iter().all(same) {
        notes.push("GPUs of several kinds are all taken for the first".into());
    }
    let most = found.gpus.iter().map(|gpu| gpu.links).max().unwrap_or(0);
    if found.gpus.iter().any(|gpu| gpu.links != most) {
        notes.push(format!("not every GPU has {most} NVLinks up"));
    }
    let generation = found.gpus.iter().find_map(|gpu| gpu.link_generation).unwrap_or(0);
    let links = if generation >= DOUBLED { 2 * most } else { most };
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
    let rates: Vec<f64> = found.port_rates.iter().filter_map(|rate| rate.split_whitespace().next()?.parse().ok()).collect();
    let slowest = rates.iter().copied().reduce(f64::min);
    if rates.iter().any(|rate| Some(*rate) != slowest) {
        notes.push("NICs of different rates are all taken for the slowest".into());
    }
    Machine {
        gpus: found.gpus.len(),
        device: first.and_then(|gpu| device_of(&format!("0x{:04x}", gpu.pci_device))),
        seen: first.map(|gpu| format!("{}, PCI device 0x{:04x}", gpu.name, gpu.pci_device)),
        joined,
        pcie,
        nics: rates.len(),
        nic_bandwidth: slowest.map(|rate| format!("{rate}Gbit/s")),
        notes,
    }
}
