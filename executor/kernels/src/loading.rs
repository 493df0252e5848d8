//! Shared libraries that are loaded at run time, by name. Nothing is linked, so one binary serves
//! machines with and without them.

use libloading::Library;
use libloading::os::unix::{self, RTLD_GLOBAL, RTLD_NOW};
use std::error::Error;
use std::ffi::OsStr;

/// Loads the library with this file name or path. It stays loaded until the value is dropped.
///
/// # Errors
/// The loader's message.
///
/// # Safety
/// The library's initialisers are sound to run in this process.
pub unsafe fn open(name: &OsStr) -> Result<Library, String> {
    // SAFETY: the caller's promise.
    unsafe { Library::new(name) }.map_err(|error| message(&error))
}

/// As [`open`], for a library whose own plug-ins look for its functions by name.
///
/// # Errors
/// The loader's message.
///
/// # Safety
/// As for [`open`].
pub unsafe fn open_for_plugins(name: &OsStr) -> Result<Library, String> {
    // SAFETY: the caller's promise.
    unsafe { unix::Library::open(Some(name), RTLD_NOW | RTLD_GLOBAL) }.map(Library::from).map_err(|error| message(&error))
}

fn message(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// A function of a library, or `None` if the library does not have it. `F` is a function pointer;
/// it is valid as long as the library stays loaded.
///
/// # Safety
/// The symbol is a function of type `F`.
pub unsafe fn function<F: Copy>(library: &Library, name: &str) -> Option<F> {
    // SAFETY: the caller's promise.
    unsafe { library.get::<F>(name) }.ok().map(|symbol| *symbol)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_found_by_name() {
        // SAFETY: every process has the C library loaded.
        let library = unsafe { open(OsStr::new("libc.so.6")) }.expect("the C library");
        // SAFETY: this is `abs` of the C library.
        let abs: extern "C" fn(i32) -> i32 = unsafe { function(&library, "abs") }.expect("`abs`");
        assert_eq!(abs(-3), 3);
        // SAFETY: there is no such function to be called.
        assert!(unsafe { function::<extern "C" fn()>(&library, "foretell_has_no_such_function") }.is_none());
    }

    #[test]
    fn a_missing_library_gives_the_loaders_message() {
        // SAFETY: nothing is loaded.
        let reason = unsafe { open(OsStr::new("/nowhere/libnothing.so")) }.expect_err("no such file");
        assert!(reason.contains("/nowhere/libnothing.so"), "{reason}");
        // SAFETY: nothing is loaded.
        assert!(unsafe { open(OsStr::new("lib\0c.so.6")) }.is_err());
    }
}
