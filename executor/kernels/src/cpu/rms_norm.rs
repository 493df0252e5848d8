//! Root-mean-square normalisation (Zhang and Sennrich 2019): layer normalisation without a mean.

use super::memory::{Scratch, floats, floats_mut};
use super::vector::{multiply_add, multiversion, reduce, reduce_pairs};
use crate::KernelCall;

/// Rows summed before their sum is added to the total.
const BLOCK_ROWS: usize = 64;

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn forward(call: &KernelCall<'_>, epsilon: f32) {
    // SAFETY: reads and writes are valid and do not overlap.
    unsafe {
        let (x, scale) = (floats(&call.reads[0]), floats(&call.reads[1]));
        normalise_rows(floats_mut(&call.writes[0]), floats_mut(&call.writes[1]), x, scale, epsilon);
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
        let dscale = floats_mut(&call.writes[0]);
        if !call.accumulate {
            dscale.fill(0.0);
        }
        let [partial] = scratch.pieces([dscale.len()]);
        if !dscale.is_empty() {
            column_products(dy, x, saved, dscale, partial);
        }
    }
}

multiversion! {
    fn normalise_rows(y: &mut [f32], saved: &mut [f32], x: &[f32], scale: &[f32], epsilon: f32) {
        let features = scale.len().max(1);
        for ((y, x), saved) in y.chunks_exact_mut(features).zip(x.chunks_exact(features)).zip(saved) {
            let factor = 1.0 / (reduce(x, |x| x * x) / features as f32 + epsilon).sqrt();
            *saved = factor;
            for ((y, &x), &scale) in y.iter_mut().zip(x).zip(scale) {
                *y = x * factor * scale;
            }
        }
    }

    /// `dx = factor (g - x̂ mean(g x̂))` with `g = dy scale`.
    fn gradient_rows(dx: &mut [f32], dy: &[f32], x: &[f32], scale: &[f32], saved: &[f32]) {
        let features = scale.len().max(1);
        for (((dx, dy), x), &factor) in
            dx.chunks_exact_mut(features).zip(dy.chunks_exact(features)).zip(x.chunks_exact(features)).zip(saved)
        {
            for ((dx, &dy), &scale) in dx.iter_mut().zip(dy).zip(scale) {
                *dx = dy * scale;
            }
            let dot = reduce_pairs(dx, x, |g, x| g * x) * factor * factor / features as f32;
            for (dx, &x) in dx.iter_mut().zip(x) {
                *dx = factor * (*dx - x * dot);
            }
        }
    }

    /// `totals[column] += Σ_rows dy · x · factor[row]`.
    fn column_products(dy: &[f32], x: &[f32], saved: &[f32], totals: &mut [f32], partial: &mut [f32]) {
        let columns = totals.len();
        let block = BLOCK_ROWS * columns;
        for ((dy, x), saved) in dy.chunks(block).zip(x.chunks(block)).zip(saved.chunks(BLOCK_ROWS)) {
            partial.fill(0.0);
            for ((dy, x), &factor) in dy.chunks_exact(columns).zip(x.chunks_exact(columns)).zip(saved) {
                for ((sum, &dy), &x) in partial.iter_mut().zip(dy).zip(x) {
                    *sum = multiply_add::<FUSED>(dy, x * factor, *sum);
                }
            }
            for (total, &sum) in totals.iter_mut().zip(&*partial) {
                *total += sum;
            }
        }
    }
}
