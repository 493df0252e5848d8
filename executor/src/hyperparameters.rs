//! The hyperparameters of a training step, from the plan and the seed.

use crate::backend::Hyperparameters;
use foretell_program::{Plan, RunLength};

/// The hyperparameters that the kernels of a step get. `step` counts from 0.
pub(crate) fn hyperparameters(plan: &Plan, seed: u64, step: usize, run: RunLength) -> Hyperparameters {
    let outer = plan.mode.outer().unwrap_or_default();
    Hyperparameters {
        learning_rate: plan.learning_rate_at(step, run),
        momentum: plan.training.momentum,
        weight_decay: plan.training.weight_decay,
        beta1: plan.training.beta1,
        beta2: plan.training.beta2,
        epsilon: plan.training.epsilon,
        gradient_scale: 1.0,
        clip_norm: plan.training.clip_norm.unwrap_or(f32::INFINITY),
        outer_learning_rate: outer.learning_rate,
        outer_momentum: outer.momentum,
        outer_mixing: plan.mode.mixing(),
        growth_interval: plan.training.loss_scale.growth_interval,
        step: step as u64 + 1,
        seed,
    }
}
