//! The memory of a rank: one arena on its device and one on its host.
//!
//! Each arena is as large as the memory plan says. It is allocated and touched before the first
//! step and never grows. The device arena is host memory on a CPU and GPU memory on a GPU, where
//! the host holds only addresses. On a GPU the host arena is pinned, so that the GPU can copy from
//! and to it.

use crate::backend::cuda::{CudaError, DeviceAddress, Driver};
use crate::error::ExecutorError;
use foretell_program::{Buffer, MemoryKind};
use foretell_units::Bytes;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ptr::NonNull;
use std::sync::Arc;

/// Zeroed memory of a fixed size.
#[derive(Debug)]
pub struct Arena {
    start: NonNull<u8>,
    length: usize,
    allocation: Allocation,
}

/// How an arena was allocated, which decides how it is freed.
#[derive(Debug)]
enum Allocation {
    /// Mapped host memory.
    Host,
    /// Host memory that is pinned for a GPU.
    Pinned(Arc<dyn Driver>),
    /// GPU memory.
    Device(Arc<dyn Driver>),
}

// SAFETY: the arena is plain memory. The Program's dependencies order all accesses to it, and the
// interpreter keeps to them.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps `size` bytes of host memory and touches every page, so that no step pays for a page
    /// fault.
    ///
    /// # Errors
    /// [`ExecutorError::OutOfMemory`] if the machine does not have that much.
    pub fn new(size: Bytes) -> Result<Self, ExecutorError> {
        let length = (size.count() as usize).max(1);
        let flags = MapFlags::PRIVATE;
        // SAFETY: a new anonymous mapping overlaps nothing.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, flags) }
            .map_err(|error| ExecutorError::OutOfMemory { wanted: size, reason: error.to_string() })?;
        // Huge pages save most address translations. Without them the mapping works as well.
        // SAFETY: the range is the mapping just made.
        let _ = unsafe { madvise(start, length, Advice::LinuxHugepage) };
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| ExecutorError::OutOfMemory { wanted: size, reason: "no address".into() })?;
        for page in (0..length).step_by(4096) {
            // SAFETY: `page` is inside the mapping.
            unsafe { start.add(page).write_volatile(0) };
        }
        Ok(Self { start, length, allocation: Allocation::Host })
    }

    /// Allocates `size` bytes of GPU memory, zeroed.
    pub(crate) fn on_device(size: Bytes, driver: Arc<dyn Driver>) -> Result<Self, ExecutorError> {
        let length = (size.count() as usize).max(1);
        let address = driver.allocate(length).map_err(|error| match error {
            CudaError::OutOfMemory { .. } => ExecutorError::OutOfMemory { wanted: size, reason: error.to_string() },
            error => error.into(),
        })?;
        let no_address = || ExecutorError::OutOfMemory { wanted: size, reason: "no address".into() };
        let start = NonNull::new(address.pointer()).ok_or_else(no_address)?;
        let arena = Self { start, length, allocation: Allocation::Device(Arc::clone(&driver)) };
        let stream = driver.create_stream()?;
        // SAFETY: the memory was just allocated with this length.
        unsafe { driver.clear(address, length, stream) }?;
        driver.synchronize(stream)?;
        Ok(arena)
    }

    /// Allocates `size` bytes of pinned host memory, zeroed. The GPU copies from and to it
    /// directly.
    pub(crate) fn pinned(size: Bytes, driver: Arc<dyn Driver>) -> Result<Self, ExecutorError> {
        let length = (size.count() as usize).max(1);
        let start = driver
            .allocate_pinned(length)
            .map_err(|error| ExecutorError::OutOfMemory { wanted: size, reason: format!("pinned host memory: {error}") })?;
        // SAFETY: the memory was just allocated with this length.
        unsafe { start.write_bytes(0, length) };
        Ok(Self { start, length, allocation: Allocation::Pinned(driver) })
    }

    /// The driver of the GPU that the memory is on; `None` for host memory.
    pub(crate) fn driver(&self) -> Option<&Arc<dyn Driver>> {
        match &self.allocation {
            Allocation::Device(driver) => Some(driver),
            Allocation::Host | Allocation::Pinned(_) => None,
        }
    }

    /// The arena's size: at least one byte.
    pub fn size(&self) -> Bytes {
        Bytes::new(self.length as u64)
    }

    /// The address of `bytes` bytes at `offset`; `None` if they do not lie inside the arena.
    pub fn at(&self, offset: Bytes, bytes: Bytes) -> Option<*mut u8> {
        let end = offset.count().checked_add(bytes.count())?;
        (end <= self.length as u64).then(|| self.start.as_ptr().wrapping_add(offset.count() as usize))
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        match &self.allocation {
            // SAFETY: this driver allocated the memory, and it is no longer in use.
            Allocation::Device(driver) => unsafe { driver.free(DeviceAddress::from_pointer(self.start.as_ptr())) },
            // SAFETY: as above.
            Allocation::Pinned(driver) => unsafe { driver.free_pinned(self.start) },
            Allocation::Host => {
                // A failure to unmap only leaks the memory.
                // SAFETY: `new` made the mapping, and it is no longer in use.
                let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
            }
        }
    }
}

/// A rank's two arenas.
#[derive(Debug)]
pub(crate) struct Arenas {
    pub(crate) device: Arena,
    pub(crate) host: Arena,
}

impl Arenas {
    /// Allocates arenas of `device` and `host` bytes. The device is the GPU of `driver`, or the CPU
    /// without one.
    pub(crate) fn new(device: Bytes, host: Bytes, driver: Option<&Arc<dyn Driver>>) -> Result<Self, ExecutorError> {
        Ok(match driver {
            Some(driver) if host > Bytes::ZERO => {
                Self { device: Arena::on_device(device, Arc::clone(driver))?, host: Arena::pinned(host, Arc::clone(driver))? }
            }
            Some(driver) => Self { device: Arena::on_device(device, Arc::clone(driver))?, host: Arena::new(host)? },
            None => Self { device: Arena::new(device)?, host: Arena::new(host)? },
        })
    }

    /// The arena that holds a buffer.
    pub(crate) fn of(&self, buffer: &Buffer) -> &Arena {
        match buffer.memory {
            MemoryKind::Device => &self.device,
            MemoryKind::Host => &self.host,
        }
    }

    /// The address of a buffer; `None` if the buffer does not lie inside its arena.
    pub(crate) fn at(&self, buffer: &Buffer) -> Option<*mut u8> {
        self.of(buffer).at(buffer.offset, buffer.bytes)
    }

    /// The driver of the GPU that holds the device arena; `None` on a CPU.
    pub(crate) fn driver(&self) -> Option<&Arc<dyn Driver>> {
        self.device.driver()
    }
}
