//! Registers, spills and instructions of every kernel on Hopper, against the table in
//! `kernels/resources.txt`. A change that makes a kernel spill shows there.
//!
//! Another version of NVRTC allocates registers differently. The figures are compared only if
//! NVRTC's version is the table's; spills may never grow.

use super::emulator::REQUIRED;
use crate::cuda::driver::Library;
use crate::cuda::kernels::SOURCES;
use elf::ElfBytes;
use elf::endian::AnyEndian;
use foretell_units::DataType;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

/// Environment variable with which the test writes the table instead.
const UPDATE: &str = "FORETELL_UPDATE_KERNEL_RESOURCES";
const TABLE: &str = include_str!("../kernels/resources.txt");
const HOPPER: (u32, u32) = (9, 0);
/// Bytes of an instruction since Volta.
const INSTRUCTION: u64 = 16;

/// What one kernel takes, as NVRTC reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Resources {
    registers: u64,
    /// Bytes of a thread's stack, where arrays go that are indexed at run time.
    stack: u64,
    /// Bytes of spilled registers that are stored, and loaded.
    spills: [u64; 2],
    instructions: u64,
}

/// By kernel and precision.
type Table = BTreeMap<(String, String), Resources>;

/// Reads the assembler's log of a file: three lines for each kernel.
fn read_log(log: &str) -> BTreeMap<&str, Resources> {
    let mut found = BTreeMap::new();
    let (mut kernel, mut stack, mut spills) = ("", 0, [0, 0]);
    for line in log.lines() {
        let number_before = |what: &str| -> Option<u64> {
            let (before, _) = line.split_once(what)?;
            before.trim_end().rsplit([' ', ',']).next()?.parse().ok()
        };
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernel = rest.split('\'').next().unwrap_or_default();
        } else if let Some(bytes) = number_before("bytes stack frame") {
            let spilled = ["bytes spill stores", "bytes spill loads"].map(|what| number_before(what).unwrap());
            (stack, spills) = (bytes, spilled);
        } else if let Some(registers) = number_before("registers") {
            found.insert(kernel, Resources { registers, stack, spills, instructions: 0 });
        }
    }
    found
}

/// Returns the instructions of a kernel: the length of its section of machine code.
fn instructions(code: &ElfBytes<'_, AnyEndian>, kernel: &str) -> u64 {
    let section = code.section_header_by_name(&format!(".text.{kernel}")).unwrap();
    section.unwrap_or_else(|| panic!("`{kernel}` has no machine code")).sh_size / INSTRUCTION
}

/// Compiles all kernels in two precisions.
fn measure() -> Table {
    let mut table = Table::new();
    for (precision, name) in [(DataType::Fp32, "fp32"), (DataType::Bf16, "bf16")] {
        for source in SOURCES.iter().filter(|source| precision != DataType::Fp32 || !source.needs_half()) {
            let (code, log) = source.compiled_with_log(precision, HOPPER).unwrap_or_else(|error| panic!("{error}"));
            let (code, used) = (ElfBytes::minimal_parse(&code).unwrap(), read_log(&log));
            for kernel in source.kernels() {
                let resources = *used.get(kernel).unwrap_or_else(|| panic!("`{kernel}` is not in the log: {log}"));
                let resources = Resources { instructions: instructions(&code, kernel), ..resources };
                table.insert((kernel.to_owned(), name.to_owned()), resources);
            }
        }
    }
    table
}

fn write(version: &str, table: &Table) -> String {
    let mut text = format!("# NVRTC {version}, sm_90. {UPDATE}=1 rewrites this table (docs/gpu.md).\n");
    text += "# kernel precision registers stack-bytes spill-store-bytes spill-load-bytes instructions\n";
    for ((kernel, precision), one) in table {
        let Resources { registers, stack, spills: [stores, loads], instructions } = one;
        let _ = writeln!(text, "{kernel} {precision} {registers} {stack} {stores} {loads} {instructions}");
    }
    text
}

