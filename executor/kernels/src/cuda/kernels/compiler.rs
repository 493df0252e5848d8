//! Compilation by NVRTC, with a cache on disk.

use super::{COMMON, KernelSource, precision_number};
use crate::cuda::driver::{CudaError, Library};
use crate::cuda::library::loader::functions;
use cudarc::nvrtc::sys;
use foretell_units::DataType;
use sha2::{Digest, Sha256};
use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

impl KernelSource {
    /// Returns the machine code of the file's kernels for one precision and compute capability. It
    /// comes from the cache if it was compiled before.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`] without NVRTC; [`CudaError::Compilation`] if the source does
    /// not compile.
    pub fn compiled(&'static self, precision: DataType, capability: (u32, u32)) -> Result<Vec<u8>, CudaError> {
        if !Library::Nvrtc.is_present() {
            return Err(CudaError::MissingLibrary { library: Library::Nvrtc });
        }
        let (architecture, options, text) = self.compilation(precision, capability);
        let cached = cache_path(&text, &options);
        if let Some(code) = cached.as_ref().and_then(|path| std::fs::read(path).ok()).filter(|code| !code.is_empty()) {
            return Ok(code);
        }
        let (code, _) = compile(self.file, &text, &options, &architecture)?;
        if let Some(path) = cached {
            write_cache(&path, &code);
        }
        Ok(code)
    }

    /// Returns the machine code, newly compiled, with the assembler's log of what each kernel
    /// takes.
    #[cfg(test)]
    pub fn compiled_with_log(&'static self, precision: DataType, capability: (u32, u32)) -> Result<(Vec<u8>, String), CudaError> {
        let (architecture, mut options, text) = self.compilation(precision, capability);
        options.push("--ptxas-options=-v".into());
        compile(self.file, &text, &options, &architecture)
    }

    /// Returns the architecture, the compiler's options and the text.
    fn compilation(&'static self, precision: DataType, capability: (u32, u32)) -> (String, Vec<String>, String) {
        let architecture = format!("sm_{}{}", capability.0, capability.1);
        let options = vec![
            format!("--gpu-architecture={architecture}"),
            format!("-DPRECISION={}", precision_number(precision)),
            "--std=c++17".into(),
            "-default-device".into(),
        ];
        let text = format!("{COMMON}\n{}\n#line 1 \"{}\"\n{}", self.headers.concat(), self.file, self.text);
        (architecture, options, text)
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

functions! {
    /// NVRTC's functions.
    NvrtcFunctions of Library::Nvrtc, cudarc::nvrtc::sys {
        nvrtcCreateProgram(
            *mut sys::nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        ) -> sys::nvrtcResult;
        nvrtcCompileProgram(sys::nvrtcProgram, c_int, *const *const c_char) -> sys::nvrtcResult;
        nvrtcGetProgramLogSize(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult;
        nvrtcGetProgramLog(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult;
        nvrtcGetCUBINSize(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult;
        nvrtcGetCUBIN(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult;
        nvrtcDestroyProgram(*mut sys::nvrtcProgram) -> sys::nvrtcResult;
    }
}

const COMPILING: &str = "compiling kernels";

fn checked(result: sys::nvrtcResult) -> Result<(), CudaError> {
    match result {
        sys::nvrtcResult::NVRTC_SUCCESS => Ok(()),
        other => Err(CudaError::Call { action: COMPILING, reason: format!("{other:?}") }),
    }
}

/// A program of NVRTC, destroyed on drop.
struct Program {
    functions: &'static NvrtcFunctions,
    program: sys::nvrtcProgram,
}

impl Program {
    fn new(functions: &'static NvrtcFunctions, text: &CStr, name: &CStr) -> Result<Self, CudaError> {
        let (mut program, none) = (std::ptr::null_mut(), std::ptr::null());
        // SAFETY: the texts end with zero bytes, there are no headers, and the pointer is valid.
        checked(unsafe { (functions.nvrtcCreateProgram)(&mut program, text.as_ptr(), name.as_ptr(), 0, none, none) })?;
        Ok(Self { functions, program })
    }

    fn compile(&self, options: &[CString]) -> Result<(), CudaError> {
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program is alive, and each option ends with a zero byte.
        checked(unsafe { (self.functions.nvrtcCompileProgram)(self.program, options.len() as c_int, options.as_ptr()) })
    }

    /// Returns the compiler's log.
    fn log(&self) -> Result<String, CudaError> {
        let mut size = 0;
        // SAFETY: the program is alive, and the pointer is valid.
        checked(unsafe { (self.functions.nvrtcGetProgramLogSize)(self.program, &mut size) })?;
        let mut log = vec![0_u8; size];
        // SAFETY: as above; the buffer has the length that the library asks for.
        checked(unsafe { (self.functions.nvrtcGetProgramLog)(self.program, log.as_mut_ptr().cast()) })?;
        Ok(CStr::from_bytes_until_nul(&log).map(|log| log.to_string_lossy().into_owned()).unwrap_or_default())
    }

    /// Returns the machine code, once the program is compiled for a real architecture (`sm_`, not
    /// `compute_`).
    fn machine_code(&self) -> Result<Vec<u8>, CudaError> {
        let mut size = 0;
        // SAFETY: the program is alive, and the pointer is valid.
        checked(unsafe { (self.functions.nvrtcGetCUBINSize)(self.program, &mut size) })?;
        let mut code = vec![0_u8; size];
        // SAFETY: as above; the buffer has the length that the library asks for.
        checked(unsafe { (self.functions.nvrtcGetCUBIN)(self.program, code.as_mut_ptr().cast()) })?;
        Ok(code)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program is alive, and nothing uses it any more.
        let _ = unsafe { (self.functions.nvrtcDestroyProgram)(&mut self.program) };
    }
}

/// Returns the machine code, and the compiler's log.
fn compile(file: &'static str, text: &str, options: &[String], architecture: &str) -> Result<(Vec<u8>, String), CudaError> {
    let with_zero =
        |text: &str| CString::new(text).map_err(|error| CudaError::Call { action: COMPILING, reason: error.to_string() });
    let options = options.iter().map(|option| with_zero(option)).collect::<Result<Vec<CString>, CudaError>>()?;
    let program = Program::new(NvrtcFunctions::get()?, &with_zero(text)?, &with_zero(file)?)?;
    if program.compile(&options).is_err() {
        return Err(CudaError::Compilation { file, architecture: architecture.into(), log: program.log()? });
    }
    Ok((program.machine_code()?, program.log()?))
}
