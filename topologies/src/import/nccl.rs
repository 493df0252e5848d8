//! Reads NCCL's topology XML: CPUs, PCI devices, GPUs with their NVLinks, NICs with their rates.
//! Elements that are not listed here are ignored.

use super::choose_nics::{Nic, choose};
use super::link_rates::OF_A_LANE;
use super::mesh::{Switches, joined};
use super::{ImportError, Joined, Machine};
use crate::device::LEFT_BY_THE_PROTOCOL;
use roxmltree::Node;

const TOOL: &str = "NCCL's topology dump";
/// PCI class of an NVSwitch in `tclass`. A GPU's class is 0x030200.
const SWITCH_CLASS: &str = "0x068000";
/// Largest number of links that one `<nvlink>` may stand for. A GPU of 2026 has 18.
const MOST_LINKS: usize = 1024;

/// Library names of GPUs by PCI device number (The PCI ID Repository, vendors 10de and 1002).
const DEVICES: [(&str, &str); 33] = [
    ("0x1db1", "v100-sxm-16g"),
    ("0x1db5", "v100-sxm-32g"),
    ("0x1db6", "v100-pcie-32g"),
    ("0x1eb8", "t4"),
    ("0x20b0", "a100-sxm-40g"),
    ("0x20b2", "a100-sxm-80g"),
    ("0x20f1", "a100-pcie-40g"),
    ("0x20b5", "a100-pcie-80g"),
    ("0x20b7", "a30"),
    ("0x2235", "a40"),
    ("0x2236", "a10"),
    ("0x2237", "a10g"),
    ("0x2230", "rtx-a6000"),
    ("0x2204", "rtx-3090"),
    ("0x2684", "rtx-4090"),
    ("0x2b85", "rtx-5090"),
    ("0x2330", "h100-sxm-80g"),
    ("0x2331", "h100-pcie-80g"),
    ("0x2324", "h800-sxm-80g"),
    ("0x2329", "h20"),
    ("0x2335", "h200-sxm-141g"),
    ("0x26b5", "l40"),
    ("0x26b9", "l40s"),
    ("0x27b8", "l4"),
    ("0x2901", "b200-sxm-180g"),
    ("0x2941", "gb200"),
    ("0x738c", "mi100"),
    ("0x740f", "mi210"),
    ("0x740c", "mi250"),
    ("0x74a1", "mi300x"),
    // A virtual function of the same GPU.
    ("0x74b5", "mi300x"),
    ("0x74a5", "mi325x"),
    ("0x75a3", "mi355x"),
];

/// AMD's GPUs by the architecture that RCCL writes (`gcn`), for dumps without a PCI number: the
/// library's name, if it has the GPU, and the product name.
const ARCHITECTURES: [(&str, Option<&str>, &str); 3] =
    [("906", None, "MI50 or MI60"), ("908", Some("mi100"), "MI100"), ("942", Some("mi300x"), "MI300X")];

/// PCI device numbers of virtual functions of ConnectX NICs.
const VIRTUAL: [&str; 6] = ["0x1014", "0x1016", "0x1018", "0x101a", "0x101c", "0x101e"];

