//! NVIDIA's driver as the seam's implementation. cudarc provides the types of its interface.
//!
//! Nothing is linked: the driver and every library are loaded before the first call.
//! It knows no kernel of ours: `launch` decides what runs.

mod device;
mod driver_functions;
mod functions;

pub use device::devices;

use super::driver::{
    Collectives, CommunicatorHandle, CommunicatorId, Convolution, CudaError, DeviceAddress, DeviceCommunication,
    DeviceDescription, Driver, EventHandle, GraphHandle, Launch, Library, Product, StreamHandle,
};
use super::library::{Communicators, CublasLt, Cudnn};
use cudarc::driver::sys;
use driver_functions::DriverFunctions;
use functions::Functions;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

/// One GPU, as this process uses it.
pub struct NvidiaDriver {
    driver: &'static DriverFunctions,
    device: DeviceDescription,
    context: Handle<sys::CUcontext>,
    functions: Functions,
    /// `None` until the first product.
    products: Mutex<Option<CublasLt>>,
    convolutions: Cudnn,
    communicators: Communicators,
    transport: GpuTransport,
}

/// How the ranks of a run communicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuTransport {
    /// From GPU to GPU by NCCL: each rank has a GPU of its own.
    Nccl,
    /// Through host memory.
    Host,
}

/// A pointer from the driver that any thread may pass back to it.
#[derive(Clone, Copy)]
struct Handle<T>(T);

// SAFETY: the driver's handles may be used from any thread.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

impl std::fmt::Debug for NvidiaDriver {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("NvidiaDriver").field("device", &self.device).finish_non_exhaustive()
    }
}

impl NvidiaDriver {
    /// Opens the GPU of an index, in the driver's order.
    ///
    /// # Errors
    /// [`CudaError`] if there is no such GPU, or if the driver, NVRTC, or (for
    /// [`GpuTransport::Nccl`]) NCCL is missing.
    pub fn open(index: usize, transport: GpuTransport) -> Result<Self, CudaError> {
        let (driver, count) = device::start()?;
        if index >= count {
            return Err(CudaError::NoDevice { index, count });
        }
        if !Library::Nvrtc.is_present() {
            return Err(CudaError::MissingLibrary { library: Library::Nvrtc });
        }
        if transport == GpuTransport::Nccl && !Library::Nccl.is_present() {
            return Err(CudaError::MissingLibrary { library: Library::Nccl });
        }
        let (device, description) = device::describe(driver, index as i32)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver just returned the device, and the pointer is valid. The context is
        // kept until the process ends.
        let retained = unsafe { (driver.cuDevicePrimaryCtxRetain)(&mut context, device) };
        driver.checked("creating a GPU's context", retained)?;
        Ok(Self {
            driver,
            device: description,
            context: Handle(context),
            functions: Functions::default(),
            products: Mutex::default(),
            convolutions: Cudnn::default(),
            communicators: Communicators::default(),
            transport,
        })
    }

    /// Makes the GPU's context current on this thread, which every other call requires.
    fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context is kept until the process ends.
        self.driver.checked("selecting a GPU", unsafe { (self.driver.cuCtxSetCurrent)(self.context.0) })
    }
}

fn raw_stream(stream: StreamHandle) -> sys::CUstream {
    std::ptr::with_exposed_provenance_mut(stream.0 as usize)
}

fn raw_event(event: EventHandle) -> sys::CUevent {
    std::ptr::with_exposed_provenance_mut(event.0 as usize)
}

impl Driver for NvidiaDriver {
    fn device(&self) -> &DeviceDescription {
        &self.device
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceAddress, CudaError> {
        self.enter()?;
        let mut address = 0;
        // SAFETY: the pointer is valid.
        match unsafe { (self.driver.cuMemAlloc_v2)(&mut address, bytes.max(1)) } {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                Err(CudaError::OutOfMemory { wanted: bytes, free: self.memory().map_or(0, |(free, _)| free) })
            }
            result => self.driver.checked("allocating memory", result).map(|()| DeviceAddress(address)),
        }
    }

