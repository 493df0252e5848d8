//! The best layouts found so far.

use super::queue::LayoutIndex;
use crate::space::Request;
use foretell_program::{Layout, Plan, Recompute};
use foretell_simulator::{MemoryUse, Prediction};

/// Spaces with fewer layouts than this are searched until the gap is zero. Forms that offload or
/// recompute part of the blocks do not count.
const SMALL_SPACE: usize = 512;

/// The most layouts that are shown as a table for people, without near-duplicates. A request for
/// more gets all simulated layouts.
const MOST_OF_A_TABLE: usize = 10;

/// The largest ratio of a bound to the least bound of a round with which a layout is simulated in
/// that round. Simulations of the best layouts end 1 to 3 % above their bounds, so layouts further
/// up hardly ever have to be simulated.
const NEAR: f64 = 1.02;

/// A layout that was simulated and fits. Its Program is not kept: it may take hundreds of
/// megabytes.
pub(super) struct Incumbent {
    /// Value in the request's objective.
    pub(super) value: f64,
    pub(super) index: LayoutIndex,
    pub(super) plan: Plan,
    /// Its prediction, if the simulation that gave the value made one.
    pub(super) predicted: Option<PredictedStep>,
}

/// The prediction of a training step, and the memory of its stages.
pub(super) struct PredictedStep {
    pub(super) prediction: Prediction,
    pub(super) memory: MemoryUse,
    /// Memory weight of each stage; see [`DeviceKinds`](crate::space::DeviceKinds).
    pub(super) weights: Vec<f64>,
}

/// The best layouts found so far. Families and layouts whose bounds cannot beat them are not
/// searched.
pub(super) struct Incumbents<'a> {
    request: &'a Request<'a>,
    /// Layouts of the space, not counting forms that offload or recompute part of the blocks.
    pub(super) layouts_of_space: usize,
    /// The incumbents, the best first.
    pub(super) list: Vec<Incumbent>,
}

