//! The learning rate of each step: a schedule after a linear warm-up.
//!
//! The values are those of PyTorch's schedulers, stepped once for each training step: `StepLR`,
//! `MultiStepLR`, `CosineAnnealingLR` and `LinearLR`, and for the warm-up `SequentialLR` of a
//! `LinearLR` and the schedule. A schedule therefore starts to count when the warm-up ends.

use super::{Period, PlanError, RunLength};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the learning rate changes after the warm-up.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum LearningRateSchedule {
    /// It stays as it is.
    #[default]
    Constant,
    /// It is multiplied by `factor` after each period.
    Step {
        /// The period.
        every: Period,
        /// The factor; PyTorch's default is 0.1.
        #[serde(default = "tenth")]
        factor: f64,
    },
    /// It is multiplied by `factor` at each milestone.
    MultiStep {
        /// The milestones, counted from the end of the warm-up, in any order.
        milestones: Vec<Period>,
        /// The factor.
        #[serde(default = "tenth")]
        factor: f64,
    },
    /// It falls to `minimum` along half a cosine (Loshchilov and Hutter 2017). Beyond `length` it
    /// rises again, as in PyTorch.
    Cosine {
        /// The length; the rest of the run if `None`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        length: Option<Period>,
        /// The learning rate at the end.
        #[serde(default)]
        minimum: f64,
    },
    /// It changes linearly from `from` to `to` times the learning rate, and then stays.
    Linear {
        /// The length; the rest of the run if `None`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        length: Option<Period>,
        /// The first factor.
        #[serde(default = "one")]
        from: f64,
        /// The last factor.
        #[serde(default)]
        to: f64,
    },
}

/// A linear warm-up of the learning rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WarmUp {
    /// The length. The step after it has the whole learning rate.
    pub length: Period,
    /// The first step's factor on the learning rate; PyTorch's default is one third.
    #[serde(default = "third")]
    pub from: f64,
}

fn tenth() -> f64 {
    0.1
}

fn third() -> f64 {
    1.0 / 3.0
}

fn one() -> f64 {
    1.0
}

impl LearningRateSchedule {
    /// The learning rate `step` steps after the warm-up. The run has `rest` steps after the
    /// warm-up.
    fn at(&self, base: f64, step: usize, rest: usize, run: RunLength) -> f64 {
        match self {
            LearningRateSchedule::Constant => base,
            LearningRateSchedule::Step { every, factor } => base * factor.powf((step / every.steps(run).max(1)) as f64),
            LearningRateSchedule::MultiStep { milestones, factor } => {
                base * factor.powf(milestones.iter().filter(|milestone| milestone.steps(run) <= step).count() as f64)
            }
            LearningRateSchedule::Cosine { length, minimum } => {
                let length = length.map_or(rest, |length| length.steps(run)).max(1);
                let turn = std::f64::consts::PI * step as f64 / length as f64;
                minimum + (base - minimum) * (1.0 + turn.cos()) / 2.0
            }
            LearningRateSchedule::Linear { length, from, to } => {
                let length = length.map_or(rest, |length| length.steps(run)).max(1);
                base * (from + (to - from) * step.min(length) as f64 / length as f64)
            }
        }
    }

    /// Refuses periods of no steps, and factors or minima that are negative or not finite.
    pub(super) fn validate(&self) -> Result<(), PlanError> {
        let refuse = |reason: &str, hint: &str| {
            Err(PlanError::Invalid { field: "training.schedule", reason: reason.into(), hint: hint.into() })
        };
        let (periods, factors) = match self {
            LearningRateSchedule::Constant => (Vec::new(), [0.0; 2]),
            LearningRateSchedule::Step { every, factor } => (vec![*every], [*factor; 2]),
            LearningRateSchedule::MultiStep { milestones, factor } => (milestones.clone(), [*factor; 2]),
            LearningRateSchedule::Cosine { length, minimum } => (length.iter().copied().collect(), [*minimum; 2]),
            LearningRateSchedule::Linear { length, from, to } => (length.iter().copied().collect(), [*from, *to]),
        };
        if periods.iter().any(|period| period.count() == 0) {
            return refuse("a period of the schedule has no steps", "give at least `1` or `1 epochs`");
        }
        if factors.iter().any(|factor| !factor.is_finite() || *factor < 0.0) {
            return refuse("a factor or the minimum is not a finite number of at least 0", "use for example `factor: 0.1`");
        }
        Ok(())
    }
}

