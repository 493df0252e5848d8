//! What the device knows: what it was told, each stream's work that is not done, and work that is captured.

use crate::backend::cuda::driver::CudaError;
use crate::backend::cuda::driver::{Convolution, ConvolutionShape};
use crate::backend::cuda::driver::{DeviceAddress, EventHandle, GraphHandle, Product, StreamHandle};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

/// What the device was told, in the order of the telling.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum DriverCall {
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

/// What is done.
pub(super) type Task = Arc<dyn Fn() + Send + Sync>;

/// StreamItem that is remembered instead of done.
pub(super) struct Capture {
    /// The stream whose work it is first of all, and those that came in by waiting for an event of it.
    pub(super) streams: Vec<StreamHandle>,
    pub(super) work: Vec<Task>,
    /// Events that were recorded in it, with the streams whose work lies before each.
    pub(super) events: HashMap<EventHandle, Vec<StreamHandle>>,
    /// By stream: those whose work it has waited for, itself too.
    pub(super) joined: HashMap<StreamHandle, Vec<StreamHandle>>,
    /// What the driver does not allow, if something was asked for.
    pub(super) broken: Option<&'static str>,
}

impl Capture {
    pub(super) fn has(&self, stream: StreamHandle) -> bool {
        self.streams.contains(&stream)
    }
}

/// A piece of a stream's work.
#[derive(Clone)]
pub(super) enum StreamItem {
    Do(Task),
    /// The event happens for the given time.
    Record(EventHandle, u64),
    /// Until the event has happened so often.
    Wait(EventHandle, u64),
}

/// A stream's work that is not done. One thread at a time does it: the device's own lock is not held meanwhile, as an communication waits for other
/// devices.
#[derive(Default)]
pub(super) struct StreamQueue {
    pub(super) work: Mutex<VecDeque<StreamItem>>,
    pub(super) doing: Mutex<()>,
}

impl StreamQueue {
    pub(super) fn push(&self, work: StreamItem) {
        self.work.lock().unwrap_or_else(PoisonError::into_inner).push_back(work);
    }
}

#[derive(Default)]
pub(super) struct DeviceState {
    pub(super) told: Vec<DriverCall>,
    pub(super) streams: HashMap<StreamHandle, Arc<StreamQueue>>,
    /// By event: how often it was recorded, on which stream last, and how often it has happened.
    pub(super) events: HashMap<EventHandle, (u64, Option<StreamHandle>, u64)>,
    /// Lengths, by address, of device memory and of pinned memory.
    pub(super) memory: BTreeMap<usize, Vec<u64>>,
    pub(super) pinned: BTreeMap<usize, usize>,
    pub(super) next: u64,
    pub(super) capturing: Option<Capture>,
    pub(super) graphs: HashMap<GraphHandle, Vec<Task>>,
    /// ConvolutionSupport that were asked about, and how many were made.
    pub(super) planned: HashSet<ConvolutionShape>,
    pub(super) convolved: usize,
    pub(super) allocated: usize,
    /// Why nothing is done any more.
    pub(super) broken: Option<CudaError>,
}

impl DeviceState {
    pub(super) fn new_number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

/// An address that closures carry.
#[derive(Clone, Copy)]
pub(super) struct Address(pub(super) usize);

impl Address {
    pub(super) fn pointer(self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.0)
    }
}
