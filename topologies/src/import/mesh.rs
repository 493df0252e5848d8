//! Determines how GPUs are joined, from the number of NVLinks between each two.

use super::Joined;

/// Whether links may lead into switches. The numbers of links between GPUs do not show that.
#[derive(Debug, Clone, Copy)]
pub(super) enum Switches {
    /// They may.
    Possible {
        /// Number of links of a device of this kind, if known.
        links: Option<usize>,
    },
    /// Every link leads to a GPU.
    None,
}

/// Determines how GPUs are joined. `wires` has the number of links between each two of them.
pub(super) fn joined(wires: &[Vec<usize>], switches: Switches, notes: &mut Vec<String>) -> Joined {
    let gpus = wires.len();
    let of_gpu = |row: &Vec<usize>| row.iter().sum::<usize>();
    let most = wires.iter().map(of_gpu).max().unwrap_or(0);
    let pair = wires.iter().flatten().copied().max().unwrap_or(0);
    if pair == 0 {
        return Joined::Pcie;
    }
    // If links lead into switches, each link reaches every other GPU, so the matrix counts it once
    // for each.
    if let Switches::Possible { links } = switches
        && gpus > 2
        && links.is_none_or(|links| most > links)
        && wires.iter().all(|row| of_gpu(row) == pair * (gpus - 1))
    {
        return Joined::Switch(pair);
    }
    let islands = islands(wires);
    let count = islands.iter().max().map_or(1, |last| last + 1);
    if count == 1 {
        let of_pairs =
            || wires.iter().enumerate().flat_map(|(gpu, row)| row.iter().enumerate().filter(move |(other, _)| *other != gpu));
        if of_pairs().any(|(_, links)| *links != pair) {
            let is_symmetric = wires.iter().enumerate().all(|(gpu, row)| {
                row.iter().enumerate().all(|(other, links)| wires.get(other).and_then(|back| back.get(gpu)) == Some(links))
            });
            if is_symmetric {
                return Joined::Wires(wires.to_vec());
            }
            notes.push("GPUs contradict each other on the NVLinks between them; they are spread over all pairs here".into());
        }
        return Joined::Mesh(most);
    }
    let size = gpus / count;
    let are_equal = gpus.is_multiple_of(count) && islands.iter().enumerate().all(|(gpu, island)| *island == gpu / size);
    if are_equal && wires.iter().all(|row| of_gpu(row) == most) {
        return Joined::Islands { size, links: most };
    }
    notes.push("NVLink joins some GPUs in groups that are not alike; all are taken as joined by PCIe alone".into());
    Joined::Pcie
}

/// The group of each GPU: the GPUs that NVLinks join, directly or through other GPUs.
fn islands(wires: &[Vec<usize>]) -> Vec<usize> {
    let mut groups: Vec<Option<usize>> = vec![None; wires.len()];
    let mut count = 0;
    for first in 0..wires.len() {
        if groups.get(first).is_some_and(Option::is_some) {
            continue;
        }
        let mut open = vec![first];
        while let Some(gpu) = open.pop() {
            let Some(group) = groups.get_mut(gpu) else { continue };
            if group.replace(count).is_none() {
                let row = wires.get(gpu).map(Vec::as_slice).unwrap_or_default();
                open.extend(row.iter().enumerate().filter(|(_, wires)| **wires > 0).map(|(other, _)| other));
            }
        }
        count += 1;
    }
    groups.into_iter().map(Option::unwrap_or_default).collect()
}
