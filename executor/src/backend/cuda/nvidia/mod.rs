//! NVIDIA's driver as the seam's implementation, through cudarc's bindings.
//!
//! Nothing is linked: the driver and every library are checked for presence before the first call.
//! It knows no kernel of ours: `launch` decides what runs.

mod device;
mod functions;

pub use device::devices;

use super::driver::{
    Collectives, CommunicatorHandle, CommunicatorId, Convolution, CudaError, DeviceAddress, DeviceCommunication,
    DeviceDescription, Driver, EventHandle, GraphHandle, Launch, Library, Product, StreamHandle,
};
use super::library::{Communicators, CublasLt, Cudnn};
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use functions::Functions;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

/// One GPU, as this process uses it.
pub(crate) struct NvidiaDriver {
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
pub(crate) enum GpuTransport {
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

/// Converts the driver's result; `action` is what was attempted.
fn checked<T>(action: &'static str, result: Result<T, DriverError>) -> Result<T, CudaError> {
    result.map_err(|error| {
        let message = error.error_string().map(|message| message.to_string_lossy().into_owned());
        CudaError::Call { action, reason: message.unwrap_or_else(|_| format!("{:?}", error.0)) }
    })
}

impl NvidiaDriver {
    /// Opens the GPU of an index, in the driver's order.
    ///
    /// # Errors
    /// [`CudaError`] if there is no such GPU, or if the driver, NVRTC, or (for
    /// [`GpuTransport::Nccl`]) NCCL is missing.
    pub(crate) fn open(index: usize, transport: GpuTransport) -> Result<Self, CudaError> {
        let count = device::start()?;
        if index >= count {
            return Err(CudaError::NoDevice { index, count });
        }
        if !Library::Nvrtc.is_present() {
            return Err(CudaError::MissingLibrary { library: Library::Nvrtc });
        }
        if transport == GpuTransport::Nccl && !Library::Nccl.is_present() {
            return Err(CudaError::MissingLibrary { library: Library::Nccl });
        }
        let (device, description) = device::describe(index as i32)?;
        // SAFETY: the driver just returned the device; the context is kept until the process ends.
        let context = checked("creating a GPU's context", unsafe { result::primary_ctx::retain(device) })?;
        Ok(Self {
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
        checked("selecting a GPU", unsafe { result::ctx::set_current(self.context.0) })
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
        // SAFETY: the caller initialises the memory before reading it.
        match unsafe { result::malloc_sync(bytes.max(1)) } {
            Ok(address) => Ok(DeviceAddress(address)),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                Err(CudaError::OutOfMemory { wanted: bytes, free: self.memory().map_or(0, |(free, _)| free) })
            }
            Err(error) => checked("allocating memory", Err(error)),
        }
    }

    unsafe fn free(&self, address: DeviceAddress) {
        if self.enter().is_ok() {
            // SAFETY: the caller's promise. A failure leaks the memory until the process ends.
            let _ = unsafe { result::free_sync(address.0) };
        }
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>, CudaError> {
        self.enter()?;
        // SAFETY: the caller initialises the memory before reading it.
        let pointer = checked("allocating pinned memory", unsafe { result::malloc_host(bytes.max(1), 0) })?;
        let none = || CudaError::Call { action: "allocating pinned memory", reason: "the address is null".into() };
        NonNull::new(pointer.cast()).ok_or_else(none)
    }

    unsafe fn free_pinned(&self, pointer: NonNull<u8>) {
        if self.enter().is_ok() {
            // SAFETY: the caller's promise.
            let _ = unsafe { result::free_host(pointer.as_ptr().cast()) };
        }
    }

    fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.enter()?;
        checked("reading free memory", result::mem_get_info())
    }

    fn create_stream(&self) -> Result<StreamHandle, CudaError> {
        self.enter()?;
        let stream = checked("creating a stream", result::stream::create(result::stream::StreamKind::NonBlocking))?;
        Ok(StreamHandle(stream.expose_provenance() as u64))
    }

    fn synchronize(&self, stream: StreamHandle) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: the stream is this driver's.
        checked("waiting for a stream", unsafe { result::stream::synchronize(raw_stream(stream)) })
    }

