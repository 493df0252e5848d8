//! The seam to the GPU: what the backend and the executor ask of a device, and nothing of kernels or Programs. Two implementations: NVIDIA's
//! driver and libraries ([`super::nvidia`]), and one for tests that records, and runs kernels on the processor where it can.

use super::arguments::Arguments;
use super::collectives::Collectives;
use super::convolutions::Convolution;
use super::error::CudaError;
use foretell_models::EightBits;
use foretell_units::DataType;
use std::fmt::Debug;
use std::ptr::NonNull;

/// An address in the device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DeviceAddress(pub(crate) u64);

impl DeviceAddress {
    /// So many bytes further on.
    pub(crate) fn after(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }

    /// Bytes at whose multiples it lies, a power of two: `most`, another one, where it is more.
    pub(crate) fn alignment(self, most: u64) -> u64 {
        1 << self.0.trailing_zeros().min(most.trailing_zeros())
    }

    /// As an operand has it.
    pub(crate) fn pointer(self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.0 as usize)
    }

    /// Of an operand.
    pub(crate) fn of(pointer: *mut u8) -> Self {
        Self(pointer.expose_provenance() as u64)
    }
}

/// A queue of work that the device does in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StreamHandle(pub(crate) u64);

/// A place in a stream's order that others can wait for, and its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct EventHandle(pub(crate) u64);

/// Captured work that is launched at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GraphHandle(pub(crate) u64);

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceDescription {
    /// As its maker calls it.
    pub name: String,
    /// The compute capability, major and minor.
    pub capability: (u32, u32),
    /// Its processors.
    pub multiprocessors: usize,
    /// Bytes of its memory.
    pub memory: usize,
    /// Bytes of shared memory that a block may ask for.
    pub shared_memory: usize,
}

/// The launch of one kernel.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Launch {
    /// The kernel, by its name in the sources.
    pub(crate) function: &'static str,
    /// Fp32, bf16 or fp16.
    pub(crate) precision: DataType,
    /// Blocks.
    pub(crate) grid: [u32; 3],
    /// Threads of a block.
    pub(crate) block: u32,
    /// Bytes of shared memory beside what the kernel itself declares.
    pub(crate) shared: u32,
    /// What it works on.
    pub(crate) arguments: Arguments,
}

/// A matrix that a product reads: as it is, or transposed in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Factor {
    pub(crate) address: DeviceAddress,
    pub(crate) is_transposed: bool,
    /// Elements from a row in memory to the next, where rows do not lie one behind the other.
    pub(crate) pitch: Option<usize>,
}

/// What is done to a product in the same pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Epilogue {
    /// A number for each column is added, in the format of the factors.
    pub(crate) bias: Option<DeviceAddress>,
    /// What follows.
    pub(crate) last: Last,
    /// What is summed up of a factor on the way.
    pub(crate) sums: Option<Sums>,
}

/// What is done to each number of a product, once it has its bias. What is read or written beside the result lies as that does where it is dense, in the
/// format of the factors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Last {
    #[default]
    Nothing,
    /// What is below zero becomes zero.
    Relu,
    /// GELU by its tanh approximation.
    Gelu,
    /// The same, and what it is applied to is written here.
    GeluKept(DeviceAddress),
    /// It is multiplied by the slope of that GELU at what is here.
    GeluSlope(DeviceAddress),
}

/// A factor whose numbers are summed over what is contracted, and where those sums go: in the format of the result, whatever is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sums {
    /// A sum for each row of the result.
    OfLeft(DeviceAddress),
    /// A sum for each column of the result.
    OfRight(DeviceAddress),
}

impl Epilogue {
    /// Whether nothing is done.
    pub(crate) fn is_plain(&self) -> bool {
        *self == Self::default()
    }
}

/// Of a product's left factor and its right one, in eight bits: their formats, and where the number lies that each is multiplied by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Factors {
    pub(crate) formats: [EightBits; 2],
    pub(crate) factors: [DeviceAddress; 2],
    /// Whether sums may be made as Hopper's tensor cores make them of eight bits alone, with some fourteen bits (DeepSeek-AI 2024, DeepSeek-V3, 3.3.2):
    /// forward, as NVIDIA's Transformer Engine does; in gradients they are added to single precision on the way, where what is
    /// lost would add up over a whole batch.
    pub(crate) sums_fast: bool,
}

/// `result[rows, columns] = left[rows, contracted] · right[contracted, columns]`, row-major, and as many times as the batch has matrices. Those of a
/// batch are dense and lie one behind the other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Product {
    pub(crate) batch: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) contracted: usize,
    pub(crate) left: Factor,
    pub(crate) right: Factor,
    pub(crate) result: DeviceAddress,
    /// As that of a factor.
    pub(crate) result_pitch: Option<usize>,
    /// The format of the factors, but where `factors` says another; and of what an epilogue reads.
    pub(crate) input: DataType,
    /// The format of the result: that of the factors, or single precision.
    pub(crate) output: DataType,
    /// Whether it is added to what is there.
    pub(crate) accumulate: bool,
    pub(crate) epilogue: Epilogue,
    /// Whether factors in single precision may be rounded to the nineteen bits that tensor cores take.
    pub(crate) tf32: bool,
    /// Where both factors are of eight bits: of which, and what they are multiplied by.
    pub(crate) factors: Option<Factors>,
}

