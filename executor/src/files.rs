//! Atomic file writes, with errors that name the file.

use crate::error::ExecutorError;
use crate::whole_file;
use std::path::Path;

/// Writes a file completely, or leaves the old one. Creates missing folders.
///
/// # Errors
/// [`ExecutorError::System`], naming the file.
pub fn write_whole(path: &Path, contents: &[u8]) -> Result<(), ExecutorError> {
    std::fs::create_dir_all(whole_file::folder_of(path))
        .and_then(|()| whole_file::write(path, contents, 0o644))
        .map_err(|error| ExecutorError::system(format!("write `{}`", path.display()), error))
}
