//! The locks by which ranks show that they live: one locked byte per rank, which the kernel unlocks
//! when the rank's process ends, however it ends.
//!
//! They are locks of open file descriptions (`F_OFD_SETLK`). Unlike a process id, such a lock
//! cannot pass to an unrelated process. Unlike ordinary record locks, they tell two ranks of one
//! process apart.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use super::super::TransportError;

/// Creates a new open file description of an inherited descriptor's file.
pub(super) fn open_description(descriptor: RawFd) -> Result<File, TransportError> {
    OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{descriptor}")).map_err(|error| {
        TransportError::system(
            format!("open the shared memory inherited as file descriptor {descriptor} (is /proc mounted?)"),
            error,
        )
    })
}

fn byte_lock(index: usize) -> libc::flock {
    // SAFETY: a plain C structure of integers, for which zeros are valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as _;
    lock.l_whence = libc::SEEK_SET as _;
    lock.l_start = index as _;
    lock.l_len = 1;
    lock
}

/// Locks the byte `index` until the description is closed or its process ends.
///
/// # Errors
/// If another description has locked it.
pub(super) fn lock(descriptor: BorrowedFd<'_>, index: usize) -> Result<(), std::io::Error> {
    let lock = byte_lock(index);
    // SAFETY: the descriptor is open and the structure lives through the call.
    let result = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_OFD_SETLK, &lock) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Returns whether another description has locked the byte `index`.
pub(super) fn is_locked(descriptor: BorrowedFd<'_>, index: usize) -> bool {
    let mut lock = byte_lock(index);
    // SAFETY: as in `lock`.
    let result = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) };
    // If the call fails, assume that the rank lives. A rank that does not is still found by the
    // time-out.
    result != 0 || libc::c_int::from(lock.l_type) != libc::F_UNLCK
}
