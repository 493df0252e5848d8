//! The seam to the GPU: memory, streams, events, graphs, kernel launches, and the libraries'
//! products, convolutions and collectives. It knows neither kernels nor Programs.
//!
//! [`Driver`] has two implementations: NVIDIA's driver and libraries ([`super::nvidia`]), and a
//! test device that records calls and runs kernels on the CPU.

mod arguments;
mod collectives;
mod convolution;
mod error;
mod library;
mod product;

#[cfg(test)]
pub use arguments::MAX_SIZES;
pub use arguments::{Arguments, IndexFault, MAX_NUMBERS, MAX_OPERANDS, StepParameters, addresses, sizes};
pub use collectives::{Collectives, CommunicationKind, CommunicatorHandle, CommunicatorId, DeviceCommunication, DeviceRange};
pub use convolution::{Convolution, ConvolutionKind, ConvolutionShape};
pub use error::CudaError;
pub use library::Library;
pub use product::{BiasGradient, Epilogue, EpilogueActivation, Fp8Scales, MatrixOperand, Product};

use foretell_units::DataType;
use std::fmt::Debug;
use std::ptr::NonNull;

/// An address in the device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceAddress(pub u64);

impl DeviceAddress {
    /// Stands for an operand that is not there.
    pub const NULL: Self = Self(0);

    /// Returns the address `bytes` further on.
    pub fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }

    /// Returns the largest power of two that divides the address, at most `limit` (itself a power
    /// of two).
    pub fn alignment(self, limit: u64) -> u64 {
        1 << self.0.trailing_zeros().min(limit.trailing_zeros())
    }

    /// Returns the address as an operand's pointer. The host must not dereference it.
    pub fn pointer(self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.0 as usize)
    }

    /// Returns the address of an operand in device memory.
    pub fn from_pointer(pointer: *mut u8) -> Self {
        Self(pointer.expose_provenance() as u64)
    }
}

/// A stream: work that the device does in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamHandle(pub u64);

/// An event: a point in a stream that other streams can wait for, and its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventHandle(pub u64);

/// A CUDA graph: captured work that one call launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GraphHandle(pub u64);

/// Properties of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceDescription {
    /// The vendor's name for it.
    pub name: String,
    /// Compute capability: major, minor.
    pub capability: (u32, u32),
    /// Number of streaming multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of device memory.
    pub memory: usize,
    /// Bytes of shared memory that one block may request.
    pub shared_memory: usize,
}

/// The launch of one kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// Name of the kernel in its source.
    pub function: &'static str,
    /// Fp32, bf16 or fp16.
    pub precision: DataType,
    /// Blocks in each dimension.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    pub arguments: Arguments,
}

/// A device as one rank uses it. Work on a stream is asynchronous unless a method says otherwise.
pub trait Driver: Debug + Send + Sync {
    /// Returns the device's properties.
    fn device(&self) -> &DeviceDescription;

    /// Allocates device memory, aligned to 256 bytes.
    fn allocate(&self, bytes: usize) -> Result<DeviceAddress, CudaError>;

    /// Frees device memory after waiting for all work.
    ///
    /// # Safety
    /// The address came from [`Driver::allocate`], and nothing uses it any more.
    unsafe fn free(&self, address: DeviceAddress);

    /// Allocates pinned host memory, which the device copies from and to without staging.
    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>, CudaError>;

    /// Frees pinned host memory.
    ///
    /// # Safety
    /// The pointer came from [`Driver::allocate_pinned`], and nothing uses it any more.
    unsafe fn free_pinned(&self, pointer: NonNull<u8>);

    /// Returns the free and the total bytes of device memory.
    fn memory(&self) -> Result<(usize, usize), CudaError>;

    /// Creates a stream.
    fn create_stream(&self) -> Result<StreamHandle, CudaError>;

    /// Blocks until all work of a stream is done.
    fn synchronize(&self, stream: StreamHandle) -> Result<(), CudaError>;

