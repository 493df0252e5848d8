//! The parameters of the optimizer.

use super::PlanError;
use serde::{Deserialize, Serialize};

/// The parameters of the optimizer. Fields that a plan file leaves out take PyTorch's defaults,
/// with three exceptions: the learning rate of SGD, a momentum of 0.9, and no weight decay in
/// AdamW.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Training {
    /// The learning rate; 0.05 for SGD and 0.001 for Adam(W) if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f32>,
    /// SGD: the momentum.
    pub momentum: f32,
    /// SGD: whether to use Nesterov momentum.
    pub nesterov: bool,
    /// The weight decay.
    pub weight_decay: f32,
    /// Adam: the decay of the first moment.
    pub beta1: f32,
    /// Adam: the decay of the second moment.
    pub beta2: f32,
    /// Adam: the term that keeps the division finite.
    pub epsilon: f32,
    /// The largest norm of the whole gradient; a larger gradient is scaled down to it. No clipping
    /// if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f32>,
    /// Loss scaling in `fp16`.
    pub loss_scale: LossScale,
}

/// Dynamic loss scaling (Micikevicius et al. 2018), with the defaults of PyTorch's `GradScaler`. A
/// step whose gradient overflows is skipped and halves the scale; a streak of other steps doubles
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LossScale {
    /// The scale of the first step.
    pub initial: f32,
    /// The number of steps without an overflow after which the scale doubles.
    pub growth_interval: u32,
}

impl Default for LossScale {
    fn default() -> Self {
        Self { initial: 65536.0, growth_interval: 2000 }
    }
}

impl Default for Training {
    fn default() -> Self {
        Self {
            learning_rate: None,
            momentum: 0.9,
            nesterov: false,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            clip_norm: None,
            loss_scale: LossScale::default(),
        }
    }
}

impl Training {
    /// Refuses values that make no meaningful update.
    pub(super) fn validate(&self) -> Result<(), PlanError> {
        let refuse = |field, value: f32, what: &str, hint: &str| {
            Err(PlanError::Invalid { field, reason: format!("{value} is not {what}"), hint: hint.into() })
        };
        let amounts = [
            ("training.learning_rate", self.learning_rate.unwrap_or(0.0), "leave it out for the default"),
            ("training.momentum", self.momentum, "leave it out for 0.9"),
            ("training.weight_decay", self.weight_decay, "leave it out for 0"),
        ];
        for (field, value, hint) in amounts {
            if !value.is_finite() || value < 0.0 {
                return refuse(field, value, "a finite number of at least 0", hint);
            }
        }
        let decays =
            [("training.beta1", self.beta1, "leave it out for 0.9"), ("training.beta2", self.beta2, "leave it out for 0.999")];
        for (field, value, hint) in decays {
            if !(0.0..1.0).contains(&value) {
                return refuse(field, value, "at least 0 and less than 1", hint);
            }
        }
        if !self.epsilon.is_finite() || self.epsilon <= 0.0 {
            return refuse("training.epsilon", self.epsilon, "a finite number above 0", "leave it out for 1e-8");
        }
        if let Some(clip) = self.clip_norm
            && (!clip.is_finite() || clip <= 0.0)
        {
            return refuse("training.clip_norm", clip, "a finite number above 0", "leave it out for no clipping");
        }
        let LossScale { initial, growth_interval } = self.loss_scale;
        if !initial.is_normal() || initial < 1.0 {
            return refuse("training.loss_scale.initial", initial, "a finite number of at least 1", "leave it out for 65536");
        }
        if growth_interval == 0 {
            return refuse("training.loss_scale.growth_interval", 0.0, "at least 1", "leave it out for 2000");
        }
        Ok(())
    }
}