impl<'a> Incumbents<'a> {
    pub(super) fn new(request: &'a Request<'a>) -> Self {
        Self { request, layouts_of_space: 0, list: Vec::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Sorts the incumbents after new ones were added.
    pub(super) fn sort(&mut self) {
        self.list.sort_by(|a, b| a.value.total_cmp(&b.value).then(a.index.cmp(&b.index)));
    }

    /// Sets the index of an incumbent that was found before its turn in the space. Until then its
    /// index has a family number of at least `found_early`.
    pub(super) fn rename(&mut self, layout: &Layout, found_early: usize, index: LayoutIndex) {
        let is_it = |incumbent: &&mut Incumbent| incumbent.index.family >= found_early && incumbent.plan.layout == *layout;
        if let Some(incumbent) = self.list.iter_mut().find(is_it) {
            incumbent.index = index;
        }
    }

    /// Moves an incumbent to the front, although others are faster: it is preferred to them.
    pub(super) fn prefer(&mut self, index: LayoutIndex) {
        if let Some(place) = self.list.iter().position(|incumbent| incumbent.index == index) {
            let preferred = self.list.remove(place);
            self.list.insert(0, preferred);
        }
    }

    /// Returns the value of the best incumbent.
    pub(super) fn best(&self) -> Option<f64> {
        self.list.first().map(|best| best.value)
    }

    /// Returns the value to beat: the least of the best incumbent's value, of `beside` (the value
    /// of another layout) and of another search's value.
    pub(super) fn value_to_beat(&self, beside: Option<f64>) -> Option<f64> {
        beside.into_iter().chain(self.best()).chain(self.request.must_beat).reduce(f64::min)
    }

    /// Returns the value that a layout must beat to be returned. `None` while any layout would be
    /// returned.
    pub(super) fn value_to_be_returned(&self, beside: Option<f64>) -> Option<f64> {
        match self.request.top {
            0 | 1 => self.value_to_beat(beside),
            _ => self.worst_returned().into_iter().chain(self.request.must_beat).reduce(f64::min),
        }
    }

    /// Returns `true` if entries with this bound or a greater one need no more search.
    pub(super) fn settles(&self, bound: f64) -> bool {
        let has_answer = !self.is_empty() || self.request.must_beat.is_some();
        has_answer && self.request.stop.is_raised() || self.settles_by_value(bound)
    }

    /// Returns `true` if no layout with this bound or a greater one can be among the best.
    pub(super) fn settles_by_value(&self, bound: f64) -> bool {
        if self.request.must_beat.is_some_and(|value| self.would_settle(bound, value, value)) {
            return true;
        }
        let Some(worst) = self.worst_returned() else { return false };
        self.would_settle(bound, self.list[0].value, worst)
    }

    /// Returns the value of the worst incumbent to return, if there are as many as requested.
    pub(super) fn worst_returned(&self) -> Option<f64> {
        self.list.get(self.request.top.max(1) - 1).map(|worst| worst.value)
    }

    /// Returns `true` if entries with this bound or a greater one would need no search, were `best`
    /// and `worst` the values of the best and the worst layout to return.
    pub(super) fn would_settle(&self, bound: f64, best: f64, worst: f64) -> bool {
        bound > worst || !self.is_small_space() && best <= bound * (1.0 + self.request.tolerance)
    }

    pub(super) fn is_small_space(&self) -> bool {
        self.layouts_of_space < SMALL_SPACE
    }

    /// Returns `true` if an entry of the queue is close enough to the round's least bound to be
    /// opened in that round.
    pub(super) fn may_be_in_round(&self, bound: f64, least: f64) -> bool {
        bound * (1.0 + self.request.tolerance) <= NEAR * least
    }

    /// Returns `true` if a layout's bound is too far above that of the first layout of its Program
    /// to be simulated in the same round.
    pub(super) fn is_far(bound: f64, first: f64) -> bool {
        bound > NEAR * first
    }

    /// Returns the indices in the list of the layouts to return: the best of each kind of layout,
    /// then the best of the rest that differ from these in more than details. So there may be fewer
    /// than requested, unless more than [`MOST_OF_A_TABLE`] were requested.
    pub(super) fn returned(&self) -> Vec<usize> {
        let top = self.request.top.max(1);
        let mut distinct: Vec<usize> = Vec::new();
        for (place, incumbent) in self.list.iter().enumerate() {
            if !distinct.iter().any(|&other| runs_the_same_step(&self.list[other], incumbent)) {
                distinct.push(place);
            }
        }
        let mut places: Vec<usize> = Vec::new();
        for &place in &distinct {
            let kind = |place: usize| kind(&self.list[place].plan.layout);
            if places.len() < top && places.iter().all(|&other| kind(other) != kind(place)) {
                places.push(place);
            }
        }
        distinct.retain(|place| !places.contains(place));
        for place in distinct {
            let coarse = |place: usize| without_details(&self.list[place].plan.layout);
            let differs = top > MOST_OF_A_TABLE || places.iter().all(|&other| coarse(other) != coarse(place));
            if places.len() < top && differs {
                places.push(place);
            }
        }
        places.sort_unstable();
        places
    }
}

/// Returns the fields in which layouts must differ to be of different kinds. How many blocks a
/// layout recomputes does not matter.
fn kind(layout: &Layout) -> Layout {
    let Layout { data, tensor, pipeline, context, expert, offload, .. } = *layout;
    let zero = if layout.zero == 3 { 3 } else { 0 };
    Layout { data, tensor, pipeline, context, expert, zero, recompute: in_part(layout), offload, ..Layout::default() }
}

/// Returns a layout with the details reset by which people hardly compare answers: numbers of
/// chunks and of recomputed blocks, cuts, buckets, rank orders, algorithms of collectives.
fn without_details(layout: &Layout) -> Layout {
    let Layout { virtual_stages, bucket, collective, .. } = Layout::default();
    Layout { virtual_stages, bucket, collective, cuts: None, placement: None, recompute: in_part(layout), ..layout.clone() }
}

/// Returns a layout's recomputation, with one common value for all partial ones.
fn in_part(layout: &Layout) -> Recompute {
    match &layout.recompute {
        Recompute::FullLayers(_) | Recompute::FullLayersOfStages(_) => Recompute::FullLayers(0),
        other => other.clone(),
    }
}

/// Returns `true` for layouts of equal value that differ only in `recompute`: they then recompute
/// the same operators.
fn runs_the_same_step(one: &Incumbent, other: &Incumbent) -> bool {
    let without = |incumbent: &Incumbent| Layout { recompute: Recompute::None, ..incumbent.plan.layout.clone() };
    one.value.total_cmp(&other.value).is_eq() && without(one) == without(other)
}
