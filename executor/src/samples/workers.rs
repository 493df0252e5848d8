//! Threads that prepare a rank's samples ahead of its steps.
//!
//! Samples are prepared in the order in which they were asked for, and each depends on the data,
//! the epoch and its index alone. So the number of workers affects when a sample is ready, and
//! never its content. Workers leave cores to the ranks' kernels: their priority is lower, and they
//! may run on all cores of the machine, not only on the rank's own.

use crate::data::{DataError, Dataset, Split};
use crate::error::ExecutorError;
use crate::machine;
use std::collections::VecDeque;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;

/// The values of one sample.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) values: Vec<f32>,
    /// Whether another sample was used instead.
    pub(super) is_replaced: bool,
}

/// A sample of a batch.
#[derive(Debug)]
struct Slot {
    /// The position in the batch.
    position: usize,
    /// The index in the split.
    index: usize,
    value: OnceLock<Result<Ready, DataError>>,
}

/// Samples of a batch that workers prepare. They stay until the batch is dropped.
#[derive(Debug)]
pub(super) struct Prepared {
    dataset: Arc<Dataset>,
    split: Split,
    epoch: u64,
    /// Ascending by position.
    slots: Vec<Slot>,
    /// Woken whenever a sample is ready.
    lock: Mutex<()>,
    is_ready: Condvar,
    pool: Arc<Shared>,
}

impl Prepared {
    /// Waits for the sample at a position of the batch; `None` if it is not prepared here.
    pub(super) fn get(&self, position: usize) -> Option<Result<&Ready, DataError>> {
        let value = &self.slots.get(self.slot_at(position)?)?.value;
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(value) = value.get() {
                return Some(value.as_ref().map_err(Clone::clone));
            }
            guard = self.is_ready.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The slot of a position.
    fn slot_at(&self, position: usize) -> Option<usize> {
        self.slots.binary_search_by_key(&position, |slot| slot.position).ok()
    }

    fn prepare(&self, slot: usize) {
        let Some(Slot { index, value, .. }) = self.slots.get(slot) else { return };
        let mut values = self.pool.buffer(self.dataset.sample_size());
        let fill = || self.dataset.fill_images(self.split, self.epoch, &[*index], &mut values);
        // A decoder that panics must not leave the rank waiting.
        let filled = panic::catch_unwind(AssertUnwindSafe(fill)).unwrap_or_else(|_| {
            let name = self.dataset.sample_name(self.split, *index);
            Err(DataError::malformed(&name, "made a worker fail; its log says how", "replace or remove it"))
        });
        let ready = filled.map(|replaced| Ready { values, is_replaced: !replaced.is_empty() });
        // Only one task prepares a slot, so it is empty.
        let _ = value.set(ready);
        let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_ready.notify_all();
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        let values = self.slots.drain(..).filter_map(|slot| slot.value.into_inner()?.ok()).map(|ready| ready.values);
        self.pool.buffers.lock().unwrap_or_else(PoisonError::into_inner).extend(values);
    }
}

/// The tasks of all workers of a rank.
#[derive(Debug, Default)]
struct Shared {
    tasks: Mutex<Tasks>,
    has_tasks: Condvar,
    /// Buffers of samples that were used. New memory costs a page fault for every 4 KiB.
    buffers: Mutex<Vec<Vec<f32>>>,
}

#[derive(Debug, Default)]
struct Tasks {
    queue: VecDeque<(Arc<Prepared>, usize)>,
    has_ended: bool,
}

impl Shared {
    fn buffer(&self, length: usize) -> Vec<f32> {
        let mut buffer = self.buffers.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        buffer.resize(length, 0.0);
        buffer
    }

    fn work(&self) {
        loop {
            let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
            let (batch, slot) = loop {
                if tasks.has_ended {
                    return;
                }
                match tasks.queue.pop_front() {
                    Some(task) => break task,
                    None => tasks = self.has_tasks.wait(tasks).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(tasks);
            batch.prepare(slot);
        }
    }
}

/// The workers of one rank. Dropping it ends them; samples that are not ready by then never are.
#[derive(Debug)]
pub(crate) struct WorkerPool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl WorkerPool {
    /// Starts `count` workers that may run on the logical CPUs `cpus`.
    ///
    /// # Errors
    /// [`ExecutorError::System`] if a thread cannot be started.
    pub(crate) fn start(count: usize, cpus: &[usize]) -> Result<Self, ExecutorError> {
        let mut pool = WorkerPool { shared: Arc::default(), threads: Vec::new() };
        for number in 0..count {
            let (shared, cpus) = (Arc::clone(&pool.shared), cpus.to_vec());
            let work = move || {
                machine::run_in_background(&cpus);
                shared.work();
            };
            let thread = std::thread::Builder::new().name(format!("worker {number}")).spawn(work);
            pool.threads.push(thread.map_err(|error| ExecutorError::system("start a thread that prepares samples", error))?);
        }
        Ok(pool)
    }

    /// Has the samples at some positions of a batch prepared, in this order.
    pub(super) fn prepare(
        &self,
        dataset: &Arc<Dataset>,
        split: Split,
        epoch: u64,
        samples: impl Iterator<Item = (usize, usize)>,
    ) -> Arc<Prepared> {
        let order: Vec<(usize, usize)> = samples.collect();
        let slot = |&(position, index): &(usize, usize)| Slot { position, index, value: OnceLock::new() };
        let mut slots: Vec<Slot> = order.iter().map(slot).collect();
        slots.sort_by_key(|slot| slot.position);
        slots.dedup_by_key(|slot| slot.position);
        let (dataset, pool) = (Arc::clone(dataset), Arc::clone(&self.shared));
        let batch = Arc::new(Prepared { dataset, split, epoch, slots, lock: Mutex::new(()), is_ready: Condvar::new(), pool });
        let mut tasks = self.shared.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        for (position, _) in order {
            if let Some(slot) = batch.slot_at(position) {
                tasks.queue.push_back((Arc::clone(&batch), slot));
            }
        }
        self.shared.has_tasks.notify_all();
        batch
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        let mut tasks = self.shared.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.has_ended = true;
        // Dropped outside the lock: a batch gives its buffers back.
        let left = std::mem::take(&mut tasks.queue);
        drop(tasks);
        drop(left);
        self.shared.has_tasks.notify_all();
        for thread in self.threads.drain(..) {
            // A worker catches what panics in it.
            let _ = thread.join();
        }
    }
}
