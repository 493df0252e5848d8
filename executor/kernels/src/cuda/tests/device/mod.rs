//! A device for tests: its memory is the host's, and its kernels run on the CPU.
//!
//! Work runs as late as the seam allows: when something waits for it. A stream that does not wait
//! for its inputs therefore finds them missing. The device records the driver's calls.

mod driver;
mod state;

pub use state::DriverCall;

use super::emulator::Emulator;
use super::host_collectives::{self, HostCollectives};
use super::limited_driver::ProductSupport;
use super::reference_product::ProductArithmetic;
use crate::cuda::driver::{
    Collectives, CommunicatorHandle, CommunicatorId, CudaError, DeviceCommunication, DeviceDescription, EventHandle, StreamHandle,
};
use state::{Capture, DeviceState, StreamItem, Task};
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What the device's library does with convolutions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvolutionSupport {
    /// It computes them.
    Full,
    /// It plans them, and refuses to run more than this many.
    FailingAfter(usize),
    /// It refuses to plan them, as if it were missing.
    None,
}

/// A kernel that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedFault {
    None,
    /// The kernel of this name does not exist.
    Missing(&'static str),
    /// The kernel of this name breaks the device when it runs.
    Breaks(&'static str),
}

/// The device.
pub struct TestDevice {
    description: DeviceDescription,
    emulator: &'static Emulator,
    products: ProductSupport,
    arithmetic: ProductArithmetic,
    convolutions: ConvolutionSupport,
    fault: InjectedFault,
    /// `None` if ranks communicate through the host.
    collectives: Option<HostCollectives>,
    state: Mutex<DeviceState>,
}

impl fmt::Debug for TestDevice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("TestDevice")
    }
}

impl TestDevice {
    /// Creates a device whose library computes products and convolutions. `None` if kernels cannot
    /// run here.
    pub fn new() -> Option<Arc<Self>> {
        Self::with_products(ProductSupport::Full)
    }

    /// Creates a device whose library computes these products, and convolutions only with all of
    /// them.
    pub fn with_products(products: ProductSupport) -> Option<Arc<Self>> {
        let description = DeviceDescription {
            name: "test device".into(),
            capability: (9, 0),
            multiprocessors: 4,
            memory: 1 << 30,
            shared_memory: 227 << 10,
        };
        let (emulator, state) = (Emulator::get()?, Mutex::default());
        let convolutions = if products == ProductSupport::Full { ConvolutionSupport::Full } else { ConvolutionSupport::None };
        Some(Arc::new(Self {
            description,
            emulator,
            products,
            arithmetic: ProductArithmetic::Exact,
            convolutions,
            fault: InjectedFault::None,
            collectives: None,
            state,
        }))
    }

    /// Creates a device whose library computes products with a Hopper GPU's arithmetic.
    pub fn with_hopper_products() -> Option<Arc<Self>> {
        let device = Arc::into_inner(Self::new()?)?;
        Some(Arc::new(Self { arithmetic: ProductArithmetic::Hopper, ..device }))
    }

    /// Creates a device whose ranks communicate from device to device.
    pub fn with_collectives() -> Option<Arc<Self>> {
        let device = Arc::into_inner(Self::new()?)?;
        Some(Arc::new(Self { collectives: Some(HostCollectives::default()), ..device }))
    }

    /// Creates a device with all products and this support of convolutions.
    pub fn with_convolutions(convolutions: ConvolutionSupport) -> Option<Arc<Self>> {
        let device = Arc::into_inner(Self::new()?)?;
        Some(Arc::new(Self { convolutions, ..device }))
    }

    /// Returns the device with a kernel that fails.
    pub fn with_fault(self: Arc<Self>, fault: InjectedFault) -> Option<Arc<Self>> {
        let device = Arc::into_inner(self)?;
        Some(Arc::new(Self { fault, ..device }))
    }

    /// Returns the calls since the last time.
    pub fn take_calls(&self) -> Vec<DriverCall> {
        std::mem::take(&mut self.lock().calls)
    }

    /// Returns the bytes of device memory that are allocated.
    pub fn allocated(&self) -> usize {
        self.lock().allocated
    }

