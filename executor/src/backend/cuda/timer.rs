//! How long kernels take on the GPU: several in a row, captured and launched at once as in a step, between two events.

use super::driver::{DeviceAddress, Driver, EventHandle, StreamHandle};
use super::{CudaBackend, CudaError};
use crate::backend::{BackendError, KernelCall};
use foretell_units::Seconds;
use std::ops::Range;
use std::sync::Arc;

/// Kernels between two events: so many that what the events cost does not count.
const IN_A_ROW: usize = 16;

/// A time on a stream, between two events.
#[derive(Debug)]
pub(crate) struct Span {
    driver: Arc<dyn Driver>,
    start: EventHandle,
    end: EventHandle,
}

impl Span {
    pub(crate) fn new(driver: &Arc<dyn Driver>) -> Result<Self, CudaError> {
        Ok(Self { driver: Arc::clone(driver), start: driver.create_event()?, end: driver.create_event()? })
    }

    /// It begins behind the work that the stream has.
    pub(crate) fn begin(&self, stream: StreamHandle) -> Result<(), CudaError> {
        self.driver.record(self.start, stream)
    }

    /// It ends behind the work that the stream has.
    pub(crate) fn end(&self, stream: StreamHandle) -> Result<(), CudaError> {
        self.driver.record(self.end, stream)
    }

    /// What it took, once it has ended.
    pub(crate) fn seconds(&self) -> Result<f64, CudaError> {
        self.driver.finish(self.end)?;
        Ok(f64::from(self.driver.milliseconds(self.start, self.end)?) * 1e-3)
    }
}

/// Times calls of kernels on one GPU.
#[derive(Debug)]
pub(crate) struct CudaTimer {
    backend: CudaBackend,
    driver: Arc<dyn Driver>,
    span: Span,
}

impl CudaTimer {
    pub(crate) fn new(driver: &Arc<dyn Driver>) -> Result<Self, CudaError> {
        let backend = CudaBackend::new(Arc::clone(driver))?;
        Ok(Self { backend, driver: Arc::clone(driver), span: Span::new(driver)? })
    }

    /// Durations of a kernel, whose calls differ in their operands and take turns: within `patience`, and at least and at most as many as
    /// `counts` says.
    ///
    /// # Safety
    /// As for [`CudaBackend::enqueue`], of each call.
    pub(crate) unsafe fn time(
        &mut self,
        calls: &[KernelCall<'_>],
        patience: Seconds,
        counts: Range<usize>,
    ) -> Result<Vec<f64>, BackendError> {
        let Some(first) = calls.first() else { return Ok(Vec::new()) };
        self.backend.tell(first.hyperparameters)?;
        // What is loaded, allocated and chosen at the first time is not captured.
        for call in calls {
            // SAFETY: the caller's promise.
            unsafe { self.backend.enqueue(call) }?;
        }
        self.backend.check()?;
        let stream = self.backend.stream();
        self.driver.begin_capture(stream)?;
        let rounds = calls.len().max(IN_A_ROW);
        let mut queued = Ok(());
        for call in calls.iter().cycle().take(rounds) {
            // SAFETY: the caller's promise.
            queued = queued.and_then(|()| unsafe { self.backend.enqueue(call) });
        }
        // The capture ends whatever became of it.
        let graph = self.driver.end_capture(stream);
        queued?;
        let graph = graph?;
        let (mut seconds, mut spent, mut is_warm) = (Vec::new(), 0.0, false);
        while seconds.len() < counts.start || (spent < patience.value() && seconds.len() < counts.end) {
            self.span.begin(stream)?;
            // SAFETY: what was captured is still there.
            unsafe { self.driver.run_graph(graph, stream) }?;
            self.span.end(stream)?;
            let all = self.span.seconds()?;
            spent += all;
            if is_warm {
                seconds.push(all / rounds as f64);
            }
            is_warm = true;
        }
        self.backend.check()?;
        self.driver.forget_graph(graph);
        Ok(seconds)
    }

    /// Queues so many calls, which take turns, between two events.
    ///
    /// # Safety
    /// As for [`CudaBackend::enqueue`], of each call.
    pub(crate) unsafe fn queue_row(&mut self, calls: &[KernelCall<'_>], count: usize) -> Result<(), BackendError> {
        let Some(first) = calls.first() else { return Ok(()) };
        self.backend.tell(first.hyperparameters)?;
        let stream = self.backend.stream();
        self.span.begin(stream)?;
        for call in calls.iter().cycle().take(count) {
            // SAFETY: the caller's promise.
            unsafe { self.backend.enqueue(call) }?;
        }
        Ok(self.span.end(stream)?)
    }

    /// What the last row took, once it is done.
    pub(crate) fn row_seconds(&self) -> Result<f64, CudaError> {
        self.span.seconds()
    }

    /// Copies to the device, and waits until it is done.
    ///
    /// # Safety
    /// Both are valid over the length, and nobody else uses the device's.
    pub(crate) unsafe fn copy_in(&self, to: DeviceAddress, from: *const u8, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.driver.copy_in(to, from, bytes, self.backend.stream()) }?;
        self.driver.synchronize(self.backend.stream())
    }
}
