//! Topologies of what NVIDIA's tools say of a machine: `nvidia-smi topo -m` and NCCL's topology XML. Text in, the text of a topology file out; what
//! neither of the two says (which GPU it is, how fast its NICs are) has to be said by who asks.

mod nccl;
mod nvml;
mod smi;

use crate::device::{Architecture, DeviceKind};
use crate::error::TopologyError;
use crate::topology::Topology;
use foretell_units::BytesPerSecond;
use std::collections::BTreeSet;
use thiserror::Error;

/// What one NVLink carries one way, of NVLink 2 to 4 (V100, A100, H100 and H200 data sheets: 50 GB/s both ways a link).
const OF_A_LINK: f64 = 25e9;
/// A PCIe slot of sixteen lanes of generation 4, one way, where nothing better is known: 31.5 GB/s less the protocol.
const PCIE: &str = "25GB/s";

/// Why a text cannot be made a topology.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ImportError {
    /// The text is not what it is said to be.
    #[error("the text is no output of {tool}: {reason}")]
    Form {
        /// What should have made it.
        tool: &'static str,
        /// What is missing.
        reason: String,
    },
    /// The text does not say which GPUs they are, or the library has none of that name.
    #[error("which GPUs they are is not known{why}; hint: say `--device` with one of {known}")]
    UnknownDevice {
        /// What was read or asked for.
        why: String,
        /// The library's.
        known: String,
    },
    /// What was made of it is no sound topology.
    #[error(transparent)]
    Topology(#[from] TopologyError),
}

/// What is asked for beside the text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImportOptions {
    /// The topology's name.
    pub name: String,
    /// The library's name of the GPUs, where the text does not say it or should not be believed.
    pub device: Option<String>,
    /// What one NIC carries, with its unit, where the text does not say it.
    pub nic_bandwidth: Option<String>,
}

/// How the GPUs of a machine are joined, as far as a tool says.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Machine {
    gpus: usize,
    /// The library's name of them, if it can be told.
    device: Option<String>,
    /// What stands in the text for them, for a message.
    seen: Option<String>,
    joined: Joined,
    /// What a slot carries one way, with its unit, if it is known.
    pcie: Option<String>,
    nics: usize,
    /// What one NIC carries, with its unit.
    nic_bandwidth: Option<String>,
    notes: Vec<String>,
}

/// What is between GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Joined {
    /// So many NVLinks of each GPU into switches.
    Switch(usize),
    /// So many NVLinks of each GPU, straight to others.
    Mesh(usize),
    /// No NVLink.
    Pcie,
}

/// The text of a topology file from that of `nvidia-smi topo -m`.
///
/// # Errors
/// [`ImportError`]: it is no such text, or the GPU is not known.
pub fn from_smi_topo(text: &str, options: &ImportOptions) -> Result<String, ImportError> {
    let device = options.device.as_deref().map(library_device).transpose()?;
    let links = device.as_ref().and_then(|device| device.link).map(links_of);
    write(smi::read(text, links)?, options)
}

/// The text of a topology file from NCCL's XML (`NCCL_TOPO_DUMP_FILE`, or a file that a cloud ships).
///
/// # Errors
/// As [`from_smi_topo`].
pub fn from_nccl_xml(text: &str, options: &ImportOptions) -> Result<String, ImportError> {
    write(nccl::read(text)?, options)
}

/// A GPU as NVML says of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiscoveredGpu {
    /// As its maker calls it.
    pub name: String,
    /// Its PCI device number, without the vendor's.
    pub pci_device: u16,
    /// Generation and lanes of its PCIe.
    pub pcie: Option<(u32, u32)>,
    /// NVLinks that are up.
    pub links: usize,
    /// Those of them that lead into a switch.
    pub links_into_switches: usize,
    /// Their generation, where there are any.
    pub link_generation: Option<u32>,
}

/// What was found of this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Discovered {
    /// Its GPUs, in the order of its PCI bus.
    pub gpus: Vec<DiscoveredGpu>,
    /// Rates of InfiniBand and RoCE ports that are up, as Linux writes them: `400 Gb/sec (4X NDR)`.
    pub port_rates: Vec<String>,
}

