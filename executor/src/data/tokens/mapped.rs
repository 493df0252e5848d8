//! A file mapped into memory: pages are read when they are touched, and all ranks of a machine
//! share them. This module knows no formats.

use crate::data::DataError;
use crate::regular;
use memmap2::Mmap;
use std::path::Path;

/// The bytes of a file. They must not be changed or cut while they are mapped: the file belongs to
/// the run as long as it lasts, as a program's own file belongs to its process.
#[derive(Debug)]
pub(crate) struct MappedFile(Mmap);

impl MappedFile {
    /// Maps a regular file. An empty one maps to no bytes.
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        let unreadable = |error: std::io::Error| DataError::io(path, &error);
        let (file, _) = regular::open(path).map_err(unreadable)?;
        // SAFETY: the file is only read here, and by the contract of this type nobody changes it.
        unsafe { Mmap::map(&file) }.map(Self).map_err(unreadable)
    }

    /// The file's bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}
