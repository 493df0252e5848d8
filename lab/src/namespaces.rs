//! Named network namespaces, and the processes in them.

use crate::command::Command;
use crate::error::LabError;
use crate::names::PREFIX;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Where `ip` keeps the named namespaces.
const FOLDER: &str = "/run/netns";

/// The file through which a namespace is entered.
pub(crate) fn namespace_file(name: &str) -> PathBuf {
    Path::new(FOLDER).join(name)
}

/// The namespaces of all labs, sorted.
pub(crate) fn namespaces() -> Vec<String> {
    let files = fs::read_dir(FOLDER).into_iter().flatten().flatten();
    let names = files.filter_map(|file| file.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| name.starts_with(PREFIX)).collect();
    names.sort();
    names
}

pub(crate) fn delete_namespace(name: &str) -> Result<(), LabError> {
    Command::new("ip", &format!("netns delete {name}")).run()
}

/// The ids of the processes in a namespace.
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

/// Kills a process in a lab.
pub(crate) fn kill(process: i32) {
    if let Some(process) = rustix::process::Pid::from_raw(process) {
        // It may have ended by itself.
        let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
    }
}
