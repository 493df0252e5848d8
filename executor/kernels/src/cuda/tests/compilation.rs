//! Compilation of every kernel by NVRTC, which needs neither a driver nor a GPU.

use super::emulator::REQUIRED;
use crate::cuda::driver::Library;
use crate::cuda::kernels::{KernelSource, SOURCES};
use foretell_units::DataType;

#[test]
fn every_kernel_compiles_for_ampere_and_hopper() {
    if !Library::Nvrtc.is_present() {
        assert!(std::env::var_os(REQUIRED).is_none(), "{REQUIRED} is set, and NVRTC cannot be loaded");
        eprintln!("skipped: NVRTC cannot be loaded ({})", Library::Nvrtc.hint());
        return;
    }
    let on_ampere = [DataType::Fp32, DataType::Bf16, DataType::Fp16].map(|precision| ((8, 0), precision));
    // `resources` compiles for Hopper in the other precisions.
    for (capability, precision) in on_ampere.into_iter().chain([((9, 0), DataType::Fp16)]) {
        // Kernels on tensor cores take long to compile, so each is compiled for each device and
        // each precision once, and not for every pair.
        let with_tensor_cores = (capability, precision) == ((8, 0), DataType::Fp16);
        for source in SOURCES.iter().filter(|source| with_tensor_cores || !source.needs_half()) {
            let code = source.compiled(precision, capability).unwrap_or_else(|error| panic!("{error}"));
            // An ELF file that names each of its kernels.
            assert_eq!(&code[..4], b"\x7fELF", "{}", source.file);
            for kernel in source.kernels() {
                let is_named = code.windows(kernel.len()).any(|window| window == kernel.as_bytes());
                assert!(is_named, "`{kernel}` is not in the code of {}", source.file);
            }
        }
    }
}

#[test]
fn each_kernel_is_in_one_source() {
    let mut names: Vec<&str> = SOURCES.iter().flat_map(KernelSource::kernels).collect();
    assert!(names.len() > 60, "{names:?}");
    for name in &names {
        assert!(KernelSource::of(name).is_some_and(|source| source.kernels().any(|kernel| kernel == *name)), "{name}");
    }
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count, "a kernel is defined twice");
}
