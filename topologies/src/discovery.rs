//! The topology `local`: this machine, from the text of Linux's `/proc` files. Opens no file
//! itself.
//!
//! The peak rate is an estimate from the CPU's flags and clock; the notes say so. Calibration
//! replaces it.

use crate::device::{Architecture, DEFAULT_SHARED_MEMORY_BANDWIDTH, DeviceKind};
use crate::fabric::{Fabric, Network};
use crate::node::{NodeGroup, NodeLink, NodeLinkKind};
use crate::topology::{Description, MAXIMUM_DEVICES, Topology};
use foretell_units::{Bytes, DataType, FlopsPerSecond};
use std::collections::{BTreeMap, BTreeSet};

/// Name of this machine's device kind.
pub const LOCAL_DEVICE: &str = "local-core";

/// Clock assumed if `/proc/cpuinfo` states none, as on most Arm machines.
const ASSUMED_MEGAHERTZ: f64 = 2500.0;

/// Memory assumed if `/proc/meminfo` cannot be read.
const ASSUMED_MEMORY: Bytes = Bytes::new(1 << 30);

/// Makes the topology `local`: one node with one device per usable core, joined by shared memory.
///
/// `cpuinfo` and `meminfo` are the texts of `/proc/cpuinfo` and `/proc/meminfo`. `allowed_cpus`
/// lists the logical CPUs that this process may run on; empty means all. Hardware threads of one
/// core count as one device. A device's memory is an equal share of the available memory. If the
/// text cannot be parsed, the result is one device with assumed figures. The topology's notes list
/// the assumptions.
pub fn discover(cpuinfo: &str, meminfo: &str, allowed_cpus: &[usize]) -> Topology {
    let mut notes = Vec::new();
    let mut processors: Vec<Processor> = processors(cpuinfo);
    if !allowed_cpus.is_empty() {
        processors.retain(|processor| allowed_cpus.contains(&processor.number));
    }
    let cores = processors.iter().map(Processor::core).collect::<BTreeSet<_>>().len().clamp(1, MAXIMUM_DEVICES);
    if cores < processors.len() {
        notes.push(format!("local: {} hardware threads on {cores} cores; one device for each core", processors.len()));
    }
    let processor = processors.into_iter().next().unwrap_or_default();
    if processor.megahertz.is_none() {
        notes.push(format!("local: the clock is not known, {ASSUMED_MEGAHERTZ} MHz assumed"));
    }
    let kind = device_kind(&processor, memory_of_each(meminfo, cores, &mut notes));
    notes.push("local: the peak rate and the memory rate are estimates; `foretell calibrate` measures them".into());

    let link = NodeLinkKind::SharedMemory;
    let group = NodeGroup {
        name: "local".into(),
        count: 1,
        kind: 0,
        devices: cores,
        link: Some(NodeLink {
            kind: link,
            bandwidth: DEFAULT_SHARED_MEMORY_BANDWIDTH,
            latency: link.default_latency(),
            tree: None,
        }),
        wires: None,
        nics: None,
        host_memory: None,
        price_per_hour: None,
        mean_time_between_failures: None,
    };
    Description {
        name: "local".into(),
        kinds: vec![kind],
        groups: vec![group],
        network: Network::plain(Fabric::None),
        storage_bandwidth: None,
        restart_time: None,
        currency: None,
        is_lab: false,
        notes,
    }
    .number()
}

/// One block of `/proc/cpuinfo`.
#[derive(Default)]
struct Processor {
    number: usize,
    model: Option<String>,
    vendor: String,
    family: u32,
    megahertz: Option<f64>,
    flags: BTreeSet<String>,
    package: Option<usize>,
    core: Option<usize>,
    siblings: Option<usize>,
    cores: Option<usize>,
}

impl Processor {
    /// Identity of the core: package and core number on machines with hardware threads, else the
    /// logical CPU's number, since virtual machines often give every CPU the same core number.
    fn core(&self) -> (usize, usize) {
        match (self.package, self.core, self.siblings, self.cores) {
            (Some(package), Some(core), Some(siblings), Some(cores)) if siblings > cores => (package, core),
            _ => (usize::MAX, self.number),
        }
    }

    fn has(&self, flag: &str) -> bool {
        self.flags.contains(flag)
    }
}

