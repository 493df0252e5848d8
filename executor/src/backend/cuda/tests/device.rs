//! A device for tests: its memory is the host's, its kernels run on the processor. StreamItem is done as late as the seam allows, when somebody
//! waits for it: a stream that does not wait for what it needs finds it not done. It remembers what it was told.

use super::emulator::Emulator;
use super::host_collectives::{self, HostCollectives};
use super::limited_driver::ProductSupport;
use super::reference_convolution;
use super::reference_product::multiply;
use crate::backend::cuda::driver::Convolution;
use crate::backend::cuda::driver::CudaError;
use crate::backend::cuda::driver::{Collectives, CommunicatorHandle, CommunicatorId, DeviceCommunication};
use crate::backend::cuda::driver::{
    DeviceAddress, DeviceDescription, Driver, EventHandle, GraphHandle, Launch, Product, StreamHandle,
};
use state::{Address, Capture, DeviceState, StreamItem, Task};
use std::collections::HashMap;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

mod state;

pub(crate) use state::DriverCall;

/// What becomes of convolutions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConvolutionSupport {
    /// The library makes them.
    Made,
    /// It says so, and does not when it comes to it but for so many.
    FailingAfter(usize),
    /// It refuses, or is not there.
    Refused,
}

/// What of its kernels fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InjectedFault {
    None,
    /// There is none of this name.
    Missing(&'static str),
    /// That of this name ends the device's work when it is run.
    Breaks(&'static str),
}

/// The device.
pub(crate) struct TestDevice {
    description: DeviceDescription,
    emulator: &'static Emulator,
    /// Which products it makes as the library does; others kernels must.
    makes: ProductSupport,
    /// What becomes of convolutions.
    convolutions: ConvolutionSupport,
    fault: InjectedFault,
    /// Where its ranks meet without the host, if they do.
    meeting: Option<HostCollectives>,
    state: Mutex<DeviceState>,
}

impl fmt::Debug for TestDevice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("TestDevice")
    }
}

impl TestDevice {
    /// A device whose library makes products and convolutions; none where kernels cannot be run.
    pub(crate) fn new() -> Option<Arc<Self>> {
        Self::that_makes(ProductSupport::Products)
    }

    /// A device with these products, and convolutions with all of them.
    pub(crate) fn that_makes(makes: ProductSupport) -> Option<Arc<Self>> {
        let description = DeviceDescription {
            name: "test device".into(),
            capability: (9, 0),
            multiprocessors: 4,
            memory: 1 << 30,
            shared_memory: 227 << 10,
        };
        let (emulator, state) = (Emulator::get()?, Mutex::default());
        let convolutions = if makes == ProductSupport::Products { ConvolutionSupport::Made } else { ConvolutionSupport::Refused };
        Some(Arc::new(Self { description, emulator, makes, convolutions, fault: InjectedFault::None, meeting: None, state }))
    }

    /// A device whose ranks reach each other from device to device.
    pub(crate) fn direct() -> Option<Arc<Self>> {
        let device = Arc::into_inner(Self::new()?)?;
        Some(Arc::new(Self { meeting: Some(HostCollectives::default()), ..device }))
    }

    /// The device, with a kernel that fails.
    pub(crate) fn failing(self: Arc<Self>, fault: InjectedFault) -> Option<Arc<Self>> {
        let device = Arc::into_inner(self)?;
        Some(Arc::new(Self { fault, ..device }))
    }

    /// A device that makes products, and whose library does with convolutions what is said.
    pub(crate) fn with(convolutions: ConvolutionSupport) -> Option<Arc<Self>> {
        let device = Arc::into_inner(Self::new()?)?;
        Some(Arc::new(Self { convolutions, ..device }))
    }

    /// What it was told since the last time.
    pub(crate) fn take_calls(&self) -> Vec<DriverCall> {
        std::mem::take(&mut self.lock().told)
    }

