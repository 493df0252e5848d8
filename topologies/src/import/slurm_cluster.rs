//! Makes the text of a topology file from Slurm's nodes.

use super::link_rates::peers_of;
use super::slurm::SlurmNode;
use super::written::noted;
use super::{ImportError, ImportOptions, library_device, library_devices, plain, unknown_device};
use crate::topology::Topology;
use std::collections::BTreeSet;

/// Makes the text of a topology file from the output of `scontrol show node`. Nodes with equal
/// devices form one group. Slurm does not say how devices and nodes are joined, so the links are
/// those of the device's kind, and a note says so. Nodes that run no jobs are left out, and a note
/// states their number.
///
/// # Errors
/// As [`super::from_smi_topo`]; also if a node has GPUs of several types, or if no node runs jobs.
pub fn from_slurm_nodes(text: &str, options: &ImportOptions) -> Result<String, ImportError> {
    let all = SlurmNode::parse_all(&plain(text))?;
    let nodes: Vec<&SlurmNode> = all.iter().filter(|node| node.takes_jobs()).collect();
    let left_out = all.len() - nodes.len();
    if nodes.is_empty() {
        return Err(ImportError::NoNodes { count: left_out });
    }
    if let Some(node) = nodes.iter().find(|node| node.gpu_types().len() > 1) {
        let types: Vec<&str> = node.gpu_types().iter().map(|kind| kind.kind.unwrap_or("one without a name")).collect();
        return Err(ImportError::SeveralTypes { node: node.name.clone(), types: types.join(", ") });
    }
    // Groups: a representative node, the number of nodes, and the least memory of any of them.
    let mut groups: Vec<(&SlurmNode, usize, u64)> = Vec::new();
    let mut has_unequal_memory = false;
    for &node in &nodes {
        let is_same = |other: &SlurmNode| match node.gpus() {
            Some(gpus) => other.gpus() == Some(gpus),
            None => other.gpus().is_none() && other.cpus.1 == node.cpus.1,
        };
        let memory = node.memory.1;
        match groups.iter_mut().find(|(other, ..)| is_same(other)) {
            Some((_, count, least)) => {
                *count += 1;
                has_unequal_memory |= *least != memory;
                *least = memory.min(*least);
            }
            None => groups.push((node, 1, memory)),
        }
    }
    let mut notes = vec!["Slurm does not say how devices and nodes are joined: links are those of the device's kind".to_owned()];
    if left_out > 0 {
        notes.push(format!("nodes left out, as they are down, drained, failed or not there yet: {left_out}"));
    }
    if has_unequal_memory {
        notes.push("nodes of equal devices have unequal memory: each is taken to have that of the smallest".into());
    }
    let nic = options.nic_bandwidth.as_deref();
    let nics = nic.map_or(String::new(), |bandwidth| format!(", nics: {{count: 1, bandwidth: {bandwidth}}}"));
    if nic.is_none() && nodes.len() > 1 {
        notes.push("the rate between nodes is assumed: 10 Gbit/s; say `--nic-bandwidth` with that of a node".into());
    }
    let assumed = if nic.is_none() && nodes.len() > 1 { ", nics: {count: 1, bandwidth: 10Gbit/s}" } else { &nics };
    let kinds: BTreeSet<String> = groups.iter().filter_map(|(node, ..)| Some(normal(node.gpus()?.kind))).collect();
    let mut lines = Vec::new();
    for (index, (node, count, memory)) in groups.iter().enumerate() {
        let (kind, devices) = match node.gpus() {
            Some(gpus) => (device_of_slurm(gpus.kind, options, &kinds)?, gpus.count),
            None => ("cpu-core".into(), node.cpus.1),
        };
        let device = library_device(&kind)?;
        let link = match device.link {
            // AMD's GPUs have a direct link between each two devices of a node.
            Some(link) if device.name.starts_with("mi") => {
                let share = (devices.saturating_sub(1) as f64 / peers_of(&device) as f64).clamp(0.0, 1.0);
                if devices > 1 {
                    format!("nvlink-mesh-{}GB/s", link.value() * share / 1e9)
                } else {
                    format!("pcie-{}GB/s", device.slot_rate().value() / 1e9)
                }
            }
            Some(link) => format!("nvswitch-{}GB/s", link.value() / 1e9),
            None if node.gpus().is_some() => format!("pcie-{}GB/s", device.slot_rate().value() / 1e9),
            None => "shared-memory-10GB/s".into(),
        };
        lines.push(format!(
            "  - {{name: group{index}, count: {count}, devices: {{kind: {kind}, count: {devices}}}, link: {link}{assumed}, host_memory: {memory}MiB}}\n"
        ));
    }
    let network = if nodes.len() > 1 { "network: {kind: switch, latency: 5us}\n" } else { "" };
    let text = format!("name: {}\n{}nodes:\n{}{network}", options.name, noted(&notes), lines.concat());
    Topology::from_yaml(&text, "the imported topology")?;
    Ok(text)
}

