//! Durations with their spread and their source.

use super::quantile::Quantile;
use foretell_program::Sample;
use foretell_units::Seconds;

/// How far off a data sheet may be, as a factor: a measured kernel lies in eight cases of ten
/// within it.
const DATA_SHEET_SPREAD: f64 = 1.25;

/// Where an estimate comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// This very thing was measured.
    Measured,
    /// Things like it were measured.
    Interpolated,
    /// Only things quite unlike it in size were measured: outside the calibrated domain.
    Extrapolated,
    /// Whole runs on such a device, with such a software stack, were.
    Fitted,
    /// A data sheet and a stated efficiency.
    Roofline,
}

impl Source {
    /// Whether the answer lies within what was measured.
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
    /// Where it comes from.
    pub source: Source,
}

impl Estimate {
    /// The duration at a quantile.
    pub fn at(&self, quantile: Quantile) -> Seconds {
        match quantile {
            Quantile::P10 => self.p10,
            Quantile::Median => self.median,
            Quantile::P90 => self.p90,
        }
    }

    /// A data sheet's answer, with the spread that data sheets have.
    pub(crate) fn assumed(median: Seconds) -> Self {
        Self { median, p10: median / DATA_SHEET_SPREAD, p90: median * DATA_SHEET_SPREAD, source: Source::Roofline }
    }

    /// So many times as long.
    pub(crate) fn times(self, factor: f64) -> Self {
        Self { median: self.median * factor, p10: self.p10 * factor, p90: self.p90 * factor, ..self }
    }

    /// One without a spread of its own.
    pub(crate) fn steady(median: Seconds, source: Source) -> Self {
        Self { median, p10: median, p90: median, source }
    }

    /// The same on a device of so many times the speed.
    pub(crate) fn over(self, speed: f64) -> Self {
        Self { median: self.median / speed, p10: self.p10 / speed, p90: self.p90 / speed, ..self }
    }

    /// Each quantile changed; the second argument is what a data sheet's spread makes of a duration
    /// at it.
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

/// What a kernel takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelCost {
    /// On the device.
    pub time: Estimate,
    /// On the host, which launches kernels one after the other, ahead of the device where it can.
    pub launch: Seconds,
}

/// How many times the time of a data sheet a quantile is.
pub(crate) fn data_sheet_factor(quantile: Quantile) -> f64 {
    match quantile {
        Quantile::P10 => 1.0 / DATA_SHEET_SPREAD,
        Quantile::Median => 1.0,
        Quantile::P90 => DATA_SHEET_SPREAD,
    }
}