/// The learning rate of a step, counted from 0.
pub(super) fn learning_rate_at(
    base: f64,
    schedule: &LearningRateSchedule,
    warm_up: Option<WarmUp>,
    step: usize,
    run: RunLength,
) -> f64 {
    let warm = warm_up.map_or(0, |warm_up| warm_up.length.steps(run));
    match warm_up {
        Some(WarmUp { from, .. }) if step < warm => base * (from + (1.0 - from) * step as f64 / warm as f64),
        _ => schedule.at(base, step - warm, run.steps.saturating_sub(warm), run),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_units::diagnostic::one_line;

    const RUN: RunLength = RunLength { steps: 60, steps_per_epoch: 5 };

    /// The learning rates that PyTorch's scheduler makes, by its own recursion: `next` gives the
    /// rate of step `t` from that of the step before.
    fn recursion(first: f64, steps: usize, next: impl Fn(usize, f64) -> f64) -> Vec<f64> {
        let mut rates = vec![first];
        for step in 1..steps {
            rates.push(next(step, rates[step - 1]));
        }
        rates
    }

    fn assert_follows(schedule: &str, warm_up: Option<WarmUp>, expected: &[f64]) {
        let schedule: LearningRateSchedule = serde_json::from_str(schedule).expect("a schedule");
        schedule.validate().expect("a valid schedule");
        for (step, expected) in expected.iter().enumerate() {
            let rate = learning_rate_at(0.4, &schedule, warm_up, step, RUN);
            assert!((rate - expected).abs() < 1e-12, "{schedule:?} at {step}: {rate} for {expected}");
        }
    }

    /// `CosineAnnealingLR.get_lr`, whose recursion has a special case at each turn.
    fn cosine(length: usize, minimum: f64) -> impl Fn(usize, f64) -> f64 {
        let cosine = move |step: f64| (std::f64::consts::PI * step / length as f64).cos();
        move |step, before| {
            if (step as isize - 1 - length as isize) % (2 * length as isize) == 0 {
                before + (0.4 - minimum) * (1.0 - (std::f64::consts::PI / length as f64).cos()) / 2.0
            } else {
                (1.0 + cosine(step as f64)) / (1.0 + cosine(step as f64 - 1.0)) * (before - minimum) + minimum
            }
        }
    }

    /// `LinearLR.get_lr`.
    fn linear(length: usize, from: f64, to: f64) -> impl Fn(usize, f64) -> f64 {
        move |step, before| {
            if step > length {
                return before;
            }
            before * (1.0 + (to - from) / (length as f64 * from + (step as f64 - 1.0) * (to - from)))
        }
    }

    #[test]
    fn every_schedule_has_the_values_of_pytorchs() {
        let step = recursion(0.4, 60, |step, before| if step % 10 == 0 { before * 0.1 } else { before });
        assert_follows(r#"{"kind": "step", "every": "2 epochs"}"#, None, &step);
        let milestones = recursion(0.4, 60, |step, before| match step {
            7 => before * 0.5,
            20 => before * 0.25,
            _ => before,
        });
        let text = r#"{"kind": "multi_step", "milestones": [7, "4 epochs", 20], "factor": 0.5}"#;
        assert_follows(text, None, &milestones);
        assert_follows(r#"{"kind": "cosine", "minimum": 0.01}"#, None, &recursion(0.4, 60, cosine(60, 0.01)));
        let text = r#"{"kind": "cosine", "length": 25, "minimum": 0.01}"#;
        assert_follows(text, None, &recursion(0.4, 49, cosine(25, 0.01)));
        let text = r#"{"kind": "linear", "length": "5 epochs", "from": 0.5, "to": 0.1}"#;
        assert_follows(text, None, &recursion(0.4 * 0.5, 60, linear(25, 0.5, 0.1)));
    }

    #[test]
    fn a_schedule_begins_where_the_warm_up_ends() {
        let warm_up = WarmUp { length: Period::Epochs(2), from: 1.0 / 3.0 };
        let mut expected = recursion(0.4 / 3.0, 10, linear(10, 1.0 / 3.0, 1.0));
        expected.extend(recursion(0.4, 50, cosine(50, 0.0)));
        assert_follows(r#"{"kind": "cosine"}"#, Some(warm_up), &expected);
        assert_eq!(learning_rate_at(0.4, &LearningRateSchedule::Constant, Some(warm_up), 10, RUN), 0.4);
    }

    #[test]
    fn a_schedule_of_no_steps_is_refused() {
        for text in
            [r#"{"kind": "step", "every": 0}"#, r#"{"kind": "cosine", "length": "0 epochs"}"#, r#"{"kind": "linear", "to": -1}"#]
        {
            let schedule: LearningRateSchedule = serde_json::from_str(text).expect("a schedule");
            assert!(one_line(&schedule.validate().expect_err("no schedule")).contains("hint:"), "{text}");
        }
    }
}
