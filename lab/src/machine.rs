//! The requirements of labs: programs, rights, and features of the kernel.

use crate::command::Command;
use crate::control_group::Hierarchy;
use crate::names::switches_namespace;
use crate::namespaces::{delete_namespace, namespace_file};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Returns the missing requirements of labs, in words; empty if a lab can be made.
///
/// It tries: it makes a namespace with links of the kinds that labs have, and removes it.
pub fn missing() -> Vec<String> {
    let mut missing: Vec<String> = ["ip", "tc", "sysctl"]
        .into_iter()
        .filter(|program| !is_program(program))
        .map(|program| {
            let package = if program == "sysctl" { "procps" } else { "iproute2" };
            format!("the program `{program}` (Debian's package {package})")
        })
        .collect();
    if !missing.is_empty() {
        return missing;
    }
    if !rustix::process::geteuid().is_root() {
        return vec!["root's rights".into()];
    }
    let name = switches_namespace(&trial_id());
    let commands = [
        Command::new("ip", &format!("netns add {name}")),
        Command::new("ip", &format!("-n {name} link add switch type bridge")),
        Command::new("ip", &format!("-n {name} link add one type veth peer name two")),
        Command::new("tc", &format!("-n {name} qdisc add dev one root handle 1: htb default 1")),
    ];
    let mut result = commands.iter().try_for_each(Command::run);
    if namespace_file(&name).exists() {
        result = result.and(delete_namespace(&name));
    }
    if let Err(error) = result {
        missing.push(format!("a feature of the kernel or a right: {error}"));
    }
    missing
}

/// Returns the missing requirement of devices with a `cpu_quota`, in words; `None` if they can be
/// made. Finds out by making a control group.
pub fn missing_for_quotas() -> Option<String> {
    match Hierarchy::find() {
        None => Some("control groups that limit CPU time".into()),
        Some(hierarchy) => {
            let id = trial_id();
            let result = hierarchy.make(&id, "device-0", 0.5);
            hierarchy.remove(&id);
            result.err().map(|error| error.to_string())
        }
    }
}

/// A lab id for one trial. It names this process as the owner, so that a trial that is left after a
/// crash is removed like any other abandoned lab.
fn trial_id() -> String {
    static TRIALS: AtomicUsize = AtomicUsize::new(0);
    format!("probe-{}~{}", TRIALS.fetch_add(1, Ordering::Relaxed), std::process::id())
}

fn is_program(name: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(name).is_file()))
}
