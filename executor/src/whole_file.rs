//! Writes a file such that its name always leads to a complete file, the old or the new one,
//! however the process ends.
//!
//! The contents go into a file without a name (`O_TMPFILE`), which disappears with its process.
//! Only the complete file gets a name. A temporary name exists in two cases: between two system
//! calls, when the new file replaces another; and during the whole write, on file systems without
//! nameless files. A process that is killed then leaves that name behind, and [`remove_abandoned`]
//! removes it.

use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, openat};
use rustix::io::Errno;
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Prefix of temporary names.
const TEMPORARY: &str = ".foretell-";

/// The folder of a file.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Writes the file, or leaves the old one. Its folder must exist. `mode` is that of a new file,
/// before the process's mask.
pub(crate) fn write(path: &Path, contents: &[u8], mode: u32) -> io::Result<()> {
    let folder = folder_of(path);
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    match openat(CWD, folder, flags, Mode::from_raw_mode(mode)) {
        Ok(file) => {
            let mut file = File::from(file);
            file.write_all(contents)?;
            file.sync_all()?;
            name(&file, path)
        }
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
            let permissions = Permissions::from_mode(mode);
            let mut file = tempfile::Builder::new().prefix(TEMPORARY).permissions(permissions).tempfile_in(folder)?;
            file.write_all(contents)?;
            file.as_file().sync_all()?;
            file.persist(path).map(drop).map_err(|error| error.error)
        }
        Err(error) => Err(error.into()),
    }
}

/// Gives a complete nameless file its name. It replaces a file that has that name.
fn name(file: &File, path: &Path) -> io::Result<()> {
    let own = format!("/proc/self/fd/{}", file.as_raw_fd());
    let link = |to: &Path| linkat(CWD, &own, CWD, to, AtFlags::SYMLINK_FOLLOW);
    match link(path) {
        Err(Errno::EXIST) => {}
        linked => return Ok(linked?),
    }
    // A link cannot replace an existing name, but a rename can. The temporary name exists only
    // between these two system calls.
    let named = tempfile::Builder::new().prefix(TEMPORARY).make_in(folder_of(path), |other| Ok(link(other)?))?;
    named.persist(path).map_err(|error| error.error)
}

/// Removes the temporary names that killed processes left in a folder. Nothing may write into the
/// folder meanwhile.
///
/// # Errors
/// The system's error.
pub fn remove_abandoned(folder: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if !entry.file_name().to_string_lossy().starts_with(TEMPORARY) {
            continue;
        }
        // Earlier versions wrote the file in a temporary folder.
        match entry.file_type()?.is_dir() {
            true => std::fs::remove_dir_all(entry.path())?,
            false => std::fs::remove_file(entry.path())?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_file_is_new_or_replaced_and_nothing_else_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for contents in [&b"one"[..], b"another", b""] {
            write(&path, contents, 0o600).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), contents);
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            assert_eq!(names(folder.path()), ["file"]);
        }
        std::fs::create_dir(folder.path().join("folder")).unwrap();
        std::fs::write(folder.path().join("folder/inside"), "kept").unwrap();
        assert!(write(&folder.path().join("folder"), b"one", 0o600).is_err());
        assert!(write(&folder.path().join("missing/file"), b"one", 0o600).is_err());
        assert_eq!(names(folder.path()).len(), 2);
    }

    #[test]
    fn what_a_killed_process_left_does_not_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        write(&path, b"one", 0o600).unwrap();
        std::fs::write(folder.path().join(".foretell-other"), "left").unwrap();
        std::fs::create_dir(folder.path().join(".foretell-Xy12")).unwrap();
        std::fs::write(folder.path().join(".foretell-Xy12/whole"), "left").unwrap();
        remove_abandoned(folder.path()).unwrap();
        assert_eq!(names(folder.path()), ["file"]);
    }

    #[test]
    fn processes_that_write_the_same_file_leave_one_of_theirs() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::thread::scope(|scope| {
            for writer in 0..4_u8 {
                let path = &path;
                scope.spawn(move || (0..100).for_each(|_| write(path, &[writer; 5000], 0o600).unwrap()));
            }
        });
        let contents = std::fs::read(&path).unwrap();
        assert!(contents.len() == 5000 && contents.iter().all(|byte| *byte == contents[0]));
        assert_eq!(names(folder.path()), ["file"]);
    }

    #[test]
    fn a_process_that_is_killed_while_it_writes_leaves_nothing() {
        const PATH: &str = "FORETELL_TEST_WHOLE_FILE";
        if let Some(path) = std::env::var_os(PATH) {
            let contents = vec![7; 16 << 20];
            loop {
                write(Path::new(&path), &contents, 0o600).unwrap();
                std::fs::remove_file(&path).unwrap();
            }
        }
        let name = "whole_file::tests::a_process_that_is_killed_while_it_writes_leaves_nothing";
        for delay in [150, 220, 330] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("file");
            let mut command = std::process::Command::new(std::env::current_exe().unwrap());
            let mut child = command.args([name, "--exact"]).env(PATH, &path).spawn().unwrap();
            std::thread::sleep(std::time::Duration::from_millis(delay));
            child.kill().unwrap();
            child.wait().unwrap();
            let left = names(folder.path());
            assert!(left.iter().all(|name| name == "file"), "{left:?}");
            assert!(left.is_empty() || std::fs::metadata(&path).unwrap().len() == 16 << 20);
        }
    }
}
