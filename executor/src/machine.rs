//! This machine, as the executor finds it: its cores, its names, and what it costs to be a process on it.

use crate::error::ExecutorError;
use foretell_program::MachineIdentity;
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::{BTreeMap, BTreeSet};
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

/// Has the allocator keep what is freed instead of giving it back to the system after a second, unless `MIMALLOC_PURGE_DELAY` says otherwise:
/// Programs come and go all the time, and to have their pages cleared anew was a quarter of a search's time on a virtual machine. To be
/// called before there are other threads; it means nothing to another allocator.
pub fn keep_freed_memory() {
    /// `mi_option_purge_delay` of mimalloc's header, which the bindings lack.
    const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
    // SAFETY: the function takes any option and value; it is not to be called by several threads at once, and there is one.
    unsafe { libmimalloc_sys::mi_option_set_default(PURGE_DELAY, -1) }
}

/// The cores that this process may run on, ascending.
pub fn allowed_cores() -> Vec<usize> {
    match sched_getaffinity(None) {
        Ok(set) => (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect(),
        Err(_) => (0..std::thread::available_parallelism().map_or(1, usize::from)).collect(),
    }
}

/// The cores that this process may use, each by the first of its hardware threads that it may run on, ascending: as many as there are
/// devices in this machine's topology.
pub fn cores() -> Vec<usize> {
    cores_of(&read("/proc/cpuinfo"), &allowed_cores())
}

/// How many cores this process may use, hardware threads of one core counting once.
pub fn core_count() -> usize {
    cores().len()
}

/// Where ranks are put, in this order: a core for each, and only if there are more ranks than cores their further hardware threads.
pub(crate) fn places() -> Vec<usize> {
    let (mut places, allowed) = (cores(), allowed_cores());
    let further: Vec<usize> = allowed.into_iter().filter(|number| !places.contains(number)).collect();
    places.extend(further);
    places
}

/// Of the `allowed` logical processors the first of each core, as a topology's discovery tells cores apart: by package and core number
/// where there are hardware threads (virtual machines often give every processor the same core number). Those of which nothing is known
/// count as cores.
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

/// Which machine a profile is of.
pub fn identity(devices: usize) -> MachineIdentity {
    let processors = read("/proc/cpuinfo");
    let model = processors.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':').map(|(_, name)| name.trim()));
    let system = format!("Linux {}", read("/proc/sys/kernel/osrelease").trim());
    MachineIdentity { device: model.unwrap_or("unknown processor").into(), system, devices, cores: None }
}

/// The machine's name, by which ranks know whether they can share memory.
pub(crate) fn host_name() -> String {
    read("/proc/sys/kernel/hostname").trim().to_string()
}

/// Keeps this process on one core.
///
/// # Errors
/// [`ExecutorError::System`] where the process may not run there.
pub fn pin_to_core(core: usize) -> Result<(), ExecutorError> {
    let mut set = CpuSet::new();
    if core < CpuSet::MAX_CPU {
        set.set(core);
    }
    sched_setaffinity(None, &set).map_err(|error| ExecutorError::system(format!("stay on core {core}"), error.into()))
}

/// Has this thread take numbers too small for full precision (denormals) as zero. A velocity that nothing feeds any more decays into
/// them and stays there, and each one costs the processor over a hundred cycles: four times the time of an optimizer's step was seen.
pub(crate) fn flush_denormals() {
    #[cfg(target_arch = "x86_64")]
    {
        /// "Flush to zero" for results, "denormals are zero" for operands.
        const FLUSH: u32 = 1 << 15 | 1 << 6;
        let mut control: u32 = 0;
        // SAFETY: the instructions store and load this thread's control register of vector arithmetic; the bits that are set
        // change how denormals are rounded and nothing else.
        unsafe {
            std::arch::asm!("stmxcsr [{0}]", in(reg) &mut control, options(nostack));
            control |= FLUSH;
            std::arch::asm!("ldmxcsr [{0}]", in(reg) &control, options(nostack));
        }
    }
}

/// The seconds that all cores of the machine have spent in interrupts; 0 where nobody counts them.
pub(crate) fn interrupt_time() -> f64 {
    interrupt_ticks(&read("/proc/stat")) as f64 / rustix::param::clock_ticks_per_second().max(1) as f64
}

/// Of `/proc/stat` what all cores have spent in hardware's and in the kernel's own interrupts (proc_stat(5): `irq`, `softirq`), in ticks.
fn interrupt_ticks(stat: &str) -> u64 {
    let all = stat.lines().find_map(|line| line.strip_prefix("cpu "));
    all.into_iter()
        .flat_map(|fields| fields.split_whitespace().skip(5).take(2))
        .filter_map(|ticks| ticks.parse::<u64>().ok())
        .sum()
}

/// Has this thread take its core soon after it is woken, from a thread that has it for longer: one that carries messages works for some
/// microseconds while another rank waits for them, and stands behind a kernel of its own rank for up to a millisecond else.
pub(crate) fn run_in_short_slices() {
    /// The shortest that the kernel knows.
    const SLICE_NANOSECONDS: u64 = 100_000;
    // SAFETY: a structure of plain numbers, for which zero says "as usual".
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    attributes.size = size_of::<libc::sched_attr>() as u32;
    attributes.sched_policy = libc::SCHED_OTHER as u32;
    attributes.sched_runtime = SLICE_NANOSECONDS;
    // SAFETY: the structure is the kernel's, says its own size, and lives through the call; 0 is the calling thread. Kernels before Linux 6.12
    // know no slices of a thread's own and leave things as they are.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}

/// A rank must not outlive its launcher, however that ends.
pub(crate) fn die_with_parent() {
    // Where the kernel has no such wish the control connection's end still stops the rank.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_are_counted_in_all_cores() {
        let stat = "cpu  3462328 1367664 264602 633481 13190 7 26922 3452 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n";
        assert_eq!(interrupt_ticks(stat), 26_929);
        assert_eq!(interrupt_ticks("cpu0 1 2 3 4 5 6 7\n"), 0);
    }

    /// Two packages of two cores of two threads, numbered as Linux does on servers: first threads first.
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
    fn where_nothing_tells_cores_apart_every_allowed_processor_is_one() {
        assert_eq!(cores_of("", &[2, 3]), [2, 3]);
        assert_eq!(cores_of(&cpuinfo(2), &[0, 4]), [0, 4]);
        assert_eq!(cores_of(&cpuinfo(4), &[0, 4, 9]), [0, 9]);
    }

    #[test]
    fn every_allowed_processor_is_a_place_once() {
        let mut places = places();
        assert!(places.starts_with(&cores()));
        places.sort_unstable();
        assert_eq!(places, allowed_cores());
    }
}
