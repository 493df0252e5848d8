//! Open MPI's library, loaded at run time: the functions and handles that the transport uses.
//!
//! MPI fixes no binary interface. This one is Open MPI's (`mpi.h` of 4.1.4, the same in 5.0, both
//! with the name [`NAME`]): a handle is the address of an exported object. Other libraries with the
//! same functions are refused, because their handles are numbers.

use super::super::TransportError;
use crate::loading::{function, open_for_plugins};
use std::ffi::{OsStr, c_char, c_int, c_void};
use std::sync::OnceLock;

/// The versioned file name of Open MPI 4 and 5.
const NAME: &str = "libmpi.so.40";
/// One thread at a time calls MPI: the value of `MPI_THREAD_SERIALIZED`.
pub(super) const THREAD_SERIALIZED: c_int = 2;
/// At least `MPI_MAX_LIBRARY_VERSION_STRING` and `MPI_MAX_ERROR_STRING`, both 256.
const TEXT_BYTES: usize = 1024;

/// A communicator, a data type, an error handler or a request.
pub(super) type Handle = *mut c_void;

/// `MPI_Status`. Only the library reads what follows `error`; it is longer than any version's.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct Status {
    pub(super) source: c_int,
    pub(super) tag: c_int,
    pub(super) error: c_int,
    rest: [u64; 8],
}

type Start = unsafe extern "C" fn(*mut c_void, c_int, Handle, c_int, c_int, Handle, *mut Handle) -> c_int;
type Text = unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int;

/// The functions, named as in MPI, and the predefined handles.
pub(super) struct Library {
    /// The text by which the library names itself, such as `Open MPI v4.1.4`.
    pub(super) version: String,
    pub(super) world: Handle,
    pub(super) byte: Handle,
    pub(super) errors_return: Handle,
    pub(super) init_thread: unsafe extern "C" fn(*mut c_int, *mut c_void, c_int, *mut c_int) -> c_int,
    pub(super) finalize: unsafe extern "C" fn() -> c_int,
    pub(super) comm_rank: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    pub(super) comm_size: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    pub(super) comm_dup: unsafe extern "C" fn(Handle, *mut Handle) -> c_int,
    pub(super) comm_set_errhandler: unsafe extern "C" fn(Handle, Handle) -> c_int,
    pub(super) isend: Start,
    pub(super) irecv: Start,
    pub(super) test: unsafe extern "C" fn(*mut Handle, *mut c_int, *mut Status) -> c_int,
    pub(super) request_get_status: unsafe extern "C" fn(Handle, *mut c_int, *mut Status) -> c_int,
    pub(super) get_count: unsafe extern "C" fn(*const Status, Handle, *mut c_int) -> c_int,
    pub(super) cancel: unsafe extern "C" fn(*mut Handle) -> c_int,
    error_string: unsafe extern "C" fn(c_int, *mut c_char, *mut c_int) -> c_int,
}

// SAFETY: the handles are addresses of the library's own objects, which live as long as it is
// loaded: until the process ends.
unsafe impl Send for Library {}
// SAFETY: as above; the functions are called under the engine's lock.
unsafe impl Sync for Library {}

impl Library {
    /// Loads the library, once in a process. It is not initialised.
    ///
    /// # Errors
    /// [`TransportError::Mpi`] if there is none, or another MPI's.
    pub(super) fn get() -> Result<&'static Self, TransportError> {
        static LOADED: OnceLock<Result<Library, (String, &'static str)>> = OnceLock::new();
        let loaded = LOADED.get_or_init(|| Self::load(NAME));
        loaded.as_ref().map_err(|(reason, hint)| TransportError::Mpi { reason: reason.clone(), hint })
    }

    fn load(name: &str) -> Result<Self, (String, &'static str)> {
        const MISSING: &str = "install Open MPI (Debian's openmpi-bin), or leave `--transport` out to use TCP";
        const OTHER: &str = "only Open MPI 4 and 5 can be used; start the ranks with its mpirun, or leave `--transport` out";
        // SAFETY: Open MPI's initialisers only set up its own data.
        let library = unsafe { open_for_plugins(OsStr::new(name)) }.map_err(|reason| (reason, MISSING))?;
        // MPI leaves threads and handlers behind that need its code.
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        let absent = |symbol: &str| (format!("`{name}` has no `{symbol}`"), OTHER);
        macro_rules! symbol {
            ($symbol:literal) => {
                // SAFETY: the field's type is that of MPI's standard, or a pointer to the object.
                unsafe { function(library, $symbol) }.ok_or_else(|| absent($symbol))?
            };
        }
        let get_version: Text = symbol!("MPI_Get_library_version");
        // SAFETY: the function may be called at any time, and writes a terminated text that fits.
        let version = unsafe { text(|bytes, length| get_version(bytes, length)) };
        if !version.starts_with("Open MPI") {
            let first = version.lines().next().unwrap_or_default().chars().take(60).collect::<String>();
            return Err((format!("`{name}` is `{first}`, not Open MPI"), OTHER));
        }
        let version = version.split(',').next().unwrap_or_default().to_owned();
        Ok(Self {
            version,
            world: symbol!("ompi_mpi_comm_world"),
            byte: symbol!("ompi_mpi_byte"),
            errors_return: symbol!("ompi_mpi_errors_return"),
            init_thread: symbol!("MPI_Init_thread"),
            finalize: symbol!("MPI_Finalize"),
            comm_rank: symbol!("MPI_Comm_rank"),
            comm_size: symbol!("MPI_Comm_size"),
            comm_dup: symbol!("MPI_Comm_dup"),
            comm_set_errhandler: symbol!("MPI_Comm_set_errhandler"),
            isend: symbol!("MPI_Isend"),
            irecv: symbol!("MPI_Irecv"),
            test: symbol!("MPI_Test"),
            request_get_status: symbol!("MPI_Request_get_status"),
            get_count: symbol!("MPI_Get_count"),
            cancel: symbol!("MPI_Cancel"),
            error_string: symbol!("MPI_Error_string"),
        })
    }

    /// The error of a call, which MPI answered with `code`; none if it succeeded.
    pub(super) fn check(&self, code: c_int, doing: impl FnOnce() -> String) -> Result<(), TransportError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the function takes any code, and writes a terminated text that fits.
        let reason = unsafe { text(|bytes, length| (self.error_string)(code, bytes, length)) };
        Err(TransportError::system(format!("{} by MPI", doing()), std::io::Error::other(reason)))
    }
}

/// The text that one of MPI's functions writes.
///
/// # Safety
/// `write` writes at most [`TEXT_BYTES`] bytes, and their number.
unsafe fn text(write: impl FnOnce(*mut c_char, *mut c_int) -> c_int) -> String {
    let (mut bytes, mut length) = ([0_u8; TEXT_BYTES], 0);
    write(bytes.as_mut_ptr().cast(), &mut length);
    let length = usize::try_from(length).unwrap_or(0).min(TEXT_BYTES);
    String::from_utf8_lossy(&bytes[..length]).trim_end_matches('\0').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_and_one_that_is_not_mpi_are_refused() {
        let refused = |name| Library::load(name).err().unwrap_or_default();
        let (reason, hint) = refused("libmpi-that-is-not-there.so.40");
        assert!(reason.contains("libmpi-that-is-not-there.so.40") && hint.contains("install Open MPI"), "{reason}");
        let (reason, hint) = refused("libc.so.6");
        assert!(reason.contains("MPI_Get_library_version") && hint.contains("only Open MPI"), "{reason}");
    }
}