impl Product {
    /// Rows and columns of a matrix as it lies in memory, and elements from a row to the next: of the left factor, the right one and the result.
    pub(crate) fn stored(&self) -> [[usize; 3]; 3] {
        let Product { rows, columns, contracted, left, right, .. } = *self;
        let stored = |[rows, columns]: [usize; 2], is_transposed: bool, pitch: Option<usize>| {
            let [rows, columns] = if is_transposed { [columns, rows] } else { [rows, columns] };
            [rows, columns, pitch.unwrap_or(columns)]
        };
        [
            stored([rows, contracted], left.is_transposed, left.pitch),
            stored([contracted, columns], right.is_transposed, right.pitch),
            stored([rows, columns], false, self.result_pitch),
        ]
    }
}

/// A device as one rank uses it. Work on a stream is asynchronous unless a function says otherwise.
pub(crate) trait Driver: Debug + Send + Sync {
    /// What it is.
    fn device(&self) -> &DeviceDescription;

    /// Memory of the device, aligned to 256 bytes.
    fn allocate(&self, bytes: usize) -> Result<DeviceAddress, CudaError>;

    /// Gives memory back once all work is done.
    ///
    /// # Safety
    /// It is this driver's, and nobody uses it any more.
    unsafe fn free(&self, address: DeviceAddress);

    /// Memory of the host that the device copies from and to by itself.
    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>, CudaError>;

    /// # Safety
    /// It is this driver's, and nobody uses it any more.
    unsafe fn free_pinned(&self, pointer: NonNull<u8>);

    /// Bytes of the device's memory that are free, and all.
    fn memory(&self) -> Result<(usize, usize), CudaError>;

    /// A new stream.
    fn create_stream(&self) -> Result<StreamHandle, CudaError>;

    /// Waits until all work of a stream is done.
    fn synchronize(&self, stream: StreamHandle) -> Result<(), CudaError>;

    /// A new event.
    fn create_event(&self) -> Result<EventHandle, CudaError>;

    /// Puts an event behind the work that a stream has.
    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<(), CudaError>;

    /// Has a stream's further work wait for an event.
    fn wait(&self, stream: StreamHandle, event: EventHandle) -> Result<(), CudaError>;

    /// Waits, on the calling thread, for an event.
    fn finish(&self, event: EventHandle) -> Result<(), CudaError>;

    /// From one event to another, both of which have happened.
    fn milliseconds(&self, start: EventHandle, end: EventHandle) -> Result<f32, CudaError>;

    /// Queues a kernel.
    ///
    /// # Safety
    /// Its operands are memory of this device, as long as the kernel says, and nobody else's until it is done.
    unsafe fn launch(&self, launch: &Launch, stream: StreamHandle) -> Result<(), CudaError>;

    /// Queues a product. [`CudaError::ProductNotSupported`] where the library has no way to make it: nothing was queued then.
    ///
    /// # Safety
    /// As for [`Driver::launch`].
    unsafe fn multiply(&self, product: &Product, stream: StreamHandle) -> Result<(), CudaError>;

    /// Bytes of memory that the library's way to a convolution works in. It is chosen once for sizes and alignments, which may take a second and
    /// load kernels: the first time never while work is captured. [`CudaError::ConvolutionNotSupported`] or [`CudaError::MissingLibrary`] where
    /// the library has none.
    fn plan_convolution(&self, convolution: &Convolution) -> Result<usize, CudaError>;

    /// Queues a convolution that was planned. [`CudaError::ConvolutionNotSupported`] where the library turns out not to make it: nothing was
    /// queued then.
    ///
    /// # Safety
    /// As for [`Driver::launch`]; of the workspace, aligned to 256 bytes, too.
    unsafe fn convolve(&self, convolution: &Convolution, workspace: DeviceAddress, stream: StreamHandle)
    -> Result<(), CudaError>;

    /// Queues a copy to the device.
    ///
    /// # Safety
    /// Both are valid over the length; of pinned memory until the copy is done, of other memory until this returns.
    unsafe fn copy_in(&self, to: DeviceAddress, from: *const u8, bytes: usize, stream: StreamHandle) -> Result<(), CudaError>;

    /// Queues a copy from the device.
    ///
    /// # Safety
    /// As for [`Driver::copy_in`].
    unsafe fn copy_out(&self, to: *mut u8, from: DeviceAddress, bytes: usize, stream: StreamHandle) -> Result<(), CudaError>;

    /// Queues zeros.
    ///
    /// # Safety
    /// As for [`Driver::launch`].
    unsafe fn clear(&self, to: DeviceAddress, bytes: usize, stream: StreamHandle) -> Result<(), CudaError>;

    /// From now on the work of a stream, and of streams that wait for its events, is remembered instead of done.
    fn begin_capture(&self, stream: StreamHandle) -> Result<(), CudaError>;

    /// What was remembered.
    fn end_capture(&self, stream: StreamHandle) -> Result<GraphHandle, CudaError>;

    /// Queues captured work.
    ///
    /// # Safety
    /// What it works on is still there, and nobody else's until it is done.
    unsafe fn run_graph(&self, graph: GraphHandle, stream: StreamHandle) -> Result<(), CudaError>;

    /// Forgets captured work that is not launched any more.
    fn forget_graph(&self, graph: GraphHandle);

    /// How ranks with GPUs of their own reach each other; none where they go through the host.
    fn collectives(&self) -> Option<&dyn Collectives>;
}
