//! Reads `nvidia-smi topo -m`: a matrix of the links between GPUs and NICs, and a legend.

use super::{ImportError, Joined, Machine};

const TOOL: &str = "`nvidia-smi topo -m`";

/// Reads the matrix. `links` is the GPU's number of NVLinks, if its kind is known.
pub(super) fn read(text: &str, links: Option<usize>) -> Result<Machine, ImportError> {
    let wrong = |reason: &str| ImportError::Form { tool: TOOL, reason: reason.into() };
    let mut lines = text.lines().skip_while(|line| !line.split_whitespace().any(|word| word == "GPU0"));
    let header = lines.next().ok_or_else(|| wrong("no line names GPU0"))?;
    // The columns after those of devices describe CPUs.
    let columns: Vec<&str> = header.split_whitespace().take_while(|word| *word != "CPU").collect();
    let is_gpu = |name: &str| name.strip_prefix("GPU").is_some_and(|number| number.parse::<usize>().is_ok());
    let gpus = columns.iter().filter(|name| is_gpu(name)).count();
    let nics = columns.iter().filter(|name| name.starts_with("NIC") || name.starts_with("mlx") || name.starts_with("ib")).count();
    let mut wires: Vec<Vec<usize>> = Vec::new();
    for line in lines {
        let mut words = line.split_whitespace();
        if !words.next().is_some_and(is_gpu) {
            continue;
        }
        let row: Vec<&str> = words.take(columns.len()).collect();
        if row.len() < gpus {
            return Err(wrong("a GPU's line is shorter than the first line says"));
        }
        let of_pair = |word: &&str| word.strip_prefix("NV").and_then(|count| count.parse().ok()).unwrap_or(0);
        wires.push(row[..gpus].iter().map(of_pair).collect());
    }
    if gpus == 0 || wires.len() != gpus {
        return Err(wrong("there is not a line for each GPU"));
    }
    let of_gpu = |row: &Vec<usize>| row.iter().sum::<usize>();
    let most = wires.iter().map(of_gpu).max().unwrap_or(0);
    let pair = wires.iter().flatten().copied().max().unwrap_or(0);
    let joined = match pair {
        0 => Joined::Pcie,
        // Through a switch all links of a GPU reach every other GPU, so the matrix counts them for
        // each.
        _ if gpus > 2 && links.is_none_or(|links| most > links) && wires.iter().all(|row| of_gpu(row) == pair * (gpus - 1)) => {
            Joined::Switch(pair)
        }
        _ => Joined::Mesh(most),
    };
    let mut notes = Vec::new();
    if joined != Joined::Pcie && wires.iter().any(|row| row.iter().filter(|&&wires| wires > 0).count() + 1 < gpus) {
        notes.push("not every pair of GPUs has an NVLink; they are spread over all pairs here".into());
    }
    Ok(Machine { gpus, device: None, seen: None, joined, pcie: None, nics, nic_bandwidth: None, notes })
}
