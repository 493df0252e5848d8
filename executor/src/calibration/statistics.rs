//! Durations that a calibration has measured so far, and their statistics. Knows nothing of the
//! measured items.

use foretell_program::Sample;
use foretell_units::Seconds;
use statrs::statistics::{Data, OrderStatistics};

/// The share of an item's passes that are faster than its usual best.
const USUAL_BEST: f64 = 0.2;

/// Item time, in seconds, over which a device's pace is averaged: shorter than the changes of the
/// pace, and longer than the noise of single items.
const PACE_WINDOW: f64 = 0.05;

/// The durations of a number of items, each measured once per pass.
///
/// On a machine with other users, a device's pace changes for a second at a time. So an item's
/// sample is its usual best over passes that lie apart in time. The device's pace relative to that,
/// window by window, is reported separately ([`Self::paces`]).
pub(super) struct Measurements {
    /// Per item, one sample per pass.
    samples: Vec<Vec<Sample>>,
    /// All measurements, in the order in which they were made.
    history: Vec<Measurement>,
}

/// One item measured in one pass, in seconds.
struct Measurement {
    item: usize,
    median: f64,
    /// The sum of the durations.
    spent: f64,
    /// The wall-clock time of the measurement.
    elapsed: f64,
}

impl Measurements {
    /// Measurements of `items` items.
    pub(super) fn new(items: usize) -> Self {
        Self { samples: vec![Vec::new(); items], history: Vec::new() }
    }

    /// Whether nothing was measured yet.
    pub(super) fn is_empty(&self) -> bool {
        self.history.is_empty()
    }

    /// Adds an item's durations in one pass.
    pub(super) fn add(&mut self, item: usize, Durations { seconds, elapsed }: Durations) {
        let spent: f64 = seconds.iter().sum();
        let sample = summarise(seconds);
        self.history.push(Measurement { item, median: sample.median.value(), spent, elapsed });
        self.samples[item].push(sample);
    }

    /// The fraction of the wall-clock time for which the items had the device.
    pub(super) fn device_fraction(&self) -> f64 {
        let sum = |part: fn(&Measurement) -> f64| self.history.iter().map(part).sum::<f64>();
        let (spent, elapsed) = (sum(|sample| sample.spent), sum(|sample| sample.elapsed));
        if elapsed > 0.0 { (spent / elapsed).clamp(0.01, 1.0) } else { 1.0 }
    }

    /// An item's usual best duration, in seconds: a fifth of its passes were faster.
    pub(super) fn usual_best(&self, item: usize) -> f64 {
        self.quantile(item, USUAL_BEST)
    }

    /// The quantile of an item's durations over its passes, in seconds.
    fn quantile(&self, item: usize, share: f64) -> f64 {
        let medians: Vec<f64> = self.samples[item].iter().map(|sample| sample.median.value()).collect();
        Data::new(medians).quantile(share).max(f64::MIN_POSITIVE)
    }

    /// Per item, a sample whose median is the usual best, and whose spread is that of durations
    /// within a pass.
    pub(super) fn samples(&self) -> Vec<Sample> {
        self.samples_at(USUAL_BEST)
    }

    /// Per item, a sample whose median is taken over all passes, and whose spread is that of
    /// durations within a pass.
    pub(super) fn usual_samples(&self) -> Vec<Sample> {
        self.samples_at(0.5)
    }

    fn samples_at(&self, share: f64) -> Vec<Sample> {
        let items = self.samples.iter().enumerate();
        items
            .map(|(item, passes)| {
                let best = self.quantile(item, share);
                let spread = |part: fn(&Sample) -> Seconds| {
                    let ratios = passes.iter().map(|sample| part(sample) / sample.median).filter(|ratio| ratio.is_finite());
                    Seconds::new(best * Data::new(ratios.collect::<Vec<_>>()).median())
                };
                let median = Seconds::new(best);
                Sample {
                    median,
                    p10: spread(|sample| sample.p10).min(median),
                    p90: spread(|sample| sample.p90).max(median),
                    count: passes.iter().map(|sample| sample.count).sum(),
                }
            })
            .collect()
    }

    /// The pace in each window of [`PACE_WINDOW`]: durations relative to the usual best.
    pub(super) fn paces(&self) -> Vec<f64> {
        let best: Vec<f64> = (0..self.samples.len()).map(|item| self.usual_best(item)).collect();
        let mut paces = Vec::new();
        let (mut spent, mut usual) = (0.0, 0.0);
        for one in &self.history {
            spent += one.spent;
            usual += one.spent * best[one.item] / one.median.max(f64::MIN_POSITIVE);
            if spent >= PACE_WINDOW {
                paces.push(spent / usual);
                (spent, usual) = (0.0, 0.0);
            }
        }
        paces
    }
}

/// Durations of one item in one pass.
pub(super) struct Durations {
    /// One duration per run, by the clock that measures the device.
    pub(super) seconds: Vec<f64>,
    /// The wall-clock time of all runs, in seconds.
    pub(super) elapsed: f64,
}

/// Median, 10th and 90th percentile of durations in seconds, without outliers: those more than
/// three scaled median absolute deviations from the median (Leys et al. 2013).
pub(super) fn summarise(mut seconds: Vec<f64>) -> Sample {
    let median = Data::new(seconds.clone()).median();
    let deviations: Vec<f64> = seconds.iter().map(|second| (second - median).abs()).collect();
    // 1.4826 scales the median absolute deviation of normal noise to its standard deviation. 50 ns,
    // a timer's resolution, is never an outlier.
    let allowed = (3.0 * 1.4826 * Data::new(deviations).median()).max(50e-9);
    seconds.retain(|second| (second - median).abs() <= allowed);
    let count = seconds.len();
    let mut kept = Data::new(seconds);
    Sample {
        median: Seconds::new(kept.median()),
        p10: Seconds::new(kept.quantile(0.1)),
        p90: Seconds::new(kept.quantile(0.9)),
        count,
    }
}
