//! The CUDA backend: kernels of our own (`kernels/*.cu`, compiled by NVRTC for the GPU that is there), matrix products by cuBLASLt.
//! Deterministic: the same sizes give the same order of every sum, and no kernel adds atomically.
//! [`driver`] is the seam to the device; `queue` turns one call of a kernel into launches, and each file below it knows one family of kernels.
//! Nothing here knows Programs, ranks or layouts.

mod arguments;
mod attention;
mod collectives;
mod convolutions;
mod driver;
mod eight_bits;
mod elementwise;
mod error;
mod images;
mod libraries;
mod library_convolutions;
mod movement;
mod norms;
mod nvidia;
mod products;
mod queue;
mod recurrent;
mod sources;
#[cfg(test)]
pub(crate) mod tests;
mod timer;
mod training;

pub(crate) use collectives::{CommunicatorHandle, Exchange, ExchangeKind, Identity, Piece};
pub use driver::DeviceDescription;
pub(crate) use driver::{DeviceAddress, Driver, EventHandle, GraphHandle, StreamHandle};
pub use error::CudaError;
pub use libraries::Library;
pub use nvidia::devices;
pub(crate) use nvidia::{NvidiaDriver, Reach};
pub(crate) use timer::{CudaTimer, Span};

use super::{Backend, BackendError, Hyperparameters, KernelCall, operands};
use arguments::{Fault, Step};
use foretell_models::{Kernel, RelativePositions};
use foretell_units::DataType;
use queue::Queue;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;

/// Runs kernels on one GPU. Owns its stream, scratch memory, which grows to the largest kernel's need, and what is told to all kernels of a step.
#[derive(Debug)]
pub(crate) struct CudaBackend {
    driver: Arc<dyn Driver>,
    stream: StreamHandle,
    step: DeviceAddress,
    fault: DeviceAddress,
    /// Where faults are copied to: a copy to other memory of the host may hold up what else is asked of the driver.
    found: NonNull<Fault>,
    scratch: Scratch,
    /// What is computed from sizes alone on the host and looked up by kernels, by what it follows from.
    tables: HashMap<BucketsOf, DeviceAddress>,
    /// What the device was last told.
    told: Option<Hyperparameters>,
    /// The names of kernels by the number that a fault has, from 1 on.
    names: Vec<&'static str>,
}

/// What the buckets of distances follow from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct BucketsOf {
    relative: RelativePositions,
    queries: usize,
    keys: usize,
    query_offset: usize,
}

/// Memory beside the arena, for the parts of sums.
#[derive(Debug)]
struct Scratch {
    address: DeviceAddress,
    bytes: usize,
    /// Smaller ones before it: captured work may still be launched again on them.
    outgrown: Vec<DeviceAddress>,
}

impl CudaBackend {
    /// A backend on a device.
    pub(crate) fn new(driver: Arc<dyn Driver>) -> Result<Self, CudaError> {
        let stream = driver.create_stream()?;
        let step = driver.allocate(size_of::<Step>())?;
        let fault = driver.allocate(size_of::<Fault>())?;
        let found = driver.allocate_pinned(size_of::<Fault>())?.cast();
        let scratch = Scratch { address: driver.allocate(INITIAL_SCRATCH)?, bytes: INITIAL_SCRATCH, outgrown: Vec::new() };
        // SAFETY: the memory was just allocated, of that size.
        unsafe { driver.clear(fault, size_of::<Fault>(), stream) }?;
        Ok(Self { driver, stream, step, fault, found, scratch, tables: HashMap::new(), told: None, names: Vec::new() })
    }

    /// The stream on which its kernels run.
    pub(crate) fn stream(&self) -> StreamHandle {
        self.stream
    }

    /// Tells the device what changes from step to step, behind what is queued. Kernels that are queued after this read it.
    pub(crate) fn tell(&mut self, hyperparameters: &Hyperparameters) -> Result<(), CudaError> {
        if self.told.as_ref() == Some(hyperparameters) {
            return Ok(());
        }
        let step = Step::of(hyperparameters);
        // SAFETY: the device's memory is as large as the structure, which lives until this returns.
        unsafe { self.driver.copy_in(self.step, (&raw const step).cast(), size_of::<Step>(), self.stream) }?;
        self.told = Some(*hyperparameters);
        Ok(())
    }

    /// Queues one call on the backend's stream. Operands whose count or size is not the kernel's are refused before anything is queued; an index
    /// out of range shows in [`CudaBackend::check`].
    ///
    /// # Safety
    /// As for [`Backend::run`], with operands in the device's memory that stay valid until the stream has come so far.
    pub(crate) unsafe fn enqueue(&mut self, call: &KernelCall<'_>) -> Result<(), BackendError> {
        // What tensor cores may round is stored in single precision.
        let tf32 = call.precision == DataType::Tf32;
        let call = &KernelCall { precision: if tf32 { DataType::Fp32 } else { call.precision }, ..*call };
        operands::check(call)?;
        let mut queue = Queue::new(self, call, tf32);
        // SAFETY: counts, sizes and alignment are checked; that the memory is valid and apart is this function's own contract.
        unsafe { queue.enqueue(call.kernel) }
    }

    /// Waits for the stream, and says whether a kernel found an index out of range since the last time.
    pub(crate) fn check(&mut self) -> Result<(), BackendError> {
        // SAFETY: the place is as large as the structure, and lives as long as the backend.
        unsafe { self.driver.copy_out(self.found.as_ptr().cast(), self.fault, size_of::<Fault>(), self.stream) }?;
        self.driver.synchronize(self.stream)?;
        // SAFETY: the copy is done; a fault may be any bits.
        let fault = unsafe { self.found.read() };
        if fault.kernel == 0 {
            return Ok(());
        }
        // SAFETY: the memory is the backend's own.
        unsafe { self.driver.clear(self.fault, size_of::<Fault>(), self.stream) }?;
        let kernel = usize::try_from(fault.kernel - 1).ok().and_then(|index| self.names.get(index)).copied().unwrap_or("unknown");
        let (position, limit) = (fault.position.max(0) as usize, fault.limit.max(0) as usize);
        Err(BackendError::IndexOutOfRange { kernel, position, value: fault.value, limit })
    }

    /// The number by which a fault knows a kernel.
    fn number_of(&mut self, kernel: &Kernel) -> i64 {
        let name = kernel.name();
        let place = self.names.iter().position(|known| *known == name).unwrap_or_else(|| {
            self.names.push(name);
            self.names.len() - 1
        });
        place as i64 + 1
    }
}

/// Enough for the sums of most kernels.
const INITIAL_SCRATCH: usize = 1 << 22;

impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        "cuda"
    }

    unsafe fn run(&mut self, call: &KernelCall<'_>) -> Result<(), BackendError> {
        self.tell(call.hyperparameters)?;
        // SAFETY: this function's own contract.
        unsafe { self.enqueue(call) }?;
        self.check()
    }
}

// SAFETY: the place for faults is the backend's own.
unsafe impl Send for CudaBackend {}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        let _ = self.driver.synchronize(self.stream);
        // SAFETY: the memory is the backend's own, and its stream is done.
        unsafe { self.driver.free_pinned(self.found.cast()) };
        let own = [self.step, self.fault, self.scratch.address];
        let outgrown = std::mem::take(&mut self.scratch.outgrown);
        for address in own.into_iter().chain(self.tables.values().copied()).chain(outgrown) {
            // SAFETY: the memory is the backend's own, and its stream is done.
            unsafe { self.driver.free(address) };
        }
    }
}
