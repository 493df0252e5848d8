//! A file mapped into memory: pages are read when they are touched, and all ranks of a machine
//! share them. This module knows no formats.

use crate::data::DataError;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::path::Path;
use std::ptr::NonNull;

/// The bytes of a file. They must not be changed or cut while they are mapped: the file belongs to
/// the run as long as it lasts, as a program's own file belongs to its process.
#[derive(Debug)]
pub(crate) struct MappedFile {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the memory is only read.
unsafe impl Send for MappedFile {}
// SAFETY: as above.
unsafe impl Sync for MappedFile {}

impl MappedFile {
    /// Maps a regular file. An empty one maps to no bytes.
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        let unreadable = |error: std::io::Error| DataError::io(path, &error);
        // Checked before opening: opening a named pipe would block.
        let metadata = std::fs::metadata(path).map_err(unreadable)?;
        if !metadata.is_file() {
            return Err(DataError::Unreadable { path: path.to_path_buf(), reason: "not a regular file".to_owned() });
        }
        let file = File::open(path).map_err(unreadable)?;
        let length = file.metadata().map_err(unreadable)?.len() as usize;
        if length == 0 {
            return Ok(Self { start: NonNull::dangling(), length });
        }
        // SAFETY: a new mapping at an address that the kernel chooses touches nothing that exists.
        let start = unsafe { mmap(std::ptr::null_mut(), length, ProtFlags::READ, MapFlags::SHARED, &file, 0) };
        let start = start.map_err(|error| unreadable(error.into()))?;
        let at_zero = || DataError::Unreadable { path: path.to_path_buf(), reason: "it was mapped at address zero".into() };
        Ok(Self { start: NonNull::new(start.cast::<u8>()).ok_or_else(at_zero)?, length })
    }

    /// The file's bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is readable for its length until it is dropped, or empty.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        if self.length > 0 {
            // SAFETY: the mapping is this value's own, and nothing borrows it any more. A failure
            // would leave it mapped until the process ends.
            let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
        }
    }
}
