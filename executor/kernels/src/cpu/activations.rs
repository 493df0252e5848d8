//! Activations: exact GELU (by the error function), and the gated product of SwiGLU.

use super::elementwise::binary;
use super::memory::{floats, floats_mut, same};
use super::vector::{exponential, multiply_add, multiversion};
use crate::KernelCall;

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn gelu_exact(call: &KernelCall<'_>) {
    // SAFETY: reads and writes are valid and do not overlap.
    unsafe { gelu_to(floats_mut(&call.writes[0]), floats(&call.reads[0])) }
}

/// # Safety
///
/// The call's operands are checked and valid; dx may be dy.
pub(super) unsafe fn gelu_exact_gradient(call: &KernelCall<'_>) {
    // SAFETY: this function's own contract.
    unsafe { binary(call, gelu_gradient_in_place, gelu_gradient_to) }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn silu_multiply(call: &KernelCall<'_>) {
    // SAFETY: reads and writes are valid and do not overlap.
    unsafe { silu_multiply_to(floats_mut(&call.writes[0]), floats(&call.reads[0]), floats(&call.reads[1])) }
}

/// # Safety
///
/// The call's operands are checked and valid; dgate may be dy.
pub(super) unsafe fn silu_multiply_gradient(call: &KernelCall<'_>) {
    // SAFETY: reads and writes are valid; when dgate is dy only dgate's slice is made.
    unsafe {
        let (gate, x) = (floats(&call.reads[1]), floats(&call.reads[2]));
        let (dgate, dx) = (floats_mut(&call.writes[0]), floats_mut(&call.writes[1]));
        if same(&call.reads[0], &call.writes[0]) {
            silu_gradient_in_place(dgate, dx, gate, x);
        } else {
            silu_gradient_to(dgate, dx, floats(&call.reads[0]), gate, x);
        }
    }
}

/// Standard normal distribution function and density at x, by formula 7.1.26 of Abramowitz and
/// Stegun, with an error below 1.5e-7.
#[inline(always)]
fn normal<const FUSED: bool>(x: f32) -> (f32, f32) {
    const ROOT_HALF: f32 = std::f32::consts::FRAC_1_SQRT_2;
    const DENSITY: f32 = 0.398_942_3; // 1 / sqrt(2 pi)
    let distance = x.abs() * ROOT_HALF;
    let t = 1.0 / multiply_add::<FUSED>(distance, 0.327_591_1, 1.0);
    let mut polynomial = 1.061_405_4;
    for coefficient in [-1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6] {
        polynomial = multiply_add::<FUSED>(polynomial, t, coefficient);
    }
    let gauss = exponential::<FUSED>(-distance * distance);
    // Probability beyond |x| on one side.
    let tail = 0.5 * polynomial * t * gauss;
    (if x < 0.0 { tail } else { 1.0 - tail }, DENSITY * gauss)
}

#[inline(always)]
fn sigmoid<const FUSED: bool>(x: f32) -> f32 {
    1.0 / (1.0 + exponential::<FUSED>(-x))
}

/// The gradients of gate and x in `gate · σ(gate) · x`.
#[inline(always)]
fn silu_slopes<const FUSED: bool>(dy: f32, gate: f32, x: f32) -> (f32, f32) {
    let open = sigmoid::<FUSED>(gate);
    let slope = open * multiply_add::<FUSED>(gate, 1.0 - open, 1.0);
    (dy * x * slope, dy * gate * open)
}

multiversion! {
    fn gelu_to(y: &mut [f32], x: &[f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = x * normal::<FUSED>(x).0;
        }
    }

    fn gelu_gradient_in_place(dx: &mut [f32], x: &[f32]) {
        for (dx, &x) in dx.iter_mut().zip(x) {
            let (below, density) = normal::<FUSED>(x);
            *dx *= multiply_add::<FUSED>(x, density, below);
        }
    }

    fn gelu_gradient_to(dx: &mut [f32], dy: &[f32], x: &[f32]) {
        for ((dx, &dy), &x) in dx.iter_mut().zip(dy).zip(x) {
            let (below, density) = normal::<FUSED>(x);
            *dx = dy * multiply_add::<FUSED>(x, density, below);
        }
    }

    fn silu_multiply_to(y: &mut [f32], gate: &[f32], x: &[f32]) {
        for ((y, &gate), &x) in y.iter_mut().zip(gate).zip(x) {
            *y = gate * sigmoid::<FUSED>(gate) * x;
        }
    }

    fn silu_gradient_in_place(dgate: &mut [f32], dx: &mut [f32], gate: &[f32], x: &[f32]) {
        for (((dgate, dx), &gate), &x) in dgate.iter_mut().zip(dx).zip(gate).zip(x) {
            (*dgate, *dx) = silu_slopes::<FUSED>(*dgate, gate, x);
        }
    }

    fn silu_gradient_to(dgate: &mut [f32], dx: &mut [f32], dy: &[f32], gate: &[f32], x: &[f32]) {
        for ((((dgate, dx), &dy), &gate), &x) in dgate.iter_mut().zip(dx).zip(dy).zip(gate).zip(x) {
            (*dgate, *dx) = silu_slopes::<FUSED>(dy, gate, x);
        }
    }
}