/// Reads the dump.
pub(super) fn read(text: &str) -> Result<Machine, ImportError> {
    let refused = |reason: &str, hint| ImportError::Form { tool: TOOL, reason: reason.into(), hint };
    let wrong = |reason: &str| refused(reason, "give the whole file that NCCL wrote for NCCL_TOPO_DUMP_FILE");
    let (mut gpus, mut links, mut is_switched) = (0, 0, false);
    let (mut of_gpu, mut most): (usize, usize) = (0, 0);
    let (mut pci, mut device, mut pcie) = (None, None, None);
    let mut architecture = None;
    // PCI addresses of GPUs. For each link: the GPU, the address that it leads to, and the number
    // of links.
    let (mut bus, mut buses) = (String::new(), Vec::new());
    let mut ends: Vec<(usize, String, usize)> = Vec::new();
    let mut has_impossible = false;
    let mut nics: Vec<Nic> = Vec::new();
    let mut is_system = false;
    let document = roxmltree::Document::parse(text).map_err(|error| wrong(&format!("it is not XML: {error}")))?;
    for element in document.descendants().filter(roxmltree::Node::is_element) {
        match element.tag_name().name() {
            "system" => is_system = true,
            "pci" => {
                pci = element.attribute("device").map(str::to_owned);
                bus = element.attribute("busid").unwrap_or_default().to_ascii_lowercase();
            }
            "gpu" => {
                gpus += 1;
                of_gpu = 0;
                buses.push(bus.clone());
                device = device.or(pci.clone());
                architecture = architecture.or(element.attribute("gcn"));
                pcie = pcie.or_else(|| slot_of(element.parent()?));
            }
            "nvlink" | "xgmi" => {
                let count = element.attribute("count").map_or(Some(1), |count| count.parse().ok());
                let count = count
                    .filter(|count| *count <= MOST_LINKS)
                    .ok_or_else(|| wrong(&format!("a link has a count that is not a number of links up to {MOST_LINKS}")))?;
                of_gpu += count;
                let target = element.attribute("target").unwrap_or_default().to_ascii_lowercase();
                ends.push((buses.len().saturating_sub(1), target, count));
                links += count;
                most = most.max(of_gpu);
                is_switched |= element.attribute("tclass") == Some(SWITCH_CLASS);
            }
            "net" => {
                let nic = nic_of(&element).filter(|nic| nics.iter().all(|other| other.name != nic.name));
                has_impossible |= nic.as_ref().is_some_and(|nic| nic.rate.is_none());
                nics.extend(nic);
            }
            _ => {}
        }
    }
    if !is_system {
        return Err(wrong("there is no <system>"));
    }
    if gpus == 0 {
        let hint = "dump the topology with NCCL_TOPO_DUMP_FILE, since the files that clouds ship often omit GPUs";
        return Err(refused("there is no <gpu>", hint));
    }
    let mut notes = Vec::new();
    let joined = match (links, is_switched) {
        (0, _) => Joined::Pcie,
        (_, true) => Joined::Switch(most),
        (_, false) => match wires(&buses, &ends) {
            Some(wires) => {
                if wires.iter().enumerate().any(|(gpu, row)| row.get(gpu).is_some_and(|&links| links > 0)) {
                    notes.push(
                        "links that lead from a GPU to itself are left out, as the dump does not say their other end".into(),
                    );
                }
                let others = |(gpu, mut row): (usize, Vec<usize>)| {
                    row.iter_mut().skip(gpu).take(1).for_each(|links| *links = 0);
                    row
                };
                let wires: Vec<Vec<usize>> = wires.into_iter().enumerate().map(others).collect();
                joined(&wires, Switches::None, &mut notes)
            }
            // Some links lead to something outside the dump.
            None => Joined::Mesh(most),
        },
    };
    if has_impossible {
        notes.push(format!(
            "a NIC claims more than {} Gbit/s, which none has: its rate is taken as not stated",
            FASTEST_NIC / 1e3
        ));
    }
    let nics = choose(&nics);
    notes.extend(nics.note);
    let by_number = device.as_deref().and_then(device_of);
    let architecture = ARCHITECTURES.iter().find(|(name, ..)| architecture == Some(*name));
    let seen = match architecture {
        Some((name, None, what)) => Some(format!("gcn {name}, an {what}, which is not in the catalogue")),
        _ => device.map(|number| format!("PCI device {number}")),
    };
    Ok(Machine {
        gpus,
        device: by_number.or_else(|| architecture.and_then(|(_, library, _)| library.map(str::to_owned))),
        seen,
        joined,
        pcie,
        nics: nics.count,
        nic_bandwidth: nics.rate.map(|rate| format!("{rate}Gbit/s")),
        notes,
    })
}

