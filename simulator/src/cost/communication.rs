//! The duration of a collective or message without contention: from the samples of a profile, or
//! from the alpha-beta model over its links. Sources: Hockney 1994, and for collectives Thakur,
//! Rabenseifner and Gropp 2005.
//!
//! A cost is a latency, during which nothing is shared, and then a flow. The flow shares links and
//! processors with other work.

use super::estimate::{Estimate, Source};
use super::quantile::Quantile;
use crate::interpolation::interpolate;
use foretell_program::{Collective, CollectiveAlgorithm, CollectiveRole, Exchange, ExchangeSample, Reach};
use foretell_units::Seconds;
use std::collections::BTreeMap;

/// The cost of a collective or message without contention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CommunicationCost {
    /// The time from the arrival of the last rank until data flow.
    pub(crate) latency: Seconds,
    /// The time for which data flow.
    pub(crate) flow: Seconds,
    /// The number of bytes that each flow carries.
    pub(crate) bytes: f64,
    /// The share of each rank's processor that the communication takes while data flow. `None` if
    /// it was not measured.
    pub(crate) processor_share: Option<f64>,
    /// The source of the cost.
    pub(crate) source: Source,
}

impl CommunicationCost {
    /// Returns the cost with a flow of at least the time that the fabric between nodes, or uneven
    /// wires inside nodes, take for its bytes. For cost rules that know the number of nodes, but
    /// neither the network between them nor the wires inside.
    pub(crate) fn through_fabric(self, fabric_seconds_per_byte: f64) -> Self {
        Self { flow: self.flow.max(Seconds::new(self.bytes * fabric_seconds_per_byte)), ..self }
    }
}

/// A collective of one group of ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CollectiveCall {
    pub(crate) kind: Collective,
    /// The purpose of the collective.
    pub(crate) role: CollectiveRole,
    /// The size of the whole tensor in bytes.
    pub(crate) bytes: f64,
    /// The algorithm that runs the collective.
    pub(crate) algorithm: CollectiveAlgorithm,
}

/// The samples of collectives and messages on one kind of device.
#[derive(Clone, Debug)]
pub(crate) struct CommunicationTable {
    /// The points, keyed by operation, reach and group size. Each list is sorted by bytes.
    curves: BTreeMap<(Exchange, Reach, usize), Vec<Point>>,
}

#[derive(Clone, Copy, Debug)]
struct Point {
    bytes: f64,
    time: Estimate,
    processor: Seconds,
}

impl CommunicationTable {
    /// Returns the table of the usable samples. `None` if no sample is usable.
    pub(crate) fn new(samples: &[ExchangeSample]) -> Option<Self> {
        let mut curves: BTreeMap<(Exchange, Reach, usize), Vec<Point>> = BTreeMap::new();
        for sample in samples.iter().filter(|sample| sample.ranks > 1 && sample.time.median > Seconds::ZERO) {
            let point =
                Point { bytes: sample.bytes.max(1) as f64, time: Estimate::measured(&sample.time), processor: sample.processor };
            curves.entry((sample.exchange, sample.reach, sample.ranks)).or_default().push(point);
        }
        for curve in curves.values_mut() {
            curve.sort_by(|left, right| left.bytes.total_cmp(&right.bytes));
            curve.dedup_by(|later, earlier| later.bytes == earlier.bytes);
        }
        (!curves.is_empty()).then_some(Self { curves })
    }

