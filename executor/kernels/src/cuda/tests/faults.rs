//! Checks that the emulator finds planted faults (`emulator/faults.cu`).

use super::emulator::{ADDRESS, Emulator, EmulatorLibrary, KernelSet};
use crate::cuda::driver::{Arguments, Launch, MAX_NUMBERS, MAX_OPERANDS, MAX_SIZES};
use foretell_units::DataType;
use std::process::Command;

/// Environment variable of a child process: the kernel that it runs.
const FAULT: &str = "FORETELL_PLANTED_FAULT";
/// Elements of an operand.
const ELEMENTS: usize = 256;

/// Runs a kernel on four blocks of 256 threads, and returns what it wrote.
fn run(library: &mut EmulatorLibrary, function: &'static str) -> Result<Vec<f32>, &'static str> {
    let read: Vec<f32> = (0..ELEMENTS).map(|index| index as f32).collect();
    let mut written = vec![0.0_f32; ELEMENTS];
    let (mut reads, mut writes, mut sizes) = ([0; MAX_OPERANDS], [0; MAX_OPERANDS], [0; MAX_SIZES]);
    (reads[0], writes[0]) = (read.as_ptr().expose_provenance() as u64, written.as_mut_ptr().expose_provenance() as u64);
    sizes[0] = ELEMENTS as i64;
    let arguments =
        Arguments { reads, writes, sizes, numbers: [0.0; MAX_NUMBERS], step: 0, fault: 0, scratch: 0, accumulate: 0, kernel: 1 };
    library.run(&Launch { function, precision: DataType::Fp32, grid: [4, 1, 1], block: 256, shared: 0, arguments })?;
    Ok(written)
}

/// Runs a kernel in a child process, with an address sanitizer if it can be had and is asked for.
/// Returns the child's standard error if it failed.
fn failure_in_child(function: &str, with_address_sanitizer: bool) -> Option<String> {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["cuda::tests::faults::the_emulator_ends_a_process_that_breaks_memory_rules", "--exact", "--nocapture"]);
    child.env(FAULT, function).env_remove(ADDRESS);
    if with_address_sanitizer {
        let found = Command::new("g++").arg("-print-file-name=libasan.so").output().unwrap();
        let path = String::from_utf8(found.stdout).unwrap();
        child.env(ADDRESS, "1").env("LD_PRELOAD", path.trim()).env("ASAN_OPTIONS", "detect_leaks=0");
    }
    let output = child.output().unwrap();
    (!output.status.success()).then(|| String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn the_emulator_finds_missing_and_divergent_barriers() {
    let Some(_) = Emulator::get() else { return };
    let mut library = EmulatorLibrary::open(KernelSet::Faults, 0);
    let reversed: Vec<f32> = (0..ELEMENTS).rev().map(|index| index as f32).collect();
    assert_eq!(run(&mut library, "no_fault"), Ok(reversed.clone()));
    assert_ne!(run(&mut library, "missing_barrier"), Ok(reversed));
    assert_eq!(run(&mut library, "divergent_barrier"), Err("its threads wait for each other forever"));
}

#[test]
fn the_emulator_finds_reads_of_uninitialised_shared_memory() {
    let Some(_) = Emulator::get() else { return };
    let mut library = EmulatorLibrary::open(KernelSet::Faults, 0);
    for _ in 0..3 {
        let written = run(&mut library, "uninitialised_shared_memory").unwrap();
        assert!(written[..4].iter().all(|sum| sum.is_nan()), "{:?}", &written[..4]);
    }
}

#[test]
fn each_library_of_kernels_has_shared_variables_of_its_own() {
    let Some(_) = Emulator::get() else { return };
    let mut libraries = [0, 1].map(|precision| EmulatorLibrary::open(KernelSet::Faults, precision));
    for _ in 0..2 {
        for library in &mut libraries {
            let written = run(library, "uninitialised_shared_memory_of_a_template").unwrap();
            assert!(written[..4].iter().all(|word| word.is_nan()), "{:?}", &written[..4]);
        }
    }
}

#[test]
fn the_emulator_finds_blocks_that_depend_on_each_other() {
    let Some(_) = Emulator::get() else { return };
    let mut library = EmulatorLibrary::open(KernelSet::Faults, 0);
    let results: Vec<Vec<f32>> = (0..3).map(|_| run(&mut library, "dependent_blocks").unwrap()[..4].to_vec()).collect();
    assert_eq!(results.iter().filter(|sums| **sums == [0.0, 1.0, 3.0, 6.0]).count(), 1, "{results:?}");
}

#[test]
fn the_emulator_ends_a_process_that_breaks_memory_rules() {
    if let Ok(function) = std::env::var(FAULT) {
        let mut library = EmulatorLibrary::open(KernelSet::Faults, 0);
        run(&mut library, function.leak()).unwrap();
        return;
    }
    let Some(_) = Emulator::get() else { return };
    assert_eq!(failure_in_child("no_fault", false), None);
    assert_eq!(failure_in_child("no_fault", true), None);
    for (function, with_address_sanitizer, message) in [
        ("misaligned_access", false, "misaligned address"),
        ("undefined_shift", false, "shift exponent"),
        ("out_of_bounds", true, "heap-buffer-overflow"),
    ] {
        let failure = failure_in_child(function, with_address_sanitizer);
        assert!(failure.as_ref().is_some_and(|failure| failure.contains(message)), "`{function}`: {failure:?}");
    }
}
