//! The seam's real side: NVIDIA's driver and libraries, through cudarc but for NCCL, which is loaded under the name that packages have. Whether a
//! library is there is asked before the first call into it.

mod cudnn;
mod nccl;
mod nccl_library;
mod products;

use super::collectives::Collectives;
use super::convolutions::Convolution;
use super::driver::{DeviceAddress, DeviceDescription, Driver, EventHandle, GraphHandle, Launch, Product, StreamHandle};
use super::error::CudaError;
use super::libraries::Library;
use super::sources::{Source, precision_number};
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute, CUfunction_attribute};
pub(super) use cudnn::fault as cudnn_fault;
pub(super) use nccl_library::Nccl;
use products::Products;
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

/// The oldest driver whose calls are all there.
const OLDEST_DRIVER: i32 = 12_080;
/// Shared memory that a block has without asking: what a kernel declares and what its launch adds, together.
const SHARED_UNASKED: u32 = 48 * 1024;

/// One GPU, as this process uses it.
pub(crate) struct NvidiaDriver {
    device: DeviceDescription,
    context: Handle<sys::CUcontext>,
    /// By source and precision.
    modules: Mutex<HashMap<(&'static str, u32), Handle<sys::CUmodule>>>,
    /// By name and precision.
    functions: Mutex<HashMap<(&'static str, u32), Function>>,
    products: Mutex<Option<Products>>,
    convolutions: cudnn::Cudnn,
    communicators: nccl::Communicators,
    reach: Reach,
}

/// How the ranks of a run reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// From GPU to GPU, by NCCL: each rank has one of its own.
    Direct,
    /// Through the host's memory.
    Host,
}

/// A kernel, and the shared memory that its launches may add: what is there without asking, or what was asked for.
type Function = (Handle<sys::CUfunction>, u32);

/// A pointer that the driver gave and that any thread may give back to it.
#[derive(Clone, Copy)]
struct Handle<T>(T);

// SAFETY: the driver's handles are for use from any thread.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

impl std::fmt::Debug for NvidiaDriver {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("NvidiaDriver").field("device", &self.device).finish_non_exhaustive()
    }
}

/// What a call of the driver came to.
fn called<T>(doing: &'static str, result: Result<T, DriverError>) -> Result<T, CudaError> {
    result.map_err(|error| {
        let words = error.error_string().map(|words| words.to_string_lossy().into_owned());
        CudaError::Call { doing, reason: words.unwrap_or_else(|_| format!("{:?}", error.0)) }
    })
}

/// All GPUs that the driver shows.
///
/// # Errors
/// [`CudaError`]: the driver is not there, too old, or fails.
pub fn devices() -> Result<Vec<DeviceDescription>, CudaError> {
    let count = start()?;
    (0..count).map(|index| describe(index as i32).map(|(_, device)| device)).collect()
}

/// Starts the driver; how many devices it has.
fn start() -> Result<usize, CudaError> {
    if !Library::Driver.is_present() {
        return Err(CudaError::MissingLibrary { library: Library::Driver });
    }
    let mut version = 0;
    // SAFETY: the library is there, and the place is valid.
    called("asking the driver for its version", unsafe { sys::cuDriverGetVersion(&mut version) }.result())?;
    if version < OLDEST_DRIVER {
        let reason = format!("it has CUDA {}.{}, and 12.8 is the oldest that is known", version / 1000, version % 1000 / 10);
        return Err(CudaError::Call { doing: "using the driver", reason });
    }
    called("starting the driver", result::init())?;
    Ok(called("counting GPUs", result::device::get_count())?.max(0) as usize)
}

fn describe(index: i32) -> Result<(sys::CUdevice, DeviceDescription), CudaError> {
    let doing = "asking what a GPU is";
    let device = called(doing, result::device::get(index))?;
    let attribute = |which| {
        // SAFETY: the device was just given.
        called(doing, unsafe { result::device::get_attribute(device, which) }).map(|value| value.max(0) as usize)
    };
    let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let description = DeviceDescription {
        name: called(doing, result::device::get_name(device))?,
        capability: (major as u32, minor as u32),
        multiprocessors: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_memory: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        // SAFETY: the device was just given.
        memory: called(doing, unsafe { result::device::total_mem(device) })?,
    };
    Ok((device, description))
}

impl NvidiaDriver {
    /// The GPU of an index, as the driver counts them.
    pub(crate) fn open(index: usize, reach: Reach) -> Result<Self, CudaError> {
        let count = start()?;
        if index >= count {
            return Err(CudaError::NoDevice { index, count });
        }
        if !Library::Nvrtc.is_present() {
            return Err(CudaError::MissingLibrary { library: Library::Nvrtc });
        }
        if reach == Reach::Direct && !Library::Nccl.is_present() {
            return Err(CudaError::MissingLibrary { library: Library::Nccl });
        }
        let (device, description) = describe(index as i32)?;
        // SAFETY: the device was just given; the process keeps its context until it ends.
        let context = called("using a GPU", unsafe { result::primary_ctx::retain(device) })?;
        Ok(Self {
            device: description,
            context: Handle(context),
            modules: Mutex::default(),
            functions: Mutex::default(),
            products: Mutex::default(),
            convolutions: cudnn::Cudnn::default(),
            communicators: nccl::Communicators::default(),
            reach,
        })
    }

