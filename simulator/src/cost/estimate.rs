//! Durations with their spread and their source.

use super::quantile::Quantile;
use foretell_program::Sample;
use foretell_units::Seconds;

/// The spread of a data sheet estimate, as a factor. In eight of ten cases, a measured kernel is
/// within this factor of the estimate.
const DATA_SHEET_SPREAD: f64 = 1.25;

/// The source of an estimate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// A sample of exactly this item.
    Measured,
    /// Samples of similar items.
    Interpolated,
    /// Samples of items of a very different size: outside the calibrated domain.
    Extrapolated,
    /// A fit to whole training runs on this kind of device with this software stack.
    Fitted,
    /// A data sheet and an assumed efficiency.
    Roofline,
}

impl Source {
    /// Returns true if the estimate is within the calibrated domain.
    pub fn is_calibrated(self) -> bool {
        matches!(self, Source::Measured | Source::Interpolated | Source::Fitted)
    }
}

/// A duration with its spread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The median.
    pub median: Seconds,
    /// The 10th percentile.
    pub p10: Seconds,
    /// The 90th percentile.
    pub p90: Seconds,
    /// The source of the estimate.
    pub source: Source,
}

impl Estimate {
    /// Returns the duration at a quantile.
    pub fn at(&self, quantile: Quantile) -> Seconds {
        match quantile {
            Quantile::P10 => self.p10,
            Quantile::Median => self.median,
            Quantile::P90 => self.p90,
        }
    }

    /// Returns an estimate from a data sheet, with the spread of data sheets.
    pub(crate) fn assumed(median: Seconds) -> Self {
        Self { median, p10: median / DATA_SHEET_SPREAD, p90: median * DATA_SHEET_SPREAD, source: Source::Roofline }
    }

    /// Returns the estimate multiplied by `factor`.
    pub(crate) fn times(self, factor: f64) -> Self {
        Self { median: self.median * factor, p10: self.p10 * factor, p90: self.p90 * factor, ..self }
    }

    /// Returns an estimate without spread.
    pub(crate) fn steady(median: Seconds, source: Source) -> Self {
        Self { median, p10: median, p90: median, source }
    }

    /// Returns the estimate on a device of relative speed `speed`.
    pub(crate) fn over(self, speed: f64) -> Self {
        Self { median: self.median / speed, p10: self.p10 / speed, p90: self.p90 / speed, ..self }
    }

    /// Returns the estimate with `change` applied to each quantile. The second argument of `change`
    /// is the data sheet factor of that quantile.
    pub(crate) fn changed(self, change: impl Fn(Seconds, f64) -> Seconds) -> Self {
        Self {
            median: change(self.median, 1.0),
            p10: change(self.p10, 1.0 / DATA_SHEET_SPREAD),
            p90: change(self.p90, DATA_SHEET_SPREAD),
            ..self
        }
    }

    pub(crate) fn measured(sample: &Sample) -> Self {
        Self { median: sample.median, p10: sample.p10, p90: sample.p90, source: Source::Measured }
    }
}

/// The cost of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelCost {
    /// The time on the device.
    pub time: Estimate,
    /// The time on the host. The host launches kernels one after the other, ahead of the device if
    /// it can.
    pub launch: Seconds,
}

/// Returns the factor from a data sheet estimate to its quantile.
pub(crate) fn data_sheet_factor(quantile: Quantile) -> f64 {
    match quantile {
        Quantile::P10 => 1.0 / DATA_SHEET_SPREAD,
        Quantile::Median => 1.0,
        Quantile::P90 => DATA_SHEET_SPREAD,
    }
}