    /// Returns the cost of an operation that was measured at this reach, for any group size. `None`
    /// if it was not measured. `flow_bytes` is the number of bytes that each flow carries.
    pub(crate) fn cost(
        &self,
        (exchange, reach): (Exchange, Reach),
        ranks: usize,
        bytes: f64,
        flow_bytes: f64,
        quantile: Quantile,
    ) -> Option<CommunicationCost> {
        // The nearest measured group size by ratio. The smaller one wins a tie.
        let ratio = |measured: usize| (measured as f64 / ranks as f64).ln().abs();
        let (&(_, _, measured), curve) = self
            .curves
            .iter()
            .filter(|((kind, distance, _), _)| *kind == exchange && *distance == reach)
            .min_by(|((_, _, curve), _), ((_, _, other), _)| ratio(*curve).total_cmp(&ratio(*other)))?;
        // The number of steps of a ring grows with the number of ranks minus one.
        let scale = (ranks as f64 - 1.0) / (measured as f64 - 1.0);
        let (first, last) = (curve.first()?, curve.last()?);
        let interpolated = |value: &dyn Fn(&Point) -> f64| {
            let value = interpolate(curve, bytes, |point| point.bytes, value);
            value.expect("invariant: the curve has a point") * scale
        };
        let total = Seconds::new(interpolated(&|point| point.time.at(quantile).value()));
        let processor = interpolated(&|point| point.processor.value());
        // The time of the smallest message counts as latency. Latency is at most half of the total,
        // so that two small operations on one processor slow each other down.
        let latency = (first.time.at(quantile) * scale).min(total / 2.0);
        let flow = total - latency;
        let source = if measured != ranks || bytes > last.bytes * 2.0 {
            Source::Extrapolated
        } else if curve.iter().any(|point| point.bytes == bytes) {
            Source::Measured
        } else {
            Source::Interpolated
        };
        let was_timed = curve.iter().any(|point| point.processor > Seconds::ZERO);
        let processor_share = (was_timed && flow > Seconds::ZERO).then(|| (processor / flow.value()).clamp(0.0, 1.0));
        Some(CommunicationCost { latency, flow, bytes: flow_bytes, processor_share, source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_program::Sample;

    fn sample(ranks: usize, bytes: u64, seconds: f64) -> ExchangeSample {
        let median = Seconds::new(seconds);
        let time = Sample { median, p10: median / 2.0, p90: median * 2.0, count: 9 };
        ExchangeSample { exchange: Exchange::AllReduce, reach: Reach::Node, ranks, bytes, time, processor: median / 2.0 }
    }

    fn alone(table: &CommunicationTable, ranks: usize, bytes: f64) -> (f64, Source) {
        let cost = table.cost((Exchange::AllReduce, Reach::Node), ranks, bytes, bytes, Quantile::Median).expect("was measured");
        ((cost.latency + cost.flow).value(), cost.source)
    }

    #[test]
    fn communication_without_contention_takes_the_measured_time() {
        let table = CommunicationTable::new(&[sample(2, 1 << 20, 1e-3), sample(2, 1 << 10, 1e-5)]).expect("samples");
        let (time, source) = alone(&table, 2, f64::from(1 << 20));
        assert!((time - 1e-3).abs() < 1e-12);
        assert_eq!(source, Source::Measured);
        // Halfway in logarithms.
        let (time, source) = alone(&table, 2, f64::from(1 << 15));
        assert!((time - 1e-4).abs() < 1e-12, "{time}");
        assert_eq!(source, Source::Interpolated);
    }

    #[test]
    fn the_processor_share_is_that_of_the_flow_and_unknown_if_not_measured() {
        let both = [sample(2, 1 << 10, 1e-5), sample(2, 1 << 20, 1e-3)];
        let table = |processor: fn(f64) -> f64| {
            let of = |sample: &ExchangeSample| ExchangeSample {
                processor: Seconds::new(processor(sample.time.median.value())),
                ..*sample
            };
            CommunicationTable::new(&both.each_ref().map(of)).expect("samples")
        };
        let share = |table: &CommunicationTable, bytes: f64| {
            let cost = table.cost((Exchange::AllReduce, Reach::Node), 2, bytes, bytes, Quantile::Median).expect("was measured");
            cost.processor_share
        };
        // The processor is busy for a fifth of the time. Latency is 1 % of the long operation and
        // half of the short one.
        let of_all = table(|time| time * 0.2);
        assert!(share(&of_all, f64::from(1 << 20)).is_some_and(|share| (share - 0.2 / 0.99).abs() < 1e-9));
        assert!(share(&of_all, 1024.0).is_some_and(|share| (share - 0.4).abs() < 1e-9));
        assert_eq!([1 << 10, 1 << 20].map(|bytes| share(&table(|_| 0.0), f64::from(bytes))), [None, None]);
    }

    #[test]
    fn a_cost_beyond_the_samples_is_extrapolated() {
        let table = CommunicationTable::new(&[sample(2, 1 << 10, 1e-5)]).expect("samples");
        assert_eq!(alone(&table, 2, f64::from(1 << 20)).1, Source::Extrapolated);
        assert_eq!(alone(&table, 4, f64::from(1 << 10)).1, Source::Extrapolated);
        assert!(table.cost((Exchange::AllGather, Reach::Node), 2, 8.0, 8.0, Quantile::Median).is_none());
        assert!(CommunicationTable::new(&[]).is_none());
    }

    #[test]
    fn samples_at_one_reach_give_no_costs_at_another() {
        let near = sample(2, 1 << 10, 1e-5);
        let far = ExchangeSample { reach: Reach::Fabric, ..sample(2, 1 << 10, 1e-3) };
        let table = CommunicationTable::new(&[near, far]).expect("samples");
        let time = |reach| {
            let cost = table.cost((Exchange::AllReduce, reach), 2, 1024.0, 1024.0, Quantile::Median)?;
            Some((cost.latency + cost.flow).value())
        };
        assert!(time(Reach::Node).is_some_and(|time| (time - 1e-5).abs() < 1e-12));
        assert!(time(Reach::Fabric).is_some_and(|time| (time - 1e-3).abs() < 1e-12));
        assert_eq!(time(Reach::Switch), None);
    }
}
