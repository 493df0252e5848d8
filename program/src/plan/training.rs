//! The recipe: the optimizer's parameters, the loss, what is trained, and how often a run reports.

use super::learning_rate::{LearningRateSchedule, WarmUp, learning_rate_at};
use super::{Lora, NamePatterns, Optimizer, Period, PlanError, RunLength};
use foretell_models::{Graph, GraphOptions, LossTarget, Model, Smoothing};
use foretell_units::SchemaVersion;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The recipe of a run. Fields that a plan file leaves out take PyTorch's defaults, with three
/// exceptions: the learning rate of SGD, a momentum of 0.9, and no weight decay in AdamW.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Training {
    /// The version of the form of a recipe in a file of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schema_version: Option<SchemaVersion>,
    /// The optimizer, for recipes in files of their own. A plan states it beside `training`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<Optimizer>,
    /// The learning rate; if `None`, 0.05 for SGD and 0.001 for other optimizers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f32>,
    /// How the learning rate changes.
    #[serde(skip_serializing_if = "is_default")]
    pub schedule: LearningRateSchedule,
    /// The warm-up of the learning rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warm_up: Option<WarmUp>,
    /// SGD and Muon: the momentum. Muon's authors use 0.95.
    pub momentum: f32,
    /// SGD: whether to use Nesterov momentum, as Muon always does.
    pub nesterov: bool,
    /// The weight decay.
    pub weight_decay: f32,
    /// The parameters without weight decay.
    #[serde(skip_serializing_if = "is_default")]
    pub no_decay: DecayExemptions,
    /// Adam, AdamW, LAMB, and the parameters that Muon leaves to AdamW: the decay of the first
    /// moment.
    pub beta1: f32,
    /// As for `beta1`: the decay of the second moment.
    pub beta2: f32,
    /// As for `beta1`: the term that keeps the division finite.
    pub epsilon: f32,
    /// The largest norm of the whole gradient; a larger gradient is scaled down to it. No clipping
    /// if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f32>,
    /// The part of each target that is spread over all classes. Evaluation ignores it.
    #[serde(skip_serializing_if = "is_default")]
    pub label_smoothing: f32,
    /// The weight of each class in the loss; all 1 if empty. The loss is divided by the sum of the
    /// labels' weights. Evaluation ignores them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub class_weights: Vec<f32>,
    /// The parameters that are not trained. They have no gradient and no optimizer state.
    #[serde(skip_serializing_if = "NamePatterns::is_empty")]
    pub frozen: NamePatterns,
    /// Low-rank adapters; none if `None`. All other parameters are then frozen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<Lora>,
    /// How often a run prints its progress if it shows no progress bar; never if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub print_every: Option<Period>,
    /// How often a run writes a checkpoint; at its end only if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub save_every: Option<Period>,
    /// How often a run evaluates, besides at its end; each epoch if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evaluate_every: Option<Period>,
    /// Loss scaling in `fp16`.
    pub loss_scale: LossScale,
}

/// The parameters that weight decay leaves alone. By default there are none, as in PyTorch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DecayExemptions {
    /// Whether biases are exempt.
    pub biases: bool,
    /// Whether the scales and shifts of norms are exempt.
    pub norms: bool,
    /// Patterns for the names of further exempt parameters.
    pub names: NamePatterns,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Dynamic loss scaling (Micikevicius et al. 2018), with the defaults of PyTorch's `GradScaler`. A
/// step whose gradient overflows is skipped and halves the scale; a streak of other steps doubles
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
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
            schema_version: None,
            optimizer: None,
            learning_rate: None,
            schedule: LearningRateSchedule::default(),
            warm_up: None,
            momentum: 0.9,
            nesterov: false,
            weight_decay: 0.0,
            no_decay: DecayExemptions::default(),
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            clip_norm: None,
            label_smoothing: 0.0,
            class_weights: Vec::new(),
            frozen: NamePatterns::default(),
            lora: None,
            print_every: None,
            save_every: None,
            evaluate_every: None,
            loss_scale: LossScale::default(),
        }
    }
}

