//! A GPU whose libraries refuse more than they must, for tests of the fallbacks.

use crate::cuda::driver::{
    Collectives, Convolution, CudaError, DeviceAddress, DeviceDescription, Driver, EventHandle, GraphHandle, Launch, Library,
    Product, StreamHandle,
};
use crate::cuda::nvidia::NvidiaDriver;
use std::ptr::NonNull;

/// The products that a device's library computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductSupport {
    /// All that the library has an algorithm for.
    Full,
    /// Only those without an epilogue.
    PlainOnly,
    /// None, as without the library.
    None,
}

impl ProductSupport {
    /// Returns `true` if the library computes a product.
    pub fn allows(self, product: &Product) -> bool {
        match self {
            Self::Full => true,
            Self::PlainOnly => product.epilogue.is_plain(),
            Self::None => false,
        }
    }
}

/// A GPU whose cuBLASLt computes only these products, with or without cuDNN.
#[derive(Debug)]
pub struct LimitedDriver {
    pub(super) driver: NvidiaDriver,
    pub(super) products: ProductSupport,
    pub(super) has_convolutions: bool,
}

impl Driver for LimitedDriver {
    unsafe fn multiply(&self, product: &Product, stream: StreamHandle) -> Result<(), CudaError> {
        if !self.products.allows(product) {
            let Product { rows, columns, contracted, .. } = *product;
            return Err(CudaError::ProductNotSupported { rows, columns, contracted });
        }
        // SAFETY: the caller's promise; so below.
        unsafe { self.driver.multiply(product, stream) }
    }

    fn plan_convolution(&self, convolution: &Convolution) -> Result<usize, CudaError> {
        match self.has_convolutions {
            true => self.driver.plan_convolution(convolution),
            false => Err(CudaError::MissingLibrary { library: Library::Cudnn }),
        }
    }

    // Everything else is passed on.

    fn device(&self) -> &DeviceDescription {
        self.driver.device()
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceAddress, CudaError> {
        self.driver.allocate(bytes)
    }

    unsafe fn free(&self, address: DeviceAddress) {
        // SAFETY: as above.
        unsafe { self.driver.free(address) }
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>, CudaError> {
        self.driver.allocate_pinned(bytes)
    }

    unsafe fn free_pinned(&self, pointer: NonNull<u8>) {
        // SAFETY: as above.
        unsafe { self.driver.free_pinned(pointer) }
    }

    fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.driver.memory()
    }

    fn create_stream(&self) -> Result<StreamHandle, CudaError> {
        self.driver.create_stream()
    }

    fn synchronize(&self, stream: StreamHandle) -> Result<(), CudaError> {
        self.driver.synchronize(stream)
    }

    fn create_event(&self) -> Result<EventHandle, CudaError> {
        self.driver.create_event()
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<(), CudaError> {
        self.driver.record(event, stream)
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), CudaError> {
        self.driver.stream_wait_event(stream, event)
    }

    fn synchronize_event(&self, event: EventHandle) -> Result<(), CudaError> {
        self.driver.synchronize_event(event)
    }

    fn elapsed_milliseconds(&self, start: EventHandle, end: EventHandle) -> Result<f32, CudaError> {
        self.driver.elapsed_milliseconds(start, end)
    }

    unsafe fn launch(&self, launch: &Launch, stream: StreamHandle) -> Result<(), CudaError> {
        // SAFETY: as above.
        unsafe { self.driver.launch(launch, stream) }
    }

    unsafe fn convolve(
        &self,
        convolution: &Convolution,
        workspace: DeviceAddress,
        stream: StreamHandle,
    ) -> Result<(), CudaError> {
        // SAFETY: as above.
        unsafe { self.driver.convolve(convolution, workspace, stream) }
    }

    unsafe fn copy_in(&self, to: DeviceAddress, from: *const u8, bytes: usize, stream: StreamHandle) -> Result<(), CudaError> {
        // SAFETY: as above.
        unsafe { self.driver.copy_in(to, from, bytes, stream) }
    }

    unsafe fn copy_out(&self, to: *mut u8, from: DeviceAddress, bytes: usize, stream: StreamHandle) -> Result<(), CudaError> {
        // SAFETY: as above.
        unsafe { self.driver.copy_out(to, from, bytes, stream) }
    }

    unsafe fn clear(&self, to: DeviceAddress, bytes: usize, stream: StreamHandle) -> Result<(), CudaError> {
        // SAFETY: as above.
        unsafe { self.driver.clear(to, bytes, stream) }
    }

    fn begin_capture(&self, stream: StreamHandle) -> Result<(), CudaError> {
        self.driver.begin_capture(stream)
    }

    fn end_capture(&self, stream: StreamHandle) -> Result<GraphHandle, CudaError> {
        self.driver.end_capture(stream)
    }

    unsafe fn launch_graph(&self, graph: GraphHandle, stream: StreamHandle) -> Result<(), CudaError> {
        // SAFETY: as above.
        unsafe { self.driver.launch_graph(graph, stream) }
    }

    fn destroy_graph(&self, graph: GraphHandle) {
        self.driver.destroy_graph(graph);
    }

    fn collectives(&self) -> Option<&dyn Collectives> {
        self.driver.collectives()
    }
}
