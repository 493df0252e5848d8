//! Operator times that a framework measured on a machine's own devices: CPUs, or GPUs without a
//! profile.

use crate::interpolation::interpolate;
use foretell_models::operator_tables::{OperatorTable, TableError, TracedOperator};
use foretell_program::traced::{HOST_COPY, RankEvent, TracedCollective, TracedJob};
use foretell_program::{Exchange, FrameworkProfile, MovesSample, Profile, Sample};
use foretell_units::{Seconds, median};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The measured operators of a framework.
#[derive(Clone, Debug)]
pub struct MeasuredFramework {
    stack: String,
    table: Result<Arc<OperatorTable>, TableError>,
    operators: FxHashMap<String, Sample>,
    /// Seconds per byte by the operator's name, for calls that were not measured.
    rates: BTreeMap<String, f64>,
    /// The median of these rates. `None` if the profile has no operators.
    usual_rate: Option<f64>,
    moves: Vec<MovesSample>,
    /// Bytes and seconds of each collective, by kind, in ascending order of size.
    exchanges: BTreeMap<Exchange, Vec<(f64, f64)>>,
    /// Number of ranks of these collectives.
    ranks: usize,
    /// The framework's own time per operator, in seconds: Python, autograd, dispatch.
    pub(super) operator_overhead: f64,
    /// The framework's own time per step, in seconds.
    pub(super) step_overhead: f64,
    /// The share of the processor that a collective takes from kernels.
    pub(super) communication_share: f64,
    /// The 10th and 90th percentile of kernel times over their medians, weighted by time.
    pub(super) spread: [f64; 2],
}

impl MeasuredFramework {
    /// The measured operators of a profile. `None` if the profile measured our own kernels.
    pub fn of_profile(profile: &Profile) -> Option<Self> {
        let FrameworkProfile { stack, table, ranks, operators, moves, .. } = profile.framework.as_ref()?;
        let mut exchanges: BTreeMap<Exchange, Vec<(f64, f64)>> = BTreeMap::new();
        for sample in &profile.exchanges {
            exchanges.entry(sample.exchange).or_default().push((sample.bytes.max(1) as f64, sample.time.median.value()));
        }
        exchanges.values_mut().for_each(|curve| curve.sort_by(|left, right| left.0.total_cmp(&right.0)));
        let mut by_name: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for sample in operators.iter().filter(|sample| sample.bytes.value() > 0.0) {
            let name = sample.call.split_once(' ').map_or(sample.call.as_str(), |(name, _)| name);
            by_name.entry(name.to_owned()).or_default().push(sample.time.median.value() / sample.bytes.value());
        }
        let rates: BTreeMap<String, f64> =
            by_name.into_iter().filter_map(|(name, all)| Some((name, median(all, f64::total_cmp)?))).collect();
        let total = |part: fn(&Sample) -> Seconds| operators.iter().map(|sample| part(&sample.time).value()).sum::<f64>();
        let usual = total(|time| time.median).max(f64::MIN_POSITIVE);
        Some(Self {
            stack: stack.clone(),
            table: OperatorTable::parse(table).map(Arc::new),
            operators: operators.iter().map(|sample| (sample.call.clone(), sample.time)).collect(),
            usual_rate: median(rates.values().copied(), f64::total_cmp),
            rates,
            moves: moves.clone(),
            exchanges,
            ranks: *ranks,
            operator_overhead: profile.instruction_overhead.median.value(),
            step_overhead: profile.step_overhead.median.value(),
            communication_share: profile.communication_share.clamp(0.0, 1.0),
            spread: [total(|time| time.p10) / usual, total(|time| time.p90) / usual],
        })
    }

    /// The name of the stack whose steps were measured.
    pub fn stack(&self) -> &str {
        &self.stack
    }

