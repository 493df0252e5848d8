//! The reference kernel: a fixed product of a few microseconds, the same in every calibration and
//! every run. Its time says how fast the machine is at that moment, whatever the model.
//!
//! A calibration times it beside its kernels. A rank of a run times it once a step, before the step
//! begins. So the error of a prediction can be split into a machine that has become faster or
//! slower, and the error of the model. The module knows no Programs and no predictions.

use crate::backend::{Backend, CpuBackend, Hyperparameters, KernelCall, Operand};
use crate::clock;
use crate::error::ExecutorError;
use foretell_models::{Activation, Kernel, WeightLayout};
use foretell_units::DataType;
use serde::{Deserialize, Serialize};

/// A product whose 20 KiB of operands fit a first-level cache: some 2 us at 65 GFLOP/s.
const KERNEL: Kernel = Kernel::Matmul {
    rows: 32,
    columns: 32,
    contracted: 64,
    weight: WeightLayout::OutIn,
    bias: false,
    activation: Activation::None,
};
/// Elements of its operands.
const ELEMENTS: [usize; 3] = [32 * 64, 32 * 64, 32 * 32];
/// Runs that warm the caches, and runs that are timed. With fewer timed runs, the cost of reading
/// the clocks would be visible.
const WARM_UP_RUNS: usize = 1;
const TIMED_RUNS: usize = 2;

/// The most parts of a run whose pace is kept.
const MOST_PARTS: usize = 16;
/// The least steps of a part. The median of fewer would be noise.
const STEPS_OF_A_PART: usize = 8;

/// One measurement of the reference kernel, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReferenceTime {
    /// The processor time of the timed runs.
    pub(crate) processor: u64,
    /// The wall-clock time of the timed runs.
    pub(crate) wall: u64,
    /// The wall-clock time of the whole measurement, warm-up included.
    pub(crate) spent: u64,
}

/// The reference kernel with its memory.
pub(crate) struct ReferenceKernel {
    backend: CpuBackend,
    x: Vec<f32>,
    w: Vec<f32>,
    y: Vec<f32>,
}

impl ReferenceKernel {
    pub(crate) fn new() -> Self {
        let [x, w, y] = ELEMENTS.map(|elements| vec![1.0; elements]);
        Self { backend: CpuBackend::new(), x, w, y }
    }

    /// Runs the kernel and times it.
    pub(crate) fn time(&mut self) -> Result<ReferenceTime, ExecutorError> {
        let begin = clock::now();
        self.run(WARM_UP_RUNS)?;
        let (wall, processor) = (clock::now(), clock::thread_cpu_time());
        self.run(TIMED_RUNS)?;
        let (processor, end) = (clock::thread_cpu_time().saturating_sub(processor), clock::now());
        Ok(ReferenceTime { processor, wall: end.saturating_sub(wall), spent: end.saturating_sub(begin) })
    }

    fn run(&mut self, times: usize) -> Result<(), ExecutorError> {
        let operand =
            |values: &mut Vec<f32>| Operand { pointer: values.as_mut_ptr().cast(), bytes: size_of_val(values.as_slice()) };
        let (reads, writes) = ([operand(&mut self.x), operand(&mut self.w)], [operand(&mut self.y)]);
        let hyperparameters = Hyperparameters::default();
        let call = KernelCall {
            kernel: &KERNEL,
            reads: &reads,
            writes: &writes,
            accumulate: false,
            hyperparameters: &hyperparameters,
            group_index: 0,
            samples_before: 0,
            precision: DataType::Fp32,
        };
        for _ in 0..times {
            // SAFETY: the operands are three whole vectors of this value, which nothing else uses
            // meanwhile.
            let ran = unsafe { self.backend.run(&call) };
            ran.map_err(|source| ExecutorError::Kernel { instruction: 0, name: "reference".into(), source })?;
        }
        Ok(())
    }
}

/// The times of the reference kernel in a run.
#[derive(Clone, Debug, Default)]
pub struct References {
    /// By rank, in the order of its steps.
    ranks: Vec<Vec<(usize, ReferenceTime)>>,
}

impl References {
    pub(crate) fn new(world_size: usize) -> Self {
        Self { ranks: vec![Vec::new(); world_size] }
    }

