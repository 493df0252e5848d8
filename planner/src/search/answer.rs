//! The answer of a search.

use crate::space::Dimension;
use foretell_program::Plan;
use foretell_simulator::Prediction;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// A plan that was simulated and fits.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The complete plan.
    pub plan: Plan,
    /// Its prediction.
    pub prediction: Prediction,
    /// The quantity that the search minimises: seconds of a step, of its slow end, or of a step in
    /// a run with failures; price per hour times seconds; or joules.
    pub value: f64,
}

/// Counts and bounds of a search. `--json` prints it as `search`.
///
/// Every layout counts in exactly one of `alike`, `indivisible`, `needless`, `bounded_out`,
/// `out_of_memory` and `simulated`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Search {
    /// Layouts of the space.
    pub layouts: usize,
    /// Layouts with the same Program as another one, for example with buckets that all hold every
    /// gradient.
    pub alike: usize,
    /// Layouts that do not divide the model or the batch.
    pub indivisible: usize,
    /// Layouts that offload or recompute although the same layout fits without doing so.
    pub needless: usize,
    /// Layouts whose lower bound is worse than the values of the returned layouts.
    pub bounded_out: usize,
    /// Layouts that do not fit.
    pub out_of_memory: usize,
    /// Layouts in `bounded_out` whose simulation was stopped when their bound became too large.
    pub stopped: usize,
    /// Layouts that were simulated to the end.
    pub simulated: usize,
    /// Layouts that were simulated early because of their estimates, or as neighbours of the best
    /// one. They do not count among `layouts`.
    pub probed: usize,
    /// Whether the search was ended before it had proven its answer.
    pub is_cut_off: bool,
    /// Values of layout fields that the space leaves out without a proof, as far as they can be
    /// counted; `space` lists them.
    pub heuristic_exclusions: usize,
    /// Names of the dimensions that `lower_bound_seconds` covers with all their values.
    pub covers: Vec<String>,
    /// The dimensions of the space.
    pub space: Vec<Dimension>,
    /// Step time of the best layout: the median, or the 90th percentile if that is the objective
    /// ([`Objective::SlowEnd`](crate::Objective::SlowEnd)).
    pub best_seconds: f64,
    /// Step time of the best layout that was simulated and leaves no device idle, if there is one.
    /// It is of the same kind as `best_seconds`.
    pub all_devices_seconds: Option<f64>,
    /// For each number of devices, the least step time of a layout that was simulated on it. Of the
    /// same kind as `best_seconds`. Empty for the objective energy, from which no times follow.
    #[serde(skip)]
    pub seconds_by_devices: BTreeMap<usize, f64>,
    /// Lower bound on the step time of every layout of the space and of every simulated layout. The
    /// time is of the same kind as `best_seconds`.
    pub lower_bound_seconds: f64,
    /// Lower bound on the step time of every plan file of the job, whatever its mesh, buckets, cuts
    /// and rank order: the kernels of a step at the devices' best rates, divided perfectly, and the
    /// stack's fixed time. Communication does not count. In modes other than `synchronous` only
    /// matrix products count, and with measured kernels none.
    pub bound_of_any_layout_seconds: f64,
    /// `best_seconds` over `lower_bound_seconds`, less one.
    pub gap: f64,
    /// Duration of the search. Zero here; the caller has the clock.
    pub wall_seconds: f64,
}

/// The best layouts of a request, and the counts of the search.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchResult {
    /// The best layouts, the best first. Empty only if none beats [`Request::must_beat`].
    ///
    /// [`Request::must_beat`]: crate::Request::must_beat
    pub candidates: Vec<Candidate>,
    /// Value of the best layout in the request's objective; smaller is better.
    pub value: f64,
    /// Counts and bounds of the search.
    pub search: Search,
}

impl SearchResult {
    /// Joins two searches by step time, for example with different number formats: the first
    /// candidate of the faster search, then the fastest candidates of both, at most `top` in all.
    ///
    /// A search may prefer a simple layout to faster ones, so the first candidate stays first.
    #[must_use]
    pub fn merged(mut self, mut other: Self, top: usize) -> Self {
        if other.value < self.value || self.candidates.is_empty() {
            std::mem::swap(&mut self, &mut other);
        }
        self.candidates.extend(other.candidates);
        let step = |candidate: &Candidate| candidate.prediction.step_seconds.value();
        if let Some((_, rest)) = self.candidates.split_first_mut() {
            rest.sort_by(|a, b| step(a).total_cmp(&step(b)));
        }
        self.candidates.truncate(top.max(1));
        self.search.add(&other.search);
        for (devices, seconds) in other.search.seconds_by_devices {
            let known = self.search.seconds_by_devices.entry(devices).or_insert(seconds);
            *known = known.min(seconds);
        }
        self
    }

    /// Marks the search as ended before its time: part of the job was not searched, so no bound
    /// holds for it.
    #[must_use]
    pub fn cut_off(self) -> Self {
        self.cut_off_beside(0.0)
    }

    /// Marks the search as ended before its time: layouts on some of its devices in other orders
    /// were not searched. The bound on every layout holds for those too.
    #[must_use]
    pub(crate) fn cut_off_on_fewer_devices(self) -> Self {
        let bound = self.search.bound_of_any_layout_seconds;
        self.cut_off_beside(bound)
    }

    /// Marks the search as ended before its time, where the layouts that were not searched take at
    /// least `bound` seconds a step.
    fn cut_off_beside(mut self, bound: f64) -> Self {
        let best_seconds = self.search.best_seconds;
        let (lower_bound_seconds, bound_of_any_layout_seconds) = (bound, bound);
        let left =
            Search { is_cut_off: true, best_seconds, lower_bound_seconds, bound_of_any_layout_seconds, ..Search::default() };
        self.search.add(&left);
        self
    }

    /// Adds the counts and the lower bound of another search, on other devices, that found nothing
    /// better.
    #[must_use]
    pub fn counting(mut self, other: &Self) -> Self {
        // Convert the other search's bound to a step time of this one by the ratio of values, since
        // objectives other than time are compared by value.
        let best_seconds = self.search.best_seconds;
        let share = (other.value / (1.0 + other.search.gap) / self.value).min(1.0);
        self.search.add(&Search { best_seconds, lower_bound_seconds: best_seconds * share, ..other.search.clone() });
        self
    }
}

impl Search {
    fn add(&mut self, other: &Self) {
        self.layouts += other.layouts;
        self.alike += other.alike;
        self.needless += other.needless;
        self.indivisible += other.indivisible;
        self.bounded_out += other.bounded_out;
        self.out_of_memory += other.out_of_memory;
        self.stopped += other.stopped;
        self.simulated += other.simulated;
        self.probed += other.probed;
        self.is_cut_off |= other.is_cut_off;
        self.best_seconds = self.best_seconds.min(other.best_seconds);
        let both = self.all_devices_seconds.into_iter().chain(other.all_devices_seconds);
        self.all_devices_seconds = both.reduce(f64::min);
        self.lower_bound_seconds = self.lower_bound_seconds.min(other.lower_bound_seconds);
        self.bound_of_any_layout_seconds = self.bound_of_any_layout_seconds.min(other.bound_of_any_layout_seconds);
        self.gap =
            if self.lower_bound_seconds > 0.0 { self.best_seconds / self.lower_bound_seconds - 1.0 } else { f64::INFINITY };
    }
}
