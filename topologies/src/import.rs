//! Makes the text of a topology file from the output of other tools: `nvidia-smi topo -m`, NCCL's
//! topology XML, NVML, `rocm-smi --showtopo`, or Slurm's `scontrol show node`. The caller supplies
//! what the output lacks, such as the GPU's kind or the NICs' rate. It must not read files or run
//! commands.

mod choose_nics;
mod link_rates;
mod mesh;
mod nccl;
mod nvml;
mod rocm;
mod slurm;
mod slurm_cluster;
mod smi;
mod written;

pub use slurm::{SlurmGpus, SlurmNode};
pub use slurm_cluster::from_slurm_nodes;

use crate::device::{Architecture, DeviceKind};
use crate::error::TopologyError;
use link_rates::links_of;
use miette::Diagnostic;
use thiserror::Error;
use written::write;

/// Why a text cannot become a topology.
#[derive(Debug, Clone, PartialEq, Eq, Error, Diagnostic)]
pub enum ImportError {
    /// The text does not have the expected format.
    #[error("the text is no output of {tool}: {reason}")]
    #[diagnostic(code(cluster_import::form), help("{hint}"))]
    Form {
        /// The tool that should have written it.
        tool: &'static str,
        /// What is missing.
        reason: String,
        /// What to pass instead.
        hint: &'static str,
    },
    /// The text does not identify the GPUs, or the library lacks them.
    #[error("which GPUs they are is not known{why}")]
    #[diagnostic(code(cluster_import::unknown_device), help("say `--device` with one of {known}"))]
    UnknownDevice {
        /// The unknown name, in words.
        why: String,
        /// The library's device names.
        known: String,
    },
    /// A node of the cluster has GPUs of several types.
    #[error("node `{node}` has GPUs of several types ({types}), and a node of a topology has one")]
    #[diagnostic(code(cluster_import::several_types), help("leave such nodes out"))]
    SeveralTypes {
        /// The node's name.
        node: String,
        /// The types.
        types: String,
    },
    /// No node of the cluster takes jobs.
    #[error("all nodes ({count}) are down, drained, failed or not there yet")]
    #[diagnostic(code(cluster_import::no_nodes), help("import the text when they are back"))]
    NoNodes {
        /// Number of its nodes.
        count: usize,
    },
    /// One kind of GPU was named for a cluster with several kinds.
    #[error("`--device {device}` does not fit all nodes: Slurm says `{kind}` of others")]
    #[diagnostic(code(cluster_import::unfit_device), help("map each kind, such as `--device {example}`"))]
    UnfitDevice {
        /// The device that was named.
        device: String,
        /// A kind of GPU that is another device.
        kind: String,
        /// An example of a mapping of all kinds.
        example: String,
    },
    /// The resulting topology is invalid.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Topology(#[from] TopologyError),
}

/// Facts that the text may not have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImportOptions {
    /// The topology's name.
    pub name: String,
    /// Library name of the GPUs, which overrides the text. For Slurm it may also be a list that
    /// maps Slurm's GPU types to library names, such as `a100=a100-sxm-80g,v100=v100-sxm-32g`.
    pub device: Option<String>,
    /// Rate of one NIC with its unit, if the text does not state it.
    pub nic_bandwidth: Option<String>,
}

/// A machine, as far as a tool describes it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Machine {
    gpus: usize,
    /// Library name of the GPUs, if known.
    device: Option<String>,
    /// The text's own name of the GPUs, for error messages.
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Joined {
    /// NVLinks into switches: the number per GPU.
    Switch(usize),
    /// NVLinks directly to other GPUs: the number per GPU.
    Mesh(usize),
    /// NVLinks directly to other GPUs, if pairs have different numbers of links: for each GPU, the
    /// number of links to each other GPU.
    Wires(Vec<Vec<usize>>),
    /// Direct links to this number of other GPUs, out of the peers for which the device's kind has
    /// links.
    Peers(usize),
    /// Groups of consecutive GPUs, with NVLink inside a group and PCIe between groups.
    Islands {
        /// Number of GPUs in a group.
        size: usize,
        /// Number of NVLinks per GPU.
        links: usize,
    },
    /// PCIe only.
    Pcie,
}

/// Makes the text of a topology file from the output of `nvidia-smi topo -m`.
///
/// # Errors
/// [`ImportError`] if the text has another format or the GPU is unknown.
pub fn from_smi_topo(text: &str, options: &ImportOptions) -> Result<String, ImportError> {
    let device = options.device.as_deref().map(library_device).transpose()?;
    let links = device.as_ref().and_then(links_of);
    write(smi::read(&plain(text), links)?, options)
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
    write(rocm::read(&plain(text))?, options)
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
    /// Rates of active InfiniBand and RoCE ports as Linux prints them: `400 Gb/sec (4X NDR)`.
    pub port_rates: Vec<String>,
}

/// Makes the text of a topology file from facts about this machine.
///
/// # Errors
/// [`ImportError`] if the library lacks the GPU.
pub fn from_discovered(found: &Discovered, options: &ImportOptions) -> Result<String, ImportError> {
    write(nvml::read(found), options)
}

/// Removes a terminal's escape codes, which a listing may have around its header.
fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            '\u{1b}' => {
                // `ESC [ 4 m`: parameters, then a letter that ends the code.
                if characters.next() == Some('[') {
                    let _ = characters.find(|letter| ('@'..='~').contains(letter));
                }
            }
            '\r' => {}
            other => plain.push(other),
        }
    }
    plain
}

/// The library's GPUs.
fn library_devices() -> Result<Vec<DeviceKind>, ImportError> {
    let mut found: Vec<DeviceKind> = Vec::new();
    for name in DeviceKind::library_names()? {
        found.extend(DeviceKind::library(name)?.filter(|kind| kind.architecture == Architecture::Gpu));
    }
    Ok(found)
}

fn unknown_device(why: String) -> ImportError {
    match library_devices() {
        Ok(known) => {
            let known: Vec<String> = known.into_iter().map(|kind| kind.name).collect();
            ImportError::UnknownDevice { why, known: known.join(", ") }
        }
        Err(error) => error,
    }
}

/// The library's device called `name`.
fn library_device(name: &str) -> Result<DeviceKind, ImportError> {
    DeviceKind::library(name)?.ok_or_else(|| unknown_device(format!(": `{name}`")))
}
