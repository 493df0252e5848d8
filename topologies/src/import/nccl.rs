//! Reads NCCL's topology XML: CPUs, PCI devices, GPUs with their NVLinks, NICs with their rates.
//! Elements that are not listed here are ignored.

use super::{ImportError, Joined, Machine};

const TOOL: &str = "NCCL's topology dump";
/// PCI class of an NVSwitch in `tclass`. A GPU's class is 0x030200.
const SWITCH_CLASS: &str = "0x068000";
/// The most links that one `<nvlink>` stands for. A GPU of 2026 has 18.
const MOST_LINKS: usize = 1024;

/// Library names of GPUs by PCI device number (The PCI ID Repository, vendor 10de).
const DEVICES: [(&str, &str); 7] = [
    ("0x1db1", "v100-sxm-16g"),
    ("0x1db5", "v100-sxm-32g"),
    ("0x20b0", "a100-sxm-40g"),
    ("0x20b2", "a100-sxm-80g"),
    ("0x2330", "h100-sxm-80g"),
    ("0x2335", "h200-sxm-141g"),
    ("0x26b9", "l40s"),
];

/// Reads the dump.
pub(super) fn read(text: &str) -> Result<Machine, ImportError> {
    let wrong = |reason: &str| ImportError::Form { tool: TOOL, reason: reason.into() };
    let (mut gpus, mut links, mut is_switched) = (0, 0, false);
    let (mut of_gpu, mut most): (usize, usize) = (0, 0);
    let (mut pci, mut device) = (None, None);
    let mut rates: Vec<f64> = Vec::new();
    let mut is_system = false;
    let document = roxmltree::Document::parse(text).map_err(|error| wrong(&format!("it is not XML: {error}")))?;
    for element in document.descendants().filter(roxmltree::Node::is_element) {
        match element.tag_name().name() {
            "system" => is_system = true,
            "pci" => pci = element.attribute("device").map(str::to_owned),
            "gpu" => {
                gpus += 1;
                of_gpu = 0;
                device = device.or(pci.clone());
            }
            "nvlink" => {
                let count = element.attribute("count").map_or(Some(1), |count| count.parse().ok());
                let count = count
                    .filter(|count| *count <= MOST_LINKS)
                    .ok_or_else(|| wrong(&format!("an <nvlink> has a count that is not a number of links up to {MOST_LINKS}")))?;
                of_gpu += count;
                links += count;
                most = most.max(of_gpu);
                is_switched |= element.attribute("tclass") == Some(SWITCH_CLASS);
            }
            // NCCL states megabits per second.
            "net" => rates.extend(element.attribute("speed").and_then(|speed| speed.parse::<f64>().ok())),
            _ => {}
        }
    }
    if !is_system {
        return Err(wrong("there is no <system>"));
    }
    if gpus == 0 {
        return Err(wrong(
            "there is no <gpu>; hint: dump the topology with NCCL_TOPO_DUMP_FILE, since the files that clouds ship often omit GPUs",
        ));
    }
    let joined = match (links, is_switched) {
        (0, _) => Joined::Pcie,
        (_, true) => Joined::Switch(most),
        (_, false) => Joined::Mesh(most),
    };
    let slowest = rates.iter().copied().reduce(f64::min);
    let mut notes = Vec::new();
    if rates.iter().any(|rate| Some(*rate) != slowest) {
        notes.push("NICs have different rates; all are taken at the slowest".into());
    }
    Ok(Machine {
        gpus,
        device: device.as_deref().and_then(device_of),
        seen: device.map(|number| format!("PCI device {number}")),
        joined,
        pcie: None,
        nics: rates.len(),
        nic_bandwidth: slowest.map(|rate| format!("{}Gbit/s", rate / 1e3)),
        notes,
    })
}

/// Returns the library's name of a GPU, given its PCI device number as NCCL writes it.
pub(super) fn device_of(number: &str) -> Option<String> {
    DEVICES.iter().find(|(device, _)| device.eq_ignore_ascii_case(number)).map(|(_, name)| (*name).to_owned())
}