fn processors(cpuinfo: &str) -> Vec<Processor> {
    let mut processors: Vec<Processor> = Vec::new();
    for line in cpuinfo.lines() {
        let Some((key, value)) = line.split_once(':') else { continue };
        let value = value.trim();
        if key.trim() == "processor" {
            // Some Arm kernels have a further line `Processor : ARMv8 ...`, which does not start a
            // block.
            if let Ok(number) = value.parse() {
                processors.push(Processor { number, ..Processor::default() });
            }
            continue;
        }
        let Some(processor) = processors.last_mut() else { continue };
        match key.trim() {
            "model name" => processor.model = Some(value.to_owned()),
            "vendor_id" => processor.vendor = value.to_owned(),
            "cpu family" => processor.family = value.parse().unwrap_or(0),
            "cpu MHz" => processor.megahertz = value.parse().ok().filter(|clock: &f64| clock.is_finite() && *clock > 0.0),
            "flags" | "Features" => processor.flags = value.split_whitespace().map(str::to_owned).collect(),
            "physical id" => processor.package = value.parse().ok(),
            "core id" => processor.core = value.parse().ok(),
            "siblings" => processor.siblings = value.parse().ok(),
            "cpu cores" => processor.cores = value.parse().ok(),
            _ => {}
        }
    }
    processors
}

/// fp32 operations per cycle: vector units x lanes x 2, where the 2 stands for a fused
/// multiply-add.
fn operations_per_cycle(processor: &Processor) -> f64 {
    // AMD's Zen 4 (family 25) runs a 512-bit instruction in two halves, so AVX-512 adds nothing to
    // its rate.
    let halves_avx512 = processor.vendor == "AuthenticAMD" && processor.family < 26;
    if processor.has("avx512f") && !halves_avx512 {
        2.0 * 16.0 * 2.0
    } else if processor.has("fma") && (processor.has("avx2") || processor.has("avx512f")) {
        2.0 * 8.0 * 2.0
    } else if processor.has("avx") {
        // One unit multiplies and one adds, without fused multiply-add.
        2.0 * 8.0
    } else if processor.has("asimd") {
        2.0 * 4.0 * 2.0
    } else {
        2.0 * 4.0
    }
}

fn device_kind(processor: &Processor, memory: Bytes) -> DeviceKind {
    let megahertz = processor.megahertz.unwrap_or(ASSUMED_MEGAHERTZ);
    let operations = operations_per_cycle(processor);
    let fp32 = FlopsPerSecond::new(operations * megahertz * 1e6);
    let mut peak = BTreeMap::from([(DataType::Fp64, fp32 / 2.0), (DataType::Fp32, fp32)]);
    // bf16 instructions compute dot products of pairs, which are twice as many operations per
    // vector. Features that our kernels do not use are left out: matrix tiles (AMX), bf16 on other
    // machines, and fp16 arithmetic, which rounds every partial sum and so breaks training.
    let bf16 = if processor.has("avx512_bf16") { fp32 * 2.0 } else { fp32 };
    peak.extend([(DataType::Bf16, bf16), (DataType::Fp16, fp32)]);
    let model = processor.model.as_deref().unwrap_or("a processor of unknown model");
    DeviceKind {
        name: LOCAL_DEVICE.into(),
        base: None,
        architecture: Architecture::Cpu,
        memory,
        memory_bandwidth: DEFAULT_SHARED_MEMORY_BANDWIDTH,
        peak,
        power: None,
        idle_power: None,
        link: None,
        host_link: None,
        cores: Some(1),
        cpu_quota: None,
        source: Some(format!("estimated from /proc/cpuinfo: {model}, {megahertz:.0} MHz, {operations} fp32 operations a cycle")),
    }
}

