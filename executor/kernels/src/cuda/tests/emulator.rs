//! The kernels' sources, compiled by `g++` for this CPU together with `emulator/emulator.cpp`,
//! which stands in for a GPU.
//!
//! The code is instrumented (`-fsanitize=undefined`, with alignment): a misaligned access, which
//! ends a GPU's context, ends the process with a message. With `ADDRESS` set, an access out of
//! bounds does so too.

use crate::cuda::driver::{Arguments, Launch};
use crate::cuda::kernels::{COMMON, SOURCES, precision_number};
use crate::loading;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};

/// The emulator's files, and the kernels with planted faults.
const EMULATOR: [&str; 5] = [
    include_str!("../emulator/emulator.cpp"),
    include_str!("../emulator/block.h"),
    include_str!("../emulator/builtins.h"),
    include_str!("../emulator/tensor_cores.h"),
    include_str!("../emulator/faults.cu"),
];

/// Environment variable that makes tests fail, instead of being skipped, if the emulator or NVRTC
/// is missing.
pub const REQUIRED: &str = "FORETELL_REQUIRE_CUDA_TOOLS";

/// Environment variable that adds `-fsanitize=address`. The process must preload `libasan.so`,
/// which `tests/emulator.sh` does.
pub(super) const ADDRESS: &str = "FORETELL_EMULATOR_ADDRESS";

/// The kernels that an emulator has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum KernelSet {
    /// The backend's.
    Backend,
    /// Kernels of `emulator/faults.cu` with planted faults, which the emulator must find.
    Faults,
}

/// `foretell_find` of `emulator.cpp`: a kernel by its name.
type Find = unsafe extern "C" fn(*const c_char) -> *mut c_void;
/// `foretell_emulate` of `emulator.cpp`: kernel, grid, block, dynamic shared memory, arguments.
type Emulate = unsafe extern "C" fn(*mut c_void, *const c_uint, c_uint, c_uint, *const Arguments) -> c_int;

/// The kernels of one precision.
pub(super) struct EmulatorLibrary {
    find: Find,
    emulate: Emulate,
    /// Keeps the functions valid.
    _loaded: libloading::Library,
    /// Kernels that were looked up before.
    functions: HashMap<&'static str, *mut c_void>,
}

// SAFETY: the functions belong to the library, which stays loaded, and are called behind a lock.
unsafe impl Send for EmulatorLibrary {}

/// The kernels of all precisions. One kernel runs at a time.
#[derive(Default)]
pub struct Emulator {
    libraries: Mutex<HashMap<u32, EmulatorLibrary>>,
}

impl Emulator {
    /// Returns the process's emulator. `None`, with a note, if there is no compiler.
    pub fn get() -> Option<&'static Self> {
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
    pub fn has(&self, launch: &Launch) -> bool {
        let precision = precision_number(launch.precision);
        let mut libraries = self.libraries.lock().unwrap_or_else(PoisonError::into_inner);
        let library = libraries.entry(precision).or_insert_with(|| EmulatorLibrary::open(KernelSet::Backend, precision));
        library.function(launch.function).is_some()
    }

    /// Runs a launch, and returns when it is done.
    pub fn run(&self, launch: &Launch) {
        let precision = precision_number(launch.precision);
        let mut libraries = self.libraries.lock().unwrap_or_else(PoisonError::into_inner);
        let library = libraries.entry(precision).or_insert_with(|| EmulatorLibrary::open(KernelSet::Backend, precision));
        if let Err(failure) = library.run(launch) {
            panic!("{failure}: {launch:?}");
        }
    }
}

