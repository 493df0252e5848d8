//! The run's key in a file that one user's ranks can read and other users cannot. Ranks that an
//! external launcher started get the key this way.

use super::{RunKey, TransportError};
use crate::whole_file;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The variable in which a rank finds the file's path.
const ENVIRONMENT_VARIABLE: &str = "FORETELL_RUN_KEY_FILE";
/// Length of the key as text.
const KEY_DIGITS: u64 = 96;

/// The file of a run's key. Dropping it deletes the file.
#[derive(Debug)]
pub struct KeyFile(PathBuf);

impl KeyFile {
    /// Writes the key to `path`, with mode 600, in one step: a reader sees the whole key, or what
    /// an earlier run left. Missing folders are created with mode 700.
    pub fn write(path: &Path, key: &RunKey) -> Result<Self, TransportError> {
        // A complete new file takes the place of an old one: it follows no link.
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(whole_file::folder_of(path))
            .and_then(|()| whole_file::write(path, key.to_text().as_bytes(), 0o600))
            .map_err(|error| TransportError::system(format!("keep the run's secret in `{}`", path.display()), error))?;
        Ok(Self(path.to_owned()))
    }

    /// Tells the rank that `command` will start where the file is, or will be.
    pub fn pass_to(path: &Path, command: &mut Command) {
        command.env(ENVIRONMENT_VARIABLE, path);
    }

    /// The path that this process was told; `None` if it was told none.
    pub fn path_from_environment() -> Option<PathBuf> {
        std::env::var_os(ENVIRONMENT_VARIABLE).map(PathBuf::from)
    }

    /// Reads the key; `None` while there is no file.
    ///
    /// # Errors
    /// [`TransportError::Credentials`] if another user could have written or read the file, or if
    /// it does not hold a key.
    pub fn read(path: &Path) -> Result<Option<RunKey>, TransportError> {
        let failed = |error| TransportError::system(format!("read the run's secret in `{}`", path.display()), error);
        let file = match OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(failed)?,
        };
        let metadata = file.metadata().map_err(failed)?;
        let user = rustix::process::getuid().as_raw();
        if !metadata.is_file() || metadata.uid() != user || metadata.mode() & 0o077 != 0 {
            let reason = "the key file must be a regular file of this user with mode 600";
            return Err(TransportError::Credentials { reason });
        }
        let mut text = String::new();
        File::take(file, KEY_DIGITS + 1).read_to_string(&mut text).map_err(failed)?;
        RunKey::from_text(&text).map(Some)
    }
}

impl Drop for KeyFile {
    fn drop(&mut self) {
        // Another run may have deleted or replaced it.
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn only_the_user_can_read_the_key_file_and_dropping_deletes_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deeper").join("run.key");
        assert!(KeyFile::read(&path).unwrap().is_none());
        let key = RunKey::generate().unwrap();
        let file = KeyFile::write(&path, &key).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::metadata(path.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(KeyFile::read(&path).unwrap() == Some(key));
        let later = RunKey::generate().unwrap();
        let second = KeyFile::write(&path, &later).unwrap();
        assert!(KeyFile::read(&path).unwrap() == Some(later));
        drop((file, second));
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
    }

    #[test]
    fn a_key_that_cannot_be_written_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.key");
        std::fs::create_dir_all(path.join("in-the-way")).unwrap();
        assert!(KeyFile::write(&path, &RunKey::generate().unwrap()).is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_key_file_that_others_could_write_or_read_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.key");
        let _file = KeyFile::write(&path, &RunKey::generate().unwrap()).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(KeyFile::read(&path), Err(TransportError::Credentials { .. })));
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let link = folder.path().join("link.key");
        symlink(&path, &link).unwrap();
        assert!(KeyFile::read(&link).is_err());
        for text in ["", "0", &"0".repeat(95), &"0".repeat(97), &"x".repeat(1 << 20)] {
            std::fs::write(&path, text).unwrap();
            assert!(matches!(KeyFile::read(&path), Err(TransportError::Credentials { .. })), "{}", text.len());
        }
    }
}
