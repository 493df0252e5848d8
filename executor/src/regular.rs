//! Opening files that a user names or that a run's folder has. Only regular files are read, and no
//! named pipe is written: reading a terminal, or opening a pipe, could block this process forever.
//! This module knows no formats.

use std::fs::{self, File, OpenOptions};
use std::io::{Error, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Opens a regular file. Returns it with its size.
///
/// # Errors
/// The system's error, or one that says that it is not a regular file.
pub fn open(path: &Path) -> Result<(File, u64), Error> {
    // Opening some devices has effects, so the name is checked first. It may lead to something else
    // by the time it is opened, so the opening itself must not block.
    let require = |metadata: &fs::Metadata| match metadata.is_file() {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::InvalidInput, "not a regular file")),
    };
    require(&fs::metadata(path)?)?;
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    let metadata = file.metadata()?;
    require(&metadata)?;
    Ok((file, metadata.len()))
}

/// Opens a file to write into it, as `options` say. It may be a device such as `/dev/null`.
///
/// # Errors
/// The system's error, or one that says that it is a named pipe, which may have no reader.
pub fn open_to_write(path: &Path, options: &OpenOptions) -> Result<File, Error> {
    let is_pipe = |metadata: fs::Metadata| metadata.file_type().is_fifo();
    let refused = || Error::new(ErrorKind::InvalidInput, "a named pipe");
    if fs::metadata(path).is_ok_and(is_pipe) {
        return Err(refused());
    }
    let file = options.clone().custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    if is_pipe(file.metadata()?) { Err(refused()) } else { Ok(file) }
}

/// Reads a regular file of at most `most` bytes. Never reads more, even if the file grows
/// meanwhile.
///
/// # Errors
/// As [`open`], or an error that says that the file is longer.
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    open(path)?.0.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(Error::new(ErrorKind::FileTooLarge, format!("it is longer than {} MiB", most >> 20)));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

    use super::*;

    #[test]
    fn only_regular_files_of_the_stated_length_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read(&path, 5).unwrap(), b"12345");
        assert_eq!(read(&path, 4).unwrap_err().kind(), ErrorKind::FileTooLarge);
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
        for path in [&*pipe, folder.path(), Path::new("/dev/zero"), Path::new("/dev/tty")] {
            let error = read(path, 5).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::NotFound), "{}: {error}", path.display());
        }
        let options = OpenOptions::new().write(true).create(true).clone();
        assert_eq!(open_to_write(&pipe, &options).unwrap_err().kind(), ErrorKind::InvalidInput);
        for path in [&*path, &*folder.path().join("new"), Path::new("/dev/null")] {
            open_to_write(path, &options).unwrap();
        }
    }
}