    /// The driver's calls are about the calling thread's device.
    fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context is kept as long as the process.
        called("using a GPU", unsafe { result::ctx::set_current(self.context.0) })
    }

    fn function(&self, launch: &Launch) -> Result<sys::CUfunction, CudaError> {
        let key = (launch.function, precision_number(launch.precision));
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let (function, asked) = match functions.get(&key) {
            Some(&known) => known,
            None => {
                let function = self.find(launch, key.1)?;
                let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
                // SAFETY: the function is of a loaded module.
                let declared = called("asking for a kernel's shared memory", unsafe {
                    result::function::get_function_attribute(function, attribute)
                })?;
                (Handle(function), SHARED_UNASKED.saturating_sub(declared.max(0) as u32))
            }
        };
        let shared = asked.max(launch.shared);
        if shared > asked {
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is of a loaded module.
            let done = unsafe { result::function::set_function_attribute(function.0, attribute, shared as i32) };
            called("asking for shared memory", done)?;
        }
        functions.insert(key, (function, shared));
        Ok(function.0)
    }

    fn find(&self, launch: &Launch, precision: u32) -> Result<sys::CUfunction, CudaError> {
        let missing = || CudaError::Call { doing: "looking for a kernel", reason: format!("there is no `{}`", launch.function) };
        let source = Source::of(launch.function).ok_or_else(missing)?;
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let module = match modules.get(&(source.file, precision)) {
            Some(&known) => known,
            None => {
                let code = source.compiled(launch.precision, self.device.capability)?;
                // SAFETY: the code is what NVRTC made for this device.
                let module = Handle(called("loading kernels", unsafe { result::module::load_data(code.as_ptr().cast()) })?);
                modules.insert((source.file, precision), module);
                module
            }
        };
        let name = CString::new(launch.function).map_err(|_| missing())?;
        // SAFETY: the module is loaded and never unloaded.
        called("looking for a kernel", unsafe { result::module::get_function(module.0, name) })
    }
}

fn stream_of(stream: StreamHandle) -> sys::CUstream {
    std::ptr::with_exposed_provenance_mut(stream.0 as usize)
}

fn event_of(event: EventHandle) -> sys::CUevent {
    std::ptr::with_exposed_provenance_mut(event.0 as usize)
}

impl Driver for NvidiaDriver {
    fn device(&self) -> &DeviceDescription {
        &self.device
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceAddress, CudaError> {
        self.enter()?;
        // SAFETY: who uses the memory initialises it.
        match unsafe { result::malloc_sync(bytes.max(1)) } {
            Ok(address) => Ok(DeviceAddress(address)),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                Err(CudaError::OutOfMemory { wanted: bytes, free: self.memory().map_or(0, |(free, _)| free) })
            }
            Err(error) => called("allocating memory", Err(error)),
        }
    }

    unsafe fn free(&self, address: DeviceAddress) {
        if self.enter().is_ok() {
            // SAFETY: the caller's promise. What cannot be freed is the process's until it ends.
            let _ = unsafe { result::free_sync(address.0) };
        }
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>, CudaError> {
        self.enter()?;
        // SAFETY: who uses the memory initialises it.
        let pointer = called("allocating pinned memory", unsafe { result::malloc_host(bytes.max(1), 0) })?;
        let none = || CudaError::Call { doing: "allocating pinned memory", reason: "no address".into() };
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
        called("asking for free memory", result::mem_get_info())
    }

    fn create_stream(&self) -> Result<StreamHandle, CudaError> {
        self.enter()?;
        let stream = called("making a stream", result::stream::create(result::stream::StreamKind::NonBlocking))?;
        Ok(StreamHandle(stream.expose_provenance() as u64))
    }

    fn synchronize(&self, stream: StreamHandle) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: the stream is this driver's.
        called("waiting for the GPU", unsafe { result::stream::synchronize(stream_of(stream)) })
    }

