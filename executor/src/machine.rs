//! This machine, as the executor finds it: its cores, its names, and what it costs to be a process on it.

use crate::error::ExecutorError;
use foretell_program::MachineIdentity;
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::fs;

/// The text of a file of `/proc`, or nothing.
fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// What a topology's discovery asks for: the processor's and the memory's descriptions, and the cores that may be used.
pub struct Description {
    /// `/proc/cpuinfo`.
    pub processors: String,
    /// `/proc/meminfo`.
    pub memory: String,
    /// The cores that this process may run on.
    pub cores: Vec<usize>,
}

/// Describes this machine.
pub fn describe() -> Description {
    Description { processors: read("/proc/cpuinfo"), memory: read("/proc/meminfo"), cores: allowed_cores() }
}

/// The cores that this process may run on, ascending.
pub fn allowed_cores() -> Vec<usize> {
    match sched_getaffinity(None) {
        Ok(set) => (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect(),
        Err(_) => (0..std::thread::available_parallelism().map_or(1, usize::from)).collect(),
    }
}

/// Which machine a profile is of.
pub fn identity(devices: usize) -> MachineIdentity {
    let processors = read("/proc/cpuinfo");
    let model = processors.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':').map(|(_, name)| name.trim()));
    let system = format!("Linux {}", read("/proc/sys/kernel/osrelease").trim());
    MachineIdentity { device: model.unwrap_or("unknown processor").into(), system, devices }
}

/// The machine's name, by which ranks know whether they can share memory.
pub(crate) fn host_name() -> String {
    read("/proc/sys/kernel/hostname").trim().to_string()
}

/// Keeps this process on one core.
pub(crate) fn pin_to_core(core: usize) -> Result<(), ExecutorError> {
    let mut set = CpuSet::new();
    if core < CpuSet::MAX_CPU {
        set.set(core);
    }
    sched_setaffinity(None, &set).map_err(|error| ExecutorError::system(format!("stay on core {core}"), error.into()))
}

/// A rank must not outlive its launcher, however that ends.
pub(crate) fn die_with_parent() {
    // Where the kernel has no such wish the control connection's end still stops the rank.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
}
