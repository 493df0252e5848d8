//! Kernels of local SGD's exchange between replicas: the mean of parameters, differences, and the
//! outer step. All are in single precision.

use super::memory::{floats, floats_mut};
use super::vector::{multiply_add, multiversion};
use crate::KernelCall;

/// The form of an outer step ([`Kernel::OuterStep`](foretell_models::Kernel::OuterStep)).
#[derive(Clone, Copy)]
pub(super) struct OuterForm {
    pub(super) momentum: bool,
    pub(super) nesterov: bool,
    pub(super) mixed: bool,
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn average(call: &KernelCall<'_>, parts: usize) {
    // SAFETY: the write is valid.
    divide(unsafe { floats_mut(&call.writes[0]) }, parts as f32);
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn difference(call: &KernelCall<'_>) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (a, b, y) = unsafe { (floats(&call.reads[0]), floats(&call.reads[1]), floats_mut(&call.writes[0])) };
    subtract(y, a, b);
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn outer_step(call: &KernelCall<'_>, replicas: usize, form: OuterForm) {
    let OuterForm { momentum, nesterov, mixed } = form;
    let parameters = call.hyperparameters;
    let rates = [replicas as f32, parameters.outer_learning_rate, parameters.outer_momentum];
    // SAFETY: reads and writes are valid and do not overlap; with momentum there is a third write.
    unsafe {
        let (sum, outer) = (floats(&call.reads[0]), floats_mut(&call.writes[1]));
        match (momentum, nesterov) {
            (false, _) => outer_plain(outer, sum, rates),
            (true, false) => outer_with_momentum(outer, floats_mut(&call.writes[2]), sum, rates),
            (true, true) => outer_nesterov(outer, floats_mut(&call.writes[2]), sum, rates),
        }
        let own = floats_mut(&call.writes[0]);
        if mixed { mix(own, outer, parameters.outer_mixing) } else { own.copy_from_slice(outer) }
    }
}

multiversion! {
    fn divide(y: &mut [f32], parts: f32) {
        for y in y {
            *y /= parts;
        }
    }

    fn subtract(y: &mut [f32], a: &[f32], b: &[f32]) {
        for ((y, &a), &b) in y.iter_mut().zip(a).zip(b) {
            *y = a - b;
        }
    }

    fn mix(own: &mut [f32], outer: &[f32], share: f32) {
        for (own, &outer) in own.iter_mut().zip(outer) {
            *own = multiply_add::<FUSED>(share, *own - outer, outer);
        }
    }

    fn outer_plain(outer: &mut [f32], sum: &[f32], rates: [f32; 3]) {
        let [replicas, rate, _] = rates;
        for (outer, &sum) in outer.iter_mut().zip(sum) {
            *outer = multiply_add::<FUSED>(-rate, sum / replicas, *outer);
        }
    }

    fn outer_with_momentum(outer: &mut [f32], velocity: &mut [f32], sum: &[f32], rates: [f32; 3]) {
        let [replicas, rate, momentum] = rates;
        for ((outer, velocity), &sum) in outer.iter_mut().zip(velocity).zip(sum) {
            *velocity = multiply_add::<FUSED>(momentum, *velocity, sum / replicas);
            *outer = multiply_add::<FUSED>(-rate, *velocity, *outer);
        }
    }

    fn outer_nesterov(outer: &mut [f32], velocity: &mut [f32], sum: &[f32], rates: [f32; 3]) {
        let [replicas, rate, momentum] = rates;
        for ((outer, velocity), &sum) in outer.iter_mut().zip(velocity).zip(sum) {
            let gradient = sum / replicas;
            *velocity = multiply_add::<FUSED>(momentum, *velocity, gradient);
            let ahead = multiply_add::<FUSED>(momentum, *velocity, gradient);
            *outer = multiply_add::<FUSED>(-rate, ahead, *outer);
        }
    }
}
