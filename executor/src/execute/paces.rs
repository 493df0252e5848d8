//! Combining what ranks report of workers that go at their own pace.

use super::ObservedPaces;
use crate::job::{ArrivalOrder, StepReport};
use foretell_program::{StalenessDistribution, Turn};
use std::collections::BTreeMap;

/// Collects the rates of workers and the turns of servers.
pub(super) struct PaceCollector {
    /// The samples of a worker's step.
    samples: usize,
    /// For each worker's rank the ends of its first and of its last step so far, in nanoseconds,
    /// and the number of steps between them.
    workers: BTreeMap<usize, (u64, u64, usize)>,
    staleness: Vec<u64>,
    order: ArrivalOrder,
}

impl PaceCollector {
    /// A collector for workers with `samples` samples in a step.
    pub(super) fn new(samples: usize) -> Self {
        Self { samples, workers: BTreeMap::new(), staleness: Vec::new(), order: ArrivalOrder::new() }
    }

    /// Adds a step of a worker. The first one warms up.
    pub(super) fn step(&mut self, rank: usize, report: &StepReport) {
        let (_, last, steps) = self.workers.entry(rank).or_insert((report.end, report.end, 0));
        if report.end > *last {
            (*last, *steps) = (report.end, *steps + 1);
        }
    }

    /// Adds the turns of a server.
    pub(super) fn turns(&mut self, rank: usize, turns: &[Turn], staleness: &[u64]) {
        self.order.insert(rank, turns.to_vec());
        let known = self.staleness.len().max(staleness.len());
        self.staleness.resize(known, 0);
        self.staleness.iter_mut().zip(staleness).for_each(|(sum, count)| *sum += count);
    }

    /// The combined observations. Each worker's rate is that of its own steps, so one that leaves
    /// early does not change the others' rates.
    pub(super) fn finish(self) -> ObservedPaces {
        let rate = |&(first, last, steps): &(u64, u64, usize)| match last - first {
            0 => 0.0,
            nanoseconds => (steps * self.samples) as f64 / (nanoseconds as f64 * 1e-9),
        };
        ObservedPaces {
            staleness: StalenessDistribution::of_counts(&self.staleness),
            samples_per_second: self.workers.values().map(rate).sum(),
            order: self.order,
        }
    }
}
