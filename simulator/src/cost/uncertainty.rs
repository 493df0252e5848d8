//! The error of a prediction that comes from the model itself. The spread of samples and the
//! devices' paces do not cover it.
//!
//! This module must not know Programs, layouts or models. It sees a step as kernel time and other
//! time.

use foretell_units::Seconds;

/// The ratio of a standard normal distribution's 95th percentile to its 90th.
const NINETY_FIFTH_OVER_NINETIETH: f64 = 1.6449 / 1.2816;

/// The error of one part of a step. Measured time is between `1 - faster` and `1 + slower` of the
/// prediction from the 5th to the 95th percentile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Residual {
    /// The share of the predicted time by which the 5th percentile is shorter.
    pub faster: f64,
    /// The share of the predicted time by which the 95th percentile is longer.
    pub slower: f64,
}

/// The model's own error, for kernels and for waits. All kernels share one error, and all waits
/// another. The two are independent and are added as such.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Uncertainty {
    /// The error of kernels.
    pub kernels: Residual,
    /// The error of everything else: communication that no kernel hides, waits for other ranks, and
    /// reading samples.
    pub waits: Residual,
}

impl Uncertainty {
    /// The error measured over 19 runs of the layouts of `benches/accuracy.py` on this machine
    /// (`local`, 21 November 2026, by versions before this one). Runs in labs are not included.
    ///
    /// From the 5th to the 95th percentile, kernels took 0.96 to 1.13 of the predicted time. Waits
    /// took 0.93 to 1.44, over the 13 runs in which they were longer than 0.25 ms.
    pub const MEASURED: Self =
        Self { kernels: Residual { faster: 0.04, slower: 0.13 }, waits: Residual { faster: 0.07, slower: 0.44 } };

    /// No error of the model itself.
    pub const NONE: Self = Self { kernels: Residual { faster: 0.0, slower: 0.0 }, waits: Residual { faster: 0.0, slower: 0.0 } };
}

/// The quantiles of the real duration of a predicted step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Interval {
    pub(crate) p05: Seconds,
    pub(crate) p10: Seconds,
    pub(crate) p90: Seconds,
    pub(crate) p95: Seconds,
}

impl Interval {
    /// Returns the interval of a step if measurements are between `low` and `high` times the
    /// prediction in eight of ten runs.
    pub(crate) fn of_spread(step: Seconds, [low, high]: [f64; 2]) -> Self {
        let beyond = |factor: f64| factor.powf(NINETY_FIFTH_OVER_NINETIETH);
        Self { p05: step * beyond(low), p10: step * low, p90: step * high, p95: step * beyond(high) }
    }

    /// Returns the interval of a step with the time `kernels` in kernels. The samples and the
    /// devices' paces alone put it between `fast` and `slow` in eight of ten runs.
    pub(crate) fn new(uncertainty: &Uncertainty, step: Seconds, kernels: Seconds, fast: Seconds, slow: Seconds) -> Self {
        let waits = (step - kernels).max(Seconds::ZERO);
        let combined = |spread: Seconds, kernel: f64, wait: f64| {
            let parts =
                [spread.max(Seconds::ZERO).value() * NINETY_FIFTH_OVER_NINETIETH, kernels.value() * kernel, waits.value() * wait];
            Seconds::new(parts.iter().map(|part| part * part).sum::<f64>().sqrt())
        };
        let Uncertainty { kernels: of_kernels, waits: of_waits } = uncertainty;
        let less = combined(step - fast, of_kernels.faster, of_waits.faster);
        let more = combined(slow - step, of_kernels.slower, of_waits.slower);
        Self {
            p05: (step - less).max(Seconds::ZERO),
            p10: (step - less / NINETY_FIFTH_OVER_NINETIETH).max(Seconds::ZERO),
            p90: step + more / NINETY_FIFTH_OVER_NINETIETH,
            p95: step + more,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interval(uncertainty: &Uncertainty, spread: f64) -> Interval {
        let [step, kernels] = [1.0, 0.5].map(Seconds::new);
        Interval::new(uncertainty, step, kernels, Seconds::new(1.0 - spread), Seconds::new(1.0 + spread))
    }

    #[test]
    fn without_a_model_error_the_spread_is_unchanged() {
        let interval = interval(&Uncertainty::NONE, 0.1);
        assert!((interval.p90.value() - 1.1).abs() < 1e-12 && (interval.p10.value() - 0.9).abs() < 1e-12);
        assert!(interval.p95 > interval.p90 && interval.p05 < interval.p10);
    }

    #[test]
    fn errors_of_kernels_and_waits_add_as_independent_errors() {
        let residual = |slower| Residual { faster: 0.0, slower };
        let uncertainty = Uncertainty { kernels: residual(0.6), waits: residual(0.8) };
        let interval = interval(&uncertainty, 0.0);
        assert!((interval.p95.value() - 1.5).abs() < 1e-12, "{interval:?}");
        assert_eq!(interval.p05, Seconds::new(1.0));
    }
}