/// The text of a topology file from what was found of this machine.
///
/// # Errors
/// [`ImportError`]: the library has no such GPU.
pub fn from_discovered(found: &Discovered, options: &ImportOptions) -> Result<String, ImportError> {
    write(nvml::read(found), options)
}

/// How many NVLinks a device has, by what they carry together.
fn links_of(total: BytesPerSecond) -> usize {
    (total.value() / OF_A_LINK).round() as usize
}

fn library_devices() -> Result<Vec<DeviceKind>, ImportError> {
    let mut found: Vec<DeviceKind> = Vec::new();
    for name in Topology::library_names() {
        let topology = Topology::library(name)?;
        let gpus = topology.device_kinds().iter().filter(|kind| kind.architecture == Architecture::Gpu);
        found.extend(gpus.cloned());
    }
    Ok(found)
}

fn library_device(name: &str) -> Result<DeviceKind, ImportError> {
    let unknown = |why: String| -> Result<DeviceKind, ImportError> {
        let known: BTreeSet<String> = library_devices()?.into_iter().map(|kind| kind.name).collect();
        Err(ImportError::UnknownDevice { why, known: known.into_iter().collect::<Vec<_>>().join(", ") })
    };
    let text = format!("name: one\nnodes: [{{name: one, devices: {{kind: {name}, count: 1}}}}]\n");
    match Topology::from_yaml(&text, "the library") {
        Ok(topology) => match topology.device_kinds() {
            [kind, ..] => Ok(kind.clone()),
            [] => unknown(format!(": `{name}`")),
        },
        Err(_) => unknown(format!(": `{name}`")),
    }
}

/// The topology file, read back to see that it is sound.
fn write(machine: Machine, options: &ImportOptions) -> Result<String, ImportError> {
    let Some(device) = options.device.clone().or(machine.device) else {
        let why = machine.seen.map_or(String::new(), |seen| format!(" (the text says {seen})"));
        return library_device("")
            .map_err(|error| match error {
                ImportError::UnknownDevice { known, .. } => ImportError::UnknownDevice { why, known },
                other => other,
            })
            .map(|_| String::new());
    };
    let kind = library_device(&device)?;
    let total = |links: usize| match kind.link {
        // Links beyond what the device has are counted twice somewhere.
        Some(link) => format!("{}GB/s", (links as f64 * OF_A_LINK).min(link.value()) / 1e9),
        None => format!("{}GB/s", links as f64 * OF_A_LINK / 1e9),
    };
    let mut notes = machine.notes;
    let link = match machine.joined {
        Joined::Switch(links) => format!("nvswitch-{}", total(links)),
        Joined::Mesh(links) => format!("nvlink-mesh-{}", total(links)),
        Joined::Pcie => match machine.pcie {
            Some(rate) => format!("pcie-{rate}"),
            None => {
                notes.push(format!("the rate of PCIe is assumed: {PCIE} one way"));
                format!("pcie-{PCIE}")
            }
        },
    };
    let bandwidth = options.nic_bandwidth.clone().or(machine.nic_bandwidth);
    let nics = match (machine.nics, bandwidth) {
        (0, _) => String::new(),
        (count, Some(bandwidth)) => format!(", nics: {{count: {count}, bandwidth: {bandwidth}}}"),
        (count, None) => {
            notes.push(format!("{count} NICs are left out, as the text does not say their rate: say `--nic-bandwidth`"));
            String::new()
        }
    };
    let mut text = format!("name: {}\n", options.name);
    if !notes.is_empty() {
        text.push_str("notes:\n");
        notes.iter().for_each(|note| text.push_str(&format!("  - '{}'\n", note.replace('\'', "''"))));
    }
    let gpus = machine.gpus;
    text.push_str("nodes:\n");
    text.push_str(&format!("  - {{name: node, devices: {{kind: {device}, count: {gpus}}}, link: {link}{nics}}}\n"));
    Topology::from_yaml(&text, "the imported topology")?;
    Ok(text)
}
