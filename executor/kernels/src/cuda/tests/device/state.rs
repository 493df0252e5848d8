//! The state of a test device: recorded calls, each stream's pending work, and captured work.

use crate::cuda::driver::{
    Convolution, ConvolutionShape, CudaError, DeviceAddress, EventHandle, GraphHandle, Product, StreamHandle,
};
use std::alloc::Layout;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

/// A recorded call of the driver.
#[derive(Clone, Debug, PartialEq)]
pub enum DriverCall {
    Launch { function: &'static str, grid: [u32; 3], stream: StreamHandle },
    Multiply { product: Product, stream: StreamHandle },
    PlanConvolution { shape: ConvolutionShape },
    Convolve { convolution: Convolution, workspace: DeviceAddress, stream: StreamHandle },
    CopyIn { bytes: usize, stream: StreamHandle },
    CopyOut { bytes: usize, stream: StreamHandle },
    Clear { bytes: usize, stream: StreamHandle },
    Record { event: EventHandle, stream: StreamHandle },
    Wait { event: EventHandle, stream: StreamHandle },
    Communicate { stream: StreamHandle },
    Synchronize { stream: StreamHandle },
    Captured,
    Graph { stream: StreamHandle },
}

/// Work of a stream. A graph runs it more than once.
pub(super) type Task = Arc<dyn Fn() + Send + Sync>;

/// A capture in progress.
pub(super) struct Capture {
    /// The stream that began the capture, and those that joined it by waiting for its events.
    pub(super) streams: Vec<StreamHandle>,
    pub(super) work: Vec<Task>,
    /// For each event recorded in the capture, the streams whose work precedes it.
    pub(super) events: HashMap<EventHandle, Vec<StreamHandle>>,
    /// For each stream, the streams whose work it has waited for, itself included.
    pub(super) joined: HashMap<StreamHandle, Vec<StreamHandle>>,
    /// A call that the driver does not allow during capture, if one was made.
    pub(super) broken: Option<&'static str>,
}

impl Capture {
    pub(super) fn has(&self, stream: StreamHandle) -> bool {
        self.streams.contains(&stream)
    }
}

/// An item of a stream.
#[derive(Clone)]
pub(super) enum StreamItem {
    Do(Task),
    /// The event happens for the n-th time.
    Record(EventHandle, u64),
    /// Waits until the event has happened n times.
    Wait(EventHandle, u64),
}

/// A stream's pending work. One thread at a time runs it. That thread does not hold the device's
/// lock meanwhile, because communication waits for other devices.
#[derive(Default)]
pub(super) struct StreamQueue {
    pub(super) items: Mutex<VecDeque<StreamItem>>,
    pub(super) running: Mutex<()>,
}

impl StreamQueue {
    pub(super) fn push(&self, item: StreamItem) {
        self.items.lock().unwrap_or_else(PoisonError::into_inner).push_back(item);
    }
}

/// An event's history.
#[derive(Clone, Copy, Default)]
pub(super) struct EventState {
    /// How often it was recorded.
    pub(super) recorded: u64,
    /// The stream that it was last recorded on.
    pub(super) stream: Option<StreamHandle>,
    /// How often it has happened.
    pub(super) happened: u64,
}

#[derive(Default)]
pub(super) struct DeviceState {
    pub(super) calls: Vec<DriverCall>,
    pub(super) streams: HashMap<StreamHandle, Arc<StreamQueue>>,
    pub(super) events: HashMap<EventHandle, EventState>,
    pub(super) memory: DeviceMemory,
    /// Bytes of pinned host memory by address.
    pub(super) pinned: BTreeMap<usize, usize>,
    last_handle: u64,
    pub(super) capturing: Option<Capture>,
    pub(super) graphs: HashMap<GraphHandle, Vec<Task>>,
    /// Shapes of convolutions that were planned, and the number of convolutions that ran.
    pub(super) planned: HashSet<ConvolutionShape>,
    pub(super) convolved: usize,
    /// Bytes of device memory that are allocated.
    pub(super) allocated: usize,
    /// Why the device does no more work; `None` while it works.
    pub(super) broken: Option<CudaError>,
}

/// The device's memory: allocations of exactly the size that is asked for, so that an address
/// sanitizer finds accesses beyond them.
#[derive(Default)]
pub(super) struct DeviceMemory(HashMap<usize, Layout>);

impl DeviceMemory {
    /// Allocates memory, aligned to 256 bytes. It holds NaNs.
    pub(super) fn allocate(&mut self, bytes: usize) -> usize {
        let layout = Layout::from_size_align(bytes.max(1), 256).unwrap();
        // SAFETY: the layout has at least one byte.
        let pointer = unsafe { std::alloc::alloc(layout) };
        assert!(!pointer.is_null(), "{bytes} bytes cannot be allocated");
        // SAFETY: the memory was just allocated, with this size.
        unsafe { pointer.write_bytes(0xFF, layout.size()) };
        let address = pointer.expose_provenance();
        self.0.insert(address, layout);
        address
    }

    /// Frees memory, and returns its bytes; 0 if it is not allocated.
    pub(super) fn free(&mut self, address: usize) -> usize {
        let Some(layout) = self.0.remove(&address) else { return 0 };
        // SAFETY: it was allocated with this layout, and is no longer listed.
        unsafe { std::alloc::dealloc(std::ptr::with_exposed_provenance_mut(address), layout) };
        layout.size()
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let addresses: Vec<usize> = self.0.keys().copied().collect();
        for address in addresses {
            self.free(address);
        }
    }
}

impl DeviceState {
    pub(super) fn new_handle(&mut self) -> u64 {
        self.last_handle += 1;
        self.last_handle
    }
}

/// An address that closures can carry between threads.
#[derive(Clone, Copy)]
pub(super) struct Address(pub(super) usize);

impl Address {
    pub(super) fn pointer(self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.0)
    }
}
