//! Shared libraries that are loaded while the program runs, by their names: nothing is linked, and a machine without them says so.

use std::ffi::{CStr, CString, OsStr, c_void};
use std::ptr::NonNull;

/// A library that is loaded, for as long as the process lives unless it is closed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedLibrary(NonNull<c_void>);

// SAFETY: the loader's functions may be called with its handles from any thread.
unsafe impl Send for SharedLibrary {}

impl SharedLibrary {
    /// The library of a file's name or path, where the loader finds it; what the loader says where it does not. What it has stays its own: it answers
    /// for no other library's names.
    pub(crate) fn open(name: &OsStr) -> Result<Self, String> {
        let name = CString::new(name.as_encoded_bytes()).map_err(|error| error.to_string())?;
        // SAFETY: the name ends with a zero; what the library does when it is loaded is any program's that asks for it.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        NonNull::new(handle).map(Self).ok_or_else(|| {
            // SAFETY: the loader has a text of its own for this thread's last error, or none.
            let text = unsafe { libc::dlerror() };
            if text.is_null() {
                return "no reason given".into();
            }
            // SAFETY: as above; it ends with a zero.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        })
    }

    /// Where the library has what is called so.
    pub(crate) fn address(self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the library is loaded, and the name ends with a zero.
        NonNull::new(unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) })
    }

    /// A function of the library. `F` is a pointer to a function.
    ///
    /// # Safety
    /// What is called so in this library is a function of the type `F`.
    pub(crate) unsafe fn function<F: Copy>(self, name: &CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<NonNull<c_void>>(), "a function is handed over as a pointer") };
        // SAFETY: of the same size, as was just said; the rest is the caller's promise.
        self.address(name).map(|found| unsafe { std::mem::transmute_copy::<NonNull<c_void>, F>(&found) })
    }

    /// Gives the library back.
    ///
    /// # Safety
    /// Nothing of it is used any more, by this or by copies of this.
    pub(crate) unsafe fn close(self) {
        // SAFETY: it was opened; the rest is the caller's promise. What stays loaded does no harm.
        let _ = unsafe { libc::dlclose(self.0.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_has_the_functions_that_it_has() {
        let library = SharedLibrary::open(OsStr::new("libc.so.6")).expect("every process has it");
        // SAFETY: this is `abs` of the C library.
        let abs: extern "C" fn(i32) -> i32 = unsafe { library.function(c"abs") }.expect("it is there");
        assert_eq!(abs(-3), 3);
        assert!(library.address(c"foretell_is_no_function_of_it").is_none());
    }

    #[test]
    fn what_is_not_there_is_said_by_the_loader() {
        let reason = SharedLibrary::open(OsStr::new("/nowhere/libnothing.so")).expect_err("it is not there");
        assert!(reason.contains("/nowhere/libnothing.so"), "{reason}");
        assert!(SharedLibrary::open(OsStr::new("lib\0c.so.6")).is_err());
    }
}
