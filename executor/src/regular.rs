//! Opening files that a user names. This module knows no formats.

use std::fs::{self, File};
use std::io::{Error, ErrorKind};
use std::path::Path;

/// Opens a regular file. Returns it with its size.
///
/// # Errors
/// The system's error, or one that says that it is not a regular file: opening a named pipe would
/// block.
pub(crate) fn open(path: &Path) -> Result<(File, u64), Error> {
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(Error::new(ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok((File::open(path)?, metadata.len()))
}