    fn create_event(&self) -> Result<EventHandle, CudaError> {
        self.enter()?;
        let event = called("making an event", result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT))?;
        Ok(EventHandle(event.expose_provenance() as u64))
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: both are this driver's.
        called("recording an event", unsafe { result::event::record(event_of(event), stream_of(stream)) })
    }

    fn wait(&self, stream: StreamHandle, event: EventHandle) -> Result<(), CudaError> {
        self.enter()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are this driver's.
        called("waiting for an event", unsafe { result::stream::wait_event(stream_of(stream), event_of(event), flags) })
    }

    fn finish(&self, event: EventHandle) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: the event is this driver's.
        called("waiting for the GPU", unsafe { result::event::synchronize(event_of(event)) })
    }

    fn milliseconds(&self, start: EventHandle, end: EventHandle) -> Result<f32, CudaError> {
        self.enter()?;
        // SAFETY: both are this driver's, and have happened.
        called("timing", unsafe { result::event::elapsed(event_of(start), event_of(end)) })
    }

    unsafe fn launch(&self, launch: &Launch, stream: StreamHandle) -> Result<(), CudaError> {
        self.enter()?;
        let function = self.function(launch)?;
        let mut arguments = launch.arguments;
        let mut parameters: [*mut c_void; 1] = [(&raw mut arguments).cast()];
        let [x, y, z] = launch.grid;
        let (block, shared) = ((launch.block, 1, 1), launch.shared);
        // SAFETY: the function takes this one structure, which the driver copies before it returns; the rest is the caller's promise.
        let done = unsafe { result::launch_kernel(function, (x, y, z), block, shared, stream_of(stream), &mut parameters) };
        called("launching a kernel", done)
    }

    unsafe fn multiply(&self, product: &Product, stream: StreamHandle) -> Result<(), CudaError> {
        self.enter()?;
        let mut products = self.products.lock().unwrap_or_else(PoisonError::into_inner);
        let products = match &mut *products {
            Some(products) => products,
            none => none.insert(Products::new(self)?),
        };
        // SAFETY: the caller's promise.
        unsafe { products.multiply(product, stream) }
    }

    fn plan_convolution(&self, convolution: &Convolution) -> Result<usize, CudaError> {
        self.convolutions.plan(self, convolution)
    }

    unsafe fn convolve(
        &self,
        convolution: &Convolution,
        workspace: DeviceAddress,
        stream: StreamHandle,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.convolutions.convolve(self, convolution, workspace, stream) }
    }

    unsafe fn copy_in(&self, to: DeviceAddress, from: *const u8, bytes: usize, stream: StreamHandle) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: the caller's promise.
        let done = unsafe { sys::cuMemcpyHtoDAsync_v2(to.0, from.cast(), bytes, stream_of(stream)) };
        called("copying to the GPU", done.result())
    }

    unsafe fn copy_out(&self, to: *mut u8, from: DeviceAddress, bytes: usize, stream: StreamHandle) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: the caller's promise.
        let done = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from.0, bytes, stream_of(stream)) };
        called("copying from the GPU", done.result())
    }

    unsafe fn clear(&self, to: DeviceAddress, bytes: usize, stream: StreamHandle) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: the caller's promise.
        called("clearing memory", unsafe { result::memset_d8_async(to.0, 0, bytes, stream_of(stream)) })
    }

    fn begin_capture(&self, stream: StreamHandle) -> Result<(), CudaError> {
        self.enter()?;
        // Other threads may allocate and copy meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is this driver's.
        called("capturing a step", unsafe { result::stream::begin_capture(stream_of(stream), mode) })
    }

    fn end_capture(&self, stream: StreamHandle) -> Result<GraphHandle, CudaError> {
        self.enter()?;
        // SAFETY: the stream is this driver's, and being captured.
        let graph = called("capturing a step", unsafe { result::stream::end_capture(stream_of(stream)) })?;
        if graph.is_null() {
            return Err(CudaError::Call { doing: "capturing a step", reason: "it was broken off".into() });
        }
        let flags = sys::CUgraphInstantiate_flags(0);
        // SAFETY: the graph was just made; what is made of it does not need it.
        let made = unsafe { result::graph::instantiate(graph, flags) };
        // SAFETY: as above.
        let _ = unsafe { result::graph::destroy(graph) };
        Ok(GraphHandle(called("making a graph", made)?.expose_provenance() as u64))
    }

    unsafe fn run_graph(&self, graph: GraphHandle, stream: StreamHandle) -> Result<(), CudaError> {
        self.enter()?;
        let graph: sys::CUgraphExec = std::ptr::with_exposed_provenance_mut(graph.0 as usize);
        // SAFETY: both are this driver's; the rest is the caller's promise.
        called("launching a graph", unsafe { result::graph::launch(graph, stream_of(stream)) })
    }

    fn forget_graph(&self, graph: GraphHandle) {
        let graph: sys::CUgraphExec = std::ptr::with_exposed_provenance_mut(graph.0 as usize);
        if self.enter().is_ok() {
            // SAFETY: the graph is this driver's, and nobody launches it again.
            let _ = unsafe { result::graph::exec_destroy(graph) };
        }
    }

    fn collectives(&self) -> Option<&dyn Collectives> {
        (self.reach == Reach::Direct).then_some(self as &dyn Collectives)
    }
}
