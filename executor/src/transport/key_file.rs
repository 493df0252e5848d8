//! The run's secret in a file that all ranks of one user can read and nobody else: for ranks that no launcher of ours started.

use super::{RunKey, TransportError};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Ranks find the file's path here.
const ENVIRONMENT_VARIABLE: &str = "FORETELL_RUN_KEY_FILE";
/// Of the key as text.
const KEY_DIGITS: u64 = 96;

/// The file, which goes when this does.
#[derive(Debug)]
pub struct KeyFile(PathBuf);

impl KeyFile {
    /// Writes the key, whole, in place of what an earlier run left; for this user alone.
    pub fn write(path: &Path, key: &RunKey) -> Result<Self, TransportError> {
        let failed = |error| TransportError::system(format!("keep the run's secret in `{}`", path.display()), error);
        if let Some(folder) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
        }
        let beside = path.with_extension(std::process::id().to_string());
        let write = || {
            // A link that somebody put there is not followed, and a file of theirs not written to.
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside)?;
            file.write_all(key.to_text().as_bytes())?;
            file.sync_all()?;
            std::fs::rename(&beside, path)
        };
        let written = write();
        if written.is_err() {
            let _ = std::fs::remove_file(&beside);
        }
        written.map_err(failed)?;
        Ok(Self(path.to_owned()))
    }

    /// Tells a rank where the file is, or will be.
    pub fn pass_to(path: &Path, command: &mut Command) {
        command.env(ENVIRONMENT_VARIABLE, path);
    }

    /// Where this process was told that the file is.
    pub fn of_environment() -> Option<PathBuf> {
        std::env::var_os(ENVIRONMENT_VARIABLE).map(PathBuf::from)
    }

    /// The key that is there now; none while there is no file.
    pub fn read(path: &Path) -> Result<Option<RunKey>, TransportError> {
        let failed = |error| TransportError::system(format!("read the run's secret in `{}`", path.display()), error);
        let file = match OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(failed)?,
        };
        let about = file.metadata().map_err(failed)?;
        let own = rustix::process::getuid().as_raw();
        if !about.is_file() || about.uid() != own || about.mode() & 0o077 != 0 {
            let reason = "the file of the run's secret is not this user's alone (mode 600)";
            return Err(TransportError::Credentials { reason });
        }
        let mut text = String::new();
        File::take(file, KEY_DIGITS + 1).read_to_string(&mut text).map_err(failed)?;
        RunKey::from_text(&text).map(Some)
    }
}

impl Drop for KeyFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn the_file_is_this_users_alone_and_goes_with_the_run() {
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
        assert!(!path.exists());
    }

    #[test]
    fn what_others_could_have_written_or_read_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.key");
        let _file = KeyFile::write(&path, &RunKey::generate().unwrap()).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(KeyFile::read(&path), Err(TransportError::Credentials { .. })));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let link = folder.path().join("link.key");
        symlink(&path, &link).unwrap();
        assert!(KeyFile::read(&link).is_err());
        for text in ["", "0", &"0".repeat(95), &"0".repeat(97), &"x".repeat(1 << 20)] {
            std::fs::write(&path, text).unwrap();
            assert!(matches!(KeyFile::read(&path), Err(TransportError::Credentials { .. })), "{}", text.len());
        }
    }
}
