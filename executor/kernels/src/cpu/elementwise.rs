//! Elementwise kernels. Most have a second loop for working in place, since two slices of the same
//! memory must not exist at once.

use super::memory::{Number, floats, floats_mut, numbers, numbers_mut, same};
use super::vector::{exponential, multiply_add, multiversion};
use crate::KernelCall;

/// Computes the first write from the first read. Both may be the same memory; then only one slice
/// of it is made.
///
/// # Safety
///
/// The call's operands are checked and valid, and are numbers `N`.
pub(super) unsafe fn unary<N: Number>(call: &KernelCall<'_>, in_place: fn(&mut [N]), apart: fn(&mut [N], &[N])) {
    // SAFETY: reads and writes are valid; when both are the same only the write's slice is made.
    unsafe {
        let y = numbers_mut(&call.writes[0]);
        if same(&call.reads[0], &call.writes[0]) { in_place(y) } else { apart(y, numbers(&call.reads[0])) }
    }
}

/// Computes the first write from two reads. The first read and the write may be the same memory.
///
/// # Safety
///
/// As [`unary`].
pub(super) unsafe fn binary<N: Number>(call: &KernelCall<'_>, in_place: fn(&mut [N], &[N]), apart: fn(&mut [N], &[N], &[N])) {
    // SAFETY: reads and writes are valid; if the first read is the first write, only the write's
    // slice is made.
    unsafe {
        let (b, y) = (numbers(&call.reads[1]), numbers_mut(&call.writes[0]));
        if same(&call.reads[0], &call.writes[0]) { in_place(y, b) } else { apart(y, numbers(&call.reads[0]), b) }
    }
}

/// # Safety
///
/// The call's operands are checked and valid; y may be x.
pub(super) unsafe fn relu(call: &KernelCall<'_>) {
    // SAFETY: this function's own contract.
    unsafe { unary(call, relu_in_place, relu_to) }
}

