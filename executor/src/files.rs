//! Atomic file writes: to a temporary file in the same folder, which is synced and renamed.

use crate::error::ExecutorError;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Writes a file completely, or leaves the old one. Creates missing folders.
///
/// # Errors
/// [`ExecutorError::System`], naming the file.
pub fn write_whole(path: &Path, contents: &[u8]) -> Result<(), ExecutorError> {
    let doing = || format!("write `{}`", path.display());
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let write = || -> std::io::Result<()> {
        std::fs::create_dir_all(folder)?;
        let readable = std::fs::Permissions::from_mode(0o644);
        let mut file = tempfile::Builder::new().prefix(".foretell-").permissions(readable).tempfile_in(folder)?;
        file.write_all(contents)?;
        file.as_file().sync_all()?;
        file.persist(path).map_err(|error| error.error)?;
        Ok(())
    };
    write().map_err(|error| ExecutorError::system(doing(), error))
}
