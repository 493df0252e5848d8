//! The text of the kernels, compiled by `g++` for this processor with what `emulator/emulator.cpp` has in place of a GPU.

use crate::backend::cuda::driver::Arguments;
use crate::backend::cuda::driver::Launch;
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

/// Set where the emulator must be there: then a test that cannot have it fails, instead of saying so.
pub(super) const REQUIRED: &str = "FORETELL_REQUIRE_CUDA_TOOLS";

type Emulate = unsafe extern "C" fn(*mut c_void, *const c_uint, c_uint, c_uint, *const Arguments) -> c_int;

/// The kernels of one precision.
struct EmulatorLibrary {
    loaded: libloading::Library,
    emulate: Emulate,
    /// Kernels that were looked up.
    functions: HashMap<&'static str, *mut c_void>,
}

// SAFETY: the functions are the library's, which stays loaded, and called behind a lock.
unsafe impl Send for EmulatorLibrary {}

/// The libraries of all precisions; one kernel runs at a time.
#[derive(Default)]
pub(crate) struct Emulator {
    libraries: Mutex<HashMap<u32, EmulatorLibrary>>,
}

impl Emulator {
    /// The process's emulator; none where there is no compiler, which is then said.
    pub(crate) fn get() -> Option<&'static Self> {
        static EMULATOR: OnceLock<Option<Emulator>> = OnceLock::new();
        let made = EMULATOR.get_or_init(|| {
            if !cfg!(target_arch = "x86_64") {
                without("the emulator is for x86-64");
                return None;
            }
            has_compiled(Command::new("g++").arg("--version")).then(Emulator::default)
        });
        made.as_ref()
    }

    /// Whether there is a kernel of this name.
    pub(crate) fn has(&self, launch: &Launch) -> bool {
        let precision = precision_number(launch.precision);
        let mut libraries = self.libraries.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = &libraries.entry(precision).or_insert_with(|| EmulatorLibrary::open(precision)).loaded;
        kernel(loaded, launch.function).is_some()
    }

    /// Runs a launch to its end.
    pub(crate) fn run(&self, launch: &Launch) {
        let precision = precision_number(launch.precision);
        let mut libraries = self.libraries.lock().unwrap_or_else(PoisonError::into_inner);
        let library = libraries.entry(precision).or_insert_with(|| EmulatorLibrary::open(precision));
        let loaded = &library.loaded;
        let found = || kernel(loaded, launch.function).unwrap_or_else(|| panic!("there is no kernel `{}`", launch.function));
        let function = *library.functions.entry(launch.function).or_insert_with(found);
        // SAFETY: the function takes this structure, by which all it touches is described: that it is valid is the launch's promise.
        let status = unsafe {
            (library.emulate)(function, launch.grid.as_ptr(), launch.block, launch.shared, &raw const launch.arguments)
        };
        assert_eq!(
            status, 0,
            "1: threads wait for each other forever; 2: no GPU takes this launch; 3: nor this address: {launch:?}"
        );
    }
}

impl EmulatorLibrary {
    fn open(precision: u32) -> Self {
        // SAFETY: the emulator has no initialisers.
        let loaded = unsafe { loading::open(compiled(precision).as_os_str()) }.unwrap();
        // SAFETY: the emulator has this function, with this type; so below.
        let emulate: Emulate = unsafe { loading::function(&loaded, "foretell_emulate") }.unwrap();
        // SAFETY: as above.
        let size: unsafe extern "C" fn() -> c_uint = unsafe { loading::function(&loaded, "foretell_arguments_size") }.unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { size() } as usize, size_of::<Arguments>(), "the structure of arguments is another in common.cuh");
        Self { loaded, emulate, functions: HashMap::new() }
    }
}

/// Where a kernel is.
fn kernel(loaded: &libloading::Library, name: &str) -> Option<*mut c_void> {
    // SAFETY: a function's address is a pointer, whatever its type.
    unsafe { loading::function(loaded, name) }
}

/// Whether a compiler was there, which compiles what it is given; whoever goes on without says so, or fails where it must be there.
pub(crate) fn has_compiled(compiler: &mut Command) -> bool {
    match compiler.output() {
        Ok(output) => {
            assert!(output.status.success(), "{compiler:?}: {}", String::from_utf8_lossy(&output.stderr));
            true
        }
        Err(error) => {
            without(&format!("{compiler:?} cannot be started: {error}"));
            false
        }
    }
}

/// A test goes on without what it needs, and says so, or fails where that must be there.
fn without(reason: &str) {
    assert!(std::env::var_os(REQUIRED).is_none(), "{REQUIRED} is set, and {reason}");
    eprintln!("skipped: {reason}");
}

/// The library of a precision, compiled unless one of the same text is there.
fn compiled(precision: u32) -> PathBuf {
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
        let beside = library.with_extension(std::process::id().to_string());
        let mut compiler = Command::new("g++");
        compiler
            .args(["-std=c++17", "-O2", "-ffp-contract=off", "-w", "-fPIC", "-shared"])
            .arg(format!("-DPRECISION={precision}"))
            .arg("-I")
            .arg(folder.join("kernels"))
            .arg(folder.join("emulator/emulator.cpp"))
            .arg("-o")
            .arg(&beside);
        assert!(has_compiled(&mut compiler), "the compiler was there");
        std::fs::rename(&beside, &library).unwrap();
    }
    library
}