/// # Safety
///
/// The call's operands are checked and valid; dx may be dy.
pub(super) unsafe fn relu_gradient(call: &KernelCall<'_>) {
    // SAFETY: this function's own contract.
    unsafe { binary(call, relu_gradient_in_place, relu_gradient_to) }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn gelu(call: &KernelCall<'_>) {
    // SAFETY: reads and writes are valid and do not overlap.
    unsafe { gelu_to(floats_mut(&call.writes[0]), floats(&call.reads[0])) }
}

/// # Safety
///
/// The call's operands are checked and valid; dx may be dy.
pub(super) unsafe fn gelu_gradient(call: &KernelCall<'_>) {
    // SAFETY: this function's own contract.
    unsafe { binary(call, gelu_gradient_in_place, gelu_gradient_to) }
}

/// # Safety
///
/// The call's operands are checked and valid; y may be a.
pub(super) unsafe fn add(call: &KernelCall<'_>) {
    // SAFETY: this function's own contract.
    unsafe { binary(call, add_in_place, add_to) }
}

/// # Safety
///
/// The call's operands are checked and valid; y may be x.
pub(super) unsafe fn scale(call: &KernelCall<'_>, factor: f64) {
    let factor = factor as f32;
    // SAFETY: reads and writes are valid; when y is x only y's slice is made.
    unsafe {
        let y = floats_mut(&call.writes[0]);
        if !same(&call.reads[0], &call.writes[0]) {
            y.copy_from_slice(floats(&call.reads[0]));
        }
        scale_in_place(y, factor);
    }
}

/// # Safety
///
/// The call's operands are checked and valid; y may be a.
pub(super) unsafe fn multiply(call: &KernelCall<'_>) {
    // SAFETY: this function's own contract.
    unsafe { binary(call, multiply_in_place, multiply_to) }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn sum_of_squares(call: &KernelCall<'_>) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, sum) = unsafe { (floats(&call.reads[0]), floats_mut(&call.writes[0])) };
    sum[0] = squared_norm(x);
}

/// Returns the sum of squares. Blocks are added in double precision: one chain of a billion squares
/// in single precision would lose digits.
pub(super) fn squared_norm(x: &[f32]) -> f32 {
    x.chunks(1 << 14).map(|block| f64::from(squares(block))).sum::<f64>() as f32
}

/// The logistic function of `2 √(2/π) (x + 0.044715 x³)`. With u half of that argument it equals `½
/// (1 + tanh(u))`; GELU is x times this.
#[inline(always)]
fn gelu_gate<const FUSED: bool>(x: f32) -> f32 {
    const TWICE_ROOT: f32 = 1.595_769;
    let argument = TWICE_ROOT * x * multiply_add::<FUSED>(0.044_715 * x, x, 1.0);
    1.0 / (1.0 + exponential::<FUSED>(-argument))
}

#[inline(always)]
fn gelu_slope<const FUSED: bool>(x: f32) -> f32 {
    const TWICE_ROOT: f32 = 1.595_769;
    let gate = gelu_gate::<FUSED>(x);
    let argument_slope = TWICE_ROOT * multiply_add::<FUSED>(3.0 * 0.044_715 * x, x, 1.0);
    multiply_add::<FUSED>(x * gate * (1.0 - gate), argument_slope, gate)
}

multiversion! {
    fn scale_in_place(y: &mut [f32], factor: f32) {
        y.iter_mut().for_each(|y| *y *= factor);
    }

    fn multiply_in_place(y: &mut [f32], b: &[f32]) {
        y.iter_mut().zip(b).for_each(|(y, &b)| *y *= b);
    }

    fn multiply_to(y: &mut [f32], a: &[f32], b: &[f32]) {
        y.iter_mut().zip(a.iter().zip(b)).for_each(|(y, (&a, &b))| *y = a * b);
    }

    pub(super) fn relu_in_place(y: &mut [f32]) {
        for y in y {
            *y = if *y > 0.0 { *y } else { 0.0 };
        }
    }

    fn relu_to(y: &mut [f32], x: &[f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = if x > 0.0 { x } else { 0.0 };
        }
    }

    fn relu_gradient_in_place(dx: &mut [f32], y: &[f32]) {
        for (dx, &y) in dx.iter_mut().zip(y) {
            *dx = if y > 0.0 { *dx } else { 0.0 };
        }
    }

    fn relu_gradient_to(dx: &mut [f32], dy: &[f32], y: &[f32]) {
        for ((dx, &dy), &y) in dx.iter_mut().zip(dy).zip(y) {
            *dx = if y > 0.0 { dy } else { 0.0 };
        }
    }

    pub(super) fn gelu_in_place(y: &mut [f32]) {
        for y in y {
            *y *= gelu_gate::<FUSED>(*y);
        }
    }

    fn gelu_to(y: &mut [f32], x: &[f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = x * gelu_gate::<FUSED>(x);
        }
    }

    pub(super) fn gelu_gradient_in_place(dx: &mut [f32], x: &[f32]) {
        for (dx, &x) in dx.iter_mut().zip(x) {
            *dx *= gelu_slope::<FUSED>(x);
        }
    }

    fn gelu_gradient_to(dx: &mut [f32], dy: &[f32], x: &[f32]) {
        for ((dx, &dy), &x) in dx.iter_mut().zip(dy).zip(x) {
            *dx = dy * gelu_slope::<FUSED>(x);
        }
    }

    fn add_in_place(y: &mut [f32], b: &[f32]) {
        for (y, &b) in y.iter_mut().zip(b) {
            *y += b;
        }
    }

    fn add_to(y: &mut [f32], a: &[f32], b: &[f32]) {
        for ((y, &a), &b) in y.iter_mut().zip(a).zip(b) {
            *y = a + b;
        }
    }

    fn squares(x: &[f32]) -> f32 {
        super::vector::reduce(x, |x| x * x)
    }
}