impl EmulatorLibrary {
    /// Loads the kernels of one precision, which is a value of the macro `PRECISION`.
    pub(super) fn open(kernels: KernelSet, precision: u32) -> Self {
        // SAFETY: the emulator's initialisers only register its kernels.
        let loaded = unsafe { loading::open(compile_emulator(kernels, precision).as_os_str()) }.unwrap();
        // SAFETY: the emulator defines the function with this type; so below.
        let find: Find = unsafe { loading::function(&loaded, "foretell_find") }.unwrap();
        // SAFETY: as above.
        let emulate: Emulate = unsafe { loading::function(&loaded, "foretell_emulate") }.unwrap();
        // SAFETY: as above.
        let size: unsafe extern "C" fn() -> c_uint = unsafe { loading::function(&loaded, "foretell_arguments_size") }.unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { size() } as usize, size_of::<Arguments>(), "`Arguments` differs from common.cuh");
        Self { find, emulate, _loaded: loaded, functions: HashMap::new() }
    }

    /// Returns a kernel's address; `None` if there is no such kernel.
    fn function(&mut self, name: &'static str) -> Option<*mut c_void> {
        let found = *self.functions.entry(name).or_insert_with(|| {
            let name = CString::new(name).unwrap();
            // SAFETY: the name ends with a zero byte.
            unsafe { (self.find)(name.as_ptr()) }
        });
        (!found.is_null()).then_some(found)
    }

    /// Runs a launch, and returns when it is done.
    ///
    /// # Errors
    /// Why no GPU could run it.
    pub(super) fn run(&mut self, launch: &Launch) -> Result<(), &'static str> {
        let function = self.function(launch.function).ok_or("there is no such kernel")?;
        // SAFETY: the function takes this structure, which describes everything that it accesses.
        // Its validity is the launch's promise.
        let status =
            unsafe { (self.emulate)(function, launch.grid.as_ptr(), launch.block, launch.shared, &raw const launch.arguments) };
        match status {
            0 => Ok(()),
            1 => Err("its threads wait for each other forever"),
            2 => Err("no GPU takes this launch"),
            3 => Err("an instruction got an invalid address"),
            _ => Err("unknown status"),
        }
    }
}

/// Runs a compiler, and panics if it reports an error. Returns `false`, with a note, if there is no
/// compiler.
pub fn has_compiled(compiler: &mut Command) -> bool {
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

/// Returns the emulator's library for a precision. It is compiled unless one of the same sources
/// and options is in the temporary folder.
fn compile_emulator(kernels: KernelSet, precision: u32) -> PathBuf {
    let mut options = vec!["-std=c++17", "-O2", "-ffp-contract=off", "-w", "-fPIC", "-shared", "-static-libubsan"];
    // Recoverable checks would only print. vptr needs run-time type information.
    options.extend(["-fsanitize=undefined,alignment", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"]);
    if std::env::var_os(ADDRESS).is_some() {
        // Fibers abandon their stacks, which stack checks do not expect.
        options.extend(["-g1", "-fsanitize=address", "--param=asan-stack=0"]);
    }
    if kernels == KernelSet::Faults {
        options.push("-DFORETELL_FAULTS");
    }
    let mut hash = Sha256::new();
    options.iter().for_each(|option| hash.update(option));
    EMULATOR.iter().for_each(|text| hash.update(text));
    hash.update(COMMON);
    for text in SOURCES.iter().flat_map(|source| source.headers.iter().chain([&source.text])) {
        hash.update(text);
    }
    let mut name = String::new();
    hash.finalize().iter().take(8).for_each(|byte| write!(name, "{byte:02x}").unwrap());
    let library = std::env::temp_dir().join(format!("foretell-emulator-{name}-{precision}.so"));
    if !library.exists() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda");
        let partial = library.with_extension(std::process::id().to_string());
        let mut compiler = Command::new("g++");
        compiler
            .args(options)
            .arg(format!("-DPRECISION={precision}"))
            .arg("-I")
            .arg(folder.join("kernels"))
            .arg("-I")
            .arg(folder.join("emulator"))
            .arg(folder.join("emulator/emulator.cpp"))
            .arg("-o")
            .arg(&partial);
        assert!(has_compiled(&mut compiler), "the compiler was found before");
        std::fs::rename(&partial, &library).unwrap();
    }
    library
}
