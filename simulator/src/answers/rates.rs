//! A step's amounts per second. This module knows neither Programs nor operator tables.

use foretell_units::{FlopsPerSecond, Seconds};

/// The amounts of a step on some devices.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepAmounts {
    /// Samples of all ranks.
    pub(super) samples: f64,
    /// Tokens of all ranks; `None` if samples are not sequences.
    pub(super) tokens: Option<f64>,
    /// Floating-point operations on `devices` without recomputation.
    pub(super) model_flops: f64,
    /// As `model_flops`, with recomputation.
    pub(super) hardware_flops: f64,
    /// The number of devices that do these operations.
    pub(super) devices: f64,
    /// The dense peak of these devices together; 0 if it is not known.
    pub(super) peak: FlopsPerSecond,
}

/// The rates of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rates {
    pub(super) samples_per_second: f64,
    pub(super) tokens_per_second: Option<f64>,
    pub(super) model_flops_per_device_per_second: FlopsPerSecond,
    /// Model FLOP per second over the peak.
    pub(super) mfu: f64,
    /// As `mfu`, with recomputation counted.
    pub(super) hfu: f64,
}

impl StepAmounts {
    /// Returns the rates if the step takes `step`. An empty step takes no time, so its rates are 0.
    pub(super) fn rates(&self, step: Seconds) -> Rates {
        let per_second = |amount: f64| if step > Seconds::ZERO { amount / step.value() } else { 0.0 };
        let utilisation = |flops: f64| if self.peak.value() > 0.0 { per_second(flops) / self.peak.value() } else { 0.0 };
        Rates {
            samples_per_second: per_second(self.samples),
            tokens_per_second: self.tokens.map(per_second),
            model_flops_per_device_per_second: FlopsPerSecond::new(per_second(self.model_flops) / self.devices),
            mfu: utilisation(self.model_flops),
            hfu: utilisation(self.hardware_flops),
        }
    }
}
