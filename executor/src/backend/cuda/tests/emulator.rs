//! The kernels' sources, compiled by `g++` for this CPU together with `emulator/emulator.cpp`,
//! which stands in for a GPU.

use crate::backend::cuda::driver::{Arguments, Launch};
use crate::backend::cuda::kernels::{COMMON, SOURCES, precision_number};
use crate::loading;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};

const EMULATOR: &str = include_str!("../emulator/emulator.cpp");

/// Environment variable that makes tests fail, instead of being skipped, if the emulator or NVRTC
/// is missing.
pub(super) const REQUIRED: &str = "FORETELL_REQUIRE_CUDA_TOOLS";

/// `foretell_emulate` of `emulator.cpp`: kernel, grid, block, dynamic shared memory, arguments.
type Emulate = unsafe extern "C" fn(*mut c_void, *const c_uint, c_uint, c_uint, *const Arguments) -> c_int;

/// The kernels of one precision.
struct EmulatorLibrary {
    loaded: libloading::Library,
    emulate: Emulate,
    /// Kernels that were looked up before.
    functions: HashMap<&'static str, *mut c_void>,
}

// SAFETY: the functions belong to the library, which stays loaded, and are called behind a lock.
unsafe impl Send for EmulatorLibrary {}

/// The kernels of all precisions. One kernel runs at a time.
#[derive(Default)]
pub(crate) struct Emulator {
    libraries: Mutex<HashMap<u32, EmulatorLibrary>>,
}

impl Emulator {
    /// Returns the process's emulator. `None`, with a note, if there is no compiler.
    pub(crate) fn get() -> Option<&'static Self> {
        static EMULATOR: OnceLock<Option<Emulator>> = OnceLock::new();
        let emulator = EMULATOR.get_or_init(|| {
            if !cfg!(target_arch = "x86_64") {
                skip_or_fail("the emulator needs x86-64");
                return None;
            }
            has_compiled(Command::new("g++").arg("--version")).then(Emulator::default)
        });
        emulator.as_ref()
    }

    /// Returns `true` if the launch's kernel exists.
    pub(crate) fn has(&self, launch: &Launch) -> bool {
        let precision = precision_number(launch.precision);
        let mut libraries = self.libraries.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = &libraries.entry(precision).or_insert_with(|| EmulatorLibrary::open(precision)).loaded;
        find_kernel(loaded, launch.function).is_some()
    }

    /// Runs a launch, and returns when it is done.
    pub(crate) fn run(&self, launch: &Launch) {
        let precision = precision_number(launch.precision);
        let mut libraries = self.libraries.lock().unwrap_or_else(PoisonError::into_inner);
        let library = libraries.entry(precision).or_insert_with(|| EmulatorLibrary::open(precision));
        let loaded = &library.loaded;
        let found = || find_kernel(loaded, launch.function).unwrap_or_else(|| panic!("there is no kernel `{}`", launch.function));
        let function = *library.functions.entry(launch.function).or_insert_with(found);
        // SAFETY: the function takes this structure, which describes everything that it accesses.
        // Its validity is the launch's promise.
        let status = unsafe {
            (library.emulate)(function, launch.grid.as_ptr(), launch.block, launch.shared, &raw const launch.arguments)
        };
        let failure = match status {
            0 => return,
            1 => "its threads wait for each other forever",
            2 => "no GPU takes this launch",
            3 => "an instruction got an invalid address",
            _ => "unknown status",
        };
        panic!("{failure}: {launch:?}");
    }
}

impl EmulatorLibrary {
    fn open(precision: u32) -> Self {
        // SAFETY: the emulator has no initialisers.
        let loaded = unsafe { loading::open(compile_emulator(precision).as_os_str()) }.unwrap();
        // SAFETY: the emulator defines the function with this type; so below.
        let emulate: Emulate = unsafe { loading::function(&loaded, "foretell_emulate") }.unwrap();
        // SAFETY: as above.
        let size: unsafe extern "C" fn() -> c_uint = unsafe { loading::function(&loaded, "foretell_arguments_size") }.unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { size() } as usize, size_of::<Arguments>(), "`Arguments` differs from common.cuh");
        Self { loaded, emulate, functions: HashMap::new() }
    }
}

/// Returns a kernel's address.
fn find_kernel(loaded: &libloading::Library, name: &str) -> Option<*mut c_void> {
    // SAFETY: a function's address is a pointer, whatever its type.
    unsafe { loading::function(loaded, name) }
}

/// Runs a compiler, and panics if it reports an error. Returns `false`, with a note, if there is no
/// compiler.
pub(crate) fn has_compiled(compiler: &mut Command) -> bool {
    match compiler.output() {
        Ok(output) => {
            assert!(output.status.success(), "{compiler:?}: {}", String::from_utf8_lossy(&output.stderr));
            true
        }
        Err(error) => {
            skip_or_fail(&format!("{compiler:?} cannot be started: {error}"));
            false
        }
    }
}

/// Notes that a test is skipped, or fails it if [`REQUIRED`] is set.
fn skip_or_fail(reason: &str) {
    assert!(std::env::var_os(REQUIRED).is_none(), "{REQUIRED} is set, and {reason}");
    eprintln!("skipped: {reason}");
}

/// Returns the emulator's library for a precision. It is compiled unless one of the same sources is
/// in the temporary folder.
fn compile_emulator(precision: u32) -> PathBuf {
    let mut hash = Sha256::new();
    hash.update(EMULATOR);
    hash.update(COMMON);
    for text in SOURCES.iter().flat_map(|source| source.headers.iter().chain([&source.text])) {
        hash.update(text);
    }
    let mut name = String::new();
    hash.finalize().iter().take(8).for_each(|byte| write!(name, "{byte:02x}").unwrap());
    let library = std::env::temp_dir().join(format!("foretell-emulator-{name}-{precision}.so"));
    if !library.exists() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/backend/cuda");
        let partial = library.with_extension(std::process::id().to_string());
        let mut compiler = Command::new("g++");
        compiler
            .args(["-std=c++17", "-O2", "-ffp-contract=off", "-w", "-fPIC", "-shared"])
            .arg(format!("-DPRECISION={precision}"))
            .arg("-I")
            .arg(folder.join("kernels"))
            .arg(folder.join("emulator/emulator.cpp"))
            .arg("-o")
            .arg(&partial);
        assert!(has_compiled(&mut compiler), "the compiler was found before");
        std::fs::rename(&partial, &library).unwrap();
    }
    library
}
