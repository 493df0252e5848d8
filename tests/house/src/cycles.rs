//! Cycles of imports between sibling modules.
//!
//! An edge between two modules counts for the two siblings under their lowest common ancestor: so a
//! folder imports another folder when any file in it does. A module and its own children do not
//! count.

use std::collections::{BTreeMap, BTreeSet};

use crate::modules::ModulePath;

/// Siblings that reach each other through imports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cycle {
    /// The module whose children these are.
    pub parent: ModulePath,
    /// Names of the siblings, sorted.
    pub siblings: Vec<String>,
    /// Every import between two of them, as `user -> used`.
    pub imports: Vec<String>,
}

/// Finds all cycles among siblings in a crate's `edges`.
#[must_use]
pub fn cycles(edges: &BTreeSet<(ModulePath, ModulePath)>) -> Vec<Cycle> {
    let mut levels: BTreeMap<ModulePath, BTreeMap<(String, String), Vec<String>>> = BTreeMap::new();
    for (user, used) in edges {
        let shared = user.iter().zip(used).take_while(|(a, b)| a == b).count();
        let (Some(from), Some(to)) = (user.get(shared), used.get(shared)) else { continue };
        let parent = user.iter().take(shared).cloned().collect();
        let import = format!("{} -> {}", user.join("::"), used.join("::"));
        levels.entry(parent).or_default().entry((from.clone(), to.clone())).or_default().push(import);
    }
    levels.iter().flat_map(|(parent, imports)| cycles_of_level(parent, imports)).collect()
}

fn cycles_of_level(parent: &ModulePath, imports: &BTreeMap<(String, String), Vec<String>>) -> Vec<Cycle> {
    let names: BTreeSet<&String> = imports.keys().flat_map(|(from, to)| [from, to]).collect();
    let mut placed: BTreeSet<&String> = BTreeSet::new();
    let mut found = Vec::new();
    for &name in &names {
        if placed.contains(name) {
            continue;
        }
        let ahead = reachable(name, |(from, to)| (from, to), imports);
        let behind = reachable(name, |(from, to)| (to, from), imports);
        let siblings: BTreeSet<&String> = ahead.intersection(&behind).copied().collect();
        if siblings.is_empty() {
            continue;
        }
        placed.extend(&siblings);
        let inside = |(from, to): &(String, String)| siblings.contains(from) && siblings.contains(to);
        found.push(Cycle {
            parent: parent.clone(),
            siblings: siblings.iter().map(|name| (*name).clone()).collect(),
            imports: imports.iter().filter(|(pair, _)| inside(pair)).flat_map(|(_, all)| all.clone()).collect(),
        });
    }
    found
}

/// Names that can be reached from `start` in one step or more.
fn reachable<'a>(
    start: &'a String,
    direction: impl Fn(&'a (String, String)) -> (&'a String, &'a String),
    imports: &'a BTreeMap<(String, String), Vec<String>>,
) -> BTreeSet<&'a String> {
    let mut reached = BTreeSet::new();
    let mut open = vec![start];
    while let Some(name) = open.pop() {
        for (from, to) in imports.keys().map(&direction) {
            if from == name && reached.insert(to) {
                open.push(to);
            }
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edge(from: &str, to: &str) -> (ModulePath, ModulePath) {
        let path = |text: &str| text.split("::").map(str::to_owned).collect();
        (path(from), path(to))
    }

    #[test]
    fn folders_whose_files_import_each_other_are_a_cycle() {
        let edges = [edge("cost::kernel", "network::route"), edge("network::link", "cost::scale")].into();
        let found = cycles(&edges);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].siblings, ["cost", "network"]);
        assert_eq!(found[0].imports.len(), 2);
    }

    #[test]
    fn a_chain_of_imports_is_no_cycle() {
        assert_eq!(cycles(&[edge("a", "b"), edge("b", "c"), edge("a", "c")].into()), []);
    }
}
