//! Optimizer steps. SGD and AdamW make one pass over gradient, parameter and state, since memory
//! bounds them. LAMB has two kernels, because its step needs the norms of the whole tensor.

use super::control::told;
use super::elementwise::squared_norm;
use super::memory::{floats, floats_mut};
use super::vector::{multiply_add, multiversion};
use crate::{Hyperparameters, KernelCall};
use foretell_models::muon_length;

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn sgd(call: &KernelCall<'_>, momentum: bool, nesterov: bool, [controlled, exempt]: [bool; 2]) {
    // SAFETY: the caller's promise.
    let Some(parameters) = (unsafe { told(call, controlled, exempt) }) else { return };
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
pub(super) unsafe fn adamw(call: &KernelCall<'_>, controlled: bool, exempt: bool) {
    // SAFETY: the caller's promise.
    let Some(parameters) = (unsafe { told(call, controlled, exempt) }) else { return };
    let keep = 1.0 - parameters.learning_rate * parameters.weight_decay;
    let constants = AdamW::new(&parameters, parameters.learning_rate, keep);
    // SAFETY: reads and writes are valid and do not overlap.
    unsafe {
        let (first, second) = (floats_mut(&call.writes[1]), floats_mut(&call.writes[2]));
        adamw_step(floats_mut(&call.writes[0]), first, second, floats(&call.reads[0]), constants);
    }
}

/// Writes LAMB's direction, the moments and the two norms. A skipped step keeps the moments;
/// [`lamb_step`] then reads only the control.
///
/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn lamb_direction(call: &KernelCall<'_>, controlled: bool, exempt: bool) {
    // SAFETY: reads and writes are valid and do not overlap; the parameter is the last read.
    let (gradient, parameter) = unsafe { (floats(&call.reads[0]), floats(&call.reads[call.reads.len() - 1])) };
    // SAFETY: as above.
    let (direction, norms) = unsafe { (floats_mut(&call.writes[0]), floats_mut(&call.writes[3])) };
    // SAFETY: the caller's promise.
    let Some(parameters) = (unsafe { told(call, controlled, exempt) }) else {
        direction.fill(0.0);
        norms.copy_from_slice(&[squared_norm(parameter), 0.0]);
        return;
    };
    let constants = AdamW::new(&parameters, 1.0, parameters.weight_decay);
    // SAFETY: as above.
    let (first, second) = unsafe { (floats_mut(&call.writes[1]), floats_mut(&call.writes[2])) };
    lamb_directions(direction, first, second, [gradient, parameter], constants);
    norms[0] = squared_norm(parameter);
    norms[1] = squared_norm(direction);
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn lamb_step(call: &KernelCall<'_>, controlled: bool) {
    // SAFETY: the caller's promise.
    let Some(parameters) = (unsafe { told(call, controlled, false) }) else { return };
    // SAFETY: reads and writes are valid and do not overlap; the norms are the last read.
    let (direction, norms) = unsafe { (floats(&call.reads[0]), floats(&call.reads[call.reads.len() - 1])) };
    let ratio = if norms[0] > 0.0 && norms[1] > 0.0 { norms[0].sqrt() / norms[1].sqrt() } else { 1.0 };
    // SAFETY: as above.
    along(unsafe { floats_mut(&call.writes[0]) }, direction, parameters.learning_rate * ratio);
}

/// Updates the momentum, and writes Nesterov's direction. A skipped step keeps the momentum;
/// [`muon_step`] then reads only the control.
///
/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn muon_direction(call: &KernelCall<'_>, controlled: bool) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (gradient, direction) = unsafe { (floats(&call.reads[0]), floats_mut(&call.writes[0])) };
    // SAFETY: the caller's promise.
    let Some(parameters) = (unsafe { told(call, controlled, false) }) else { return direction.fill(0.0) };
    // SAFETY: as above.
    let momentum = unsafe { floats_mut(&call.writes[1]) };
    let rest = (1.0 - f64::from(parameters.momentum)) as f32 * parameters.gradient_scale;
    nesterov_directions(direction, momentum, gradient, [parameters.momentum, rest]);
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn muon_step(call: &KernelCall<'_>, longest: usize, [controlled, exempt]: [bool; 2]) {
    // SAFETY: the caller's promise.
    let Some(parameters) = (unsafe { told(call, controlled, exempt) }) else { return };
    // SAFETY: reads and writes are valid and do not overlap.
    let (direction, parameter) = unsafe { (floats(&call.reads[0]), floats_mut(&call.writes[0])) };
    let keep = 1.0 - parameters.learning_rate * parameters.weight_decay;
    decayed_along(parameter, direction, [keep, parameters.learning_rate * muon_length(longest)]);
}

impl AdamW {
    /// The factors of one step. `keep` is AdamW's factor on parameters, `1 - learning rate · weight
    /// decay`; for LAMB it is the weight decay.
    fn new(parameters: &Hyperparameters, learning_rate: f32, keep: f32) -> Self {
        // In double precision: 1 - 0.999^step loses three digits in single precision for small
        // steps.
        let corrected = |beta: f32| 1.0 - f64::from(beta).powf(parameters.step.max(1) as f64);
        AdamW {
            gradient_scale: parameters.gradient_scale,
            keep,
            beta1: parameters.beta1,
            rest1: (1.0 - f64::from(parameters.beta1)) as f32,
            beta2: parameters.beta2,
            rest2: (1.0 - f64::from(parameters.beta2)) as f32,
            rate: (f64::from(learning_rate) / corrected(parameters.beta1)) as f32,
            root_scale: (1.0 / corrected(parameters.beta2).sqrt()) as f32,
            epsilon: parameters.epsilon,
        }
    }
}

/// Factors of one step of AdamW or LAMB.
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

/// Adds an element of the gradient to its moments. Returns the change that AdamW subtracts from the
/// parameter.
#[inline(always)]
fn with_moments<const FUSED: bool>(first: &mut f32, second: &mut f32, gradient: f32, constants: &AdamW) -> f32 {
    let AdamW { gradient_scale, beta1, rest1, beta2, rest2, rate, root_scale, epsilon, .. } = *constants;
    let gradient = gradient_scale * gradient;
    *first = multiply_add::<FUSED>(beta1, *first, rest1 * gradient);
    *second = multiply_add::<FUSED>(beta2, *second, rest2 * gradient * gradient);
    rate * *first / multiply_add::<FUSED>(second.sqrt(), root_scale, epsilon)
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
        for (((parameter, first), second), &gradient) in parameter.iter_mut().zip(first).zip(second).zip(gradient) {
            let step = with_moments::<FUSED>(first, second, gradient, &constants);
            *parameter = multiply_add::<FUSED>(constants.keep, *parameter, -step);
        }
    }

    /// Here `keep` is the weight decay.
    fn lamb_directions(direction: &mut [f32], first: &mut [f32], second: &mut [f32], reads: [&[f32]; 2], constants: AdamW) {
        let [gradient, parameter] = reads;
        let moments = first.iter_mut().zip(second);
        for (((direction, (first, second)), &gradient), &parameter) in
            direction.iter_mut().zip(moments).zip(gradient).zip(parameter)
        {
            let step = with_moments::<FUSED>(first, second, gradient, &constants);
            *direction = multiply_add::<FUSED>(constants.keep, parameter, step);
        }
    }

    fn nesterov_directions(direction: &mut [f32], momentum: &mut [f32], gradient: &[f32], shares: [f32; 2]) {
        let [kept, rest] = shares;
        for ((direction, momentum), &gradient) in direction.iter_mut().zip(momentum).zip(gradient) {
            *momentum = multiply_add::<FUSED>(kept, *momentum, rest * gradient);
            *direction = multiply_add::<FUSED>(kept, *momentum, rest * gradient);
        }
    }

    fn decayed_along(parameter: &mut [f32], direction: &[f32], factors: [f32; 2]) {
        let [keep, rate] = factors;
        for (parameter, &direction) in parameter.iter_mut().zip(direction) {
            *parameter = multiply_add::<FUSED>(-rate, direction, keep * *parameter);
        }
    }

    fn along(parameter: &mut [f32], direction: &[f32], rate: f32) {
        for (parameter, &direction) in parameter.iter_mut().zip(direction) {
            *parameter = multiply_add::<FUSED>(-rate, direction, *parameter);
        }
    }
}
