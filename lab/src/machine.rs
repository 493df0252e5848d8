//! What a lab needs of the machine: `ip` and `tc`, the rights to use them, namespaces and who is in them.

use crate::blueprint::{Command, PREFIX};
use crate::control_group::Hierarchy;
use crate::error::LabError;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Where `ip` keeps the named namespaces.
const NAMESPACES: &str = "/run/netns";

/// Runs a command, quietly.
pub(crate) fn run(command: &Command) -> Result<(), LabError> {
    let failed = |reason: String| LabError::Command { command: command.to_string(), reason };
    let output = std::process::Command::new(command.program)
        .args(&command.arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| failed(error.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    Err(failed(words.lines().next().map_or_else(|| output.status.to_string(), str::to_owned)))
}

fn ip(words: &str) -> Command {
    Command { program: "ip", arguments: words.split_whitespace().map(str::to_owned).collect() }
}

/// The file by which a namespace is entered.
pub(crate) fn namespace_file(name: &str) -> PathBuf {
    Path::new(NAMESPACES).join(name)
}

/// The namespaces of all labs.
pub(crate) fn namespaces() -> Vec<String> {
    let files = fs::read_dir(NAMESPACES).into_iter().flatten().flatten();
    let names = files.filter_map(|file| file.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| name.starts_with(PREFIX)).collect();
    names.sort();
    names
}

pub(crate) fn delete_namespace(name: &str) -> Result<(), LabError> {
    run(&ip(&format!("netns delete {name}")))
}

/// The processes in a namespace.
pub(crate) fn processes_in(namespace: &str) -> Vec<i32> {
    let Ok(wanted) = fs::metadata(namespace_file(namespace)) else { return Vec::new() };
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|process| {
            let number: i32 = process.file_name().to_str()?.parse().ok()?;
            let own = fs::metadata(process.path().join("ns/net")).ok()?;
            ((own.dev(), own.ino()) == (wanted.dev(), wanted.ino())).then_some(number)
        })
        .collect()
}

/// Ends a process that is in a lab.
pub(crate) fn kill(process: i32) {
    if let Some(process) = rustix::process::Pid::from_raw(process) {
        // It may have ended by itself.
        let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
    }
}

fn is_program(name: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(name).is_file()))
}

/// A name for what is tried, another for each thread that tries. It is one that belongs to this process, so that it is cleared away if that
/// is killed meanwhile.
fn probe() -> String {
    static TRIED: AtomicUsize = AtomicUsize::new(0);
    format!("probe-{}~{}", TRIED.fetch_add(1, Ordering::Relaxed), std::process::id())
}

/// What is missing for a lab on this machine, in words; nothing if one can be made. It is tried: a namespace with a link of the kind that
/// labs have is made and removed again.
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
        return vec!["the rights of root".into()];
    }
    let name = format!("{PREFIX}{}_switches", probe());
    let mut tried = run(&ip(&format!("netns add {name}")));
    let steps = [
        ("ip", format!("-n {name} link add switch type bridge")),
        ("ip", format!("-n {name} link add one type veth peer name two")),
        ("tc", format!("-n {name} qdisc add dev one root handle 1: htb default 1")),
    ];
    for (program, words) in steps {
        tried = tried.and_then(|()| run(&Command { program, arguments: words.split_whitespace().map(str::to_owned).collect() }));
    }
    if namespace_file(&name).exists() {
        tried = tried.and(delete_namespace(&name));
    }
    if let Err(error) = tried {
        missing.push(format!("a kernel or a right: {error}"));
    }
    missing
}

/// What is missing for devices with a `cpu_quota`; nothing if a group can be made, which is tried.
pub fn missing_for_quotas() -> Option<String> {
    match Hierarchy::find() {
        None => Some("control groups that limit processors".into()),
        Some(hierarchy) => {
            let id = probe();
            let tried = hierarchy.make(&id, "device-0", 0.5);
            hierarchy.remove(&id);
            tried.err().map(|error| error.to_string())
        }
    }
}
