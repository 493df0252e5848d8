//! The answer of a search.

use foretell_program::Plan;
use foretell_simulator::Prediction;
use foretell_units::Seconds;
use serde::Serialize;

/// A plan that was simulated and fits.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The complete plan.
    pub plan: Plan,
    /// Its prediction.
    pub prediction: Prediction,
}

/// What a search did. `--json` prints it as `search`.
///
/// Every layout counts in exactly one of `alike`, `indivisible`, `needless`, `bounded_out`,
/// `out_of_memory` and `simulated`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Search {
    /// Layouts of the space.
    pub layouts: usize,
    /// Layouts with the same Program as another one, for example with buckets that all hold every
    /// gradient.
    pub alike: usize,
    /// Layouts that do not divide the model or the batch.
    pub indivisible: usize,
    /// Layouts that offload or recompute although the same layout fits without.
    pub needless: usize,
    /// Layouts whose lower bound is worse than the layouts returned.
    pub bounded_out: usize,
    /// Layouts that do not fit.
    pub out_of_memory: usize,
    /// Layouts in `bounded_out` whose simulation was stopped when their bound became too large.
    pub stopped: usize,
    /// Layouts that were simulated to the end.
    pub simulated: usize,
    /// Step time of the best layout.
    pub best_seconds: f64,
    /// Lower bound on the step time of every layout.
    pub lower_bound_seconds: f64,
    /// `best_seconds` over `lower_bound_seconds`, less one.
    pub gap: f64,
    /// Duration of the search. Zero here; the caller has the clock.
    pub wall_seconds: f64,
}

/// The best layouts of a request, and what the search did.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// The best layouts, the best first. Empty only if none beats [`Request::must_beat`].
    ///
    /// [`Request::must_beat`]: crate::Request::must_beat
    pub candidates: Vec<Candidate>,
    /// Value of the best layout in the request's objective; smaller is better.
    pub value: f64,
    /// What the search did.
    pub search: Search,
}

impl Planned {
    /// Joins two searches for the least time, for example with different number formats: the
    /// fastest `top` candidates of both.
    #[must_use]
    pub fn merged(mut self, other: Self, top: usize) -> Self {
        self.candidates.extend(other.candidates);
        let step = |candidate: &Candidate| -> Seconds { candidate.prediction.step_seconds };
        self.candidates.sort_by(|a, b| step(a).value().total_cmp(&step(b).value()));
        self.candidates.truncate(top.max(1));
        self.value = self.value.min(other.value);
        self.search.add(&other.search);
        self
    }

    /// Adds the counts and the lower bound of another search, on other devices, that found nothing
    /// better.
    #[must_use]
    pub fn counting(mut self, other: &Self) -> Self {
        // The other search's bound as a step time of this one: objectives other than time are
        // compared by value.
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
        self.best_seconds = self.best_seconds.min(other.best_seconds);
        self.lower_bound_seconds = self.lower_bound_seconds.min(other.lower_bound_seconds);
        self.gap =
            if self.lower_bound_seconds > 0.0 { self.best_seconds / self.lower_bound_seconds - 1.0 } else { f64::INFINITY };
    }
}