/// Normalises Slurm's type of GPUs to the form of the library's names: `nvidia_b200` becomes
/// `b200`.
fn normal(kind: Option<&str>) -> String {
    let kind = kind.unwrap_or_default().to_ascii_lowercase().replace(['_', ' ', '.'], "-");
    let makers = ["nvidia-", "amd-", "tesla-", "geforce-"];
    makers.iter().fold(kind, |kind, maker| kind.strip_prefix(maker).map_or(kind.clone(), str::to_owned))
}

/// Whether `kind` names the library's device `library`. `kind` is either NVML's name of a GPU, as
/// Slurm detects it (`a100-sxm4-80gb`, `h100-80gb-hbm3`), or a name that an administrator wrote
/// (`rtx4090`).
fn is_named(kind: &str, library: &str) -> bool {
    let plain = |name: &str| name.replace('-', "").trim_start_matches("rtx").to_owned();
    let normal = |part: &str| match part {
        "sxm2" | "sxm4" | "sxm5" | "hbm3" => "sxm".to_owned(),
        memory if memory.ends_with("gb") => memory.trim_end_matches('b').to_owned(),
        other => other.to_owned(),
    };
    let parts: Vec<String> = kind.split('-').map(normal).collect();
    let of_library: Vec<&str> = library.split('-').collect();
    // Only memory size and form factor may be missing in `kind`.
    let is_open = |part: &str| {
        let is_memory = part.strip_suffix('g').is_some_and(|size| size.chars().all(|digit| digit.is_ascii_digit()));
        is_memory || matches!(part, "sxm" | "pcie")
    };
    let has_all = parts.iter().all(|part| of_library.contains(&part.as_str()));
    let is_same = of_library.iter().all(|part| is_open(part) || parts.iter().any(|own| own == part));
    plain(kind) == plain(library) || (has_all && is_same)
}

/// The device that `--device` states for GPUs of this type: one device for all types, or a list
/// that maps types.
fn stated_device(kind: &str, options: &ImportOptions, kinds: &BTreeSet<String>) -> Result<Option<String>, ImportError> {
    let Some(stated) = &options.device else { return Ok(None) };
    if stated.contains('=') {
        let pairs = stated.split(',').filter_map(|pair| pair.split_once('='));
        return Ok(pairs.into_iter().find(|(name, _)| normal(Some(name)) == kind).map(|(_, device)| device.trim().to_owned()));
    }
    if kinds.len() < 2 || kind.is_empty() || stated == kind || stated.starts_with(&format!("{kind}-")) {
        return Ok(Some(stated.clone()));
    }
    Ok(None)
}

/// The library's name of GPUs of the type that Slurm states, such as `h100`. `kinds` are the types
/// of all nodes.
fn device_of_slurm(kind: Option<&str>, options: &ImportOptions, kinds: &BTreeSet<String>) -> Result<String, ImportError> {
    let seen = kind.unwrap_or_default();
    let kind = normal(kind);
    if let Some(device) = stated_device(&kind, options, kinds)? {
        return Ok(library_device(&device)?.name);
    }
    let known = library_devices()?;
    let begins = |name: &&str| {
        !kind.is_empty() && (**name == *kind || name.starts_with(&format!("{kind}-")) || kind.starts_with(&format!("{name}-")))
    };
    let mut found: BTreeSet<&str> = known.iter().map(|kind| kind.name.as_str()).filter(begins).collect();
    if found.is_empty() && !kind.is_empty() {
        found = known.iter().map(|kind| kind.name.as_str()).filter(|name| is_named(&kind, name)).collect();
    }
    if found.contains(kind.as_str()) {
        return Ok(kind);
    }
    match (found.iter().collect::<Vec<_>>()[..].first(), found.len()) {
        (Some(name), 1) => Ok((**name).to_owned()),
        (None, _) => Err(unknown_device(if kind.is_empty() { String::new() } else { format!(" (Slurm says `{seen}`)") })),
        // The candidates differ in memory, which Slurm does not state.
        (Some(first), _) => match &options.device {
            Some(device) if !device.contains('=') => {
                let others = kinds.iter().find(|other| device.starts_with(other.as_str()));
                let example =
                    others.map_or_else(|| format!("{kind}={first}"), |other| format!("{other}={device},{kind}={first}"));
                Err(ImportError::UnfitDevice { device: device.clone(), kind, example })
            }
            _ => {
                let known = found.into_iter().collect::<Vec<_>>().join(", ");
                let map = if kinds.len() > 1 { format!("; map kinds with `{kind}=NAME`") } else { String::new() };
                Err(ImportError::UnknownDevice { why: format!(" (Slurm says `{seen}`, of which there are several{map})"), known })
            }
        },
    }
}
