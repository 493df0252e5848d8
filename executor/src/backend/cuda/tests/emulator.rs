//! The text of the kernels, compiled by `g++` for this processor with what `emulator/emulator.cpp` has in place of a GPU.

use crate::backend::cuda::arguments::Arguments;
use crate::backend::cuda::driver::Launch;
use crate::backend::cuda::sources::{COMMON, SOURCES, precision_number};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_uint, c_void};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};

const EMULATOR: &str = include_str!("../emulator/emulator.cpp");

/// Set where the emulator must be there: then a test that cannot have it fails, instead of saying so.
pub(super) const REQUIRED: &str = "FORETELL_REQUIRE_CUDA_TOOLS";

type Emulate = unsafe extern "C" fn(*mut c_void, *const c_uint, c_uint, c_uint, *const Arguments) -> c_int;

/// The kernels of one precision.
struct Library {
    handle: *mut c_void,
    emulate: Emulate,
    /// Kernels that were looked up.
    functions: HashMap<&'static str, *mut c_void>,
}

// SAFETY: the library is used behind a lock.
unsafe impl Send for Library {}

/// The libraries of all precisions; one kernel runs at a time.
#[derive(Default)]
pub(crate) struct Emulator {
    libraries: Mutex<HashMap<u32, Library>>,
}

impl Emulator {
    /// The process's emulator; none where there is no compiler, which is then said.
    pub(crate) fn get() -> Option<&'static Self> {
        static EMULATOR: OnceLock<Option<Emulator>> = OnceLock::new();
        let made = EMULATOR.get_or_init(|| {
            let has_compiler = cfg!(target_arch = "x86_64") && Command::new("g++").arg("--version").output().is_ok();
            if !has_compiler {
                assert!(std::env::var_os(REQUIRED).is_none(), "{REQUIRED} is set, and there is no g++");
                eprintln!("skipped: kernels are not run on the processor, as there is no g++ for x86-64");
            }
            has_compiler.then(Emulator::default)
        });
        made.as_ref()
    }

    /// Runs a launch to its end.
    pub(crate) fn run(&self, launch: &Launch) {
        let precision = precision_number(launch.precision);
        let mut libraries = self.libraries.lock().unwrap_or_else(PoisonError::into_inner);
        let library = libraries.entry(precision).or_insert_with(|| Library::open(precision));
        let handle = library.handle;
        let function = *library.functions.entry(launch.function).or_insert_with(|| symbol(handle, launch.function));
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

impl Library {
    fn open(precision: u32) -> Self {
        let path = CString::new(compiled(precision).to_str().unwrap()).unwrap();
        // SAFETY: the library was just compiled from the emulator's text, which has no initialisers.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null(), "{path:?} cannot be loaded");
        // SAFETY: the emulator has this function, with this type.
        let emulate = unsafe { std::mem::transmute::<*mut c_void, Emulate>(symbol(handle, "foretell_emulate")) };
        // SAFETY: as above.
        let size = unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_uint>(symbol(handle, "foretell_arguments_size"))()
        };
        assert_eq!(size as usize, size_of::<Arguments>(), "the structure of arguments is another in common.cuh");
        Self { handle, emulate, functions: HashMap::new() }
    }
}

fn symbol(library: *mut c_void, name: &str) -> *mut c_void {
    let text = CString::new(name).unwrap();
    // SAFETY: the library is loaded, and the name ends with a zero.
    let found = unsafe { libc::dlsym(library, text.as_ptr()) };
    assert!(!found.is_null(), "there is no kernel `{name}`");
    found
}

/// The library of a precision, compiled unless one of the same text is there.
fn compiled(precision: u32) -> PathBuf {
    let mut hash = Sha256::new();
    hash.update(EMULATOR);
    hash.update(COMMON);
    for text in SOURCES.iter().flat_map(|source| source.heads.iter().chain([&source.text])) {
        hash.update(text);
    }
    let mut name = String::new();
    hash.finalize().iter().take(8).for_each(|byte| write!(name, "{byte:02x}").unwrap());
    let library = std::env::temp_dir().join(format!("foretell-emulator-{name}-{precision}.so"));
    if !library.exists() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/backend/cuda");
        let beside = library.with_extension(std::process::id().to_string());
        let output = Command::new("g++")
            .args(["-std=c++17", "-O2", "-ffp-contract=off", "-w", "-fPIC", "-shared"])
            .arg(format!("-DPRECISION={precision}"))
            .arg("-I")
            .arg(folder.join("kernels"))
            .arg(folder.join("emulator/emulator.cpp"))
            .arg("-o")
            .arg(&beside)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        std::fs::rename(&beside, &library).unwrap();
    }
    library
}
