//! Times kernels on a GPU, each by itself.
//!
//! A kernel cycles through several sets of operands, which spread over about as many bytes as a
//! step touches. With one set it would find its operands in the cache.

use super::statistics::Durations;
use super::{LEARNING_RATE, MAX_DURATIONS, MIN_DURATIONS, kernel_error};
use crate::arena::{Arena, Arenas};
use crate::backend::cuda::{CudaTimer, DeviceAddress, Driver};
use crate::backend::{Hyperparameters, KernelCall, Operand, operand_bytes};
use crate::clock;
use crate::error::ExecutorError;
use crate::fp8::nearest;
use crate::half::SixteenBits;
use crate::job::CalibrationJob;
use foretell_models::{EightBits, Kernel, KernelOperand};
use foretell_units::{Bytes, DataType, Seconds};
use std::sync::Arc;

/// The most operand sets of a kernel.
const MAX_SETS: u64 = 64;
/// The most bytes that a kernel's operands are spread over: more than the tens of megabytes of a
/// GPU's second-level cache.
const MAX_FOOTPRINT: u64 = 256 << 20;
/// An operand repeats its contents after this many bytes, which are generated once.
const PATTERN_BYTES: usize = 4 << 20;
/// The step from the operand position of one call to that of the next: a prime above `MAX_SETS`, so
/// that calls cycle through all positions.
const STRIDE: usize = 67;
/// The alignment of operands in the arena.
const ALIGNMENT: u64 = 256;

/// Times kernels on operands of its own.
pub(super) struct GpuKernelTimer {
    timer: CudaTimer,
    arena: Arena,
    /// The bytes that a kernel's operands are spread over.
    footprint: u64,
    precision: DataType,
}

/// The calls of one kernel, which can be queued several at a time.
pub(super) struct RepeatedKernel<'a> {
    timer: &'a mut CudaTimer,
    kernel: &'a Kernel,
    calls: &'a [KernelCall<'a>],
}

impl RepeatedKernel<'_> {
    /// Queues `count` calls in a row.
    pub(super) fn enqueue(&mut self, count: usize) -> Result<(), ExecutorError> {
        // SAFETY: operands are disjoint ranges of the timer's arena, except where the kernel may
        // work in place.
        unsafe { self.timer.enqueue_row(self.calls, count) }.map_err(|source| kernel_error(self.kernel, source))
    }

    /// Waits for the last row and returns its duration, in seconds.
    pub(super) fn seconds(&self) -> Result<f64, ExecutorError> {
        Ok(self.timer.row_seconds()?)
    }
}

/// The reads and writes of each call.
type OperandSets = Vec<(Vec<Operand>, Vec<Operand>)>;

/// Hyperparameters with which optimizers do all of their work but hardly change the parameters.
fn hyperparameters() -> Hyperparameters {
    Hyperparameters { learning_rate: LEARNING_RATE, momentum: 0.9, ..Hyperparameters::default() }
}

/// A call of a kernel for each operand set.
fn calls<'a>(
    kernel: &'a Kernel,
    sets: &'a OperandSets,
    hyperparameters: &'a Hyperparameters,
    accumulate: bool,
    precision: DataType,
) -> Vec<KernelCall<'a>> {
    let call = |(reads, writes): &'a (Vec<Operand>, Vec<Operand>)| KernelCall {
        kernel,
        reads,
        writes,
        accumulate,
        hyperparameters,
        group_index: 0,
        samples_before: 0,
        precision,
    };
    sets.iter().map(call).collect()
}

impl GpuKernelTimer {
    /// Allocates memory for the kernels of a job.
    pub(super) fn new(driver: &Arc<dyn Driver>, job: &CalibrationJob) -> Result<Self, ExecutorError> {
        let largest = job.kernels.iter().map(|(kernel, _)| set_bytes(kernel, job.precision)).max().unwrap_or(0);
        let footprint = job.footprint.count().min(MAX_FOOTPRINT);
        let arena = Arenas::new(Bytes::new(largest.max(footprint) + largest), Bytes::ZERO, Some(driver))?.device;
        Ok(Self { timer: CudaTimer::new(driver)?, arena, footprint, precision: job.precision })
    }

    /// Times a kernel for about `time`, on operands at these reuse distances, reads before writes.
    pub(super) fn time(
        &mut self,
        kernel: &Kernel,
        accumulate: bool,
        reuse_distances: &[Bytes],
        time: Seconds,
    ) -> Result<Durations, ExecutorError> {
        let sets = self.operand_sets(kernel, reuse_distances)?;
        let hyperparameters = hyperparameters();
        let calls = calls(kernel, &sets, &hyperparameters, accumulate, self.precision);
        let started = clock::now();
        // SAFETY: operands are disjoint ranges of the arena, except where the kernel may work in
        // place.
        let seconds = unsafe { self.timer.time(&calls, time, MIN_DURATIONS..MAX_DURATIONS) }
            .map_err(|source| kernel_error(kernel, source))?;
        Ok(Durations { seconds, elapsed: (clock::now() - started) as f64 * 1e-9 })
    }

