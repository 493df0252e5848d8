//! Finds NVIDIA's libraries by their versioned file names, and loads each once.
//!
//! Folders of `LD_LIBRARY_PATH` are searched first, in their order, each for the newest version;
//! then the system's search paths. So the folder that comes first decides which build is used, for
//! example PyTorch's. Stub libraries, which CUDA's toolkit has in folders named `stubs`, are
//! refused: they only serve linkers.

use crate::cuda::driver::Library;
use crate::loading;
use std::ffi::{CStr, OsStr, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A library that stays loaded for as long as the process lives.
#[derive(Debug)]
pub(in crate::cuda) struct LoadedLibrary {
    pub(in crate::cuda) library: libloading::Library,
    /// The file that it was loaded from.
    pub(super) path: PathBuf,
}

/// Returns the file names of a library, the preferred one first. A library's soname changes only if
/// its interface does.
fn file_names(library: Library) -> &'static [&'static str] {
    match library {
        Library::Driver => &["libcuda.so.1"],
        Library::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12"],
        Library::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12"],
        Library::Cudnn => &["libcudnn.so.9"],
        Library::Nccl => &["libnccl.so.2"],
    }
}

/// Returns the function that reports a library's version. Every version of the library has it.
pub(super) fn version_function(library: Library) -> &'static str {
    match library {
        Library::Driver => "cuDriverGetVersion",
        Library::Nvrtc => "nvrtcVersion",
        Library::CublasLt => "cublasLtGetVersion",
        Library::Cudnn => "cudnnGetVersion",
        Library::Nccl => "ncclGetVersion",
    }
}

/// Returns a library; `None` if it cannot be found.
pub(in crate::cuda) fn get(library: Library) -> Option<&'static LoadedLibrary> {
    static LIBRARIES: [OnceLock<Option<LoadedLibrary>>; Library::ALL.len()] = [const { OnceLock::new() }; Library::ALL.len()];
    let index = Library::ALL.iter().position(|listed| *listed == library)?;
    let load = || find(std::env::var_os("LD_LIBRARY_PATH").as_deref(), library);
    LIBRARIES.get(index)?.get_or_init(load).as_ref()
}

/// Loads a library from the folders of a search path, else from where the loader finds it.
fn find(search_path: Option<&OsStr>, library: Library) -> Option<LoadedLibrary> {
    let folders = search_path.into_iter().flat_map(std::env::split_paths);
    // Two colons in a row enclose an empty folder.
    let folders = folders.filter(|folder| !folder.as_os_str().is_empty());
    let in_folders = folders.flat_map(|folder| file_names(library).iter().map(move |name| folder.join(name)));
    let files = in_folders.filter(|path| path.is_file() && !is_stub(path));
    let names = file_names(library).iter().map(PathBuf::from);
    files.chain(names).find_map(|name| open(&name, library))
}

/// Loads one file, unless it is a stub or another library.
fn open(name: &Path, library: Library) -> Option<LoadedLibrary> {
    // SAFETY: these libraries only set up their own state when they are loaded.
    let loaded = unsafe { loading::open(name.as_os_str()) }.ok()?;
    // SAFETY: only the function's address is used, which is a pointer.
    let address: *const c_void = unsafe { loading::function(&loaded, version_function(library)) }?;
    let path = file_of(address).unwrap_or_else(|| name.into());
    (!is_stub(&path)).then_some(LoadedLibrary { library: loaded, path })
}

/// Returns `true` for a library that only serves linkers.
fn is_stub(path: &Path) -> bool {
    path.components().any(|component| component.as_os_str() == "stubs")
}

/// Returns the file that an address was loaded from, without symbolic links.
fn file_of(address: *const c_void) -> Option<PathBuf> {
    let mut information = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: the pointer to the result is valid; any address may be asked for.
    let is_known = unsafe { libc::dladdr(address, &mut information) } != 0;
    if !is_known || information.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's name of the file ends with a zero byte, and lives as long as the
    // library.
    let name = unsafe { CStr::from_ptr(information.dli_fname) };
    let path = PathBuf::from(name.to_str().ok()?);
    Some(path.canonicalize().unwrap_or(path))
}

/// Declares a table of a library's functions, which is loaded once. Each type is checked at compile
/// time against cudarc's declaration, which is generated from NVIDIA's headers.
macro_rules! functions {
    (
        $(#[$attribute:meta])*
        $table:ident of $library:expr, $bindings:path {
            $($function:ident($($parameter:ty),* $(,)?) $(-> $result:ty)?;)*
        }
    ) => {
        $(#[$attribute])*
        #[derive(Debug)]
        #[allow(non_snake_case, reason = "functions have the library's names")]
        pub(in crate::cuda) struct $table {
            $(pub(in crate::cuda) $function: unsafe extern "C" fn($($parameter),*) $(-> $result)?,)*
        }

        const _: () = {
            use $bindings as bindings;
            $(const _: unsafe fn($($parameter),*) $(-> $result)? = bindings::$function;)*
        };

        impl $table {
            /// Returns the functions.
            ///
            /// # Errors
            /// [`CudaError::MissingLibrary`] if the library cannot be loaded, or is too old to have
            /// all of them.
            pub(in crate::cuda) fn get() -> Result<&'static Self, CudaError> {
                static TABLE: std::sync::OnceLock<Option<$table>> = std::sync::OnceLock::new();
                let load = || {
                    let loaded = $crate::cuda::library::loader::get($library)?;
                    // SAFETY: these are the types that the library's header declares.
                    unsafe {
                        Some(Self { $($function: $crate::loading::function(&loaded.library, stringify!($function))?,)* })
                    }
                };
                TABLE.get_or_init(load).as_ref().ok_or(CudaError::MissingLibrary { library: $library })
            }
        }
    };
}
pub(in crate::cuda) use functions;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::tests::emulator::has_compiled;
    use std::process::Command;

    /// Compiles a library that has NVRTC's version function. Returns `false` without a compiler.
    fn compile(path: &Path) -> bool {
        std::fs::create_dir_all(path.parent().unwrap_or(path)).expect("a folder");
        let source = path.with_extension("cpp");
        std::fs::write(&source, "extern \"C\" int nvrtcVersion(int *, int *) { return 0; }").expect("a file");
        has_compiled(Command::new("g++").args(["-shared", "-fPIC"]).arg(&source).arg("-o").arg(path))
    }

    #[test]
    fn the_first_folder_decides_and_stubs_are_left_out() {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path().canonicalize().expect("it exists");
        let [stub, first, second] =
            ["stubs/libnvrtc.so.13", "first/libnvrtc.so.12", "second/libnvrtc.so.13"].map(|name| root.join(name));
        if ![&stub, &first, &second].into_iter().all(|path| compile(path)) {
            return;
        }
        let search = |folders: &[&str]| {
            let path = std::env::join_paths(folders.iter().map(|name| root.join(name))).expect("a search path");
            find(Some(&path), Library::Nvrtc).map(|found| found.path)
        };
        assert_eq!(search(&["stubs", "first", "second"]), Some(first.clone()));
        assert_eq!(search(&["second", "first"]), Some(second));
        std::os::unix::fs::symlink(&stub, root.join("first/libnvrtc.so.13")).expect("a link");
        assert_eq!(search(&["first"]), Some(first), "a link to a stub is a stub");
    }
}
