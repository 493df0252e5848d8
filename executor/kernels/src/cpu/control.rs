//! Control of the update: gradient norm, clipping and loss scale; and single passes over gradients
//! (sum, add, narrow, zero).

use super::memory::{floats, floats_mut};
use super::vector::{LANES, multiversion, sum_lanes};
use crate::{Hyperparameters, KernelCall};
use foretell_models::Control;

/// Largest loss scale, 2^24: the reciprocal of a larger one underflows in fp16.
const LARGEST_SCALE: f32 = 16_777_216.0;

/// PyTorch's `clip_grad_norm_` adds this to the norm before dividing.
const CLIP_EPSILON: f32 = 1e-6;

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn update(call: &KernelCall<'_>, clip: bool, scaled: bool, predictions: usize) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (norm, control) = unsafe { (floats(&call.reads[0])[0], floats_mut(&call.writes[0])) };
    let used = control[Control::LossScale.place()];
    // The gradient kernel divided by the number of predictions. With weighted classes the divisor
    // should be the sum of their weights, so this corrects for it. SAFETY: as above; with weighted
    // classes the call also reads that sum.
    let divisor = if predictions > 0 { used * (unsafe { floats(&call.reads[1]) })[0] / predictions as f32 } else { used };
    let squared = norm / divisor / divisor;
    let overflowed = scaled && !norm.is_finite();
    control[Control::SquaredGradientNorm.place()] = squared;
    control[Control::IsSkipped.place()] = f32::from(u8::from(overflowed));
    let mut factor = 1.0 / divisor;
    if clip {
        factor *= (call.hyperparameters.clip_norm / (squared.sqrt() + CLIP_EPSILON)).min(1.0);
    }
    control[Control::GradientFactor.place()] = factor;
    if overflowed {
        control[Control::SkippedSteps.place()] += 1.0;
        control[Control::Streak.place()] = 0.0;
        control[Control::LossScale.place()] = (used * 0.5).max(f32::MIN_POSITIVE);
        return;
    }
    control[Control::Updates.place()] += 1.0;
    control[Control::Streak.place()] += 1.0;
    if scaled && control[Control::Streak.place()] >= call.hyperparameters.growth_interval as f32 {
        control[Control::Streak.place()] = 0.0;
        control[Control::LossScale.place()] = (used * 2.0).min(LARGEST_SCALE.max(used));
    }
}

/// An optimizer's hyperparameters for this step, with the gradient factor and the step count of its
/// control if it is `controlled`. Weight decay is 0 if it is `exempt`. Returns `None` if the
/// control skips this step's update.
///
/// # Safety
///
/// The call's operands are checked and valid; if `controlled`, the second read is the control.
pub(super) unsafe fn told(call: &KernelCall<'_>, controlled: bool, exempt: bool) -> Option<Hyperparameters> {
    let mut told = *call.hyperparameters;
    if exempt {
        told.weight_decay = 0.0;
    }
    if controlled {
        // SAFETY: the caller's promise.
        let control = unsafe { floats(&call.reads[1]) };
        if control[Control::IsSkipped.place()] != 0.0 {
            return None;
        }
        told.gradient_scale *= control[Control::GradientFactor.place()];
        told.step = control[Control::Updates.place()] as u64;
    }
    Some(told)
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn sum(call: &KernelCall<'_>) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, y) = unsafe { (floats(&call.reads[0]), floats_mut(&call.writes[0])) };
    // Blocks are added in double precision: one chain in single precision would lose digits of
    // numbers of both signs.
    y[0] = x.chunks(1 << 10).map(|block| f64::from(sum_of(block))).sum::<f64>() as f32;
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn accumulate(call: &KernelCall<'_>) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, y) = unsafe { (floats(&call.reads[0]), floats_mut(&call.writes[0])) };
    add_to(y, x);
}

/// Copies in single precision. The half-precision caller narrows the result.
///
/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn narrow(call: &KernelCall<'_>) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, y) = unsafe { (floats(&call.reads[0]), floats_mut(&call.writes[0])) };
    y.copy_from_slice(x);
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn zero(call: &KernelCall<'_>) {
    // SAFETY: the write is valid.
    unsafe { floats_mut(&call.writes[0]) }.fill(0.0);
}

multiversion! {
    fn sum_of(x: &[f32]) -> f32 {
        let mut lanes = [0.0; LANES];
        let chunks = x.chunks_exact(LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            for (lane, &x) in lanes.iter_mut().zip(chunk) {
                *lane += x;
            }
        }
        for (lane, &x) in lanes.iter_mut().zip(rest) {
            *lane += x;
        }
        sum_lanes(lanes)
    }

    fn add_to(y: &mut [f32], x: &[f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y += x;
        }
    }
}
