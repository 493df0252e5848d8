//! A file mapped into memory: pages are read when they are touched, and all ranks of a machine
//! share them. This module knows no formats.

use crate::data::DataError;
use memmap2::Mmap;
use std::fs::File;
use std::path::Path;

/// The bytes of a file. They must not be changed or cut while they are mapped: the file belongs to
/// the run as long as it lasts, as a program's own file belongs to its process.
#[derive(Debug)]
pub(crate) struct MappedFile(Mmap);

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
        // SAFETY: the file is only read here, and by the contract of this type nobody changes it.
        unsafe { Mmap::map(&file) }.map(Self).map_err(unreadable)
    }

    /// The file's bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}
