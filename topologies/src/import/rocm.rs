//! Reads the output of `rocm-smi --showtopo`: tables of the links between AMD's GPUs. It must not
//! run the tool.

use super::mesh::{Switches, joined};
use super::{ImportError, Joined, Machine};

const TOOL: &str = "`rocm-smi --showtopo`";
/// The table with the kinds of the links.
const TABLE: &str = "Link Type between two GPUs";

/// Reads the tables. xGMI links join GPUs directly, with one link per pair.
pub(super) fn read(text: &str) -> Result<Machine, ImportError> {
    let wrong = |reason: &str| ImportError::Form {
        tool: TOOL,
        reason: reason.into(),
        hint: "give the whole output of `rocm-smi --showtopo`",
    };
    let mut lines = text.lines().skip_while(|line| !line.contains(TABLE)).skip(1);
    let header = lines.next().ok_or_else(|| wrong("there is no table of link types"))?;
    let gpus = header.split_whitespace().filter(|word| word.starts_with("GPU")).count();
    let rows: Vec<Vec<&str>> = lines
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .take_while(|row| row.first().is_some_and(|first| first.starts_with("GPU")))
        .collect();
    if gpus == 0 || rows.len() != gpus || rows.iter().any(|row| row.len() != gpus + 1) {
        return Err(wrong("there is not a line for each GPU"));
    }
    let links = |row: &Vec<&str>| row.iter().filter(|word| **word == "XGMI").count();
    let most = rows.iter().map(links).max().unwrap_or(0);
    let mut notes = Vec::new();
    let wires: Vec<Vec<usize>> =
        rows.iter().map(|row| row.iter().skip(1).map(|cell| usize::from(*cell == "XGMI")).collect()).collect();
    let joined = if most + 1 == gpus && rows.iter().all(|row| links(row) == most) {
        if most > 0 { Joined::Peers(most) } else { Joined::Pcie }
    } else {
        joined(&wires, Switches::None, &mut notes)
    };
    Ok(Machine { gpus, device: None, seen: None, joined, pcie: None, nics: 0, nic_bandwidth: None, notes })
}
