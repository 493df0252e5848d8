//! Makes the text of a topology file from the output of other tools: `nvidia-smi topo -m`, NCCL's
//! topology XML, NVML, `rocm-smi --showtopo`, or Slurm's `scontrol show node`. The caller supplies
//! what the output lacks, such as the GPU's kind or the NICs' rate. It must not know where the
//! output came from: no file is read, no command run.

mod nccl;
mod nvml;
mod rocm;
mod slurm;
mod smi;

pub use slurm::{SlurmGpus, SlurmNode};

use crate::device::{Architecture, DeviceKind};
use crate::error::TopologyError;
use crate::topology::Topology;
use foretell_units::BytesPerSecond;
use std::collections::BTreeSet;
use thiserror::Error;

/// Rate of one NVLink, one way, for NVLink 2 to 4 (V100, A100, H100, H200 data sheets: 50 GB/s per
/// link in both directions).
const OF_A_LINK: f64 = 25e9;
/// Default rate of PCIe, one way: generation 4 x16, 31.5 GB/s less protocol overhead.
const PCIE: &str = "25GB/s";

/// Why a text does not become a topology.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ImportError {
    /// The text has another format.
    #[error("the text is no output of {tool}: {reason}")]
    Form {
        /// The tool that should have written it.
        tool: &'static str,
        /// What is missing.
        reason: String,
    },
    /// The text does not identify the GPUs, or the library lacks them.
    #[error("which GPUs they are is not known{why}; hint: say `--device` with one of {known}")]
    UnknownDevice {
        /// The name that was read or given.
        why: String,
        /// The library's device names.
        known: String,
    },
    /// A node of the cluster has GPUs of several types.
    #[error("node `{node}` has GPUs of several types ({types}), and a node of a topology has one; hint: leave such nodes out")]
    SeveralTypes {
        /// The node's name.
        node: String,
        /// The types.
        types: String,
    },
    /// No node of the cluster takes jobs.
    #[error("all nodes ({count}) are down, drained, failed or not there yet; hint: import the text when they are back")]
    NoNodes {
        /// Their number.
        count: usize,
    },
    /// The resulting topology is invalid.
    #[error(transparent)]
    Topology(#[from] TopologyError),
}

/// Facts that the text may lack.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImportOptions {
    /// The topology's name.
    pub name: String,
    /// Library name of the GPUs; overrides the text.
    pub device: Option<String>,
    /// Rate of one NIC with its unit, if the text lacks it.
    pub nic_bandwidth: Option<String>,
}

/// A machine as far as a tool describes it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Machine {
    gpus: usize,
    /// Library name of the GPUs, if known.
    device: Option<String>,
    /// The text's own name of the GPUs, for messages.
    seen: Option<String>,
    joined: Joined,
    /// Rate of a PCIe slot, one way, with its unit, if known.
    pcie: Option<String>,
    nics: usize,
    /// Rate of one NIC, with its unit.
    nic_bandwidth: Option<String>,
    notes: Vec<String>,
}

/// The links between GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Joined {
    /// NVLinks per GPU, into switches.
    Switch(usize),
    /// NVLinks per GPU, directly to other GPUs.
    Mesh(usize),
    /// Links directly to other GPUs, as many as the device's kind has.
    DeviceLinks,
    /// No NVLink.
    Pcie,
}

/// Makes the text of a topology file from the output of `nvidia-smi topo -m`.
///
/// # Errors
/// [`ImportError`] if the text has another format or the GPU is unknown.
pub fn from_smi_topo(text: &str, options: &ImportOptions) -> Result<String, ImportError> {
    let device = options.device.as_deref().map(library_device).transpose()?;
    let links = device.as_ref().and_then(|device| device.link).map(links_of);
    write(smi::read(text, links)?, options)
}

/// Makes the text of a topology file from NCCL's XML (`NCCL_TOPO_DUMP_FILE`, or a cloud provider's
/// file).
///
/// # Errors
/// As [`from_smi_topo`].
pub fn from_nccl_xml(text: &str, options: &ImportOptions) -> Result<String, ImportError> {
    write(nccl::read(text)?, options)
}

