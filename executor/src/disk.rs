//! The file system as the writing of checkpoints uses it. A trait, so that tests can fill the disk
//! or cut the power at any operation.

#[cfg(test)]
mod simulated;

#[cfg(test)]
pub(crate) use simulated::{DiskFault, SimulatedDisk};

use rustix::fs::FallocateFlags;
use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The operations that change files and folders. A change survives a power cut only after
/// [`sync`](Self::sync) of the file and [`sync_folder`](Self::sync_folder) of the folder.
pub(crate) trait Disk: Debug + Send + Sync {
    /// Makes a folder and those above it. Existing ones stay.
    fn create_folder(&self, path: &Path) -> io::Result<()>;

    /// Opens a file to write into it. It is made if it is missing, and keeps its contents.
    fn open(&self, path: &Path) -> io::Result<File>;

    /// The bytes that the file system of a folder has free; `None` if it does not say.
    fn free(&self, _folder: &Path) -> Option<u64> {
        None
    }

    /// Allocates the space of a file, so that a full disk shows at once.
    fn reserve(&self, file: &File, bytes: u64) -> io::Result<()>;

    /// Writes all of `bytes` at an offset in a file.
    fn write_at(&self, file: &File, bytes: &[u8], place: u64) -> io::Result<()>;

    /// Lets the disk begin to write a part of a file, so that [`sync`](Self::sync) has less to wait
    /// for.
    fn begin_sync(&self, _file: &File, _place: u64, _bytes: usize) {}

    /// Makes the contents of a file durable.
    fn sync(&self, file: &File) -> io::Result<()>;

    /// Makes the names in a folder durable.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;

    /// Renames a file or folder.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a folder and everything in it.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;
}

/// The operating system's file system.
#[derive(Debug)]
pub(crate) struct SystemDisk;

impl Disk for SystemDisk {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        std::fs::create_dir_all(path)
    }

    fn open(&self, path: &Path) -> io::Result<File> {
        File::options().create(true).truncate(false).write(true).open(path)
    }

    fn free(&self, folder: &Path) -> Option<u64> {
        let space = rustix::fs::statvfs(folder).ok()?;
        Some(space.f_bavail.saturating_mul(space.f_frsize))
    }

    fn reserve(&self, file: &File, bytes: u64) -> io::Result<()> {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes.max(1)) {
            Ok(()) => Ok(()),
            // Some file systems allocate only when they are written to.
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => file.set_len(bytes),
            Err(error) => Err(error.into()),
        }
    }

    fn write_at(&self, file: &File, bytes: &[u8], place: u64) -> io::Result<()> {
        file.write_all_at(bytes, place)
    }

    fn begin_sync(&self, file: &File, place: u64, bytes: usize) {
        let (place, bytes) = (i64::try_from(place), i64::try_from(bytes));
        if let (Ok(place), Ok(bytes)) = (place, bytes) {
            // It is only advice: `sync` reports what fails.
            // SAFETY: the call takes integers, and the file is open.
            let _ = unsafe { libc::sync_file_range(file.as_raw_fd(), place, bytes, libc::SYNC_FILE_RANGE_WRITE) };
        }
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_all()
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_dir_all(path)
    }
}