/// Returns the table's version of NVRTC, and its rows.
fn parse(text: &str) -> (&str, Table) {
    let version = text.strip_prefix("# NVRTC ").and_then(|rest| rest.split(',').next()).unwrap_or_default();
    let rows = text.lines().filter(|line| !line.starts_with('#')).map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        let [kernel, precision, numbers @ ..] = &words[..] else { panic!("`{line}` is no row") };
        let numbers: Vec<u64> = numbers.iter().map(|word| word.parse().unwrap()).collect();
        let [registers, stack, stores, loads, instructions] = numbers[..] else { panic!("`{line}` is no row") };
        ((kernel.to_string(), precision.to_string()), Resources { registers, stack, spills: [stores, loads], instructions })
    });
    (version, rows.collect())
}

/// Lists what is worse, or different if the versions of NVRTC are equal.
fn differences(kept: &Table, measured: &Table, is_same_version: bool) -> Vec<String> {
    let mut found = Vec::new();
    for (key, now) in measured {
        match kept.get(key) {
            None => found.push(format!("{key:?} is new: {now:?}")),
            Some(before) if is_same_version && before != now => found.push(format!("{key:?} was {before:?}, is {now:?}")),
            Some(before) if now.spills.iter().sum::<u64>() > before.spills.iter().sum() => {
                found.push(format!("{key:?} spills more: it was {before:?}, is {now:?}"));
            }
            Some(_) => {}
        }
    }
    found.extend(kept.keys().filter(|key| !measured.contains_key(key)).map(|key| format!("{key:?} is gone")));
    found
}

#[test]
fn kernels_take_the_registers_and_spills_of_the_table() {
    let Some(version) = Library::Nvrtc.version() else {
        assert!(std::env::var_os(REQUIRED).is_none(), "{REQUIRED} is set, and NVRTC cannot be loaded");
        eprintln!("skipped: NVRTC cannot be loaded ({})", Library::Nvrtc.hint());
        return;
    };
    let measured = measure();
    if std::env::var_os(UPDATE).is_some() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda/kernels/resources.txt");
        std::fs::write(path, write(&version, &measured)).unwrap();
        return;
    }
    let (of_table, kept) = parse(TABLE);
    let found = differences(&kept, &measured, of_table == version);
    assert!(found.is_empty(), "NVRTC {version}, table {of_table}:\n{}\nhint: `{UPDATE}=1` rewrites the table", found.join("\n"));
}

#[test]
fn a_kernel_that_starts_to_spill_differs_from_the_table() {
    let log = "ptxas info    : Compiling entry function 'one' for 'sm_90'\n\
               ptxas info    : Function properties for one\n\
               ptxas         .     256 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n\
               ptxas info    : Used 80 registers, used 0 barriers, 256 bytes cumulative stack size\n";
    let spilling = Resources { registers: 80, stack: 256, spills: [8, 12], instructions: 0 };
    assert_eq!(read_log(log).into_iter().collect::<Vec<_>>(), [("one", spilling)]);
    let table = |resources| Table::from([(("one".to_owned(), "bf16".to_owned()), resources)]);
    let [kept, measured] = [table(Resources { spills: [0, 0], ..spilling }), table(spilling)];
    assert_eq!(parse(&write("13.0", &kept)), ("13.0", kept.clone()));
    for is_same_version in [false, true] {
        assert_eq!(differences(&kept, &measured, is_same_version).len(), 1);
        assert!(differences(&kept, &kept, is_same_version).is_empty());
    }
    let larger = table(Resources { registers: 81, ..spilling });
    assert!(differences(&measured, &larger, false).is_empty(), "another version allocates differently");
    assert_eq!(differences(&measured, &larger, true).len(), 1);
    assert_eq!(differences(&kept, &Table::new(), true).len(), 1);
}
