//! What a calibration has timed so far, and what follows from it. Knows nothing of what was timed.

use foretell_program::Sample;
use foretell_units::Seconds;
use statrs::statistics::{Data, OrderStatistics};

/// Kernel time over which a device's pace is taken: shorter than its changes, longer than most steps' noise.
const WINDOW: f64 = 0.05;

/// What was timed so far, in the order in which it was.
///
/// On a machine that others use too a device changes its pace for a second at a time. So a sample is of the usual best over passes that lie
/// some time apart, and how much slower the device was from window to window is kept beside it.
pub(super) struct Measurements {
    /// By what is timed: one sample a pass.
    samples: Vec<Vec<Sample>>,
    /// One of each in a pass, in the order in which they were.
    visits: Vec<Visit>,
}

/// Something that was timed for a while.
struct Visit {
    which: usize,
    median: f64,
    /// The sum of its durations, and what passed by the clock on the wall.
    spent: f64,
    elapsed: f64,
}

impl Measurements {
    pub(super) fn new(count: usize) -> Self {
        Self { samples: vec![Vec::new(); count], visits: Vec::new() }
    }

    pub(super) fn add(&mut self, which: usize, Durations { seconds, elapsed }: Durations) {
        let spent: f64 = seconds.iter().sum();
        let sample = summarise(seconds);
        self.visits.push(Visit { which, median: sample.median.value(), spent, elapsed });
        self.samples[which].push(sample);
    }

    /// The share of the time for which it had the processor.
    pub(super) fn share(&self) -> f64 {
        let sum = |part: fn(&Visit) -> f64| self.visits.iter().map(part).sum::<f64>();
        let (spent, elapsed) = (sum(|visit| visit.spent), sum(|visit| visit.elapsed));
        if elapsed > 0.0 { (spent / elapsed).clamp(0.01, 1.0) } else { 1.0 }
    }

    /// The duration that a fifth of the passes were below.
    pub(super) fn best(&self, which: usize) -> f64 {
        let medians: Vec<f64> = self.samples[which].iter().map(|sample| sample.median.value()).collect();
        Data::new(medians).quantile(0.2).max(f64::MIN_POSITIVE)
    }

    /// The sample of each at its usual best; its spread is that within a pass.
    pub(super) fn samples(&self) -> Vec<Sample> {
        let all = self.samples.iter().enumerate();
        all.map(|(which, passes)| {
            let best = self.best(which);
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

    /// Durations over those of the usual best, in windows of [`WINDOW`] of kernel time.
    pub(super) fn paces(&self) -> Vec<f64> {
        let best: Vec<f64> = (0..self.samples.len()).map(|which| self.best(which)).collect();
        let mut paces = Vec::new();
        let (mut spent, mut usual) = (0.0, 0.0);
        for visit in &self.visits {
            spent += visit.spent;
            usual += visit.spent * best[visit.which] / visit.median.max(f64::MIN_POSITIVE);
            if spent >= WINDOW {
                paces.push(spent / usual);
                (spent, usual) = (0.0, 0.0);
            }
        }
        paces
    }
}

/// Durations of one thing, and the time in which they were taken.
pub(super) struct Durations {
    pub(super) seconds: Vec<f64>,
    pub(super) elapsed: f64,
}

/// What is left of durations once those beyond three scaled median absolute deviations are gone (Leys et al. 2013).
pub(crate) fn summarise(mut seconds: Vec<f64>) -> Sample {
    let median = Data::new(seconds.clone()).median();
    let deviations: Vec<f64> = seconds.iter().map(|second| (second - median).abs()).collect();
    // 1.4826 makes the median absolute deviation of normal noise its standard deviation. A timer's resolution is always allowed.
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
