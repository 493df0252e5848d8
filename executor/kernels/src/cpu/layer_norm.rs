//! Layer normalisation (Ba, Kiros and Hinton 2016): each row by its own mean and deviation.

use super::memory::{Scratch, floats, floats_mut};
use super::sums::column_sums_normalised_rows;
use super::vector::{multiply_add, multiversion, reduce, reduce_pairs};
use crate::KernelCall;

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn forward(call: &KernelCall<'_>, epsilon: f32) {
    // SAFETY: reads and writes are valid and do not overlap.
    unsafe {
        let (x, scale, shift) = (floats(&call.reads[0]), floats(&call.reads[1]), floats(&call.reads[2]));
        normalise_rows(floats_mut(&call.writes[0]), floats_mut(&call.writes[1]), x, scale, shift, epsilon);
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn input_gradient(call: &KernelCall<'_>) {
    // SAFETY: reads and writes are valid and do not overlap.
    unsafe {
        let (dy, x, scale, saved) =
            (floats(&call.reads[0]), floats(&call.reads[1]), floats(&call.reads[2]), floats(&call.reads[3]));
        gradient_rows(floats_mut(&call.writes[0]), dy, x, scale, saved);
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn weight_gradient(call: &KernelCall<'_>, scratch: &mut Scratch) {
    // SAFETY: reads and writes are valid and do not overlap.
    unsafe {
        let (dy, x, saved) = (floats(&call.reads[0]), floats(&call.reads[1]), floats(&call.reads[2]));
        let (dscale, dshift) = (floats_mut(&call.writes[0]), floats_mut(&call.writes[1]));
        if !call.accumulate {
            dscale.fill(0.0);
            dshift.fill(0.0);
        }
        let [partial] = scratch.pieces([2 * dshift.len()]);
        if !dshift.is_empty() {
            column_sums_normalised_rows(dy, x, saved, dshift, dscale, partial);
        }
    }
}

multiversion! {
    fn normalise_rows(y: &mut [f32], saved: &mut [f32], x: &[f32], scale: &[f32], shift: &[f32], epsilon: f32) {
        let features = scale.len().max(1);
        for ((y, x), saved) in y.chunks_exact_mut(features).zip(x.chunks_exact(features)).zip(saved.chunks_exact_mut(2)) {
            let mean = reduce(x, |x| x) / features as f32;
            // Computed from deviations: the mean of squares minus the squared mean would lose
            // digits in a row far from zero.
            let variance = reduce(x, |x| (x - mean) * (x - mean)) / features as f32;
            let factor = 1.0 / (variance + epsilon).sqrt();
            saved[0] = mean;
            saved[1] = factor;
            for (((y, &x), &scale), &shift) in y.iter_mut().zip(x).zip(scale).zip(shift) {
                *y = multiply_add::<FUSED>((x - mean) * factor, scale, shift);
            }
        }
    }

    /// `dx = factor (g - mean(g) - x̂ mean(g x̂))` with `g = dy scale`.
    fn gradient_rows(dx: &mut [f32], dy: &[f32], x: &[f32], scale: &[f32], saved: &[f32]) {
        let features = scale.len().max(1);
        for (((dx, dy), x), saved) in
            dx.chunks_exact_mut(features).zip(dy.chunks_exact(features)).zip(x.chunks_exact(features)).zip(saved.chunks_exact(2))
        {
            let (mean, factor) = (saved[0], saved[1]);
            for ((dx, &dy), &scale) in dx.iter_mut().zip(dy).zip(scale) {
                *dx = dy * scale;
            }
            let sum = reduce(dx, |g| g) / features as f32;
            let dot = reduce_pairs(dx, x, |g, x| g * (x - mean)) * factor / features as f32;
            for (dx, &x) in dx.iter_mut().zip(x) {
                *dx = factor * (*dx - sum - (x - mean) * factor * dot);
            }
        }
    }
}
