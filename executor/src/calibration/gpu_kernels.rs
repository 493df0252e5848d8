//! How long kernels take on a GPU, one by one: on operands of their own, spread over about as many bytes as a step touches, since one that is
//! timed over and over on the same few bytes would find them in the cache.

use super::statistics::Durations;
use super::{FEWEST, LEARNING_RATE, MOST, kernel_error};
use crate::arena::{Arena, Arenas};
use crate::backend::cuda::{CudaTimer, DeviceAddress, Driver};
use crate::backend::{Hyperparameters, KernelCall, Operand, operand_bytes, operand_types};
use crate::clock;
use crate::error::ExecutorError;
use crate::fp8::nearest;
use crate::half::Half;
use crate::job::CalibrationJob;
use crate::member::Member;
use foretell_models::{EightBits, Kernel};
use foretell_units::{Bytes, DataType, Seconds};
use std::sync::Arc;

/// The most sets of operands that a kernel takes turns on.
const MOST_SETS: u64 = 64;
/// The most bytes that a kernel's operands are spread over: beyond a GPU's second-level cache of tens of megabytes.
const MOST_FOOTPRINT: u64 = 256 << 20;
/// Bytes of an operand that are made before they are repeated.
const FILLED: usize = 4 << 20;
/// How many sets further the next turn is: a prime beyond the most sets, so that all have their turn.
const STRIDE: usize = 67;

/// Times kernels on sets of operands of their own.
pub(super) struct GpuKernelTimer {
    timer: CudaTimer,
    arena: Arena,
    footprint: u64,
    precision: DataType,
}

/// KernelRows of a kernel on a GPU, one after the other.
pub(super) struct KernelRows<'a> {
    timer: &'a mut CudaTimer,
    kernel: &'a Kernel,
    calls: &'a [KernelCall<'a>],
}

impl KernelRows<'_> {
    /// GpuStreams so many.
    pub(super) fn queue(&mut self, count: usize) -> Result<(), ExecutorError> {
        // SAFETY: every operand is a place of its own in the bench's arena, but where the kernel may work in place.
        unsafe { self.timer.enqueue_row(self.calls, count) }.map_err(|source| kernel_error(self.kernel, source))
    }

    /// What the last row took, once it is done.
    pub(super) fn seconds(&self) -> Result<f64, ExecutorError> {
        Ok(self.timer.row_seconds()?)
    }
}

/// The operands of a call, set by set.
type OperandSets = Vec<(Vec<Operand>, Vec<Operand>)>;

/// Those of an optimizer that does all that it can, and learns nothing.
fn hyperparameters() -> Hyperparameters {
    Hyperparameters { learning_rate: LEARNING_RATE, momentum: 0.9, ..Hyperparameters::default() }
}

/// A call of a kernel on each of the sets.
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
    /// Nothing where this rank has no GPU.
    pub(super) fn new(member: &Member, job: &CalibrationJob) -> Result<Option<Self>, ExecutorError> {
        member.device.as_ref().map(|driver| Self::on(driver, job)).transpose()
    }

    /// On a GPU.
    pub(super) fn on(driver: &Arc<dyn Driver>, job: &CalibrationJob) -> Result<Self, ExecutorError> {
        let largest = job.kernels.iter().map(|(kernel, _)| set_bytes(kernel, job.precision)).max().unwrap_or(0);
        let footprint = job.footprint.count().min(MOST_FOOTPRINT);
        let arena = Arenas::new(Bytes::new(largest.max(footprint) + largest), Bytes::ZERO, Some(driver))?.device;
        Ok(Self { timer: CudaTimer::new(driver)?, arena, footprint, precision: job.precision })
    }

    pub(super) fn time(
        &mut self,
        kernel: &Kernel,
        accumulate: bool,
        reuse: &[Bytes],
        patience: Seconds,
    ) -> Result<Durations, ExecutorError> {
        let sets = self.operand_sets(kernel, reuse)?;
        let hyperparameters = hyperparameters();
        let calls = calls(kernel, &sets, &hyperparameters, accumulate, self.precision);
        let started = clock::now();
        // SAFETY: every operand is a place of its own in the arena, but where the kernel may work in place.
        let seconds =
            unsafe { self.timer.time(&calls, patience, FEWEST..MOST) }.map_err(|source| kernel_error(kernel, source))?;
        Ok(Durations { seconds, elapsed: (clock::now() - started) as f64 * 1e-9 })
    }

    /// Has `body` queue rows of a kernel's calls, which differ in their operands and take turns.
    pub(super) fn in_rows<T>(
        &mut self,
        kernel: &Kernel,
        accumulate: bool,
        body: impl FnOnce(&mut KernelRows<'_>) -> Result<T, ExecutorError>,
    ) -> Result<T, ExecutorError> {
        let sets = self.operand_sets(kernel, &[])?;
        let hyperparameters = hyperparameters();
        let calls = calls(kernel, &sets, &hyperparameters, accumulate, self.precision);
        body(&mut KernelRows { timer: &mut self.timer, kernel, calls: &calls })
    }

    /// Gives each operand as many places as it takes to come back to one after `reuse` bytes, and fills them with numbers that are usual. Where
    /// nothing is said of the reuse, as many as fill the footprint.
    fn operand_sets(&mut self, kernel: &Kernel, reuse: &[Bytes]) -> Result<OperandSets, ExecutorError> {
        let bytes = operand_bytes(kernel, self.precision);
        let types = operand_types(kernel, self.precision);
        let one = set_bytes(kernel, self.precision).max(1);
        let most = (self.footprint / one).clamp(1, MOST_SETS);
        let mut offset = 0;
        let mut places = |index: usize, size: &Bytes, data_type: DataType, below: Option<usize>| {
            let count = reuse.get(index).map_or(most, |distance| (distance.count() / one).clamp(1, most));
            let mut place = || {
                let start = offset;
                offset += size.count().next_multiple_of(256);
                let pointer = self.arena.at(Bytes::new(start), *size).unwrap_or(std::ptr::null_mut());
                let operand = Operand { pointer, bytes: size.count() as usize };
                fill_in(&self.timer, &operand, data_type, below)?;
                Ok(operand)
            };
            (0..count).map(|_| place()).collect::<Result<Vec<Operand>, ExecutorError>>()
        };
        let side = bytes.reads.iter().zip(&types.reads).enumerate();
        let reads: Vec<Vec<Operand>> = side
            .map(|(index, (size, &data_type))| places(index, size, data_type, integers_of(kernel, index)))
            .collect::<Result<_, _>>()?;
        let side = bytes.writes.iter().zip(&types.writes).enumerate();
        let mut writes: Vec<Vec<Operand>> = side
            .map(|(index, (size, &data_type))| places(reads.len() + index, size, data_type, None))
            .collect::<Result<_, _>>()?;
        if let (Some(index), Some(write)) = (foretell_program::in_place_input(kernel), writes.first_mut()) {
            write.clone_from(&reads[index]);
        }
        let rounds = reads.iter().chain(&writes).map(Vec::len).max().unwrap_or(1);
        // Not in the order in which they lie: that would be fetched ahead.
        let turn = |round: usize, places: &Vec<Operand>| places[round.wrapping_mul(STRIDE) % places.len()];
        let set = |round: usize| {
            let side = |operands: &[Vec<Operand>]| operands.iter().map(|places| turn(round, places)).collect();
            (side(&reads), side(&writes))
        };
        Ok((0..rounds).map(set).collect())
    }
}

