//! Measured kernels, and what they say of those that were not measured.
//!
//! A kernel's time is its roofline time multiplied by a ratio that changes slowly with its sizes.
//! So the ratio is what is interpolated, among the few nearest samples of the same kind of kernel,
//! weighted by inverse distance over the logarithms of the sizes (Shepard 1968). What of it follows
//! from how large a kernel is, such as a launch that costs more or less than the roofline has it,
//! is caught by a line through them (locally weighted regression, Cleveland 1979).

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
    alike: BTreeMap<(&'static str, DataType), Vec<Reference>>,
}

/// A sample as its neighbours see it.
#[derive(Clone, Copy, Debug)]
struct Reference {
    features: Features,
    /// The logarithm of the arithmetic.
    work: f64,
    /// Logarithms of measured over roofline time, and of the percentiles over the median.
    ratio: f64,
    low: f64,
    high: f64,
}

/// Where a kernel lies among those of its name: logarithms of its sizes to the base 2, and what it
/// is beside them.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Features {
    sizes: [f64; 7],
    flags: [bool; 5],
}

/// So many samples have a say. With more, far ones outvote near ones.
const NEIGHBOURS: usize = 4;

/// A flag that differs (a bias, a layout) counts like two doublings of a size.
const FLAG_DISTANCE: f64 = 2.0;

/// Beyond so many doublings from the nearest sample the domain that was calibrated has been left.
const DOMAIN: f64 = 4.0;

/// Works that vary less than this (the variance of their logarithms) are of one size.
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
            table.alike.entry((spec.name, precision)).or_default().push(Reference {
                features: features(&spec, accumulate),
                work: work(&spec),
                ratio: (estimate.median / expected).ln(),
                low: over_median(estimate.p10).min(0.0),
                high: over_median(estimate.p90).max(0.0),
            });
        }
        table
    }

    /// What the samples say of a kernel, if there is any of its name and number format.
    pub(crate) fn estimate(&self, kernel: &Kernel, accumulate: bool, precision: DataType, kind: &DeviceKind) -> Option<Estimate> {
        let kernel = kernel.without_constants();
        if let Some(estimate) = self.exact.get(&(kernel, accumulate, precision)) {
            return Some(*estimate);
        }
        let spec = kernel.spec();
        let references = self.alike.get(&(spec.name, precision))?;
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
        // Both times grow with the work, and no faster than it; so their ratio neither grows nor
        // falls faster than it. Samples of about one size say nothing of a slope.
        let slope = if variance > SLIGHT { (covariance / variance).clamp(-1.0, 1.0) } else { 0.0 };
        let line = |work: f64| ratio + slope * (work - center);
        // Beyond the samples the line is not believed.
        let sizes = || nearest.iter().flatten().map(|(_, reference)| reference.work);
        let (least, most) = (sizes().fold(f64::INFINITY, f64::min), sizes().fold(f64::NEG_INFINITY, f64::max));
        let ratio = line(work(&spec).max(least).min(most));
        // Neighbours that disagree make a worse guess than neighbours that agree.
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

/// The nearest samples, nearest first; of equals the earlier in the profile.
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

/// The say of a sample at a distance: steep, so that between two samples the line is nearly the one
/// through them. That of a twin is large but finite.
fn weight(distance: f64) -> f64 {
    1.0 / (distance * distance + 1e-3).powi(2)
}

impl Features {
    fn distance(&self, other: &Self) -> f64 {
        let sizes: f64 = self.sizes.iter().zip(&other.sizes).map(|(one, two)| (one - two) * (one - two)).sum();
        let flags = self.flags.iter().zip(&other.flags).filter(|(one, two)| one != two).count() as f64;
        (sizes + flags * FLAG_DISTANCE * FLAG_DISTANCE).sqrt()
    }
}

/// The coordinates of a kernel.
fn features(spec: &KernelSpec, accumulate: bool) -> Features {
    let [one, two, three, four] = spec.flags;
    Features { sizes: spec.sizes.map(|size| (size.max(1) as f64).log2()), flags: [accumulate, one, two, three, four] }
}