impl Training {
    /// The learning rate of a step, counted from 0, with this rate before any schedule.
    pub(super) fn learning_rate_at(&self, base: f32, step: usize, run: RunLength) -> f32 {
        learning_rate_at(f64::from(base), &self.schedule, self.warm_up, step, run) as f32
    }

    /// Whether a parameter is not trained.
    pub fn is_frozen(&self, parameter: &str) -> bool {
        self.frozen.match_name(parameter) || self.lora.as_ref().is_some_and(|lora| !lora.trains(parameter))
    }

    /// The forward graph of a model under this recipe: with its adapters, if there are any.
    ///
    /// # Errors
    /// [`PlanError`] if the model's sizes contradict each other, or if a pattern of adapters
    /// matches no layer.
    pub fn graph(&self, model: &Model, name: &str, options: &GraphOptions) -> Result<Graph, PlanError> {
        let graph = model.graph(name, options)?;
        match &self.lora {
            Some(lora) => lora.apply(graph),
            None => Ok(graph),
        }
    }

    /// The target of the loss.
    pub(crate) fn loss_target(&self) -> LossTarget {
        LossTarget { smoothing: Smoothing::new(self.label_smoothing), weights: self.class_weights.as_slice().into() }
    }

    /// Whether the recipe states class weights.
    pub(crate) fn weighs_classes(&self) -> bool {
        !self.class_weights.is_empty()
    }

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
        self.validate_loss()?;
        self.lora.as_ref().map_or(Ok(()), Lora::validate)?;
        self.schedule.validate()?;
        self.validate_periods()?;
        let LossScale { initial, growth_interval } = self.loss_scale;
        if !initial.is_normal() || initial < 1.0 {
            return refuse("training.loss_scale.initial", initial, "a finite number of at least 1", "leave it out for 65536");
        }
        if growth_interval == 0 {
            return refuse("training.loss_scale.growth_interval", 0.0, "at least 1", "leave it out for 2000");
        }
        Ok(())
    }

    /// Refuses label smoothing outside of [0, 1), and class weights that are negative, not finite
    /// or all 0.
    fn validate_loss(&self) -> Result<(), PlanError> {
        let refuse = |field, reason: String, hint: &str| Err(PlanError::Invalid { field, reason, hint: hint.into() });
        if !(0.0..1.0).contains(&self.label_smoothing) {
            let reason = format!("{} is not at least 0 and less than 1", self.label_smoothing);
            return refuse("training.label_smoothing", reason, "leave it out for no smoothing");
        }
        let is_weight = |weight: &&f32| weight.is_finite() && **weight >= 0.0;
        if let Some(wrong) = self.class_weights.iter().find(|weight| !is_weight(weight)) {
            return refuse(
                "training.class_weights",
                format!("{wrong} is not a finite number of at least 0"),
                "weigh classes by 1",
            );
        }
        if self.weighs_classes() && self.class_weights.iter().all(|&weight| weight == 0.0) {
            return refuse("training.class_weights", "all of them are 0".into(), "leave them out to weigh all classes by 1");
        }
        Ok(())
    }

    /// Refuses periods of no steps and an impossible warm-up.
    fn validate_periods(&self) -> Result<(), PlanError> {
        let periods = [
            ("training.print_every", self.print_every),
            ("training.save_every", self.save_every),
            ("training.evaluate_every", self.evaluate_every),
            ("training.warm_up.length", self.warm_up.map(|warm_up| warm_up.length)),
        ];
        for (field, period) in periods {
            if period.is_some_and(|period| period.count() == 0) {
                let hint = "give at least `1` or `1 epochs`, or leave it out".into();
                return Err(PlanError::Invalid { field, reason: "it has no steps".into(), hint });
            }
        }
        match self.warm_up {
            Some(WarmUp { from, .. }) if !(0.0..=1.0).contains(&from) => Err(PlanError::Invalid {
                field: "training.warm_up.from",
                reason: format!("{from} is not between 0 and 1"),
                hint: "leave it out for one third".into(),
            }),
            _ => Ok(()),
        }
    }
}