/// The bytes of one set of a kernel's operands.
fn set_bytes(kernel: &Kernel, precision: DataType) -> u64 {
    let bytes = operand_bytes(kernel, precision);
    bytes.reads.iter().chain(&bytes.writes).map(|size| size.count().next_multiple_of(256)).sum()
}

/// What bounds the integers in a kernel's read, if they are integers.
fn integers_of(kernel: &Kernel, read: usize) -> Option<usize> {
    match (kernel, read) {
        (Kernel::Embedding { vocabulary, parts, .. }, 0) | (Kernel::EmbeddingWeightGradient { vocabulary, parts, .. }, 1) => {
            Some(vocabulary * parts)
        }
        (Kernel::LogitStatistics { classes, parts, .. } | Kernel::CrossEntropyGradient { classes, parts, .. }, 1) => {
            Some(classes * parts)
        }
        (Kernel::CrossEntropy { classes, .. }, 1) => Some(*classes),
        (Kernel::MaxPoolGradient(window), 1) => Some(window.input_elements()),
        (Kernel::RouteGradient { experts, .. }, 2) => Some(*experts),
        (Kernel::Dispatch(sizes) | Kernel::DispatchGradient(sizes), 1) => Some(sizes.experts),
        (Kernel::DispatchGradient(sizes), 2) => Some(sizes.capacity),
        (Kernel::Combine(sizes) | Kernel::CombineInputGradient(sizes) | Kernel::CombineGateGradient(sizes), 2) => {
            Some(sizes.experts)
        }
        (Kernel::Combine(sizes) | Kernel::CombineInputGradient(sizes) | Kernel::CombineGateGradient(sizes), 3) => {
            Some(sizes.capacity)
        }
        _ => None,
    }
}

/// Fills an operand in a GPU's memory through the host's.
fn fill_in(timer: &CudaTimer, operand: &Operand, data_type: DataType, below: Option<usize>) -> Result<(), ExecutorError> {
    // The same numbers again and again: what a kernel does with them takes as long, and the host makes them slowly.
    let length = operand.bytes.min(FILLED);
    let mut words = vec![0_u32; length.div_ceil(4)];
    fill(&Operand { pointer: words.as_mut_ptr().cast(), bytes: length }, data_type, below);
    for start in (0..operand.bytes).step_by(FILLED) {
        let place = DeviceAddress::from_pointer(operand.pointer).offset(start);
        // SAFETY: the place lies in the operand, which lies in the arena, and the words are as long.
        unsafe { timer.copy_in(place, words.as_ptr().cast(), length.min(operand.bytes - start)) }?;
    }
    Ok(())
}

/// Fills an operand with positive numbers around a half, or with integers below a bound, spread about.
fn fill(operand: &Operand, data_type: DataType, below: Option<usize>) {
    // Weyl's sequence: spread evenly, the same on every run.
    let spread = |index: usize| (index as u32).wrapping_mul(2_654_435_769);
    let number = |index: usize| spread(index) as f32 / u32::MAX as f32;
    let half = Half::of(data_type);
    for index in 0..operand.bytes / data_type.size().count() as usize {
        if data_type == DataType::Fp8 {
            // Of either format of eight bits these are finite.
            let code = nearest(EightBits::E4M3, number(index));
            // SAFETY: the operand lies in the arena; `index` is below its length.
            unsafe { operand.pointer.add(index).write(code) };
            continue;
        }
        if let Some(half) = half {
            // SAFETY: the operand lies in the arena and is aligned; `index` is below its length.
            unsafe { operand.pointer.cast::<u16>().add(index).write(half.nearest(number(index))) };
            continue;
        }
        let bits = match below {
            Some(below) => ((u64::from(spread(index)) * below as u64) >> 32) as u32,
            None => number(index).to_bits(),
        };
        // SAFETY: as above.
        unsafe { operand.pointer.cast::<u32>().add(index).write(bits) };
    }
}
