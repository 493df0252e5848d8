//! Ranks' places in a segment: one locked byte each, which the kernel unlocks when the rank's process ends, however it ends.
//!
//! The locks are those of open file descriptions (`F_OFD_SETLK`): unlike a process id they cannot be taken over by a stranger,
//! and unlike ordinary record locks they tell two ranks in one process apart.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use super::super::TransportError;

/// A new open file description of an inherited descriptor's file.
pub(super) fn open_description(descriptor: RawFd) -> Result<File, TransportError> {
    OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{descriptor}")).map_err(|error| {
        TransportError::system(
            format!("open the shared memory inherited as file descriptor {descriptor} (is /proc mounted?)"),
            error,
        )
    })
}

fn byte_lock(slot: usize) -> libc::flock {
    // SAFETY: a plain C structure of integers, for which zeros are valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as _;
    lock.l_whence = libc::SEEK_SET as _;
    lock.l_start = slot as _;
    lock.l_len = 1;
    lock
}

/// Takes the place of the rank in `slot`, until the description is closed or its process ends.
pub(super) fn lock(descriptor: BorrowedFd<'_>, slot: usize) -> Result<(), std::io::Error> {
    let lock = byte_lock(slot);
    // SAFETY: the descriptor is open and the structure lives through the call.
    let result = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_OFD_SETLK, &lock) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Whether somebody else holds the place of the rank in `slot`.
pub(super) fn is_locked(descriptor: BorrowedFd<'_>, slot: usize) -> bool {
    let mut lock = byte_lock(slot);
    // SAFETY: as in `lock`.
    let result = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) };
    // Not knowing, believe that it lives: the time-out is still there.
    result != 0 || libc::c_int::from(lock.l_type) != libc::F_UNLCK
}
