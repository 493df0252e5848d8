//! Cheap elementwise kernels in bf16: ReLU, its gradient and addition. Numbers are widened and
//! narrowed in registers. Other elementwise kernels, and all fp16 kernels, widen blocks into the
//! cache. That is faster for GELU, where arithmetic dominates, and for fp16, for which the compiler
//! does not select the conversion instructions.

use foretell_models::Kernel;

use crate::KernelCall;
use crate::cpu::elementwise::{binary, unary};
use crate::cpu::vector::multiversion;
use crate::half::SixteenBits::Bf16;

/// Runs the call and returns `true` if its kernel is one of this file's; otherwise returns `false`.
///
/// # Safety
///
/// The call's operands are checked and valid, and their format is bf16.
pub(super) unsafe fn run(call: &KernelCall<'_>) -> bool {
    // SAFETY: this function's own contract.
    unsafe {
        match call.kernel {
            Kernel::Relu { .. } => unary(call, relu_in_place, relu_to),
            Kernel::ReluGradient { .. } => binary(call, relu_gradient_in_place, relu_gradient_to),
            Kernel::Add { .. } => binary(call, add_in_place, add_to),
            _ => return false,
        }
    }
    true
}

#[inline(always)]
fn is_positive(x: u16) -> bool {
    Bf16.to_single(x) > 0.0
}

#[inline(always)]
fn sum(a: u16, b: u16) -> u16 {
    Bf16.nearest(Bf16.to_single(a) + Bf16.to_single(b))
}

multiversion! {
    fn relu_in_place(y: &mut [u16]) {
        for y in y {
            *y = if is_positive(*y) { *y } else { 0 };
        }
    }

    fn relu_to(y: &mut [u16], x: &[u16]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = if is_positive(x) { x } else { 0 };
        }
    }

    fn relu_gradient_in_place(dx: &mut [u16], y: &[u16]) {
        for (dx, &y) in dx.iter_mut().zip(y) {
            *dx = if is_positive(y) { *dx } else { 0 };
        }
    }

    fn relu_gradient_to(dx: &mut [u16], dy: &[u16], y: &[u16]) {
        for ((dx, &dy), &y) in dx.iter_mut().zip(dy).zip(y) {
            *dx = if is_positive(y) { dy } else { 0 };
        }
    }

    fn add_in_place(y: &mut [u16], b: &[u16]) {
        for (y, &b) in y.iter_mut().zip(b) {
            *y = sum(*y, b);
        }
    }

    fn add_to(y: &mut [u16], a: &[u16], b: &[u16]) {
        for ((y, &a), &b) in y.iter_mut().zip(a).zip(b) {
            *y = sum(a, b);
        }
    }
}
