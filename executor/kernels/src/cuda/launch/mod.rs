//! Kernel calls as launches on a GPU's stream.
//!
//! [`CudaBackend`] owns the stream and the memory beside the arena. A [`Dispatcher`] carries one
//! call; each file adds one family of kernels to it. It reaches the GPU through the seam in
//! `driver` alone, and must not know NVIDIA's bindings.

mod attention;
mod convolutions;
mod dispatcher;
mod elementwise;
mod fp8;
mod images;
mod movement;
mod multiply;
mod norms;
mod products;
mod recurrent;
mod training;
mod windows;

use super::driver::{CudaError, DeviceAddress, Driver, IndexFault, StepParameters, StreamHandle};
use crate::{Backend, BackendError, Hyperparameters, KernelCall, operands};
use dispatcher::{BucketTableKey, Dispatcher};
use foretell_models::Kernel;
use foretell_units::DataType;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;

/// Runs kernels on one GPU. It owns its stream, scratch memory that grows to the largest kernel's
/// need, and the step's parameters in device memory.
#[derive(Debug)]
pub struct CudaBackend {
    driver: Arc<dyn Driver>,
    stream: StreamHandle,
    /// The device's [`StepParameters`].
    step: DeviceAddress,
    /// The device's [`IndexFault`].
    fault: DeviceAddress,
    /// Pinned memory that the fault is copied to. A copy to pageable memory could stall other calls
    /// of the driver.
    host_fault: NonNull<IndexFault>,
    scratch: ScratchMemory,
    limits: LaunchLimits,
    /// Buckets of relative positions, which the host computes once for each key.
    bucket_tables: HashMap<BucketTableKey, DeviceAddress>,
    /// The hyperparameters that the device has; `None` before the first upload.
    uploaded: Option<Hyperparameters>,
    /// Kernel names by their number in an [`IndexFault`], less 1.
    kernel_names: Vec<&'static str>,
}

/// Device memory beside the arena, for partial sums and rearranged operands.
#[derive(Debug)]
struct ScratchMemory {
    address: DeviceAddress,
    bytes: usize,
    /// Smaller allocations that this one replaced. Captured graphs may still use them.
    outgrown: Vec<DeviceAddress>,
}

/// The sizes at which the backend copies or splits operands.
#[derive(Clone, Copy, Debug)]
pub struct LaunchLimits {
    /// Least number of multiplications (`rows · columns · contracted`) for which a product with
    /// unaligned rows runs on aligned copies.
    pub min_aligned_multiplications: usize,
    /// Most bytes of scratch memory for aligned rows. A larger product is split into parts.
    pub max_aligned_bytes: usize,
    /// Most bytes of scratch memory for the pixels under windows. A larger batch is split into
    /// parts.
    pub max_column_bytes: usize,
}

impl Default for LaunchLimits {
    fn default() -> Self {
        Self { min_aligned_multiplications: 1 << 30, max_aligned_bytes: 256 << 20, max_column_bytes: 256 << 20 }
    }
}

/// Bytes of scratch memory at the start: enough for the partial sums of most kernels.
const INITIAL_SCRATCH: usize = 1 << 22;

impl CudaBackend {
    /// Creates a backend on a device.
    pub fn new(driver: Arc<dyn Driver>) -> Result<Self, CudaError> {
        let stream = driver.create_stream()?;
        let step = driver.allocate(size_of::<StepParameters>())?;
        let fault = driver.allocate(size_of::<IndexFault>())?;
        let host_fault = driver.allocate_pinned(size_of::<IndexFault>())?.cast();
        let address = driver.allocate(INITIAL_SCRATCH)?;
        let scratch = ScratchMemory { address, bytes: INITIAL_SCRATCH, outgrown: Vec::new() };
        // SAFETY: the memory was just allocated, with this size.
        unsafe { driver.clear(fault, size_of::<IndexFault>(), stream) }?;
        let (bucket_tables, kernel_names) = (HashMap::new(), Vec::new());
        let limits = LaunchLimits::default();
        Ok(Self { driver, stream, step, fault, host_fault, scratch, limits, bucket_tables, uploaded: None, kernel_names })
    }