/// Makes the text of a topology file from the output of `rocm-smi --showtopo`.
///
/// # Errors
/// As [`from_smi_topo`].
pub fn from_rocm_topo(text: &str, options: &ImportOptions) -> Result<String, ImportError> {
    write(rocm::read(text)?, options)
}

/// Makes the text of a topology file from the output of `scontrol show node`. Nodes of equal
/// devices are one group. Slurm does not say how devices and nodes are joined: links are those of
/// the device's kind, and a note says so. Nodes that take no jobs are left out, and a note has
/// their number.
///
/// # Errors
/// As [`from_smi_topo`]; also if a node has GPUs of several types, or no node takes jobs.
pub fn from_slurm_nodes(text: &str, options: &ImportOptions) -> Result<String, ImportError> {
    let all = SlurmNode::parse_all(text)?;
    let nodes: Vec<&SlurmNode> = all.iter().filter(|node| node.takes_jobs()).collect();
    let left_out = all.len() - nodes.len();
    if nodes.is_empty() {
        return Err(ImportError::NoNodes { count: left_out });
    }
    if let Some(node) = nodes.iter().find(|node| node.gpu_types().len() > 1) {
        let types: Vec<&str> = node.gpu_types().iter().map(|one| one.kind.unwrap_or("one without a name")).collect();
        return Err(ImportError::SeveralTypes { node: node.name.clone(), types: types.join(", ") });
    }
    let mut groups: Vec<(&SlurmNode, usize)> = Vec::new();
    for &node in &nodes {
        let is_same = |other: &SlurmNode| match node.gpus() {
            Some(gpus) => other.gpus() == Some(gpus),
            None => other.gpus().is_none() && other.cpus.1 == node.cpus.1,
        };
        match groups.iter_mut().find(|(other, _)| is_same(other)) {
            Some((_, count)) => *count += 1,
            None => groups.push((node, 1)),
        }
    }
    let mut notes = vec!["Slurm does not say how devices and nodes are joined: links are those of the device's kind".to_owned()];
    if left_out > 0 {
        notes.push(format!("nodes left out, as they are down, drained, failed or not there yet: {left_out}"));
    }
    let nic = options.nic_bandwidth.as_deref();
    let nics = nic.map_or(String::new(), |bandwidth| format!(", nics: {{count: 1, bandwidth: {bandwidth}}}"));
    if nic.is_none() && nodes.len() > 1 {
        notes.push("the rate between nodes is assumed: 10 Gbit/s; say `--nic-bandwidth` with that of a node".into());
    }
    let assumed = if nic.is_none() && nodes.len() > 1 { ", nics: {count: 1, bandwidth: 10Gbit/s}" } else { &nics };
    let mut lines = Vec::new();
    for (index, (node, count)) in groups.iter().enumerate() {
        let (kind, devices) = match node.gpus() {
            Some(gpus) => (device_of_slurm(gpus.kind, options)?, gpus.count),
            None => ("cpu-core".into(), node.cpus.1),
        };
        let link = match library_device(&kind)?.link {
            Some(link) => format!("nvswitch-{}GB/s", link.value() / 1e9),
            None if node.gpus().is_some() => format!("pcie-{PCIE}"),
            None => "shared-memory-10GB/s".into(),
        };
        lines.push(format!(
            "  - {{name: group{index}, count: {count}, devices: {{kind: {kind}, count: {devices}}}, link: {link}{assumed}, host_memory: {}MiB}}\n",
            node.memory.1
        ));
    }
    let network = if nodes.len() > 1 { "network: {kind: switch, latency: 5us}\n" } else { "" };
    let text = format!("name: {}\n{}nodes:\n{}{network}", options.name, noted(&notes), lines.concat());
    Topology::from_yaml(&text, "the imported topology")?;
    Ok(text)
}