/// A device's share of the available memory, in whole MiB.
fn memory_of_each(meminfo: &str, cores: usize, notes: &mut Vec<String>) -> Bytes {
    let kibibytes = |field: &str| {
        let value = meminfo.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
        value.trim().trim_end_matches("kB").trim().parse::<u64>().ok()
    };
    let Some(available) = kibibytes("MemAvailable").or_else(|| kibibytes("MemTotal")) else {
        notes.push(format!("local: the memory is not known, {ASSUMED_MEMORY} a device assumed"));
        return ASSUMED_MEMORY;
    };
    let mebibytes = available / 1024 / cores as u64;
    Bytes::new(mebibytes.max(1) << 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DeviceId;

    /// Two virtual CPUs of a Sapphire Rapids machine, flags shortened.
    const CPUINFO: &str = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel name\t: Intel(R) Xeon(R) Processor\n\
        cpu MHz\t\t: 2299.998\nphysical id\t: 0\nsiblings\t: 2\ncore id\t\t: 0\ncpu cores\t: 2\n\
        flags\t\t: fpu sse2 fma avx avx2 avx512f avx512_bf16 avx512_fp16\n\n\
        processor\t: 1\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel name\t: Intel(R) Xeon(R) Processor\n\
        cpu MHz\t\t: 2299.998\nphysical id\t: 0\nsiblings\t: 2\ncore id\t\t: 1\ncpu cores\t: 2\n\
        flags\t\t: fpu sse2 fma avx avx2 avx512f avx512_bf16 avx512_fp16\n";
    const MEMINFO: &str = "MemTotal:       16384000 kB\nMemFree:         1000000 kB\nMemAvailable:    8388608 kB\n";

    #[test]
    fn every_allowed_core_is_a_device() {
        let local = discover(CPUINFO, MEMINFO, &[0, 1]);
        assert_eq!((local.name(), local.device_count(), local.node_count()), ("local", 2, 1));
        let kind = local.device_kind(DeviceId(0));
        assert_eq!(kind.memory, Bytes::new(4 << 30));
        assert_eq!(kind.peak_rate(DataType::Fp32), Some(FlopsPerSecond::new(64.0 * 2299.998 * 1e6)));
        assert_eq!(kind.peak_rate(DataType::Bf16), Some(FlopsPerSecond::new(128.0 * 2299.998 * 1e6)));
        assert_eq!(kind.peak_rate(DataType::Fp16), kind.peak_rate(DataType::Fp32), "products of fp16 are made in fp32");
        let source = "estimated from /proc/cpuinfo: Intel(R) Xeon(R) Processor, 2300 MHz, 64 fp32 operations a cycle";
        assert_eq!(kind.source.as_deref(), Some(source));
        assert_eq!(local.validate(), Ok(()));
        assert!(local.notes().iter().any(|note| note.contains("estimates")));

        let one = discover(CPUINFO, MEMINFO, &[1]);
        assert_eq!(one.device_count(), 1);
        assert_eq!(one.device_kind(DeviceId(0)).memory, Bytes::new(8 << 30));
    }

    #[test]
    fn threads_of_one_core_are_one_device() {
        let threads = CPUINFO.replace("cpu cores\t: 2", "cpu cores\t: 1").replace("core id\t\t: 1", "core id\t\t: 0");
        assert_eq!(discover(&threads, MEMINFO, &[0, 1]).device_count(), 1);
    }

    #[test]
    fn a_zen_4_gains_nothing_from_avx512() {
        let zen = CPUINFO.replace("GenuineIntel", "AuthenticAMD").replace("family\t: 6", "family\t: 25");
        let kind = discover(&zen, MEMINFO, &[]).device_kind(DeviceId(0)).clone();
        assert_eq!(kind.peak_rate(DataType::Fp32), Some(FlopsPerSecond::new(32.0 * 2299.998 * 1e6)));
        assert_eq!(kind.peak_rate(DataType::Bf16), Some(FlopsPerSecond::new(64.0 * 2299.998 * 1e6)));
    }

    #[test]
    fn without_products_of_bfloat16_it_is_as_fast_as_single_precision() {
        let older = CPUINFO.replace("avx512_bf16", "");
        let kind = discover(&older, MEMINFO, &[]).device_kind(DeviceId(0)).clone();
        assert_eq!(kind.peak_rate(DataType::Bf16), kind.peak_rate(DataType::Fp32));
    }

    #[test]
    fn nonsense_gives_one_device_and_says_what_was_assumed() {
        let local = discover("no such file", "", &[3]);
        assert_eq!(local.device_count(), 1);
        assert_eq!(local.device_kind(DeviceId(0)).memory, ASSUMED_MEMORY);
        assert_eq!(local.notes().len(), 3);
    }
}
