//! What kernels are given, as `kernels/common.cuh` has it, byte for byte.

use super::driver::DeviceAddress;
use crate::backend::Hyperparameters;

/// The most operands of a side.
pub(crate) const OPERANDS: usize = 8;
/// The most sizes.
pub(crate) const SIZES: usize = 24;
/// The most numbers.
pub(crate) const NUMBERS: usize = 8;

/// The one argument of every kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Arguments {
    pub(crate) reads: [u64; OPERANDS],
    pub(crate) writes: [u64; OPERANDS],
    pub(crate) sizes: [i64; SIZES],
    pub(crate) numbers: [f32; NUMBERS],
    pub(crate) step: u64,
    pub(crate) fault: u64,
    pub(crate) scratch: u64,
    pub(crate) accumulate: i64,
    pub(crate) kernel: i64,
}

/// What changes from step to step, in the device's memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Step {
    learning_rate: f64,
    momentum: f64,
    weight_decay: f64,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    gradient_scale: f64,
    clip_norm: f64,
    growth_interval: i64,
    step: u64,
    seed: u64,
}

impl Step {
    pub(crate) fn of(parameters: &Hyperparameters) -> Self {
        Self {
            learning_rate: parameters.learning_rate.into(),
            momentum: parameters.momentum.into(),
            weight_decay: parameters.weight_decay.into(),
            beta1: parameters.beta1.into(),
            beta2: parameters.beta2.into(),
            epsilon: parameters.epsilon.into(),
            gradient_scale: parameters.gradient_scale.into(),
            clip_norm: parameters.clip_norm.into(),
            growth_interval: parameters.growth_interval.into(),
            step: parameters.step,
            seed: parameters.seed,
        }
    }
}

/// The first index that a kernel found out of range; none where `kernel` is zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) kernel: i32,
    pub(crate) value: i32,
    pub(crate) position: i64,
    pub(crate) limit: i64,
}

/// The operands of one side, as arguments have them.
pub(crate) fn addresses(operands: impl IntoIterator<Item = DeviceAddress>) -> [u64; OPERANDS] {
    let mut all = [0; OPERANDS];
    all.iter_mut().zip(operands).for_each(|(place, address)| *place = address.0);
    all
}

/// Sizes, as arguments have them.
pub(crate) fn sizes(given: &[usize]) -> [i64; SIZES] {
    let mut all = [0; SIZES];
    all.iter_mut().zip(given).for_each(|(place, &size)| *place = size as i64);
    all
}
