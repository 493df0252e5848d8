//! A rank's one allocation: as large as the memory plan says, mapped and touched before the first step, never grown. It is the host's memory, or a
//! GPU's, of which the host has the addresses alone.

use crate::backend::cuda::{CudaError, DeviceAddress, Driver};
use crate::error::ExecutorError;
use foretell_units::Bytes;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ptr::NonNull;
use std::sync::Arc;

/// Memory of a fixed size, zeroed.
#[derive(Debug)]
pub struct Arena {
    start: NonNull<u8>,
    length: usize,
    /// The GPU whose memory it is; none where it is the host's.
    driver: Option<Arc<dyn Driver>>,
}

// SAFETY: the arena is plain memory. Who may touch which part of it when is the Program's to say, by its dependencies;
// the interpreter keeps to them.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps `size` bytes and touches every page, so that no step pays for it.
    ///
    /// # Errors
    /// [`ExecutorError::OutOfMemory`] where the machine has not so much.
    pub fn new(size: Bytes) -> Result<Self, ExecutorError> {
        let length = (size.count() as usize).max(1);
        let flags = MapFlags::PRIVATE;
        // SAFETY: a new anonymous mapping overlaps nothing.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, flags) }
            .map_err(|error| ExecutorError::OutOfMemory { wanted: size, reason: error.to_string() })?;
        // Large pages spare the processor most address look-ups; where there are none nothing is lost.
        // SAFETY: the range is the mapping just made.
        let _ = unsafe { madvise(start, length, Advice::LinuxHugepage) };
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| ExecutorError::OutOfMemory { wanted: size, reason: "no address".into() })?;
        for page in (0..length).step_by(4096) {
            // SAFETY: `page` is inside the mapping.
            unsafe { start.add(page).write_volatile(0) };
        }
        Ok(Self { start, length, driver: None })
    }

    /// Allocates `size` bytes of a GPU's memory, zeroed.
    pub(crate) fn on_device(size: Bytes, driver: Arc<dyn Driver>) -> Result<Self, ExecutorError> {
        let length = (size.count() as usize).max(1);
        let address = driver.allocate(length).map_err(|error| match error {
            CudaError::OutOfMemory { .. } => ExecutorError::OutOfMemory { wanted: size, reason: error.to_string() },
            error => error.into(),
        })?;
        let none = || ExecutorError::OutOfMemory { wanted: size, reason: "no address".into() };
        let start = NonNull::new(address.pointer()).ok_or_else(none)?;
        let arena = Self { start, length, driver: Some(Arc::clone(&driver)) };
        let stream = driver.create_stream()?;
        // SAFETY: the memory was just allocated, of that length.
        unsafe { driver.clear(address, length, stream) }?;
        driver.synchronize(stream)?;
        Ok(arena)
    }

    /// The GPU whose memory it is, if it is one's.
    pub(crate) fn driver(&self) -> Option<&Arc<dyn Driver>> {
        self.driver.as_ref()
    }

    /// Its size.
    pub fn size(&self) -> Bytes {
        Bytes::new(self.length as u64)
    }

    /// The address of a place, checked to lie inside with all of its `bytes`.
    pub fn at(&self, offset: Bytes, bytes: Bytes) -> Option<*mut u8> {
        let end = offset.count().checked_add(bytes.count())?;
        (end <= self.length as u64).then(|| self.start.as_ptr().wrapping_add(offset.count() as usize))
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if let Some(driver) = &self.driver {
            // SAFETY: the memory was allocated by this driver, and nobody uses it any more.
            unsafe { driver.free(DeviceAddress::of(self.start.as_ptr())) };
            return;
        }
        // SAFETY: the mapping was made in `new` and nobody uses it any more. Failing to unmap leaks it, no more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
    }
}