    /// Bytes of device memory that are allocated.
    pub(crate) fn allocated(&self) -> usize {
        self.lock().allocated
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, DeviceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn queue(&self, stream: StreamHandle, told: DriverCall, work: impl Fn() + Send + Sync + 'static) {
        let mut state = self.lock();
        state.told.push(told);
        let work: Task = Arc::new(work);
        match &mut state.capturing {
            Some(capture) if capture.has(stream) => {
                capture.work.push(work);
                // Whoever had waited for this stream has not waited for this.
                let others = capture.joined.iter_mut().filter(|(other, _)| **other != stream);
                others.for_each(|(_, joined)| joined.retain(|one| *one != stream));
            }
            _ => state.streams[&stream].push(StreamItem::Do(work)),
        }
    }

    /// Refuses what ends a capture in failure.
    fn forbid(&self, what: &'static str, is_part: impl Fn(&Capture) -> bool) -> Result<(), CudaError> {
        match &mut self.lock().capturing {
            Some(capture) if is_part(capture) => {
                capture.broken = Some(what);
                Err(CudaError::Call { action: "capturing a step", reason: what.into() })
            }
            _ => Ok(()),
        }
    }

    /// Whether memory of the host is what the device copies from and to by itself.
    fn is_pinned(&self, pointer: *const u8) -> bool {
        let state = self.lock();
        let before = state.pinned.range(..=pointer.addr()).next_back();
        before.is_some_and(|(start, length)| pointer.addr() < start + length.max(&1))
    }

    /// Does a stream's work until `until` says that it is enough, or there is none left. When some of it has failed, nothing is done any more on the
    /// device, and whoever waits is told so, as by the driver.
    fn advance(&self, stream: StreamHandle, until: &dyn Fn(&DeviceState) -> bool) -> Result<(), CudaError> {
        let queue = Arc::clone(&self.lock().streams[&stream]);
        loop {
            if until(&*self.unbroken()?) {
                return Ok(());
            }
            // Who does this stream's work may wait for one that we do, and what we want may be done meanwhile: so nobody blocks here.
            let Ok(_doing) = queue.doing.try_lock() else {
                std::thread::sleep(Duration::from_micros(50));
                continue;
            };
            if until(&*self.unbroken()?) {
                return Ok(());
            }
            let work = queue.work.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            match work {
                None => return Ok(()),
                Some(StreamItem::Do(work)) => {
                    // Nobody holds the device meanwhile, and nothing of it is looked at after a failure.
                    let done = std::panic::catch_unwind(AssertUnwindSafe(|| work()));
                    if done.is_err() {
                        let reason = "work of its streams panicked: see standard error".into();
                        self.lock().broken = Some(CudaError::Call { action: "running on the test device", reason });
                    }
                }
                Some(StreamItem::Record(event, times)) => self.lock().events.get_mut(&event).unwrap().2 = times,
                Some(StreamItem::Wait(event, times)) => self.until_happened(event, times)?,
            }
        }
    }

    /// What the device knows, unless it is broken.
    fn unbroken(&self) -> Result<std::sync::MutexGuard<'_, DeviceState>, CudaError> {
        let state = self.lock();
        match &state.broken {
            Some(error) => Err(error.clone()),
            None => Ok(state),
        }
    }

    fn until_happened(&self, event: EventHandle, times: u64) -> Result<(), CudaError> {
        let own = self.lock().events[&event].1;
        if let Some(stream) = own {
            self.advance(stream, &|state: &DeviceState| state.events[&event].2 >= times)?;
        }
        assert!(self.lock().events[&event].2 >= times, "an event that is waited for never happens");
        Ok(())
    }
}

impl Collectives for TestDevice {
    fn new_communicator_id(&self) -> Result<CommunicatorId, CudaError> {
        Ok(host_collectives::new_communicator_id())
    }

    fn join(&self, identity: &CommunicatorId, size: usize, position: usize) -> Result<CommunicatorHandle, CudaError> {
        self.meeting.as_ref().unwrap().join(identity, size, position)
    }

    unsafe fn communicate(
        &self,
        communicator: CommunicatorHandle,
        communication: &DeviceCommunication,
        stream: StreamHandle,
    ) -> Result<(), CudaError> {
        let (member, own) = (self.meeting.as_ref().unwrap().member(communicator), *communication);
        // SAFETY: the caller's promise.
        self.queue(stream, DriverCall::Communicate { stream }, move || unsafe { member.communicate(&own) });
        Ok(())
    }

    fn abort(&self) {
        self.meeting.iter().for_each(HostCollectives::abort);
    }

    fn is_aborted(&self) -> bool {
        self.meeting.as_ref().is_some_and(HostCollectives::is_aborted)
    }
}

