//! The test device as an implementation of the seam.

use super::state::{Address, Capture, EventState, StreamItem};
use super::{ConvolutionSupport, DeviceState, DriverCall, InjectedFault, TestDevice};
use crate::cuda::driver::{
    Collectives, Convolution, CudaError, DeviceAddress, DeviceDescription, Driver, EventHandle, GraphHandle, Launch, Product,
    StreamHandle,
};
use crate::cuda::tests::{reference_convolution, reference_product};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;

impl Driver for TestDevice {
    fn device(&self) -> &DeviceDescription {
        &self.description
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceAddress, CudaError> {
        let mut state = self.lock();
        let address = state.memory.allocate(bytes);
        state.allocated += bytes;
        Ok(DeviceAddress(address as u64))
    }

    unsafe fn free(&self, address: DeviceAddress) {
        let mut state = self.lock();
        let bytes = state.memory.free(address.0 as usize);
        state.allocated -= bytes;
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
        let stream = StreamHandle(state.new_handle());
        state.streams.insert(stream, Arc::default());
        Ok(stream)
    }

    fn synchronize(&self, stream: StreamHandle) -> Result<(), CudaError> {
        self.lock().calls.push(DriverCall::Synchronize { stream });
        self.forbid("a captured stream is waited for", |capture| capture.has(stream))?;
        self.advance(stream, &|_: &DeviceState| false)
    }

    fn create_event(&self) -> Result<EventHandle, CudaError> {
        let mut state = self.lock();
        let event = EventHandle(state.new_handle());
        state.events.insert(event, EventState::default());
        Ok(event)
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<(), CudaError> {
        let mut state = self.lock();
        state.calls.push(DriverCall::Record { event, stream });
        if let Some(capture) = &mut state.capturing
            && capture.has(stream)
        {
            let preceding = capture.joined[&stream].clone();
            capture.events.insert(event, preceding);
            return Ok(());
        }
        let known = state.events.get_mut(&event).unwrap();
        (known.recorded, known.stream) = (known.recorded + 1, Some(stream));
        let times = known.recorded;
        state.streams[&stream].push(StreamItem::Record(event, times));
        Ok(())
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), CudaError> {
        let mut state = self.lock();
        state.calls.push(DriverCall::Wait { event, stream });
        if let Some(capture) = &mut state.capturing {
            if let Some(preceding) = capture.events.get(&event).cloned() {
                if !capture.has(stream) {
                    capture.streams.push(stream);
                }
                let joined = capture.joined.entry(stream).or_insert_with(|| vec![stream]);
                joined.extend(preceding);
                return Ok(());
            }
            if capture.has(stream) {
                capture.broken = Some("a captured stream waits for an event outside the capture");
                return Err(CudaError::Call {
                    action: "capturing a step",
                    reason: "an event outside the capture is waited for".into(),
                });
            }
        }
        let times = state.events[&event].recorded;
        // Waiting for an event that was never recorded has no effect.
        if times > 0 {
            state.streams[&stream].push(StreamItem::Wait(event, times));
        }
        Ok(())
    }

    fn synchronize_event(&self, event: EventHandle) -> Result<(), CudaError> {
        self.forbid("a captured event is waited for", |capture| capture.events.contains_key(&event))?;
        let times = self.lock().events[&event].recorded;
        self.wait_until_happened(event, times)
    }

    fn elapsed_milliseconds(&self, start: EventHandle, end: EventHandle) -> Result<f32, CudaError> {
        let state = self.lock();
        for event in [start, end] {
            let EventState { recorded, happened, .. } = state.events[&event];
            assert!(recorded > 0 && recorded == happened, "an event is timed that has not happened");
        }
        Ok(0.001)
    }

    unsafe fn launch(&self, launch: &Launch, stream: StreamHandle) -> Result<(), CudaError> {
        // The driver looks up a kernel before it queues it.
        if self.fault == InjectedFault::Missing(launch.function) || !self.emulator.has(launch) {
            let reason = format!("there is no kernel `{}`", launch.function);
            return Err(CudaError::Call { action: "looking up a kernel", reason });
        }
        let (emulator, own, breaks) = (self.emulator, launch.clone(), self.fault == InjectedFault::Breaks(launch.function));
        let call = DriverCall::Launch { function: launch.function, grid: launch.grid, stream };
        self.queue(stream, call, move || {
            assert!(!breaks, "`{}` fails on purpose", own.function);
            emulator.run(&own);
        });
        Ok(())
    }

    unsafe fn multiply(&self, product: &Product, stream: StreamHandle) -> Result<(), CudaError> {
        let Product { rows, columns, contracted, .. } = *product;
        if !self.products.allows(product) {
            return Err(CudaError::ProductNotSupported { rows, columns, contracted });
        }
        let (own, arithmetic) = (*product, self.arithmetic);
        // SAFETY: the caller's promise.
        let work = move || unsafe { reference_product::multiply(&own, arithmetic) };
        self.queue(stream, DriverCall::Multiply { product: own, stream }, work);
        Ok(())
    }

    fn plan_convolution(&self, convolution: &Convolution) -> Result<usize, CudaError> {
        let shape = convolution.shape();
        if self.convolutions == ConvolutionSupport::None {
            return Err(CudaError::ConvolutionNotSupported { reason: "it refuses on purpose".into() });
        }
        let is_new = self.lock().planned.insert(shape);
        if is_new {
            self.lock().calls.push(DriverCall::PlanConvolution { shape });
            self.forbid("a convolution is planned during capture", |_| true)?;
        }
        Ok(reference_convolution::WORKSPACE)
    }

    unsafe fn convolve(
        &self,
        convolution: &Convolution,
        workspace: DeviceAddress,
        stream: StreamHandle,
    ) -> Result<(), CudaError> {
        assert!(self.lock().planned.contains(&convolution.shape()), "the convolution was not planned: {convolution:?}");
        let count = self.lock().convolved;
        if matches!(self.convolutions, ConvolutionSupport::FailingAfter(limit) if count >= limit) {
            return Err(CudaError::ConvolutionNotSupported { reason: "it fails on purpose".into() });
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
            self.forbid("pageable memory is copied", |capture| capture.has(stream))?;
        }
        let (to, call) = (Address(to.0 as usize), DriverCall::CopyIn { bytes, stream });
        if is_pinned {
            let from = Address(from.expose_provenance());
            // SAFETY: the caller's promise.
            self.queue(stream, call, move || unsafe { std::ptr::copy_nonoverlapping(from.pointer(), to.pointer(), bytes) });
        } else {
            // SAFETY: the caller's promise.
            let copy = unsafe { std::slice::from_raw_parts(from, bytes) }.to_vec();
            // SAFETY: as above.
            self.queue(stream, call, move || unsafe { std::ptr::copy_nonoverlapping(copy.as_ptr(), to.pointer(), bytes) });
        }
        Ok(())
    }

    unsafe fn copy_out(&self, to: *mut u8, from: DeviceAddress, bytes: usize, stream: StreamHandle) -> Result<(), CudaError> {
        if !self.is_pinned(to) {
            self.forbid("pageable memory is copied to", |capture| capture.has(stream))?;
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
        state.calls.push(DriverCall::Captured);
        let Capture { streams, work, joined, broken, .. } = state.capturing.take().unwrap();
        let is_complete = streams.iter().all(|waiting| joined[&stream].contains(waiting));
        if let Some(reason) = broken.or((!is_complete).then_some("a stream that joined the capture was not waited for")) {
            return Err(CudaError::Call { action: "capturing a step", reason: reason.into() });
        }
        let graph = GraphHandle(state.new_handle());
        state.graphs.insert(graph, work);
        Ok(graph)
    }

    fn destroy_graph(&self, graph: GraphHandle) {
        self.lock().graphs.remove(&graph);
    }

    fn collectives(&self) -> Option<&dyn Collectives> {
        self.collectives.as_ref().map(|_| self as &dyn Collectives)
    }

    unsafe fn launch_graph(&self, graph: GraphHandle, stream: StreamHandle) -> Result<(), CudaError> {
        let work = self.lock().graphs[&graph].clone();
        self.queue(stream, DriverCall::Graph { stream }, move || work.iter().for_each(|work| work()));
        Ok(())
    }
}
