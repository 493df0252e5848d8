//! How far a prediction may be off because the model is a model: what neither the spread of samples
//! nor that of the devices' pace says.
//!
//! It must not know Programs, layouts or models: a step is to it so much time in kernels and so
//! much beside them.

use foretell_units::Seconds;

/// A normal distribution's 95th percentile over its 90th.
const NINETY_FIFTH_OVER_NINETIETH: f64 = 1.6449 / 1.2816;

/// How far off a kind of time may be: at the 5th percentile it takes `faster` of itself less than
/// predicted, at the 95th `slower` more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Residual {
    /// Of its time less, as a share.
    pub faster: f64,
    /// Of its time more, as a share.
    pub slower: f64,
}

/// The model's own error, by what a step is spent on. What is off in one kernel is off in all, and
/// has nothing to do with what is off in waiting; so the two are added as independent errors are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Uncertainty {
    /// Of kernels.
    pub kernels: Residual,
    /// Of everything else: exchanges that no kernel hides, waiting for other ranks, reading
    /// samples.
    pub waits: Residual,
}

impl Uncertainty {
    /// The 5th and 95th percentile of measured over predicted time, kernels and waits apart, over
    /// 19 runs of `benches/accuracy.py`'s layouts on the machine itself (`local`, 21 November 2026,
    /// by versions on the way to this one): kernels took 0.96 to 1.13 of what was predicted; waits,
    /// where they were more than 0.25 ms (13 of the runs), 0.93 to 1.44. The runs in labs had no
    /// part in it.
    pub const MEASURED: Self =
        Self { kernels: Residual { faster: 0.04, slower: 0.13 }, waits: Residual { faster: 0.07, slower: 0.44 } };

    /// The model is right.
    pub const NONE: Self = Self { kernels: Residual { faster: 0.0, slower: 0.0 }, waits: Residual { faster: 0.0, slower: 0.0 } };
}

/// A step time with the quantiles of how long it may really take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Interval {
    pub(crate) p05: Seconds,
    pub(crate) p10: Seconds,
    pub(crate) p90: Seconds,
    pub(crate) p95: Seconds,
}

impl Interval {
    /// That of a step of such a kind that measurements are between these two times the prediction
    /// in eight runs of ten.
    pub(crate) fn of_spread(step: Seconds, [low, high]: [f64; 2]) -> Self {
        let farther = |factor: f64| factor.powf(NINETY_FIFTH_OVER_NINETIETH);
        Self { p05: step * farther(low), p10: step * low, p90: step * high, p95: step * farther(high) }
    }

    /// That of a step of which `kernels` are kernels, and whose samples and devices' paces alone
    /// have it between `fast` and `slow` in eight runs of ten.
    pub(crate) fn new(uncertainty: &Uncertainty, step: Seconds, kernels: Seconds, fast: Seconds, slow: Seconds) -> Self {
        let waits = (step - kernels).max(Seconds::ZERO);
        let both = |spread: Seconds, kernel: f64, wait: f64| {
            let parts =
                [spread.max(Seconds::ZERO).value() * NINETY_FIFTH_OVER_NINETIETH, kernels.value() * kernel, waits.value() * wait];
            Seconds::new(parts.iter().map(|part| part * part).sum::<f64>().sqrt())
        };
        let Uncertainty { kernels: of_kernels, waits: of_waits } = uncertainty;
        let less = both(step - fast, of_kernels.faster, of_waits.faster);
        let more = both(slow - step, of_kernels.slower, of_waits.slower);
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
    fn a_model_that_is_right_leaves_the_spread_as_it_is() {
        let interval = interval(&Uncertainty::NONE, 0.1);
        assert!((interval.p90.value() - 1.1).abs() < 1e-12 && (interval.p10.value() - 0.9).abs() < 1e-12);
        assert!(interval.p95 > interval.p90 && interval.p05 < interval.p10);
    }

    #[test]
    fn errors_of_kernels_and_of_waits_are_added_as_independent_ones() {
        let residual = |slower| Residual { faster: 0.0, slower };
        let uncertainty = Uncertainty { kernels: residual(0.6), waits: residual(0.8) };
        let interval = interval(&uncertainty, 0.0);
        assert!((interval.p95.value() - 1.5).abs() < 1e-12, "{interval:?}");
        assert_eq!(interval.p05, Seconds::new(1.0));
    }
}