    /// Calls `body` with calls of a kernel that cycle through operand sets.
    pub(super) fn with_repeated<T>(
        &mut self,
        kernel: &Kernel,
        accumulate: bool,
        body: impl FnOnce(&mut RepeatedKernel<'_>) -> Result<T, ExecutorError>,
    ) -> Result<T, ExecutorError> {
        let sets = self.operand_sets(kernel, &[])?;
        let hyperparameters = hyperparameters();
        let calls = calls(kernel, &sets, &hyperparameters, accumulate, self.precision);
        body(&mut RepeatedKernel { timer: &mut self.timer, kernel, calls: &calls })
    }

    /// Chooses positions for a kernel's operands and fills them. Each operand gets as many
    /// positions as it takes to touch its reuse distance before a position is used again. An
    /// operand without a reuse distance gets as many as fit the footprint.
    fn operand_sets(&mut self, kernel: &Kernel, reuse_distances: &[Bytes]) -> Result<OperandSets, ExecutorError> {
        let spec = kernel.spec();
        let bytes_per_set = set_bytes(kernel, self.precision).max(1);
        let max_sets = (self.footprint / bytes_per_set).clamp(1, MAX_SETS);
        let mut offset = 0;
        let mut places = |index: usize, described: &KernelOperand| {
            let (size, data_type) = (described.bytes(self.precision), described.data_type(self.precision));
            let limit = Some(described.index_limit).filter(|&limit| limit > 0);
            let sets_apart = |distance: &Bytes| (distance.count() / bytes_per_set).clamp(1, max_sets);
            let count = reuse_distances.get(index).map_or(max_sets, sets_apart);
            let mut place = || {
                let start = offset;
                offset += size.count().next_multiple_of(ALIGNMENT);
                let pointer = self.arena.at(Bytes::new(start), size).expect("invariant: the arena holds all sets");
                let operand = Operand { pointer, bytes: size.count() as usize };
                fill_on_device(&self.timer, &operand, data_type, limit)?;
                Ok(operand)
            };
            (0..count).map(|_| place()).collect::<Result<Vec<Operand>, ExecutorError>>()
        };
        let reads: Vec<Vec<Operand>> =
            spec.reads().enumerate().map(|(index, read)| places(index, read)).collect::<Result<_, _>>()?;
        let writes = spec.writes(self.precision).enumerate();
        let mut writes: Vec<Vec<Operand>> =
            writes.map(|(index, write)| places(reads.len() + index, write)).collect::<Result<_, _>>()?;
        if let (Some(index), Some(write)) = (foretell_program::in_place_input(kernel), writes.first_mut()) {
            write.clone_from(&reads[index]);
        }
        let sets = reads.iter().chain(&writes).map(Vec::len).max().unwrap_or(1);
        // Not in address order, which the hardware would prefetch.
        let place_of = |set: usize, places: &Vec<Operand>| places[set.wrapping_mul(STRIDE) % places.len()];
        let operands = |set: usize, side: &[Vec<Operand>]| side.iter().map(|places| place_of(set, places)).collect();
        Ok((0..sets).map(|set| (operands(set, &reads), operands(set, &writes))).collect())
    }
}

/// The bytes of one operand set of a kernel, with alignment.
fn set_bytes(kernel: &Kernel, precision: DataType) -> u64 {
    let bytes = operand_bytes(kernel, precision);
    bytes.reads.iter().chain(&bytes.writes).map(|size| size.count().next_multiple_of(ALIGNMENT)).sum()
}

/// Fills an operand in GPU memory with the pattern of [`fill`], repeated.
fn fill_on_device(timer: &CudaTimer, operand: &Operand, data_type: DataType, limit: Option<usize>) -> Result<(), ExecutorError> {
    // Repetition does not change a kernel's duration, and the host generates numbers slowly.
    let length = operand.bytes.min(PATTERN_BYTES);
    let mut pattern = vec![0_u32; length.div_ceil(4)];
    fill(&Operand { pointer: pattern.as_mut_ptr().cast(), bytes: length }, data_type, limit);
    for start in (0..operand.bytes).step_by(PATTERN_BYTES) {
        let place = DeviceAddress::from_pointer(operand.pointer).offset(start);
        // SAFETY: the range lies in the operand, and the pattern is as long.
        unsafe { timer.copy_in(place, pattern.as_ptr().cast(), length.min(operand.bytes - start)) }?;
    }
    Ok(())
}

/// Fills an operand in host memory: with numbers between 0 and 1, or with integers below `limit`.
fn fill(operand: &Operand, data_type: DataType, limit: Option<usize>) {
    // Weyl's sequence: evenly distributed, and the same in every run.
    let weyl = |index: usize| (index as u32).wrapping_mul(2_654_435_769);
    let number = |index: usize| weyl(index) as f32 / u32::MAX as f32;
    let half = SixteenBits::of(data_type);
    for index in 0..operand.bytes / data_type.size().count() as usize {
        if data_type == DataType::Fp8 {
            // These codes are finite numbers in both fp8 formats.
            let code = nearest(EightBits::E4M3, number(index));
            // SAFETY: `index` is below the operand's length.
            unsafe { operand.pointer.add(index).write(code) };
            continue;
        }
        if let Some(half) = half {
            // SAFETY: the operand is aligned, and `index` is below its length.
            unsafe { operand.pointer.cast::<u16>().add(index).write(half.nearest(number(index))) };
            continue;
        }
        let bits = match limit {
            Some(limit) => ((u64::from(weyl(index)) * limit as u64) >> 32) as u32,
            None => number(index).to_bits(),
        };
        // SAFETY: as above.
        unsafe { operand.pointer.cast::<u32>().add(index).write(bits) };
    }
}