    /// Creates an event.
    fn create_event(&self) -> Result<EventHandle, CudaError>;

    /// Records an event behind the work that is queued on a stream.
    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<(), CudaError>;

    /// Makes a stream wait until an event has happened.
    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), CudaError>;

    /// Blocks until an event has happened.
    fn synchronize_event(&self, event: EventHandle) -> Result<(), CudaError>;

    /// Returns the time between two events that have both happened.
    fn elapsed_milliseconds(&self, start: EventHandle, end: EventHandle) -> Result<f32, CudaError>;

    /// Queues a kernel.
    ///
    /// # Safety
    /// The kernel's operands are memory of this device, as long as the kernel documents, and
    /// nothing else uses them until it is done.
    unsafe fn launch(&self, launch: &Launch, stream: StreamHandle) -> Result<(), CudaError>;

    /// Queues a matrix product.
    ///
    /// # Errors
    /// [`CudaError::ProductNotSupported`] if the library has no algorithm for it; nothing is
    /// queued.
    ///
    /// # Safety
    /// As for [`Driver::launch`].
    unsafe fn multiply(&self, product: &Product, stream: StreamHandle) -> Result<(), CudaError>;

    /// Chooses an engine for a convolution and returns the bytes of workspace that it needs. The
    /// choice is made once for a shape. It may take a second and load kernels, so the first call
    /// must not happen during capture.
    ///
    /// # Errors
    /// [`CudaError::ConvolutionNotSupported`] or [`CudaError::MissingLibrary`] if the library
    /// cannot compute it.
    fn plan_convolution(&self, convolution: &Convolution) -> Result<usize, CudaError>;

    /// Queues a convolution that was planned.
    ///
    /// # Errors
    /// [`CudaError::ConvolutionNotSupported`] if its engine cannot run after all; nothing is
    /// queued.
    ///
    /// # Safety
    /// As for [`Driver::launch`], for the workspace too, which is aligned to 256 bytes.
    unsafe fn convolve(&self, convolution: &Convolution, workspace: DeviceAddress, stream: StreamHandle)
    -> Result<(), CudaError>;

    /// Queues a copy to the device.
    ///
    /// # Safety
    /// Both ranges are valid. Pinned host memory stays valid until the copy is done; other host
    /// memory until this returns.
    unsafe fn copy_in(&self, to: DeviceAddress, from: *const u8, bytes: usize, stream: StreamHandle) -> Result<(), CudaError>;

    /// Queues a copy from the device.
    ///
    /// # Safety
    /// As for [`Driver::copy_in`].
    unsafe fn copy_out(&self, to: *mut u8, from: DeviceAddress, bytes: usize, stream: StreamHandle) -> Result<(), CudaError>;

    /// Queues filling memory with zero bytes.
    ///
    /// # Safety
    /// As for [`Driver::launch`].
    unsafe fn clear(&self, to: DeviceAddress, bytes: usize, stream: StreamHandle) -> Result<(), CudaError>;

    /// Starts capture: work of this stream, and of streams that wait for its events, is recorded
    /// instead of done.
    fn begin_capture(&self, stream: StreamHandle) -> Result<(), CudaError>;

    /// Ends capture and returns the recorded work.
    fn end_capture(&self, stream: StreamHandle) -> Result<GraphHandle, CudaError>;

    /// Queues captured work.
    ///
    /// # Safety
    /// The memory that the captured work uses is still allocated, and nothing else uses it until
    /// the work is done.
    unsafe fn launch_graph(&self, graph: GraphHandle, stream: StreamHandle) -> Result<(), CudaError>;

    /// Destroys a graph that is not launched any more.
    fn destroy_graph(&self, graph: GraphHandle);

    /// Returns the means of communication between GPUs; `None` if ranks communicate through the
    /// host.
    fn collectives(&self) -> Option<&dyn Collectives>;
}