    /// Returns the backend with other limits, for tests of parts and copies.
    #[cfg(test)]
    pub fn with_limits(mut self, limits: LaunchLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Returns the stream that kernels are queued on.
    pub fn stream(&self) -> StreamHandle {
        self.stream
    }

    /// Queues an upload of the hyperparameters, if they changed. Kernels that are queued later read
    /// the new ones.
    pub fn upload_hyperparameters(&mut self, hyperparameters: &Hyperparameters) -> Result<(), CudaError> {
        if self.uploaded.as_ref() == Some(hyperparameters) {
            return Ok(());
        }
        let step = StepParameters::from(hyperparameters);
        // SAFETY: the device memory has the structure's size; the structure lives until this
        // returns.
        unsafe { self.driver.copy_in(self.step, (&raw const step).cast(), size_of::<StepParameters>(), self.stream) }?;
        self.uploaded = Some(*hyperparameters);
        Ok(())
    }

    /// Queues one call on the backend's stream. Wrong operand counts or sizes are refused before
    /// anything is queued. [`CudaBackend::check_indices`] reports an index that is out of range.
    ///
    /// # Safety
    /// As for [`Backend::run`]; the operands are in device memory and stay valid until the stream
    /// has run the call.
    pub unsafe fn enqueue(&mut self, call: &KernelCall<'_>) -> Result<(), BackendError> {
        // Tf32 is stored as fp32. It only allows tensor cores to round operands.
        let tf32 = call.precision == DataType::Tf32;
        let call = &KernelCall { precision: if tf32 { DataType::Fp32 } else { call.precision }, ..*call };
        operands::check(call)?;
        let mut dispatcher = Dispatcher::new(self, call, tf32);
        // SAFETY: counts, sizes and alignment are checked. Validity and the absence of overlap are
        // this function's own contract.
        unsafe { dispatch(&mut dispatcher, call.kernel) }
    }

    /// Waits for the stream.
    ///
    /// # Errors
    /// [`BackendError::IndexOutOfRange`] if a kernel found such an index since the last check.
    pub fn check_indices(&mut self) -> Result<(), BackendError> {
        let bytes = size_of::<IndexFault>();
        // SAFETY: the pinned memory has the structure's size, and lives as long as the backend.
        unsafe { self.driver.copy_out(self.host_fault.as_ptr().cast(), self.fault, bytes, self.stream) }?;
        self.driver.synchronize(self.stream)?;
        // SAFETY: the copy is done, and every bit pattern is a valid fault.
        let fault = unsafe { self.host_fault.read() };
        if fault.kernel == 0 {
            return Ok(());
        }
        // SAFETY: the memory is the backend's own.
        unsafe { self.driver.clear(self.fault, bytes, self.stream) }?;
        let name = usize::try_from(fault.kernel - 1).ok().and_then(|index| self.kernel_names.get(index));
        let (position, limit) = (fault.position.max(0) as usize, fault.limit.max(0) as usize);
        let kernel = name.copied().unwrap_or("unknown");
        Err(BackendError::IndexOutOfRange { kernel, position, value: fault.value, limit })
    }

    /// Returns the number that identifies a kernel in an [`IndexFault`].
    fn kernel_number(&mut self, kernel: &Kernel) -> i64 {
        let name = kernel.name();
        let index = self.kernel_names.iter().position(|known| *known == name).unwrap_or_else(|| {
            self.kernel_names.push(name);
            self.kernel_names.len() - 1
        });
        index as i64 + 1
    }
}

/// Queues a kernel by the family that knows it. Each family's method returns `false` for a kernel
/// of another family.
///
/// # Safety
/// The call's operands are checked, and valid in device memory.
unsafe fn dispatch(dispatcher: &mut Dispatcher<'_>, kernel: &Kernel) -> Result<(), BackendError> {
    // SAFETY: the caller's promise.
    let is_known = unsafe {
        dispatcher.product_kernel(kernel)?
            || dispatcher.fp8_kernel(kernel)?
            || dispatcher.elementwise_kernel(kernel)?
            || dispatcher.norm_kernel(kernel)?
            || dispatcher.image_kernel(kernel)?
            || dispatcher.attention_kernel(kernel)?
            || dispatcher.movement_kernel(kernel)?
            || dispatcher.training_kernel(kernel)?
            || dispatcher.recurrent_kernel(kernel)?
    };
    assert!(is_known, "invariant: {kernel:?} is of a family");
    Ok(())
}

impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        "cuda"
    }

    unsafe fn run(&mut self, call: &KernelCall<'_>) -> Result<(), BackendError> {
        self.upload_hyperparameters(call.hyperparameters)?;
        // SAFETY: this function's own contract.
        unsafe { self.enqueue(call) }?;
        self.check_indices()
    }
}

// SAFETY: the pinned memory is the backend's own.
unsafe impl Send for CudaBackend {}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        let _ = self.driver.synchronize(self.stream);
        // SAFETY: the memory is the backend's own, and its stream is done.
        unsafe { self.driver.free_pinned(self.host_fault.cast()) };
        let own = [self.step, self.fault, self.scratch.address];
        let outgrown = std::mem::take(&mut self.scratch.outgrown);
        for address in own.into_iter().chain(self.bucket_tables.values().copied()).chain(outgrown) {
            // SAFETY: as above.
            unsafe { self.driver.free(address) };
        }
    }
}
