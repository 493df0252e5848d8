//! The machine: its cores and names, and system settings of processes and threads.

use crate::error::ExecutorError;
use foretell_program::MachineIdentity;
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

/// The text of a file under `/proc`; empty if it cannot be read.
fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The facts from which a topology is discovered.
pub struct Description {
    /// `/proc/cpuinfo`.
    pub processors: String,
    /// `/proc/meminfo`.
    pub memory: String,
    /// The logical CPUs that this process may run on, ascending.
    pub cores: Vec<usize>,
}

/// Describes this machine.
pub fn describe() -> Description {
    Description { processors: read("/proc/cpuinfo"), memory: read("/proc/meminfo"), cores: allowed_cores() }
}

/// Makes mimalloc keep freed memory instead of returning it to the system after a second, unless
/// `MIMALLOC_PURGE_DELAY` is set. Programs are allocated and freed all the time; clearing their
/// pages again took a quarter of a search's time on a virtual machine.
///
/// Call it while the process has one thread. It has no effect on another allocator.
pub fn keep_freed_memory() {
    /// `mi_option_purge_delay` of mimalloc's header; the bindings lack it.
    const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
    // SAFETY: the function takes any option and value. No other thread calls it.
    unsafe { libmimalloc_sys::mi_option_set_default(PURGE_DELAY, -1) }
}

/// The logical CPUs (hardware threads) that this process may run on, ascending.
pub fn allowed_cores() -> Vec<usize> {
    match sched_getaffinity(None) {
        Ok(set) => (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect(),
        Err(_) => (0..std::thread::available_parallelism().map_or(1, usize::from)).collect(),
    }
}

/// The cores that this process may use, ascending. Each core is given by the first of its hardware
/// threads that the process may run on. The topology `local` has one device per core.
pub fn cores() -> Vec<usize> {
    cores_of(&read("/proc/cpuinfo"), &allowed_cores())
}

/// The number of cores that this process may use; hardware threads of one core count once.
pub fn core_count() -> usize {
    cores().len()
}

/// The logical CPUs in the order in which ranks take them: first one per core, then the other
/// hardware threads of the cores.
pub(crate) fn cpus_for_ranks() -> Vec<usize> {
    let (mut cpus, allowed) = (cores(), allowed_cores());
    let siblings: Vec<usize> = allowed.into_iter().filter(|number| !cpus.contains(number)).collect();
    cpus.extend(siblings);
    cpus
}

/// The first of the `allowed` logical CPUs of each core. As in the discovery of topologies, package
/// and core number identify a core, but only if it has several hardware threads: virtual machines
/// often give every logical CPU the same core number. A logical CPU that `cpuinfo` does not
/// describe counts as a core.
fn cores_of(cpuinfo: &str, allowed: &[usize]) -> Vec<usize> {
    let mut identities: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
    for block in cpuinfo.split("\n\n") {
        let value = |name: &str| -> Option<usize> {
            let mut fields = block.lines().filter_map(|line| line.split_once(':'));
            fields.find(|(key, _)| key.trim() == name)?.1.trim().parse().ok()
        };
        let identity = (value("physical id"), value("core id"), value("siblings"), value("cpu cores"));
        if let (Some(number), (Some(package), Some(core), Some(siblings), Some(cores))) = (value("processor"), identity)
            && siblings > cores
        {
            identities.insert(number, (package, core));
        }
    }
    let mut seen = BTreeSet::new();
    allowed.iter().copied().filter(|number| identities.get(number).is_none_or(|&identity| seen.insert(identity))).collect()
}

/// The identity of this machine, for a profile that is measured on `devices` of its devices.
pub fn identity(devices: usize) -> MachineIdentity {
    let processors = read("/proc/cpuinfo");
    let model = processors.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':').map(|(_, name)| name.trim()));
    let system = format!("Linux {}", read("/proc/sys/kernel/osrelease").trim());
    MachineIdentity { device: model.unwrap_or("unknown processor").into(), system, devices, cores: None }
}

/// The machine's name. Ranks with the same one can share memory.
pub(crate) fn host_name() -> String {
    read("/proc/sys/kernel/hostname").trim().to_string()
}

/// Pins this process to one logical CPU.
///
/// # Errors
/// [`ExecutorError::System`] if the process may not run there.
pub fn pin_to_core(core: usize) -> Result<(), ExecutorError> {
    let mut set = CpuSet::new();
    if core < CpuSet::MAX_CPU {
        set.set(core);
    }
    sched_setaffinity(None, &set).map_err(|error| ExecutorError::system(format!("pin the process to core {core}"), error.into()))
}

