//! NCCL's topology XML: processors, PCI devices, GPUs with their NVLinks, NICs with their rate. Read by a scan for tags, which is all that such files
//! have; whatever else is in them is passed over.

use super::{ImportError, Joined, Machine};

const TOOL: &str = "NCCL's topology dump";
/// The PCI class of NVSwitch, as `tclass` has it; a GPU's own is 0x030200.
const SWITCH_CLASS: &str = "0x068000";

/// GPUs of the library by their PCI device number (The PCI ID Repository, vendor 10de).
const DEVICES: [(&str, &str); 7] = [
    ("0x1db1", "v100-sxm-16g"),
    ("0x1db5", "v100-sxm-32g"),
    ("0x20b0", "a100-sxm-40g"),
    ("0x20b2", "a100-sxm-80g"),
    ("0x2330", "h100-sxm-80g"),
    ("0x2335", "h200-sxm-141g"),
    ("0x26b9", "l40s"),
];

/// Reads the file.
pub(super) fn read(text: &str) -> Result<Machine, ImportError> {
    let wrong = |reason: &str| ImportError::Form { tool: TOOL, reason: reason.into() };
    let (mut gpus, mut links, mut is_switched) = (0, 0, false);
    let (mut of_gpu, mut most): (usize, usize) = (0, 0);
    let (mut pci, mut device) = (None, None);
    let mut rates: Vec<f64> = Vec::new();
    let mut is_system = false;
    for tag in tags(text) {
        match tag.name {
            "system" => is_system = true,
            "pci" => pci = tag.attribute("device").map(str::to_owned),
            "gpu" => {
                gpus += 1;
                of_gpu = 0;
                device = device.or(pci.clone());
            }
            "nvlink" => {
                let count = tag.attribute("count").and_then(|count| count.parse().ok()).unwrap_or(1);
                of_gpu += count;
                links += count;
                most = most.max(of_gpu);
                is_switched |= tag.attribute("tclass") == Some(SWITCH_CLASS);
            }
            // In megabits a second.
            "net" => rates.extend(tag.attribute("speed").and_then(|speed| speed.parse::<f64>().ok())),
            _ => {}
        }
    }
    if !is_system {
        return Err(wrong("there is no <system>"));
    }
    if gpus == 0 {
        return Err(wrong(
            "there is no <gpu>; hint: dump it with NCCL_TOPO_DUMP_FILE, as files that clouds ship often leave GPUs to be detected",
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
        notes.push("NICs of different rates are all taken for the slowest".into());
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

/// The library's name of a GPU, by its PCI device number as NCCL writes it.
pub(super) fn device_of(number: &str) -> Option<String> {
    DEVICES.iter().find(|(device, _)| device.eq_ignore_ascii_case(number)).map(|(_, name)| (*name).to_owned())
}

/// An opening tag.
struct Tag<'a> {
    name: &'a str,
    inside: &'a str,
}

impl<'a> Tag<'a> {
    fn attribute(&self, name: &str) -> Option<&'a str> {
        let mut rest = self.inside;
        while let Some((before, after)) = rest.split_once("=\"") {
            let (value, next) = after.split_once('"')?;
            if before.split_whitespace().next_back() == Some(name) {
                return Some(value);
            }
            rest = next;
        }
        None
    }
}

fn tags(text: &str) -> impl Iterator<Item = Tag<'_>> {
    text.split('<').skip(1).filter(|piece| !piece.starts_with(['/', '!', '?'])).filter_map(|piece| {
        let inside = piece.split('>').next()?;
        let name = inside.split(|one: char| one.is_whitespace() || one == '/').next()?;
        Some(Tag { name, inside: inside.get(name.len()..)? })
    })
}