    fn create_event(&self) -> Result<EventHandle, CudaError> {
        self.enter()?;
        let event = checked("creating an event", result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT))?;
        Ok(EventHandle(event.expose_provenance() as u64))
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: both are this driver's.
        checked("recording an event", unsafe { result::event::record(raw_event(event), raw_stream(stream)) })
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), CudaError> {
        self.enter()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are this driver's.
        checked("waiting for an event", unsafe { result::stream::wait_event(raw_stream(stream), raw_event(event), flags) })
    }

    fn synchronize_event(&self, event: EventHandle) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: the event is this driver's.
        checked("waiting for a stream", unsafe { result::event::synchronize(raw_event(event)) })
    }

    fn elapsed_milliseconds(&self, start: EventHandle, end: EventHandle) -> Result<f32, CudaError> {
        self.enter()?;
        // SAFETY: both are this driver's, and have happened.
        checked("reading the time between events", unsafe { result::event::elapsed(raw_event(start), raw_event(end)) })
    }

    unsafe fn launch(&self, launch: &Launch, stream: StreamHandle) -> Result<(), CudaError> {
        self.enter()?;
        let function = self.functions.get(launch, self.device.capability)?;
        let mut arguments = launch.arguments;
        let mut parameters: [*mut c_void; 1] = [(&raw mut arguments).cast()];
        let [x, y, z] = launch.grid;
        let (block, shared) = ((launch.block, 1, 1), launch.shared);
        // SAFETY: the function takes this one structure, which the driver copies before it returns.
        // The rest is the caller's promise.
        let launched = unsafe { result::launch_kernel(function, (x, y, z), block, shared, raw_stream(stream), &mut parameters) };
        checked("launching a kernel", launched)
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
        let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(to.0, from.cast(), bytes, raw_stream(stream)) };
        checked("copying to the GPU", copied.result())
    }

    unsafe fn copy_out(&self, to: *mut u8, from: DeviceAddress, bytes: usize, stream: StreamHandle) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: the caller's promise.
        let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from.0, bytes, raw_stream(stream)) };
        checked("copying from the GPU", copied.result())
    }

    unsafe fn clear(&self, to: DeviceAddress, bytes: usize, stream: StreamHandle) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: the caller's promise.
        checked("clearing memory", unsafe { result::memset_d8_async(to.0, 0, bytes, raw_stream(stream)) })
    }

    fn begin_capture(&self, stream: StreamHandle) -> Result<(), CudaError> {
        self.enter()?;
        // Relaxed: other threads may allocate and copy meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is this driver's.
        checked("capturing a step", unsafe { result::stream::begin_capture(raw_stream(stream), mode) })
    }

    fn end_capture(&self, stream: StreamHandle) -> Result<GraphHandle, CudaError> {
        self.enter()?;
        // SAFETY: the stream is this driver's, and is being captured.
        let graph = checked("capturing a step", unsafe { result::stream::end_capture(raw_stream(stream)) })?;
        if graph.is_null() {
            return Err(CudaError::Call { action: "capturing a step", reason: "it was invalidated".into() });
        }
        let flags = sys::CUgraphInstantiate_flags(0);
        // SAFETY: the graph was just created. The instance does not need it.
        let instance = unsafe { result::graph::instantiate(graph, flags) };
        // SAFETY: as above.
        let _ = unsafe { result::graph::destroy(graph) };
        Ok(GraphHandle(checked("instantiating a graph", instance)?.expose_provenance() as u64))
    }

    unsafe fn launch_graph(&self, graph: GraphHandle, stream: StreamHandle) -> Result<(), CudaError> {
        self.enter()?;
        let graph: sys::CUgraphExec = std::ptr::with_exposed_provenance_mut(graph.0 as usize);
        // SAFETY: both are this driver's. The rest is the caller's promise.
        checked("launching a graph", unsafe { result::graph::launch(graph, raw_stream(stream)) })
    }

    fn destroy_graph(&self, graph: GraphHandle) {
        let graph: sys::CUgraphExec = std::ptr::with_exposed_provenance_mut(graph.0 as usize);
        if self.enter().is_ok() {
            // SAFETY: the graph is this driver's, and is not launched again.
            let _ = unsafe { result::graph::exec_destroy(graph) };
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
