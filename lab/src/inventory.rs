//! The labs of this machine, found by the names of their parts.
//!
//! A lab's id is its topology's name. A lab that was made for one process has that process's id
//! behind [`OWNER`].

use crate::control_group::Hierarchy;
use crate::names::lab_of_namespace;
use crate::namespaces::namespaces;
use crate::state;
use std::collections::BTreeSet;

/// Separates a topology's name from the id of the process that a lab was made for.
pub(crate) const OWNER: char = '~';

/// The ids of all labs, even incomplete ones, sorted. Labs that a living process has made for
/// itself are left out.
pub fn labs() -> Vec<String> {
    all_ids().into_iter().filter(|id| !id.contains(OWNER) || is_abandoned(id)).collect()
}

/// The ids of all labs, even incomplete ones.
pub(crate) fn all_ids() -> BTreeSet<String> {
    let id_of_namespace = |name: String| lab_of_namespace(&name).map(str::to_owned);
    let groups = Hierarchy::find().map_or_else(Vec::new, |hierarchy| hierarchy.labs());
    namespaces().into_iter().filter_map(id_of_namespace).chain(groups).chain(state::known()).collect()
}

/// The ids of the labs of this topology whose processes have ended.
pub(crate) fn abandoned_ids(topology: &str) -> Vec<String> {
    let is_of_topology = |id: &str| id.rsplit_once(OWNER).is_some_and(|(name, _)| name == topology);
    all_ids().into_iter().filter(|id| is_of_topology(id) && is_abandoned(id)).collect()
}

/// Returns whether a lab was made for a process that has ended. Another program may have that
/// process id by now.
fn is_abandoned(id: &str) -> bool {
    let Some((_, owner)) = id.rsplit_once(OWNER) else { return false };
    program(owner).is_none_or(|owner| Some(owner) != program("self"))
}

/// The file name of the program that a process runs; `None` if there is no such process.
fn program(process: &str) -> Option<String> {
    let path = std::fs::read_link(format!("/proc/{process}/exe")).ok()?;
    // The kernel adds this if the program's file was replaced, such as by a new build.
    Some(path.file_name()?.to_string_lossy().trim_end_matches(" (deleted)").to_owned())
}
