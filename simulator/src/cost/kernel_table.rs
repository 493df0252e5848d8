//! Kernel times from samples, with interpolation for kernels that were not measured.
//!
//! The time of a kernel is its roofline time multiplied by a ratio that changes slowly with its
//! sizes. The table interpolates this ratio among the nearest samples of the same kernel name. The
//! weights are inverse distances over the logarithms of the sizes (Shepard 1968).
//!
//! A line through these samples captures how the ratio depends on the amount of work, for example
//! if a launch costs more than the roofline assumes. This is locally weighted regression (Cleveland
//! 1979).

use super::estimate::{Estimate, Source};
use super::roofline;
use foretell_models::{Kernel, KernelSpec};
use foretell_program::KernelSample;
use foretell_topologies::DeviceKind;
use foretell_units::{DataType, Seconds};
use std::collections::BTreeMap;

/// The samples of one kind of device.
#[derive(Clone, Debug, Default)]
pub(crate) struct KernelTable {
    exact: BTreeMap<(Kernel, bool, DataType), Estimate>,
    by_name: BTreeMap<(&'static str, DataType), Vec<Reference>>,
}

/// A sample from which other kernels are interpolated.
#[derive(Clone, Copy, Debug)]
struct Reference {
    features: Features,
    /// The natural logarithm of the number of operations.
    work: f64,
    /// The natural logarithm of the measured time over the roofline time. `low` (at most 0) and
    /// `high` (at least 0) are the logarithms of the 10th and of the 90th percentile over the
    /// median.
    ratio: f64,
    low: f64,
    high: f64,
}

/// The coordinates of a kernel among those of its name: base-2 logarithms of its sizes, then its
/// flags.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Features {
    sizes: [f64; 7],
    flags: [bool; 5],
}

/// The number of samples to interpolate from. With more, distant samples outweigh near ones.
const NEIGHBOURS: usize = 4;

/// The distance that a differing flag (a bias, a layout) adds, in doublings of one size.
const FLAG_DISTANCE: f64 = 2.0;

/// The distance from the nearest sample, in doublings, within which a kernel is in the calibrated
/// domain.
const DOMAIN: f64 = 4.0;

/// The variance of the logarithms of work below which samples count as one size.
const SLIGHT: f64 = 1e-6;

/// The 90th percentile of a normal distribution in standard deviations.
const NINETIETH: f64 = 1.2816;

impl KernelTable {
    pub(crate) fn new(samples: &[KernelSample], kind: &DeviceKind) -> Self {
        let mut table = Self::default();
        for sample in samples {
            let KernelSample { accumulate, precision, .. } = *sample;
            let kernel = sample.kernel.without_constants();
            let estimate = Estimate::measured(&sample.time);
            table.exact.insert((kernel, accumulate, precision), estimate);
            let expected = roofline::kernel_time(&kernel, accumulate, precision, kind);
            if estimate.median <= Seconds::ZERO || expected <= Seconds::ZERO {
                continue;
            }
            let over_median = |quantile: Seconds| (quantile / estimate.median).max(f64::MIN_POSITIVE).ln();
            let spec = kernel.spec();
            table.by_name.entry((spec.name, precision)).or_default().push(Reference {
                features: features(&spec, accumulate),
                work: work(&spec),
                ratio: (estimate.median / expected).ln(),
                low: over_median(estimate.p10).min(0.0),
                high: over_median(estimate.p90).max(0.0),
            });
        }
        table
    }

