//! Taking labs down, whole or in part.
//!
//! The names of all parts of a lab start with its id, so no record of the parts is needed.

use crate::control_group::Hierarchy;
use crate::error::LabError;
use crate::inventory::{abandoned_ids, all_ids};
use crate::names::{identifier, namespace_prefix};
use crate::namespaces::{delete_namespace, kill, namespaces, processes_in};
use crate::state;
use std::time::{Duration, Instant};

/// How long the processes in a lab may take to end.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Takes down the labs of a topology's name: the one that was brought up, and those of processes
/// that have ended. Returns whether there was any.
///
/// # Errors
/// [`LabError::NotRemoved`] if something could not be removed.
pub fn take_down(name: &str) -> Result<bool, LabError> {
    let name = identifier(name);
    let mut ids = abandoned_ids(&name);
    ids.extend(all_ids().contains(&name).then(|| name.clone()));
    ids.iter().try_for_each(|id| remove(id))?;
    Ok(!ids.is_empty())
}

/// Removes all parts of a lab that exist, and kills the processes in it.
pub(crate) fn remove(id: &str) -> Result<(), LabError> {
    let hierarchy = Hierarchy::find();
    let prefix = namespace_prefix(id);
    state::forget(id);
    let started = Instant::now();
    loop {
        let own_namespaces: Vec<String> = namespaces().into_iter().filter(|name| name.starts_with(&prefix)).collect();
        let find_processes = || {
            let mut processes: Vec<i32> = own_namespaces.iter().flat_map(|name| processes_in(name)).collect();
            processes.extend(hierarchy.as_ref().map_or_else(Vec::new, |hierarchy| hierarchy.processes(id)));
            processes.retain(|process| *process as u32 != std::process::id());
            processes
        };
        let processes = find_processes();
        processes.iter().copied().for_each(kill);
        let mut failure = None;
        // If a namespace is deleted while a process is in it, it lives on without a name.
        if processes.is_empty() || find_processes().is_empty() {
            failure = own_namespaces.iter().find_map(|name| delete_namespace(name).err());
            let groups_are_gone = hierarchy.as_ref().is_none_or(|hierarchy| hierarchy.remove(id));
            if failure.is_none() && groups_are_gone {
                return Ok(());
            }
        }
        if started.elapsed() > TIMEOUT {
            let is_left = || format!("{} and the processes in it are left", own_namespaces.join(", "));
            let reason = failure.map_or_else(is_left, |error| error.to_string());
            return Err(LabError::NotRemoved { name: id.into(), reason });
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
