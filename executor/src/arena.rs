//! A rank's two allocations: as large as the memory plan says, mapped and touched before the first step, never grown. That of the device's memory is
//! the host's, or a GPU's, of which the host has the addresses alone; that of the host's memory is pinned where a GPU copies from and to it.

use crate::backend::cuda::{CudaError, DeviceAddress, Driver};
use crate::error::ExecutorError;
use foretell_program::{Buffer, MemoryKind};
use foretell_units::Bytes;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ptr::NonNull;
use std::sync::Arc;

/// Memory of a fixed size, zeroed.
#[derive(Debug)]
pub struct Arena {
    start: NonNull<u8>,
    length: usize,
    owner: Owner,
}

/// Whose memory it is.
#[derive(Debug)]
enum Owner {
    /// The host's, mapped.
    Host,
    /// The host's, pinned for a GPU.
    Pinned(Arc<dyn Driver>),
    /// A GPU's.
    Device(Arc<dyn Driver>),
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
        Ok(Self { start, length, owner: Owner::Host })
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
        let arena = Self { start, length, owner: Owner::Device(Arc::clone(&driver)) };
        let stream = driver.create_stream()?;
        // SAFETY: the memory was just allocated, of that length.
        unsafe { driver.clear(address, length, stream) }?;
        driver.synchronize(stream)?;
        Ok(arena)
    }

    /// Allocates `size` bytes of the host's memory that a GPU copies from and to by itself, zeroed.
    pub(crate) fn pinned(size: Bytes, driver: Arc<dyn Driver>) -> Result<Self, ExecutorError> {
        let length = (size.count() as usize).max(1);
        let start = driver
            .allocate_pinned(length)
            .map_err(|error| ExecutorError::OutOfMemory { wanted: size, reason: format!("of the host's memory: {error}") })?;
        // SAFETY: the memory was just allocated, of that length.
        unsafe { start.write_bytes(0, length) };
        Ok(Self { start, length, owner: Owner::Pinned(driver) })
    }

    /// The GPU whose memory it is, if it is one's.
    pub(crate) fn driver(&self) -> Option<&Arc<dyn Driver>> {
        match &self.owner {
            Owner::Device(driver) => Some(driver),
            Owner::Host | Owner::Pinned(_) => None,
        }
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
        match &self.owner {
            // SAFETY: the memory was allocated by this driver, and nobody uses it any more.
            Owner::Device(driver) => unsafe { driver.free(DeviceAddress::from_pointer(self.start.as_ptr())) },
            // SAFETY: as above.
            Owner::Pinned(driver) => unsafe { driver.free_pinned(self.start) },
            Owner::Host => {
                // SAFETY: the mapping was made in `new` and nobody uses it any more. Failing to unmap leaks it, no more.
                let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
            }
        }
    }
}

/// A rank's memory: the arenas of its device and of the host.
#[derive(Debug)]
pub(crate) struct Arenas {
    pub(crate) device: Arena,
    pub(crate) host: Arena,
}

impl Arenas {
    /// So many bytes on the device, and so many on the host. The device is a GPU, or the host's processor.
    pub(crate) fn new(device: Bytes, host: Bytes, driver: Option<&Arc<dyn Driver>>) -> Result<Self, ExecutorError> {
        Ok(match driver {
            Some(driver) if host > Bytes::ZERO => {
                Self { device: Arena::on_device(device, Arc::clone(driver))?, host: Arena::pinned(host, Arc::clone(driver))? }
            }
            Some(driver) => Self { device: Arena::on_device(device, Arc::clone(driver))?, host: Arena::new(host)? },
            None => Self { device: Arena::new(device)?, host: Arena::new(host)? },
        })
    }

    /// The arena in which a buffer lies.
    pub(crate) fn of(&self, buffer: &Buffer) -> &Arena {
        match buffer.memory {
            MemoryKind::Device => &self.device,
            MemoryKind::Host => &self.host,
        }
    }

    /// The address of a buffer, checked to lie inside with all of its bytes.
    pub(crate) fn at(&self, buffer: &Buffer) -> Option<*mut u8> {
        self.of(buffer).at(buffer.offset, buffer.bytes)
    }

    /// The GPU whose memory the device's is, if it is one's.
    pub(crate) fn driver(&self) -> Option<&Arc<dyn Driver>> {
        self.device.driver()
    }
}