/// The number of links between each two GPUs. `None` if a link leads elsewhere.
fn wires(buses: &[String], ends: &[(usize, String, usize)]) -> Option<Vec<Vec<usize>>> {
    let mut wires = vec![vec![0; buses.len()]; buses.len()];
    for (from, target, count) in ends {
        let to = buses.iter().position(|bus| bus == target)?;
        *wires.get_mut(*from)?.get_mut(to)? += count;
    }
    Some(wires)
}

/// Rate between a PCI device and the processor, one way, without packet overhead: that of the
/// slowest link between them. A link inside a card, or behind a switch, may be faster than the
/// links above it.
fn slot_of(pci: Node<'_, '_>) -> Option<String> {
    let links = pci.ancestors().filter(|ancestor| ancestor.tag_name().name() == "pci");
    let rate = links.filter_map(|link| rate_of(&link)).reduce(f64::min)?;
    Some(format!("{rate:.1}GB/s"))
}

/// Rate of a PCI link in GB/s, one way, without packet overhead.
fn rate_of(pci: &Node<'_, '_>) -> Option<f64> {
    // The value is `16 GT/s` or `16.0 GT/s PCIe`: 2.5, 5, 8 and so on by generation.
    let speed: f64 = pci.attribute("link_speed")?.split_whitespace().next()?.parse().ok()?;
    let lanes: f64 = pci.attribute("link_width")?.parse().ok().filter(|lanes| (1.0..=32.0).contains(lanes))?;
    let generation = [2.5, 5.0, 8.0, 16.0, 32.0, 64.0].iter().position(|rate| *rate == speed)?;
    Some(OF_A_LANE.get(generation)? * lanes * LEFT_BY_THE_PROTOCOL)
}

/// First parts of the names of interfaces that software creates.
const SOFTWARE: [&str; 13] =
    ["veth", "br-", "cali", "tunl", "docker", "virbr", "vnet", "cni", "flannel", "vxlan", "tap", "dummy", "podman"];

/// Largest plausible rate of a NIC, in Mbit/s: twice that of the fastest NIC sold.
const FASTEST_NIC: f64 = 1.6e6;

/// A NIC. `None` if its rate is not stated.
fn nic_of(net: &Node<'_, '_>) -> Option<Nic> {
    // NCCL states Mbit/s. Some drivers state a rate that no NIC has.
    let rate = net.attribute("speed")?.parse::<f64>().ok().filter(|rate| *rate > 0.0)?;
    let is_possible = rate <= FASTEST_NIC;
    let pci = net.ancestors().find(|ancestor| ancestor.tag_name().name() == "pci");
    let number = pci.and_then(|pci| pci.attribute("device")).unwrap_or_default();
    let name = format!("{} (port {})", net.attribute("name").unwrap_or("a NIC"), net.attribute("port").unwrap_or("1"));
    let dev = net.attribute("dev").unwrap_or_default();
    // Clouds have physical NICs without a PCI device, such as `eth0`.
    let begins = |name: &str| SOFTWARE.iter().any(|start| name.starts_with(start));
    let is_of_software = pci.is_none() && net.attribute("name").is_some_and(begins);
    Some(Nic {
        name: if net.has_attribute("name") { name } else { format!("NIC {dev} at {}", net.range().start) },
        rate: Some(rate / 1e3).filter(|_| is_possible),
        is_beside_gpu: None,
        is_virtual: is_of_software || VIRTUAL.iter().any(|listed| listed.eq_ignore_ascii_case(number)),
    })
}

/// Returns the library's name of a GPU, given its PCI device number as NCCL writes it.
pub(super) fn device_of(number: &str) -> Option<String> {
    DEVICES.iter().find(|(device, _)| device.eq_ignore_ascii_case(number)).map(|(_, name)| (*name).to_owned())
}