    /// A part of a job's step that was not measured and cannot be estimated. `None` if there is
    /// none.
    ///
    /// # Errors
    /// [`TableError`] if the table needs a size that is not given.
    pub fn lacks(&self, job: &TracedJob) -> Result<Option<String>, TableError> {
        if self.usual_rate.is_none() {
            return Ok(Some("a profile without operators".into()));
        }
        let mut lacking = None;
        job.emit(1, |event| match event {
            RankEvent::Collective { kind, .. } if !self.exchanges.contains_key(&exchange_of(kind)) => {
                lacking = Some(format!("collectives of {} ranks, as the profile was measured on {}", job.ranks, self.ranks));
            }
            RankEvent::HostCopy { .. } | RankEvent::HostUpdate { .. } => {
                lacking = Some("offloading, which was not measured".into())
            }
            _ => {}
        })?;
        Ok(lacking)
    }

    fn usual_rate(&self) -> f64 {
        self.usual_rate.expect("invariant: `lacks` refuses a profile without operators")
    }

    /// The table of a step's operators.
    ///
    /// # Errors
    /// [`TableError`] if the profile's table is damaged.
    pub fn table(&self) -> Result<Arc<OperatorTable>, TableError> {
        self.table.clone()
    }

    /// The time of an operator call, and whether it was measured.
    pub(super) fn operator(&self, operator: &TracedOperator, values: &[f64]) -> (Seconds, bool) {
        let call = operator.call(values);
        if let Some(sample) = self.measured(&call, &operator.name) {
            return (sample.median, true);
        }
        let bytes: f64 = operator.inputs.iter().chain(&operator.outputs).map(|tensor| tensor.bytes(values)).sum();
        let rate = self.rates.get(&operator.name).copied().unwrap_or_else(|| self.usual_rate());
        (Seconds::new(bytes * rate), false)
    }

    /// The sample of a call. Autograd sums gradients in place or into a new tensor, so the sample
    /// of the other variant (`name` with or without a trailing `_`) also serves.
    fn measured(&self, call: &str, name: &str) -> Option<&Sample> {
        let other = || match name.strip_suffix('_') {
            Some(plain) => call.replacen(name, plain, 1),
            None => call.replacen(name, &format!("{name}_"), 1),
        };
        self.operators.get(call).or_else(|| self.operators.get(&other()))
    }

    /// The time of a pass over memory, and whether a pass with this name was measured.
    pub(super) fn moving(&self, name: &str, bytes: f64) -> (Seconds, bool) {
        if name == HOST_COPY {
            // The device is the host, so there is nothing to copy.
            return (Seconds::ZERO, true);
        }
        let distance = |sample: &MovesSample| (sample.bytes.value().max(1.0) / bytes.max(1.0)).ln().abs();
        let of_name = self.moves.iter().filter(|sample| sample.name == name);
        let nearest = of_name.min_by(|left, right| distance(left).total_cmp(&distance(right)));
        if let Some(sample) = nearest {
            return (sample.time.median * (bytes / sample.bytes.value().max(1.0)), true);
        }
        (Seconds::new(bytes * self.usual_rate()), false)
    }

    /// The time of a collective of all ranks.
    pub(super) fn collective(&self, kind: TracedCollective, ranks: usize, bytes: f64) -> Seconds {
        let curve = self.exchanges.get(&exchange_of(kind)).expect("invariant: `lacks` refuses collectives without a sample");
        let time = interpolate(curve, bytes, |point| point.0, |point| point.1).expect("invariant: a kind has a sample");
        // The number of a ring's steps is proportional to the number of ranks minus one.
        let steps = |ranks: usize| (ranks as f64 - 1.0).max(1.0);
        Seconds::new(time * steps(ranks) / steps(self.ranks))
    }
}

/// The kind of exchange whose samples time a collective.
const fn exchange_of(kind: TracedCollective) -> Exchange {
    match kind {
        TracedCollective::AllGather => Exchange::AllGather,
        TracedCollective::ReduceScatter => Exchange::ReduceScatter,
        TracedCollective::AllReduce => Exchange::AllReduce,
    }
}