    unsafe fn free(&self, address: DeviceAddress) {
        if self.enter().is_ok() {
            // SAFETY: the caller's promise. A failure leaks the memory until the process ends.
            let _ = unsafe { (self.driver.cuMemFree_v2)(address.0) };
        }
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>, CudaError> {
        self.enter()?;
        let mut pointer = std::ptr::null_mut();
        // SAFETY: the pointer to the result is valid.
        let allocated = unsafe { (self.driver.cuMemHostAlloc)(&mut pointer, bytes.max(1), 0) };
        self.driver.checked("allocating pinned memory", allocated)?;
        let none = || CudaError::Call { action: "allocating pinned memory", reason: "the address is null".into() };
        NonNull::new(pointer.cast()).ok_or_else(none)
    }

    unsafe fn free_pinned(&self, pointer: NonNull<u8>) {
        if self.enter().is_ok() {
            // SAFETY: the caller's promise.
            let _ = unsafe { (self.driver.cuMemFreeHost)(pointer.as_ptr().cast()) };
        }
    }

    fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are valid.
        self.driver.checked("reading free memory", unsafe { (self.driver.cuMemGetInfo_v2)(&mut free, &mut total) })?;
        Ok((free, total))
    }

    fn create_stream(&self) -> Result<StreamHandle, CudaError> {
        self.enter()?;
        let (mut stream, flags) = (std::ptr::null_mut(), sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32);
        // SAFETY: the pointer is valid.
        self.driver.checked("creating a stream", unsafe { (self.driver.cuStreamCreate)(&mut stream, flags) })?;
        Ok(StreamHandle(stream.expose_provenance() as u64))
    }