/// Makes this thread treat denormal numbers as zero, in operands and results. The velocity of a
/// parameter without gradients decays to denormals and stays there. An operation on one takes over
/// a hundred cycles: an optimizer step was seen to take four times as long.
pub(crate) fn flush_denormals() {
    #[cfg(target_arch = "x86_64")]
    {
        /// "Flush to zero" for results, "denormals are zero" for operands.
        const FLUSH: u32 = 1 << 15 | 1 << 6;
        let mut control: u32 = 0;
        // SAFETY: the instructions store and load MXCSR, this thread's control register of vector
        // arithmetic. The bits that are set only change how denormals are handled.
        unsafe {
            std::arch::asm!("stmxcsr [{0}]", in(reg) &mut control, options(nostack));
            control |= FLUSH;
            std::arch::asm!("ldmxcsr [{0}]", in(reg) &control, options(nostack));
        }
    }
}

/// The time that all cores of the machine have spent in interrupts, in seconds; 0 if the kernel
/// does not count it.
pub(crate) fn interrupt_time() -> f64 {
    interrupt_ticks(&read("/proc/stat")) as f64 / rustix::param::clock_ticks_per_second().max(1) as f64
}

/// The time of all cores in hardware and software interrupts, from `/proc/stat`, in ticks
/// (proc_stat(5): `irq`, `softirq`).
fn interrupt_ticks(stat: &str) -> u64 {
    let all = stat.lines().find_map(|line| line.strip_prefix("cpu "));
    all.into_iter()
        .flat_map(|fields| fields.split_whitespace().skip(5).take(2))
        .filter_map(|ticks| ticks.parse::<u64>().ok())
        .sum()
}

/// Gives this thread short time slices, so that it gets its core soon after it is woken. A thread
/// that carries messages works for some microseconds while another rank waits. Without this it
/// waits up to a millisecond for a kernel of its own rank to use up its slice.
pub(crate) fn run_in_short_slices() {
    /// The shortest slice that Linux accepts.
    const SLICE_NANOSECONDS: u64 = 100_000;
    // SAFETY: a structure of plain numbers, for which zero means the default.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    attributes.size = size_of::<libc::sched_attr>() as u32;
    attributes.sched_policy = libc::SCHED_OTHER as u32;
    attributes.sched_runtime = SLICE_NANOSECONDS;
    // Before Linux 6.12, threads have no slices of their own and the call changes nothing.
    // SAFETY: the structure is the kernel's, states its size, and outlives the call. 0 is the
    // calling thread.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}

/// Makes this thread a background one that works ahead: it may run on the logical CPUs `cpus`, and
/// leaves them to threads of usual priority that have work. If the system refuses, the thread stays
/// as it is.
pub(crate) fn run_in_background(cpus: &[usize]) {
    /// About a tenth of a core's time beside a thread of usual priority.
    const PRIORITY: i32 = 10;
    let mut set = CpuSet::new();
    cpus.iter().filter(|&&cpu| cpu < CpuSet::MAX_CPU).for_each(|&cpu| set.set(cpu));
    let _ = sched_setaffinity(None, &set);
    // On Linux a priority belongs to a thread.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), PRIORITY);
}

/// Has the kernel kill this process when its parent ends, so that no rank outlives its launcher.
pub(crate) fn die_with_parent() {
    // If the call fails, the end of the control connection still stops the rank.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupt_ticks_are_those_of_all_cores() {
        let stat = "cpu  3462328 1367664 264602 633481 13190 7 26922 3452 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n";
        assert_eq!(interrupt_ticks(stat), 26_929);
        assert_eq!(interrupt_ticks("cpu0 1 2 3 4 5 6 7\n"), 0);
    }

    /// Two packages of two cores of two hardware threads, numbered as Linux does on servers: the
    /// first threads of all cores come first.
    fn cpuinfo(siblings: usize) -> String {
        let block = |number: usize| {
            let (package, core) = (number % 2, number / 2 % 2);
            format!(
                "processor\t: {number}\nphysical id\t: {package}\nsiblings\t: {siblings}\ncore id\t\t: {core}\ncpu cores\t: 2\n"
            )
        };
        (0..8).map(block).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn hardware_threads_of_a_core_count_once() {
        let all: Vec<usize> = (0..8).collect();
        assert_eq!(cores_of(&cpuinfo(4), &all), [0, 1, 2, 3]);
        assert_eq!(cores_of(&cpuinfo(4), &[1, 4, 5, 7]), [1, 4, 7]);
    }

    #[test]
    fn logical_cpus_without_core_numbers_count_as_cores() {
        assert_eq!(cores_of("", &[2, 3]), [2, 3]);
        assert_eq!(cores_of(&cpuinfo(2), &[0, 4]), [0, 4]);
        assert_eq!(cores_of(&cpuinfo(4), &[0, 4, 9]), [0, 9]);
    }

    #[test]
    fn every_allowed_logical_cpu_is_offered_to_ranks_once() {
        let mut cpus = cpus_for_ranks();
        assert!(cpus.starts_with(&cores()));
        cpus.sort_unstable();
        assert_eq!(cpus, allowed_cores());
    }
}
