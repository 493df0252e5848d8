//! Writes the topology file of a machine.

use super::link_rates::{link_rate, peers_of};
use super::{ImportError, ImportOptions, Joined, Machine, library_device, unknown_device};
use crate::topology::Topology;

/// Writes the topology file and checks that it reads back.
pub(super) fn write(machine: Machine, options: &ImportOptions) -> Result<String, ImportError> {
    let Some(device) = options.device.clone().or(machine.device.clone()) else {
        let why = machine.seen.map_or(String::new(), |seen| format!(" (the text says {seen})"));
        return Err(unknown_device(why));
    };
    let kind = library_device(&device)?;
    let mut notes = machine.notes;
    if let (Some(stated), Some(seen)) = (&options.device, &machine.device)
        && stated != seen
    {
        notes.push(format!("the text says {seen}, which `--device {stated}` replaces"));
    }
    if let (Some(stated), Some(seen)) = (&options.nic_bandwidth, &machine.nic_bandwidth)
        && stated != seen
    {
        notes.push(format!("the text says NICs of {seen}, which `--nic-bandwidth {stated}` replaces"));
    }
    let of_links = |links: usize| {
        let rate = links as f64 * link_rate(&kind);
        // If there are more links than the device has, some were counted twice.
        let rate = kind.link.map_or(rate, |link| rate.min(link.value()));
        format!("{}GB/s", rate / 1e9)
    };
    let is_stated = machine.pcie.is_some();
    let slot = machine.pcie.unwrap_or_else(|| format!("{}GB/s", kind.slot_rate().value() / 1e9));
    let mut assume_slot = || {
        if !is_stated {
            notes.push(format!("the rate of PCIe is assumed, that of the device's slot less overhead: {slot} one way"));
        }
    };
    let link = match machine.joined {
        Joined::Switch(links) => format!("nvswitch-{}", of_links(links)),
        Joined::Mesh(links) => format!("nvlink-mesh-{}", of_links(links)),
        Joined::Wires(rows) => {
            let most = rows.iter().map(|row| row.iter().sum()).max().unwrap_or(0);
            let has_unlinked = rows.iter().any(|row| row.iter().filter(|&&wires| wires == 0).count() > 1);
            let unlinked = if has_unlinked {
                assume_slot();
                format!(", unlinked: {slot}")
            } else {
                String::new()
            };
            format!("{{kind: nvlink-mesh, bandwidth: {}, wires: {rows:?}{unlinked}}}", of_links(most))
        }
        Joined::Peers(peers) => match kind.link {
            Some(link) => {
                let share = (peers as f64 / peers_of(&kind) as f64).min(1.0);
                format!("nvlink-mesh-{}GB/s", link.value() * share / 1e9)
            }
            None => {
                assume_slot();
                format!("pcie-{slot}")
            }
        },
        Joined::Islands { size, links } => {
            assume_slot();
            // All devices of a group use their PCIe lanes together to reach other groups.
            let rate = slot.trim_end_matches("GB/s").parse::<f64>().expect("invariant: a slot's rate is in GB/s") * size as f64;
            notes.push(format!(
                "groups of {size} GPUs are joined by NVLink, and by PCIe to others: a group stands as a switch whose lanes have NVLink's rate"
            ));
            format!("{{kind: pcie, bandwidth: {}, devices_per_switch: {size}, uplink: {rate}GB/s}}", of_links(links))
        }
        Joined::Pcie => {
            assume_slot();
            format!("pcie-{slot}")
        }
    };
    let bandwidth = options.nic_bandwidth.clone().or(machine.nic_bandwidth);
    let nics = match (machine.nics, bandwidth) {
        (0, Some(bandwidth)) if options.nic_bandwidth.is_some() => {
            notes.push(format!("the text names no NIC: one of {bandwidth} is assumed, since `--nic-bandwidth` says so"));
            format!(", nics: {{count: 1, bandwidth: {bandwidth}}}")
        }
        (0, _) => String::new(),
        (count, Some(bandwidth)) => format!(", nics: {{count: {count}, bandwidth: {bandwidth}}}"),
        (count, None) => {
            notes.push(format!("{count} NICs are left out, as the text does not say their rate: say `--nic-bandwidth`"));
            String::new()
        }
    };
    let mut text = format!("name: {}\n", options.name);
    text.push_str(&noted(&notes));
    let gpus = machine.gpus;
    text.push_str("nodes:\n");
    text.push_str(&format!("  - {{name: node, devices: {{kind: {device}, count: {gpus}}}, link: {link}{nics}}}\n"));
    Topology::from_yaml(&text, "the imported topology")?;
    Ok(text)
}

/// The `notes` field of a topology file. Empty if there are no notes.
pub(super) fn noted(notes: &[String]) -> String {
    let lines = notes.iter().map(|note| format!("  - '{}'\n", note.replace('\'', "''")));
    if notes.is_empty() { String::new() } else { format!("notes:\n{}", lines.collect::<String>()) }
}
