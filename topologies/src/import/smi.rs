//! Reads the output of `nvidia-smi topo -m`: a matrix of the links between GPUs and NICs, and a
//! legend.

use super::choose_nics::{Nic, choose};
use super::mesh::{Switches, joined};
use super::{ImportError, Machine};

const TOOL: &str = "`nvidia-smi topo -m`";

/// Cells of the matrix other than `NV` and a number.
const CELLS: [&str; 8] = ["X", "SYS", "NODE", "PHB", "PXB", "PIX", "SOC", "N/A"];

/// Number of NVLinks that a cell states. `None` if it states none. A GPU has about 18 links, so
/// larger numbers than 16 bits hold are read as 0, and no sum overflows.
fn links_of_cell(cell: &str) -> Option<usize> {
    cell.strip_prefix("NV")?.parse::<u128>().ok().map(|count| usize::from(u16::try_from(count).unwrap_or(0)))
}

/// Reads the matrix. `links` is the GPU's number of NVLinks, if its kind is known.
pub(super) fn read(text: &str, links: Option<usize>) -> Result<Machine, ImportError> {
    let wrong = |reason: String| ImportError::Form { tool: TOOL, reason, hint: "give the output of `nvidia-smi topo -m`" };
    let mut lines = text.lines().skip_while(|line| !line.split_whitespace().any(|word| word == "GPU0"));
    let header = lines.next().ok_or_else(|| wrong("no line names GPU0".into()))?;
    // Columns after those of devices describe CPUs.
    let columns: Vec<&str> = header.split_whitespace().take_while(|word| *word != "CPU").collect();
    let is_gpu = |name: &str| name.strip_prefix("GPU").is_some_and(|number| number.parse::<usize>().is_ok());
    let is_nic = |name: &str| name.starts_with("NIC") || name.starts_with("mlx") || name.starts_with("ib");
    let gpus = columns.iter().filter(|name| is_gpu(name)).count();
    let mut nics: Vec<Nic> = Vec::new();
    for name in columns.iter().filter(|name| is_nic(name)) {
        nics.push(Nic { name: (*name).into(), rate: None, is_beside_gpu: Some(false), is_virtual: false });
    }
    let mut wires: Vec<Vec<usize>> = Vec::new();
    for line in lines {
        // Another matrix may follow (`topo -p2p`).
        if wires.len() == gpus {
            break;
        }
        let mut words = line.split_whitespace();
        if !words.next().is_some_and(is_gpu) {
            continue;
        }
        let row: Vec<&str> = words.take(columns.len()).collect();
        if row.len() < columns.len() {
            return Err(wrong("a GPU's line is shorter than the first line says".into()));
        }
        if let Some(other) = row.iter().find(|cell| !CELLS.contains(cell) && links_of_cell(cell).is_none()) {
            let is_of_peers = ["OK", "CNS", "TNS", "NS", "GNS", "DR", "U"].contains(other);
            let why = if is_of_peers { ": such cells are of `nvidia-smi topo -p2p`" } else { ": the line is damaged" };
            return Err(wrong(format!("`{other}` is no link that it prints{why}")));
        }
        for (cell, name) in row.iter().zip(&columns) {
            if let Some(nic) = nics.iter_mut().find(|nic| nic.name == *name) {
                nic.is_beside_gpu = Some(nic.is_beside_gpu == Some(true) || matches!(*cell, "PIX" | "PXB"));
            }
        }
        wires.push(row.iter().take(gpus).map(|cell| links_of_cell(cell).unwrap_or(0)).collect());
    }
    if gpus == 0 || wires.len() != gpus {
        return Err(wrong("there is not a line for each GPU".into()));
    }
    // `topo -mp` shows only PCIe paths, and its legend has no NVLinks.
    let has_wires = wires.iter().flatten().any(|&count| count > 0);
    if !has_wires && gpus > 1 && links.is_some() && text.contains("Legend") && !text.contains("NV#") {
        return Err(wrong("it is that of `topo -mp`, which leaves out NVLinks, and the GPUs have some".into()));
    }
    let chosen = choose(&nics);
    let mut notes: Vec<String> = chosen.note.into_iter().collect();
    if let Some(links) = links.filter(|_| !has_wires && gpus > 1) {
        notes.push(format!(
            "no two GPUs are joined by NVLinks here, of which such a GPU has {links}: they are taken as joined by PCIe"
        ));
    }
    let joined = joined(&wires, Switches::Possible { links }, &mut notes);
    Ok(Machine { gpus, device: None, seen: None, joined, pcie: None, nics: chosen.count, nic_bandwidth: None, notes })
}
