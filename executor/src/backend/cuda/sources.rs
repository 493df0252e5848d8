//! The kernels' sources, and their compilation by NVRTC, kept on disk.

use super::error::CudaError;
use super::libraries::Library;
use cudarc::nvrtc::{result, sys};
use foretell_units::DataType;
use sha2::{Digest, Sha256};
use std::ffi::{CStr, CString};
use std::fmt::Write as _;
use std::path::PathBuf;

/// A file of kernels.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) file: &'static str,
    pub(crate) text: &'static str,
    /// What is put before it, beside what is put before all.
    pub(crate) heads: &'static [&'static str],
}

/// What is put before each file.
pub(crate) const COMMON: &str = include_str!("kernels/common.cuh");
/// What the files of attention share.
const ATTENTION: &str = include_str!("kernels/attention.cuh");
/// Products of a warp on tensor cores.
const TENSOR: &str = include_str!("kernels/tensor.cuh");

macro_rules! source {
    ($file:literal $(, $heads:expr)*) => {
        Source { file: $file, text: include_str!(concat!("kernels/", $file)), heads: &[$($heads),*] }
    };
}

/// All files.
pub(crate) const SOURCES: &[Source] = &[
    source!("attention.cu", ATTENTION),
    source!("attention_tensor.cu", ATTENTION, TENSOR),
    source!("cross_entropy.cu"),
    source!("eight_bits.cu"),
    source!("elementwise.cu"),
    source!("images.cu"),
    source!("lstm.cu"),
    source!("mixture.cu"),
    source!("movement.cu"),
    source!("norms.cu"),
    source!("optimizers.cu"),
    source!("product.cu"),
    source!("rope.cu"),
    source!("sums.cu"),
];

impl Source {
    /// The file that has a kernel.
    pub(crate) fn of(function: &str) -> Option<&'static Self> {
        let head = format!("KERNEL({function})");
        SOURCES.iter().find(|source| source.text.contains(&head))
    }

    /// Its kernels.
    #[cfg(test)]
    pub(crate) fn kernels(&self) -> impl Iterator<Item = &'static str> + use<> {
        let name = |line: &'static str| line.trim_start_matches("TENSOR_").strip_prefix("KERNEL(")?.split(')').next();
        self.text.lines().filter_map(name)
    }

    /// Whether its kernels are made for sixteen bits alone, as those on tensor cores are.
    #[cfg(test)]
    pub(crate) fn needs_half(&self) -> bool {
        self.text.contains("TENSOR_KERNEL(")
    }

    /// The machine code of its kernels for devices of a capability, in a precision: from the disk if it was compiled before.
    pub(crate) fn compiled(&'static self, precision: DataType, capability: (u32, u32)) -> Result<Vec<u8>, CudaError> {
        if !Library::Nvrtc.is_present() {
            return Err(CudaError::MissingLibrary { library: Library::Nvrtc });
        }
        let architecture = format!("sm_{}{}", capability.0, capability.1);
        let options = [
            format!("--gpu-architecture={architecture}"),
            format!("-DPRECISION={}", precision_number(precision)),
            "--std=c++17".into(),
            "-default-device".into(),
        ];
        let text = format!("{COMMON}\n{}\n#line 1 \"{}\"\n{}", self.heads.concat(), self.file, self.text);
        let place = kept_at(&text, &options);
        if let Some(code) = place.as_ref().and_then(|place| std::fs::read(place).ok()).filter(|code| !code.is_empty()) {
            return Ok(code);
        }
        let code = compile(self.file, &text, &options, &architecture)?;
        if let Some(place) = place {
            keep(&place, &code);
        }
        Ok(code)
    }
}

/// How the sources know a precision.
pub(crate) fn precision_number(precision: DataType) -> u32 {
    match precision {
        DataType::Bf16 => 1,
        DataType::Fp16 => 2,
        _ => 0,
    }
}

/// Where a compilation's result is kept: named by all that it follows from.
fn kept_at(text: &str, options: &[String]) -> Option<PathBuf> {
    let folder = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))?;
    let mut hash = Sha256::new();
    hash.update(Library::Nvrtc.version().unwrap_or_default());
    options.iter().for_each(|option| hash.update(option));
    hash.update(text);
    let mut name = String::new();
    for byte in hash.finalize().iter().take(16) {
        let _ = write!(name, "{byte:02x}");
    }
    Some(folder.join("foretell").join("kernels").join(name))
}

/// Keeps it. Another rank may do so at the same time, and a disk may be full or read-only: then it is compiled again.
fn keep(place: &std::path::Path, code: &[u8]) {
    let Some(folder) = place.parent() else { return };
    if std::fs::create_dir_all(folder).is_ok() {
        let beside = place.with_extension(std::process::id().to_string());
        if std::fs::write(&beside, code).is_err() || std::fs::rename(&beside, place).is_err() {
            let _ = std::fs::remove_file(&beside);
        }
    }
}

fn compile(file: &'static str, text: &str, options: &[String], architecture: &str) -> Result<Vec<u8>, CudaError> {
    let failed = |reason: String| CudaError::Call { doing: "compiling kernels", reason };
    let text = CString::new(text).map_err(|error| failed(error.to_string()))?;
    let name = CString::new(file).map_err(|error| failed(error.to_string()))?;
    let program = result::create_program(&text, Some(&name)).map_err(|error| failed(error.to_string()))?;
    // SAFETY: the program was just made, and the library is there.
    let compiled = unsafe { result::compile_program(program, options) };
    let code = match compiled {
        // SAFETY: as above.
        Ok(()) => unsafe { binary(program) }.map_err(|error| failed(error.to_string())),
        Err(_) => {
            // SAFETY: as above; the log ends with a zero.
            let log = unsafe { result::get_program_log(program) }.unwrap_or_default();
            let log: Vec<u8> = log.iter().map(|&byte| byte as u8).collect();
            let log = CStr::from_bytes_until_nul(&log).map(|log| log.to_string_lossy().into_owned()).unwrap_or_default();
            Err(CudaError::Compilation { file, architecture: architecture.into(), log })
        }
    };
    // SAFETY: as above; it is not used after this.
    let _ = unsafe { result::destroy_program(program) };
    code
}

/// The machine code of a compiled program.
///
/// # Safety
/// The program is compiled, for a real architecture.
unsafe fn binary(program: sys::nvrtcProgram) -> Result<Vec<u8>, result::NvrtcError> {
    let mut size = 0;
    // SAFETY: the caller's promise; the place is valid.
    unsafe { sys::nvrtcGetCUBINSize(program, &mut size) }.result()?;
    let mut code = vec![0_u8; size];
    // SAFETY: as above; the buffer is as long as the library says.
    unsafe { sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()) }.result()?;
    Ok(code)
}
