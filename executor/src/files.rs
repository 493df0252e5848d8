//! Atomic file writes and bounded reads.

use crate::error::ExecutorError;
use crate::regular;
use crate::whole_file;
use std::path::Path;

/// The longest description of a checkpoint, or index of weights. The largest models' have some
/// hundred kilobytes.
const MOST_DESCRIPTION: u64 = 64 << 20;

/// Reads the description of a checkpoint or of weights, a regular file of at most
/// [`MOST_DESCRIPTION`] bytes.
pub(crate) fn read_description(path: &Path) -> std::io::Result<Vec<u8>> {
    regular::read(path, MOST_DESCRIPTION)
}

/// Writes a file completely, or leaves the old one. Creates missing folders.
///
/// # Errors
/// [`ExecutorError::System`], naming the file.
pub fn write_whole(path: &Path, contents: &[u8]) -> Result<(), ExecutorError> {
    std::fs::create_dir_all(whole_file::folder_of(path))
        .and_then(|()| whole_file::write(path, contents, 0o644))
        .map_err(|error| ExecutorError::system(format!("write `{}`", path.display()), error))
}
