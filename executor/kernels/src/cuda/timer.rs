//! Times kernels on the GPU: several in a row, captured in a graph as in a training step, between
//! two events.

use super::driver::{CudaError, DeviceAddress, Driver, EventHandle, StreamHandle};
use super::launch::CudaBackend;
use crate::{BackendError, KernelCall};
use foretell_units::Seconds;
use std::ops::Range;
use std::sync::Arc;

/// Kernels between two events: enough that the cost of the events is negligible.
const KERNELS_PER_GRAPH: usize = 16;

/// Two events on a stream, and the time between them.
#[derive(Debug)]
pub struct StreamTimer {
    driver: Arc<dyn Driver>,
    start: EventHandle,
    end: EventHandle,
}

impl StreamTimer {
    /// Creates the events.
    pub fn new(driver: &Arc<dyn Driver>) -> Result<Self, CudaError> {
        Ok(Self { driver: Arc::clone(driver), start: driver.create_event()?, end: driver.create_event()? })
    }

    /// Starts the timer behind the work that is queued on a stream.
    pub fn begin(&self, stream: StreamHandle) -> Result<(), CudaError> {
        self.driver.record(self.start, stream)
    }

    /// Stops the timer behind the work that is queued on a stream.
    pub fn end(&self, stream: StreamHandle) -> Result<(), CudaError> {
        self.driver.record(self.end, stream)
    }

    /// Waits for the end, and returns the seconds between start and end.
    pub fn seconds(&self) -> Result<f64, CudaError> {
        self.driver.synchronize_event(self.end)?;
        Ok(f64::from(self.driver.elapsed_milliseconds(self.start, self.end)?) * 1e-3)
    }
}

/// Times kernel calls on one GPU.
#[derive(Debug)]
pub struct CudaTimer {
    backend: CudaBackend,
    driver: Arc<dyn Driver>,
    timer: StreamTimer,
}

impl CudaTimer {
    /// Creates a backend and a timer on a device.
    pub fn new(driver: &Arc<dyn Driver>) -> Result<Self, CudaError> {
        let backend = CudaBackend::new(Arc::clone(driver))?;
        Ok(Self { backend, driver: Arc::clone(driver), timer: StreamTimer::new(driver)? })
    }

    /// Returns durations of a kernel, in seconds. `calls` differ in their operands and run in
    /// rotation. Measuring stops after `patience`, with a number of durations within `counts`.
    ///
    /// # Safety
    /// As for [`CudaBackend::enqueue`], for each call.
    pub unsafe fn time(
        &mut self,
        calls: &[KernelCall<'_>],
        patience: Seconds,
        counts: Range<usize>,
    ) -> Result<Vec<f64>, BackendError> {
        let Some(first) = calls.first() else { return Ok(Vec::new()) };
        self.backend.upload_hyperparameters(first.hyperparameters)?;
        // The first run loads, allocates and chooses algorithms, none of which may be captured.
        for call in calls {
            // SAFETY: the caller's promise.
            unsafe { self.backend.enqueue(call) }?;
        }
        self.backend.check_indices()?;
        let stream = self.backend.stream();
        self.driver.begin_capture(stream)?;
        let captured = calls.len().max(KERNELS_PER_GRAPH);
        let mut queued = Ok(());
        for call in calls.iter().cycle().take(captured) {
            // SAFETY: the caller's promise.
            queued = queued.and_then(|()| unsafe { self.backend.enqueue(call) });
        }
        // The capture must end even if queueing failed.
        let graph = self.driver.end_capture(stream);
        queued?;
        let graph = graph?;
        let (mut seconds, mut elapsed, mut is_warm) = (Vec::new(), 0.0, false);
        while seconds.len() < counts.start || (elapsed < patience.value() && seconds.len() < counts.end) {
            self.timer.begin(stream)?;
            // SAFETY: the memory of the captured calls is still allocated.
            unsafe { self.driver.launch_graph(graph, stream) }?;
            self.timer.end(stream)?;
            let of_graph = self.timer.seconds()?;
            elapsed += of_graph;
            if is_warm {
                seconds.push(of_graph / captured as f64);
            }
            is_warm = true;
        }
        self.backend.check_indices()?;
        self.driver.destroy_graph(graph);
        Ok(seconds)
    }

    /// Queues `count` calls, which take turns, between the timer's events.
    ///
    /// # Safety
    /// As for [`CudaBackend::enqueue`], for each call.
    pub unsafe fn enqueue_row(&mut self, calls: &[KernelCall<'_>], count: usize) -> Result<(), BackendError> {
        let Some(first) = calls.first() else { return Ok(()) };
        self.backend.upload_hyperparameters(first.hyperparameters)?;
        let stream = self.backend.stream();
        self.timer.begin(stream)?;
        for call in calls.iter().cycle().take(count) {
            // SAFETY: the caller's promise.
            unsafe { self.backend.enqueue(call) }?;
        }
        Ok(self.timer.end(stream)?)
    }

    /// Waits for the last row, and returns its duration in seconds.
    pub fn row_seconds(&self) -> Result<f64, CudaError> {
        self.timer.seconds()
    }

    /// Copies to the device, and waits until the copy is done.
    ///
    /// # Safety
    /// Both ranges are valid, and nothing else uses the device's range.
    pub unsafe fn copy_in(&self, to: DeviceAddress, from: *const u8, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.driver.copy_in(to, from, bytes, self.backend.stream()) }?;
        self.driver.synchronize(self.backend.stream())
    }
}
