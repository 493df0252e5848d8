//! The version numbers that libraries report.

use super::loader;
use crate::cuda::driver::Library;
use crate::loading;
use std::ffi::c_int;

/// Returns a library's version number in its own format; `None` if it cannot be loaded. NVRTC's is
/// 1000 times the major version plus the minor one.
pub(in crate::cuda) fn number(library: Library) -> Option<u64> {
    let (loaded, name) = (&loader::get(library)?.library, loader::version_function(library));
    let mut number: c_int = 0;
    // SAFETY: these are the types that the libraries' headers declare, and the pointers are valid.
    let status = unsafe {
        match library {
            Library::Driver | Library::Nccl => {
                let version: unsafe extern "C" fn(*mut c_int) -> c_int = loading::function(loaded, name)?;
                version(&mut number)
            }
            Library::Nvrtc => {
                let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int = loading::function(loaded, name)?;
                let (mut major, mut minor) = (0, 0);
                let status = version(&mut major, &mut minor);
                number = 1000 * major + minor;
                status
            }
            Library::CublasLt | Library::Cudnn => {
                let version: unsafe extern "C" fn() -> usize = loading::function(loaded, name)?;
                number = c_int::try_from(version()).ok()?;
                0
            }
        }
    };
    u64::try_from(number).ok().filter(|_| status == 0)
}