    pub(crate) fn add(&mut self, rank: usize, step: usize, time: Option<ReferenceTime>) {
        if let (Some(times), Some(time)) = (self.ranks.get_mut(rank), time) {
            times.push((step, time));
        }
    }

    /// What the reference kernels of a run show, without the steps `first_steps`, which warm up.
    /// `None` if a rank has timed none.
    pub fn observed(&self, first_steps: &[usize]) -> Option<ObservedReference> {
        let is_warm = |(step, _): &&(usize, ReferenceTime)| !first_steps.contains(step);
        let ranks: Vec<Vec<ReferenceTime>> =
            self.ranks.iter().map(|times| times.iter().filter(is_warm).map(|(_, time)| *time).collect()).collect();
        let steps = ranks.iter().map(Vec::len).min().filter(|&steps| steps > 0)?;
        let parts = (steps / STEPS_OF_A_PART).clamp(1, MOST_PARTS);
        let medians = |part: usize, time: fn(&ReferenceTime) -> u64| {
            let range = part * steps / parts..(part + 1) * steps / parts;
            ranks.iter().map(|times| median(times[range.clone()].iter().map(time))).collect::<Vec<f64>>()
        };
        let spent: u64 = ranks.iter().flatten().map(|time| time.spent).sum();
        Some(ObservedReference {
            count: self.ranks.iter().map(Vec::len).sum(),
            seconds: spent as f64 * 1e-9 / ranks.len() as f64,
            processor_seconds: (0..parts).map(|part| medians(part, |time| time.processor)).collect(),
            wall_seconds: (0..parts).map(|part| medians(part, |time| time.wall)).collect(),
        })
    }
}

/// The reference kernel in a run, in successive parts of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ObservedReference {
    /// How many times the ranks timed it.
    pub count: usize,
    /// The wall-clock time that a rank spent on it, outside of its steps.
    pub seconds: f64,
    /// For each part of the run, each rank's median processor time.
    pub processor_seconds: Vec<Vec<f64>>,
    /// For each part of the run, each rank's median wall-clock time. It exceeds the processor time
    /// if other processes ran on the rank's core.
    pub wall_seconds: Vec<Vec<f64>>,
}

/// The median of times in nanoseconds, in seconds; 0 if there are none.
fn median(times: impl Iterator<Item = u64>) -> f64 {
    foretell_units::median(times, Ord::cmp).unwrap_or(0) as f64 * 1e-9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_kernel_computes_and_takes_microseconds() {
        let mut reference = ReferenceKernel::new();
        let time = (0..50).map(|_| reference.time().expect("it runs")).min_by_key(|time| time.processor).expect("a time");
        assert!(reference.y.iter().all(|&sum| sum == 64.0), "each sum is of 64 ones");
        assert!((100..1_000_000).contains(&time.processor), "{time:?}");
        assert!(time.spent >= time.wall, "{time:?}");
    }

    #[test]
    fn a_run_is_seen_in_parts_with_the_median_of_each_rank() {
        let mut references = References::new(2);
        let time = |processor| Some(ReferenceTime { processor, wall: 2 * processor, spent: 3 * processor });
        // The first step warms up, and one of each part is an outlier.
        for step in 0..=16 {
            let slow = if step > 8 { 2 } else { 1 };
            references.add(0, step, time(if step % 8 == 3 { 99_000 } else { 1000 * slow }));
            references.add(1, step, time(500));
        }
        let observed = references.observed(&[0]).expect("both ranks have times");
        assert_eq!(observed.count, 34);
        let close = |found: &[Vec<f64>], wanted: [[f64; 2]; 2]| {
            found.iter().flatten().zip(wanted.as_flattened()).all(|(found, wanted)| (found - wanted).abs() < 1e-12)
        };
        assert!(close(&observed.processor_seconds, [[1e-6, 5e-7], [2e-6, 5e-7]]), "{observed:?}");
        assert!(close(&observed.wall_seconds, [[2e-6, 1e-6], [4e-6, 1e-6]]), "{observed:?}");
    }

    #[test]
    fn a_rank_without_times_leaves_the_pace_unknown() {
        let mut references = References::new(2);
        references.add(0, 1, Some(ReferenceTime { processor: 1, wall: 1, spent: 1 }));
        references.add(1, 1, None);
        assert_eq!(references.observed(&[]), None);
    }
}