impl Driver for TestDevice {
    fn device(&self) -> &DeviceDescription {
        &self.description
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceAddress, CudaError> {
        let mut state = self.lock();
        // Whoever reads what was never written gets what is no number.
        let mut memory = vec![u64::MAX; bytes.div_ceil(8) + 32];
        let start = memory.as_mut_ptr().expose_provenance();
        let aligned = start.next_multiple_of(256);
        state.memory.insert(aligned, memory);
        state.allocated += bytes;
        Ok(DeviceAddress(aligned as u64))
    }

    unsafe fn free(&self, address: DeviceAddress) {
        let mut state = self.lock();
        let memory = state.memory.remove(&(address.0 as usize));
        state.allocated -= memory.map_or(0, |memory| (memory.len() - 32) * 8).min(state.allocated);
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>, CudaError> {
        let memory: &'static mut [u64] = vec![0_u64; bytes.div_ceil(8).max(1)].leak();
        let pointer = NonNull::new(memory.as_mut_ptr().cast::<u8>()).unwrap();
        self.lock().pinned.insert(pointer.as_ptr().expose_provenance(), bytes);
        Ok(pointer)
    }

    unsafe fn free_pinned(&self, pointer: NonNull<u8>) {
        self.lock().pinned.remove(&pointer.as_ptr().addr());
    }

    fn memory(&self) -> Result<(usize, usize), CudaError> {
        let all = self.description.memory;
        Ok((all - self.allocated().min(all), all))
    }

    fn create_stream(&self) -> Result<StreamHandle, CudaError> {
        let mut state = self.lock();
        let stream = StreamHandle(state.new_number());
        state.streams.insert(stream, Arc::default());
        Ok(stream)
    }

    fn synchronize(&self, stream: StreamHandle) -> Result<(), CudaError> {
        self.lock().told.push(DriverCall::Synchronize { stream });
        self.forbid("a stream that is captured is waited for", |capture| capture.has(stream))?;
        self.advance(stream, &|_: &DeviceState| false)
    }

    fn create_event(&self) -> Result<EventHandle, CudaError> {
        let mut state = self.lock();
        let event = EventHandle(state.new_number());
        state.events.insert(event, (0, None, 0));
        Ok(event)
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<(), CudaError> {
        let mut state = self.lock();
        state.told.push(DriverCall::Record { event, stream });
        if let Some(capture) = &mut state.capturing
            && capture.has(stream)
        {
            let before = capture.joined[&stream].clone();
            capture.events.insert(event, before);
            return Ok(());
        }
        let known = state.events.get_mut(&event).unwrap();
        (known.0, known.1) = (known.0 + 1, Some(stream));
        let times = known.0;
        state.streams[&stream].push(StreamItem::Record(event, times));
        Ok(())
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), CudaError> {
        let mut state = self.lock();
        state.told.push(DriverCall::Wait { event, stream });
        if let Some(capture) = &mut state.capturing {
            if let Some(before) = capture.events.get(&event).cloned() {
                if !capture.has(stream) {
                    capture.streams.push(stream);
                }
                let joined = capture.joined.entry(stream).or_insert_with(|| vec![stream]);
                joined.extend(before);
                return Ok(());
            }
            if capture.has(stream) {
                capture.broken = Some("a captured stream waits for an event outside");
                return Err(CudaError::Call { action: "capturing a step", reason: "an event outside is waited for".into() });
            }
        }
        let times = state.events[&event].0;
        // An event that was never recorded holds nobody up.
        if times > 0 {
            state.streams[&stream].push(StreamItem::Wait(event, times));
        }
        Ok(())
    }

    fn synchronize_event(&self, event: EventHandle) -> Result<(), CudaError> {
        self.forbid("an event that is captured is waited for", |capture| capture.events.contains_key(&event))?;
        let times = self.lock().events[&event].0;
        self.until_happened(event, times)
    }

    fn elapsed_milliseconds(&self, start: EventHandle, end: EventHandle) -> Result<f32, CudaError> {
        let state = self.lock();
        for event in [start, end] {
            let (recorded, _, happened) = state.events[&event];
            assert!(recorded > 0 && recorded == happened, "an event that has not happened is timed");
        }
        Ok(0.001)
    }

    unsafe fn launch(&self, launch: &Launch, stream: StreamHandle) -> Result<(), CudaError> {
        // The driver looks a kernel up before it queues it.
        if self.fault == InjectedFault::Missing(launch.function) || !self.emulator.has(launch) {
            let reason = format!("there is no kernel `{}`", launch.function);
            return Err(CudaError::Call { action: "looking up a kernel", reason });
        }
        let (emulator, own, breaks) = (self.emulator, launch.clone(), self.fault == InjectedFault::Breaks(launch.function));
        let told = DriverCall::Launch { function: launch.function, grid: launch.grid, stream };
        self.queue(stream, told, move || {
            assert!(!breaks, "`{}` was told to fail", own.function);
            emulator.run(&own);
        });
        Ok(())
    }

    unsafe fn multiply(&self, product: &Product, stream: StreamHandle) -> Result<(), CudaError> {
        let Product { rows, columns, contracted, .. } = *product;
        if !self.makes.allows(product) {
            return Err(CudaError::ProductNotSupported { rows, columns, contracted });
        }
        let own = *product;
        // SAFETY: the caller's promise.
        self.queue(stream, DriverCall::Multiply { product: own, stream }, move || unsafe { multiply(&own) });
        Ok(())
    }

    fn plan_convolution(&self, convolution: &Convolution) -> Result<usize, CudaError> {
        let shape = convolution.shape();
        if self.convolutions == ConvolutionSupport::Refused {
            return Err(CudaError::ConvolutionNotSupported { reason: "it was told to refuse".into() });
        }
        let is_new = self.lock().planned.insert(shape);
        if is_new {
            self.lock().told.push(DriverCall::PlanConvolution { shape });
            self.forbid("a convolution is planned while work is captured", |_| true)?;
        }
        Ok(reference_convolution::WORKSPACE)
    }

    unsafe fn convolve(
        &self,
        convolution: &Convolution,
        workspace: DeviceAddress,
        stream: StreamHandle,
    ) -> Result<(), CudaError> {
        assert!(self.lock().planned.contains(&convolution.shape()), "a convolution was not planned: {convolution:?}");
        let made = self.lock().convolved;
        if matches!(self.convolutions, ConvolutionSupport::FailingAfter(most) if made >= most) {
            return Err(CudaError::ConvolutionNotSupported { reason: "it was told to fail".into() });
        }
        self.lock().convolved += 1;
        let own = *convolution;
        // SAFETY: the caller's promise.
        self.queue(stream, DriverCall::Convolve { convolution: own, workspace, stream }, move || unsafe {
            reference_convolution::convolve(&own, workspace);
        });
        Ok(())
    }

    unsafe fn copy_in(&self, to: DeviceAddress, from: *const u8, bytes: usize, stream: StreamHandle) -> Result<(), CudaError> {
        let is_pinned = self.is_pinned(from);
        if !is_pinned {
            self.forbid("memory that is not pinned is copied", |capture| capture.has(stream))?;
        }
        let (to, told) = (Address(to.0 as usize), DriverCall::CopyIn { bytes, stream });
        if is_pinned {
            let from = Address(from.expose_provenance());
            // SAFETY: the caller's promise.
            self.queue(stream, told, move || unsafe { std::ptr::copy_nonoverlapping(from.pointer(), to.pointer(), bytes) });
        } else {
            // SAFETY: the caller's promise.
            let copy = unsafe { std::slice::from_raw_parts(from, bytes) }.to_vec();
            // SAFETY: as above.
            self.queue(stream, told, move || unsafe { std::ptr::copy_nonoverlapping(copy.as_ptr(), to.pointer(), bytes) });
        }
        Ok(())
    }

    unsafe fn copy_out(&self, to: *mut u8, from: DeviceAddress, bytes: usize, stream: StreamHandle) -> Result<(), CudaError> {
        if !self.is_pinned(to) {
            self.forbid("memory that is not pinned is copied to", |capture| capture.has(stream))?;
        }
        let (to, from) = (Address(to.expose_provenance()), Address(from.0 as usize));
        // SAFETY: the caller's promise.
        let work = move || unsafe { std::ptr::copy_nonoverlapping(from.pointer(), to.pointer(), bytes) };
        self.queue(stream, DriverCall::CopyOut { bytes, stream }, work);
        Ok(())
    }

    unsafe fn clear(&self, to: DeviceAddress, bytes: usize, stream: StreamHandle) -> Result<(), CudaError> {
        let to = Address(to.0 as usize);
        // SAFETY: the caller's promise.
        self.queue(stream, DriverCall::Clear { bytes, stream }, move || unsafe { to.pointer().write_bytes(0, bytes) });
        Ok(())
    }

    fn begin_capture(&self, stream: StreamHandle) -> Result<(), CudaError> {
        let joined = HashMap::from([(stream, vec![stream])]);
        let (work, events) = (Vec::new(), HashMap::new());
        self.lock().capturing = Some(Capture { streams: vec![stream], work, events, joined, broken: None });
        Ok(())
    }

    fn end_capture(&self, stream: StreamHandle) -> Result<GraphHandle, CudaError> {
        let mut state = self.lock();
        state.told.push(DriverCall::Captured);
        let Capture { streams, work, joined, broken, .. } = state.capturing.take().unwrap();
        let is_whole = streams.iter().all(|one| joined[&stream].contains(one));
        if let Some(reason) = broken.or((!is_whole).then_some("a stream that came in was not joined")) {
            return Err(CudaError::Call { action: "capturing a step", reason: reason.into() });
        }
        let graph = GraphHandle(state.new_number());
        state.graphs.insert(graph, work);
        Ok(graph)
    }

    fn destroy_graph(&self, graph: GraphHandle) {
        self.lock().graphs.remove(&graph);
    }

    fn collectives(&self) -> Option<&dyn Collectives> {
        self.meeting.as_ref().map(|_| self as &dyn Collectives)
    }

    unsafe fn launch_graph(&self, graph: GraphHandle, stream: StreamHandle) -> Result<(), CudaError> {
        let work = self.lock().graphs[&graph].clone();
        self.queue(stream, DriverCall::Graph { stream }, move || work.iter().for_each(|work| work()));
        Ok(())
    }
}