    /// Returns the estimate of a kernel. `None` if no sample has its name and number format.
    pub(crate) fn estimate(&self, kernel: &Kernel, accumulate: bool, precision: DataType, kind: &DeviceKind) -> Option<Estimate> {
        let kernel = kernel.without_constants();
        if let Some(estimate) = self.exact.get(&(kernel, accumulate, precision)) {
            return Some(*estimate);
        }
        let spec = kernel.spec();
        let references = self.by_name.get(&(spec.name, precision))?;
        let here = features(&spec, accumulate);
        let nearest = nearest(references, &here);
        let total: f64 = nearest.iter().flatten().map(|(distance, _)| weight(*distance)).sum();
        let mean = |value: &dyn Fn(&Reference) -> f64| {
            nearest.iter().flatten().map(|(distance, reference)| weight(*distance) * value(reference)).sum::<f64>() / total
        };
        let roofline = roofline::kernel_time(&kernel, accumulate, precision, kind);
        let (center, ratio) = (mean(&|reference| reference.work), mean(&|reference| reference.ratio));
        let variance = mean(&|reference| (reference.work - center).powi(2));
        let covariance = mean(&|reference| (reference.work - center) * (reference.ratio - ratio));
        // Measured and roofline time both grow with the work, at most in proportion. So the slope
        // of their ratio is between -1 and 1 in logarithms. Samples of about one size determine no
        // slope.
        let slope = if variance > SLIGHT { (covariance / variance).clamp(-1.0, 1.0) } else { 0.0 };
        let line = |work: f64| ratio + slope * (work - center);
        // Do not extrapolate the line beyond the samples.
        let sizes = || nearest.iter().flatten().map(|(_, reference)| reference.work);
        let (least, most) = (sizes().fold(f64::INFINITY, f64::min), sizes().fold(f64::NEG_INFINITY, f64::max));
        let ratio = line(work(&spec).max(least).min(most));
        // The spread grows with the disagreement of the neighbours.
        let disagreement = mean(&|reference| (reference.ratio - line(reference.work)).powi(2)).sqrt() * NINETIETH;
        let low = mean(&|reference| reference.low);
        let high = mean(&|reference| reference.high);
        let closest = nearest.iter().flatten().map(|(distance, _)| *distance).next()?;
        let median = roofline * ratio.exp();
        Some(Estimate {
            median,
            p10: median * (-low.hypot(disagreement)).exp(),
            p90: median * high.hypot(disagreement).exp(),
            source: if closest <= DOMAIN { Source::Interpolated } else { Source::Extrapolated },
        })
    }
}

/// Returns the nearest samples, nearest first. The earlier one in the profile wins a tie.
fn nearest<'a>(references: &'a [Reference], here: &Features) -> [Option<(f64, &'a Reference)>; NEIGHBOURS] {
    let mut nearest: [Option<(f64, &Reference)>; NEIGHBOURS] = [None; NEIGHBOURS];
    for reference in references {
        let mut candidate = (reference.features.distance(here), reference);
        for slot in &mut nearest {
            match slot {
                Some(taken) if taken.0 <= candidate.0 => {}
                Some(taken) => std::mem::swap(taken, &mut candidate),
                None => {
                    *slot = Some(candidate);
                    break;
                }
            }
        }
    }
    nearest
}

fn work(spec: &KernelSpec) -> f64 {
    spec.flops().value().max(1.0).ln()
}

/// Returns the weight of a sample at a distance. It falls steeply, so that the result between two
/// samples is nearly the line through them. The weight at distance zero is large but finite.
fn weight(distance: f64) -> f64 {
    1.0 / (distance * distance + 1e-3).powi(2)
}

impl Features {
    fn distance(&self, other: &Self) -> f64 {
        let sizes: f64 = self.sizes.iter().zip(&other.sizes).map(|(size, theirs)| (size - theirs) * (size - theirs)).sum();
        let flags = self.flags.iter().zip(&other.flags).filter(|(flag, theirs)| flag != theirs).count() as f64;
        (sizes + flags * FLAG_DISTANCE * FLAG_DISTANCE).sqrt()
    }
}

/// Returns the coordinates of a kernel.
fn features(spec: &KernelSpec, accumulate: bool) -> Features {
    let [one, two, three, four] = spec.flags;
    Features { sizes: spec.sizes.map(|size| (size.max(1) as f64).log2()), flags: [accumulate, one, two, three, four] }
}
