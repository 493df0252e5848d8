//! Optimizer steps: one pass over gradient, parameter and state, since memory bounds them.

use super::control::told;
use super::memory::{floats, floats_mut};
use super::vector::{multiply_add, multiversion};
use crate::backend::KernelCall;

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn sgd(call: &KernelCall<'_>, momentum: bool, nesterov: bool, controlled: bool) {
    // SAFETY: the caller's promise.
    let Some(parameters) = (unsafe { told(call, controlled) }) else { return };
    let rates = [parameters.gradient_scale, parameters.weight_decay, parameters.learning_rate, parameters.momentum];
    // SAFETY: reads and writes are valid and do not overlap; with momentum there is a second write.
    unsafe {
        let (gradient, parameter) = (floats(&call.reads[0]), floats_mut(&call.writes[0]));
        match (momentum, nesterov) {
            (false, _) => sgd_plain(parameter, gradient, rates),
            (true, false) => sgd_momentum(parameter, floats_mut(&call.writes[1]), gradient, rates),
            (true, true) => sgd_nesterov(parameter, floats_mut(&call.writes[1]), gradient, rates),
        }
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn adamw(call: &KernelCall<'_>, controlled: bool) {
    // SAFETY: the caller's promise.
    let Some(parameters) = (unsafe { told(call, controlled) }) else { return };
    // In double precision: 1 - 0.999^step loses four digits in single precision for small steps.
    let corrected = |beta: f32| 1.0 - f64::from(beta).powf(parameters.step.max(1) as f64);
    let rate = f64::from(parameters.learning_rate) / corrected(parameters.beta1);
    let constants = AdamW {
        gradient_scale: parameters.gradient_scale,
        keep: 1.0 - parameters.learning_rate * parameters.weight_decay,
        beta1: parameters.beta1,
        rest1: (1.0 - f64::from(parameters.beta1)) as f32,
        beta2: parameters.beta2,
        rest2: (1.0 - f64::from(parameters.beta2)) as f32,
        rate: rate as f32,
        root_scale: (1.0 / corrected(parameters.beta2).sqrt()) as f32,
        epsilon: parameters.epsilon,
    };
    // SAFETY: reads and writes are valid and do not overlap.
    unsafe {
        let (first, second) = (floats_mut(&call.writes[1]), floats_mut(&call.writes[2]));
        adamw_step(floats_mut(&call.writes[0]), first, second, floats(&call.reads[0]), constants);
    }
}

/// Factors of one AdamW step.
#[derive(Clone, Copy)]
struct AdamW {
    gradient_scale: f32,
    keep: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    rate: f32,
    root_scale: f32,
    epsilon: f32,
}

multiversion! {
    fn sgd_plain(parameter: &mut [f32], gradient: &[f32], rates: [f32; 4]) {
        let [scale, decay, rate, _] = rates;
        for (parameter, &gradient) in parameter.iter_mut().zip(gradient) {
            let gradient = multiply_add::<FUSED>(decay, *parameter, scale * gradient);
            *parameter = multiply_add::<FUSED>(-rate, gradient, *parameter);
        }
    }

    fn sgd_momentum(parameter: &mut [f32], velocity: &mut [f32], gradient: &[f32], rates: [f32; 4]) {
        let [scale, decay, rate, momentum] = rates;
        for ((parameter, velocity), &gradient) in parameter.iter_mut().zip(velocity).zip(gradient) {
            let gradient = multiply_add::<FUSED>(decay, *parameter, scale * gradient);
            *velocity = multiply_add::<FUSED>(momentum, *velocity, gradient);
            *parameter = multiply_add::<FUSED>(-rate, *velocity, *parameter);
        }
    }

    fn sgd_nesterov(parameter: &mut [f32], velocity: &mut [f32], gradient: &[f32], rates: [f32; 4]) {
        let [scale, decay, rate, momentum] = rates;
        for ((parameter, velocity), &gradient) in parameter.iter_mut().zip(velocity).zip(gradient) {
            let gradient = multiply_add::<FUSED>(decay, *parameter, scale * gradient);
            *velocity = multiply_add::<FUSED>(momentum, *velocity, gradient);
            let ahead = multiply_add::<FUSED>(momentum, *velocity, gradient);
            *parameter = multiply_add::<FUSED>(-rate, ahead, *parameter);
        }
    }

    fn adamw_step(parameter: &mut [f32], first: &mut [f32], second: &mut [f32], gradient: &[f32], constants: AdamW) {
        let AdamW { gradient_scale, keep, beta1, rest1, beta2, rest2, rate, root_scale, epsilon } = constants;
        for (((parameter, first), second), &gradient) in parameter.iter_mut().zip(first).zip(second).zip(gradient) {
            let gradient = gradient_scale * gradient;
            *first = multiply_add::<FUSED>(beta1, *first, rest1 * gradient);
            *second = multiply_add::<FUSED>(beta2, *second, rest2 * gradient * gradient);
            let denominator = multiply_add::<FUSED>(second.sqrt(), root_scale, epsilon);
            *parameter = multiply_add::<FUSED>(keep, *parameter, -rate * *first / denominator);
        }
    }
}