/// The library's name of GPUs whose type Slurm states, such as `h100`.
fn device_of_slurm(kind: Option<&str>, options: &ImportOptions) -> Result<String, ImportError> {
    if let Some(device) = &options.device {
        return Ok(device.clone());
    }
    let kind = kind.unwrap_or_default().to_ascii_lowercase().replace(['_', ' '], "-");
    let known = library_devices()?;
    let begins = |one: &&DeviceKind| !kind.is_empty() && (one.name == kind || one.name.starts_with(&format!("{kind}-")));
    let found: BTreeSet<&str> = known.iter().filter(begins).map(|one| one.name.as_str()).collect();
    if found.contains(kind.as_str()) {
        return Ok(kind);
    }
    match found.iter().collect::<Vec<_>>()[..] {
        [name] => Ok((*name).to_owned()),
        [] => {
            let why = if kind.is_empty() { String::new() } else { format!(" (Slurm says `{kind}`)") };
            let names: BTreeSet<String> = known.iter().map(|one| one.name.clone()).collect();
            Err(ImportError::UnknownDevice { why, known: names.into_iter().collect::<Vec<_>>().join(", ") })
        }
        // Their memories differ, and Slurm does not say them.
        _ => {
            let known = found.into_iter().collect::<Vec<_>>().join(", ");
            Err(ImportError::UnknownDevice { why: format!(" (Slurm says `{kind}`, of which there are several)"), known })
        }
    }
}

/// A GPU as NVML describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiscoveredGpu {
    /// Product name.
    pub name: String,
    /// PCI device number, without the vendor.
    pub pci_device: u16,
    /// PCIe generation and number of lanes.
    pub pcie: Option<(u32, u32)>,
    /// Number of active NVLinks.
    pub links: usize,
    /// Number of these that lead into a switch.
    pub links_into_switches: usize,
    /// NVLink generation, if there are any.
    pub link_generation: Option<u32>,
}

/// Facts about this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Discovered {
    /// GPUs in PCI bus order.
    pub gpus: Vec<DiscoveredGpu>,
    /// Rates of active InfiniBand and RoCE ports in Linux's words: `400 Gb/sec (4X NDR)`.
    pub port_rates: Vec<String>,
}

/// Makes the text of a topology file from facts about this machine.
///
/// # Errors
/// [`ImportError`] if the library lacks the GPU.
pub fn from_discovered(found: &Discovered, options: &ImportOptions) -> Result<String, ImportError> {
    write(nvml::read(found), options)
}

/// Number of NVLinks, derived from their total rate.
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

/// Writes the topology file and checks that it reads back.
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
        // More links than the device has means that some were counted twice.
        Some(link) => format!("{}GB/s", (links as f64 * OF_A_LINK).min(link.value()) / 1e9),
        None => format!("{}GB/s", links as f64 * OF_A_LINK / 1e9),
    };
    let mut notes = machine.notes;
    let link = match machine.joined {
        Joined::Switch(links) => format!("nvswitch-{}", total(links)),
        Joined::Mesh(links) => format!("nvlink-mesh-{}", total(links)),
        Joined::DeviceLinks => match kind.link {
            Some(link) => format!("nvlink-mesh-{}GB/s", link.value() / 1e9),
            None => format!("pcie-{PCIE}"),
        },
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
    text.push_str(&noted(&notes));
    let gpus = machine.gpus;
    text.push_str("nodes:\n");
    text.push_str(&format!("  - {{name: node, devices: {{kind: {device}, count: {gpus}}}, link: {link}{nics}}}\n"));
    Topology::from_yaml(&text, "the imported topology")?;
    Ok(text)
}

/// The notes of a topology file; nothing if there are none.
fn noted(notes: &[String]) -> String {
    let lines = notes.iter().map(|note| format!("  - '{}'\n", note.replace('\'', "''")));
    if notes.is_empty() { String::new() } else { format!("notes:\n{}", lines.collect::<String>()) }
}