    fn lock(&self) -> MutexGuard<'_, DeviceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a call, and queues or captures its work.
    fn queue(&self, stream: StreamHandle, call: DriverCall, work: impl Fn() + Send + Sync + 'static) {
        let mut state = self.lock();
        state.calls.push(call);
        let work: Task = Arc::new(work);
        match &mut state.capturing {
            Some(capture) if capture.has(stream) => {
                capture.work.push(work);
                // Streams that had waited for this one have not waited for this work.
                let others = capture.joined.iter_mut().filter(|(other, _)| **other != stream);
                others.for_each(|(_, joined)| joined.retain(|joining| *joining != stream));
            }
            _ => state.streams[&stream].push(StreamItem::Do(work)),
        }
    }

    /// Refuses a call that would invalidate the capture that it is part of.
    fn forbid(&self, what: &'static str, is_part: impl Fn(&Capture) -> bool) -> Result<(), CudaError> {
        match &mut self.lock().capturing {
            Some(capture) if is_part(capture) => {
                capture.broken = Some(what);
                Err(CudaError::Call { action: "capturing a step", reason: what.into() })
            }
            _ => Ok(()),
        }
    }

    /// Returns `true` if host memory is pinned.
    fn is_pinned(&self, pointer: *const u8) -> bool {
        let state = self.lock();
        let preceding = state.pinned.range(..=pointer.addr()).next_back();
        preceding.is_some_and(|(start, length)| pointer.addr() < start + length.max(&1))
    }

    /// Runs a stream's work until `is_enough`, or until none is left.
    ///
    /// # Errors
    /// After some work has failed, the device does none, and every call that waits gets the error,
    /// as from the driver.
    fn advance(&self, stream: StreamHandle, is_enough: &dyn Fn(&DeviceState) -> bool) -> Result<(), CudaError> {
        let queue = Arc::clone(&self.lock().streams[&stream]);
        loop {
            if is_enough(&*self.working_state()?) {
                return Ok(());
            }
            // Another thread may run this stream, wait for a stream that we run, or finish what we
            // wait for. So this thread must not block.
            let Ok(_running) = queue.running.try_lock() else {
                std::thread::sleep(Duration::from_micros(50));
                continue;
            };
            if is_enough(&*self.working_state()?) {
                return Ok(());
            }
            let item = queue.items.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            match item {
                None => return Ok(()),
                Some(StreamItem::Do(work)) => {
                    // The device is not locked meanwhile, and its memory is not read after a
                    // failure.
                    let result = std::panic::catch_unwind(AssertUnwindSafe(|| work()));
                    if result.is_err() {
                        let reason = "work of its streams panicked: see standard error".into();
                        self.lock().broken = Some(CudaError::Call { action: "running on the test device", reason });
                    }
                }
                Some(StreamItem::Record(event, times)) => self.lock().events.get_mut(&event).unwrap().happened = times,
                Some(StreamItem::Wait(event, times)) => self.wait_until_happened(event, times)?,
            }
        }
    }

    /// Returns the state, unless the device is broken.
    fn working_state(&self) -> Result<MutexGuard<'_, DeviceState>, CudaError> {
        let state = self.lock();
        match &state.broken {
            Some(error) => Err(error.clone()),
            None => Ok(state),
        }
    }

    fn wait_until_happened(&self, event: EventHandle, times: u64) -> Result<(), CudaError> {
        let recorded_on = self.lock().events[&event].stream;
        if let Some(stream) = recorded_on {
            self.advance(stream, &|state: &DeviceState| state.events[&event].happened >= times)?;
        }
        assert!(self.lock().events[&event].happened >= times, "an event that is waited for never happens");
        Ok(())
    }
}

impl Collectives for TestDevice {
    fn new_communicator_id(&self) -> Result<CommunicatorId, CudaError> {
        Ok(host_collectives::new_id())
    }

    fn join(&self, id: &CommunicatorId, size: usize, position: usize) -> Result<CommunicatorHandle, CudaError> {
        self.collectives.as_ref().unwrap().join(id, size, position)
    }

    unsafe fn communicate(
        &self,
        communicator: CommunicatorHandle,
        communication: &DeviceCommunication,
        stream: StreamHandle,
    ) -> Result<(), CudaError> {
        let (member, own) = (self.collectives.as_ref().unwrap().member(communicator), *communication);
        // SAFETY: the caller's promise.
        self.queue(stream, DriverCall::Communicate { stream }, move || unsafe { member.communicate(&own) });
        Ok(())
    }

    fn abort(&self) {
        self.collectives.iter().for_each(HostCollectives::abort);
    }

    fn is_aborted(&self) -> bool {
        self.collectives.as_ref().is_some_and(HostCollectives::is_aborted)
    }
}