    fn synchronize(&self, stream: StreamHandle) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: the stream is this driver's.
        self.driver.checked("waiting for a stream", unsafe { (self.driver.cuStreamSynchronize)(raw_stream(stream)) })
    }

    fn create_event(&self) -> Result<EventHandle, CudaError> {
        self.enter()?;
        let (mut event, flags) = (std::ptr::null_mut(), sys::CUevent_flags::CU_EVENT_DEFAULT as u32);
        // SAFETY: the pointer is valid.
        self.driver.checked("creating an event", unsafe { (self.driver.cuEventCreate)(&mut event, flags) })?;
        Ok(EventHandle(event.expose_provenance() as u64))
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: both are this driver's.
        let recorded = unsafe { (self.driver.cuEventRecord)(raw_event(event), raw_stream(stream)) };
        self.driver.checked("recording an event", recorded)
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), CudaError> {
        self.enter()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT as u32;
        // SAFETY: both are this driver's.
        let queued = unsafe { (self.driver.cuStreamWaitEvent)(raw_stream(stream), raw_event(event), flags) };
        self.driver.checked("waiting for an event", queued)
    }

    fn synchronize_event(&self, event: EventHandle) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: the event is this driver's.
        self.driver.checked("waiting for an event", unsafe { (self.driver.cuEventSynchronize)(raw_event(event)) })
    }

    fn elapsed_milliseconds(&self, start: EventHandle, end: EventHandle) -> Result<f32, CudaError> {
        self.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: both are this driver's, and have happened; the pointer is valid.
        let read = unsafe { (self.driver.cuEventElapsedTime_v2)(&mut milliseconds, raw_event(start), raw_event(end)) };
        self.driver.checked("reading the time between events", read)?;
        Ok(milliseconds)
    }

    unsafe fn launch(&self, launch: &Launch, stream: StreamHandle) -> Result<(), CudaError> {
        self.enter()?;
        let function = self.functions.get(self.driver, launch, self.device.capability)?;
        let mut arguments = launch.arguments;
        let mut parameters: [*mut c_void; 1] = [(&raw mut arguments).cast()];
        let [x, y, z] = launch.grid;
        let (block, shared, stream, none) = (launch.block, launch.shared, raw_stream(stream), std::ptr::null_mut());
        // SAFETY: the function takes this one structure, which the driver copies before it returns.
        // The rest is the caller's promise.
        let launched = unsafe {
            (self.driver.cuLaunchKernel)(function, x, y, z, block, 1, 1, shared, stream, parameters.as_mut_ptr(), none)
        };
        self.driver.checked("launching a kernel", launched)
    }

    unsafe fn multiply(&self, product: &Product, stream: StreamHandle) -> Result<(), CudaError> {
        self.enter()?;
        let mut products = self.products.lock().unwrap_or_else(PoisonError::into_inner);
        let products = match &mut *products {
            Some(products) => products,
            none => none.insert(CublasLt::new(|bytes| self.allocate(bytes))?),
        };
        // SAFETY: the caller's promise.
        unsafe { products.multiply(product, stream) }
    }

    fn plan_convolution(&self, convolution: &Convolution) -> Result<usize, CudaError> {
        self.enter()?;
        self.convolutions.plan(convolution)
    }

    unsafe fn convolve(
        &self,
        convolution: &Convolution,
        workspace: DeviceAddress,
        stream: StreamHandle,
    ) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: the caller's promise.
        unsafe { self.convolutions.convolve(convolution, workspace, stream) }
    }

    unsafe fn copy_in(&self, to: DeviceAddress, from: *const u8, bytes: usize, stream: StreamHandle) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: the caller's promise.
        let copied = unsafe { (self.driver.cuMemcpyHtoDAsync_v2)(to.0, from.cast(), bytes, raw_stream(stream)) };
        self.driver.checked("copying to the GPU", copied)
    }

    unsafe fn copy_out(&self, to: *mut u8, from: DeviceAddress, bytes: usize, stream: StreamHandle) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: the caller's promise.
        let copied = unsafe { (self.driver.cuMemcpyDtoHAsync_v2)(to.cast(), from.0, bytes, raw_stream(stream)) };
        self.driver.checked("copying from the GPU", copied)
    }

    unsafe fn clear(&self, to: DeviceAddress, bytes: usize, stream: StreamHandle) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: the caller's promise.
        let cleared = unsafe { (self.driver.cuMemsetD8Async)(to.0, 0, bytes, raw_stream(stream)) };
        self.driver.checked("clearing memory", cleared)
    }

    fn begin_capture(&self, stream: StreamHandle) -> Result<(), CudaError> {
        self.enter()?;
        // Relaxed: other threads may allocate and copy meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is this driver's.
        let begun = unsafe { (self.driver.cuStreamBeginCapture_v2)(raw_stream(stream), mode) };
        self.driver.checked("capturing a step", begun)
    }

    fn end_capture(&self, stream: StreamHandle) -> Result<GraphHandle, CudaError> {
        self.enter()?;
        let (mut graph, mut instance) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream is this driver's, and is being captured; the pointer is valid.
        let ended = unsafe { (self.driver.cuStreamEndCapture)(raw_stream(stream), &mut graph) };
        self.driver.checked("capturing a step", ended)?;
        if graph.is_null() {
            return Err(CudaError::Call { action: "capturing a step", reason: "it was invalidated".into() });
        }
        // SAFETY: the graph was just created, and the pointer is valid.
        let instantiated = unsafe { (self.driver.cuGraphInstantiateWithFlags)(&mut instance, graph, 0) };
        // SAFETY: the instance does not need the graph.
        let _ = unsafe { (self.driver.cuGraphDestroy)(graph) };
        self.driver.checked("instantiating a graph", instantiated)?;
        Ok(GraphHandle(instance.expose_provenance() as u64))
    }

    unsafe fn launch_graph(&self, graph: GraphHandle, stream: StreamHandle) -> Result<(), CudaError> {
        self.enter()?;
        let graph: sys::CUgraphExec = std::ptr::with_exposed_provenance_mut(graph.0 as usize);
        // SAFETY: both are this driver's. The rest is the caller's promise.
        let launched = unsafe { (self.driver.cuGraphLaunch)(graph, raw_stream(stream)) };
        self.driver.checked("launching a graph", launched)
    }

    fn destroy_graph(&self, graph: GraphHandle) {
        let graph: sys::CUgraphExec = std::ptr::with_exposed_provenance_mut(graph.0 as usize);
        if self.enter().is_ok() {
            // SAFETY: the graph is this driver's, and is not launched again.
            let _ = unsafe { (self.driver.cuGraphExecDestroy)(graph) };
        }
    }

    fn collectives(&self) -> Option<&dyn Collectives> {
        (self.transport == GpuTransport::Nccl).then_some(self as &dyn Collectives)
    }
}

impl Collectives for NvidiaDriver {
    fn new_communicator_id(&self) -> Result<CommunicatorId, CudaError> {
        self.enter()?;
        self.communicators.new_id()
    }

    fn join(&self, id: &CommunicatorId, size: usize, position: usize) -> Result<CommunicatorHandle, CudaError> {
        self.enter()?;
        self.communicators.join(id, size, position)
    }

    unsafe fn communicate(
        &self,
        communicator: CommunicatorHandle,
        communication: &DeviceCommunication,
        stream: StreamHandle,
    ) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: the caller's promise.
        unsafe { self.communicators.communicate(communicator, communication, stream) }
    }

    fn abort(&self) {
        if self.communicators.mark_aborted() && self.enter().is_ok() {
            self.communicators.abort_joined();
        }
    }

    fn is_aborted(&self) -> bool {
        self.communicators.is_aborted()
    }
}
