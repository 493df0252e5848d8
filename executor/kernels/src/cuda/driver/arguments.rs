//! The structures that kernels receive, laid out byte for byte as `kernels/common.cuh` declares
//! them.

use super::DeviceAddress;
use crate::Hyperparameters;

/// Slots for the operands that a kernel reads, and as many for those that it writes.
pub const MAX_OPERANDS: usize = 8;
/// Slots for a kernel's sizes and flags.
pub const MAX_SIZES: usize = 24;
/// Slots for a kernel's floating-point constants.
pub const MAX_NUMBERS: usize = 8;

/// The one argument of every kernel. Each kernel documents its operands, sizes and numbers.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arguments {
    /// Addresses of the operands that are read. Unused slots are 0.
    pub reads: [u64; MAX_OPERANDS],
    /// Addresses of the operands that are written. Unused slots are 0.
    pub writes: [u64; MAX_OPERANDS],
    pub sizes: [i64; MAX_SIZES],
    pub numbers: [f32; MAX_NUMBERS],
    /// Address of the [`StepParameters`].
    pub step: u64,
    /// Address of the [`IndexFault`].
    pub fault: u64,
    /// Address of the backend's scratch memory.
    pub scratch: u64,
    /// 1 to add to what is written, 0 to overwrite it.
    pub accumulate: i64,
    /// Number that identifies the kernel in an [`IndexFault`], from 1.
    pub kernel: i64,
}

/// Values that change from step to step. They stay at one address, so that a captured graph reads
/// the current ones.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepParameters {
    learning_rate: f64,
    momentum: f64,
    weight_decay: f64,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    gradient_scale: f64,
    clip_norm: f64,
    outer_learning_rate: f64,
    outer_momentum: f64,
    outer_mixing: f64,
    growth_interval: i64,
    step: u64,
    seed: u64,
}

impl From<&Hyperparameters> for StepParameters {
    fn from(parameters: &Hyperparameters) -> Self {
        Self {
            learning_rate: parameters.learning_rate.into(),
            momentum: parameters.momentum.into(),
            weight_decay: parameters.weight_decay.into(),
            beta1: parameters.beta1.into(),
            beta2: parameters.beta2.into(),
            epsilon: parameters.epsilon.into(),
            gradient_scale: parameters.gradient_scale.into(),
            clip_norm: parameters.clip_norm.into(),
            outer_learning_rate: parameters.outer_learning_rate.into(),
            outer_momentum: parameters.outer_momentum.into(),
            outer_mixing: parameters.outer_mixing.into(),
            growth_interval: parameters.growth_interval.into(),
            step: parameters.step,
            seed: parameters.seed,
        }
    }
}

/// The out-of-range index that is reported: of the first kernel that found one, the index at the
/// smallest position.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexFault {
    /// The kernel's number; 0 if every index was in range.
    pub kernel: i32,
    /// The index that was found.
    pub value: i32,
    /// Its position in its operand.
    pub position: i64,
    /// The bound that the index must be below.
    pub limit: i64,
    /// Lock that threads take to report; 0 between kernels.
    lock: i32,
    padding: i32,
}

/// Packs the operands of one side into the slots of [`Arguments`].
pub fn addresses(operands: impl IntoIterator<Item = DeviceAddress>) -> [u64; MAX_OPERANDS] {
    let mut slots = [0; MAX_OPERANDS];
    slots.iter_mut().zip(operands).for_each(|(slot, address)| *slot = address.0);
    slots
}

/// Packs sizes into the slots of [`Arguments`].
pub fn sizes(given: &[usize]) -> [i64; MAX_SIZES] {
    let mut slots = [0; MAX_SIZES];
    slots.iter_mut().zip(given).for_each(|(slot, &size)| *slot = size as i64);
    slots
}
