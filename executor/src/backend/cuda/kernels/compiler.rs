//! Compilation by NVRTC, with a cache on disk.

use super::{COMMON, KernelSource, precision_number};
use crate::backend::cuda::driver::{CudaError, Library};
use cudarc::nvrtc::{result, sys};
use foretell_units::DataType;
use sha2::{Digest, Sha256};
use std::ffi::{CStr, CString};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

impl KernelSource {
    /// Returns the machine code of the file's kernels for one precision and compute capability. It
    /// comes from the cache if it was compiled before.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`] without NVRTC; [`CudaError::Compilation`] if the source does
    /// not compile.
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
        let text = format!("{COMMON}\n{}\n#line 1 \"{}\"\n{}", self.headers.concat(), self.file, self.text);
        let cached = cache_path(&text, &options);
        if let Some(code) = cached.as_ref().and_then(|path| std::fs::read(path).ok()).filter(|code| !code.is_empty()) {
            return Ok(code);
        }
        let code = compile(self.file, &text, &options, &architecture)?;
        if let Some(path) = cached {
            write_cache(&path, &code);
        }
        Ok(code)
    }
}

/// Returns the cache file for a compilation: its name is a hash of everything that the result
/// depends on. `None` if there is no home folder.
fn cache_path(text: &str, options: &[String]) -> Option<PathBuf> {
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

/// Writes the cache file, by rename because another rank may write it too. Failure is ignored: the
/// disk may be full or read-only, and then the next process compiles again.
fn write_cache(path: &Path, code: &[u8]) {
    let Some(folder) = path.parent() else { return };
    if std::fs::create_dir_all(folder).is_ok() {
        let partial = path.with_extension(std::process::id().to_string());
        if std::fs::write(&partial, code).is_err() || std::fs::rename(&partial, path).is_err() {
            let _ = std::fs::remove_file(&partial);
        }
    }
}

fn compile(file: &'static str, text: &str, options: &[String], architecture: &str) -> Result<Vec<u8>, CudaError> {
    let failed = |reason: String| CudaError::Call { action: "compiling kernels", reason };
    let text = CString::new(text).map_err(|error| failed(error.to_string()))?;
    let name = CString::new(file).map_err(|error| failed(error.to_string()))?;
    let program = result::create_program(&text, Some(&name)).map_err(|error| failed(error.to_string()))?;
    // SAFETY: the program was just created, and the library is present.
    let compiled = unsafe { result::compile_program(program, options) };
    let code = match compiled {
        // SAFETY: as above.
        Ok(()) => unsafe { machine_code(program) }.map_err(|error| failed(error.to_string())),
        Err(_) => {
            // SAFETY: as above; the log ends with a zero byte.
            let log = unsafe { result::get_program_log(program) }.unwrap_or_default();
            let log: Vec<u8> = log.iter().map(|&byte| byte as u8).collect();
            let log = CStr::from_bytes_until_nul(&log).map(|log| log.to_string_lossy().into_owned()).unwrap_or_default();
            Err(CudaError::Compilation { file, architecture: architecture.into(), log })
        }
    };
    // SAFETY: as above; nothing uses it any more.
    let _ = unsafe { result::destroy_program(program) };
    code
}

/// Returns the machine code of a compiled program.
///
/// # Safety
/// The program is compiled, for a real architecture (`sm_`, not `compute_`).
unsafe fn machine_code(program: sys::nvrtcProgram) -> Result<Vec<u8>, result::NvrtcError> {
    let mut size = 0;
    // SAFETY: the caller's promise; the pointer is valid.
    unsafe { sys::nvrtcGetCUBINSize(program, &mut size) }.result()?;
    let mut code = vec![0_u8; size];
    // SAFETY: as above; the buffer has the length that the library asks for.
    unsafe { sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()) }.result()?;
    Ok(code)
}
