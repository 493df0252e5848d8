//! The search itself: opening families, and rounds of simulations.

use super::answer::{Search, SearchResult};
use super::incumbents::Incumbents;
use super::queue::{LayoutIndex, NEIGHBOURS, QueueContent, QueueEntry, QueuedLayout, grouped_by_program};
use super::records::{Corrections, Known, KnownLayouts, Manner, OffloadedTooLarge, Refits};
use super::refusal::nothing_found;
use super::simulation::{FirstOutcome, Outcome, Simulations};
use crate::bounds::{Bound, Bounded, Bounds, Excluded};
use crate::error::PlannerError;
use crate::operator_sharding::with_sharded_operators;
use crate::space::{Family, Progress, Request};
use foretell_program::Layout;
use foretell_units::diagnostic::Mistake;
use foretell_units::{Bytes, Seconds};
use rayon::prelude::*;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashSet};

/// The most families that are bounded together.
const FAMILIES_PER_BOUNDING: usize = 128;

/// Once families with this many layouts are opened together, no further family is added.
const LAYOUTS_PER_OPENING: usize = 16;

/// The most groups of layouts that are simulated in a round. Rounds without incumbents have few,
/// since often nothing has to be simulated after them.
const GROUPS_OF_FIRST_ROUND: usize = 2;
const GROUPS_PER_ROUND: usize = 4;

/// The state of a search.
pub(super) struct Searcher<'a> {
    pub(super) request: &'a Request<'a>,
    pub(super) bounds: Bounds<'a>,
    pub(super) search: Search,
    pub(super) incumbents: Incumbents<'a>,
    pub(super) offloaded_too_large: OffloadedTooLarge,
    pub(super) refits: Refits,
    queue: BinaryHeap<Reverse<QueueEntry>>,
    pub(super) corrections: Corrections,
    pub(super) known: KnownLayouts,
    /// The families that were tried early, each represented by its layout with the least
    /// recomputation.
    pub(super) tried: HashSet<Layout>,
    /// The manners of the layouts where climbs started.
    pub(super) climbed: BTreeSet<Manner>,
    /// Bound on the value of every layout, if the search ended before all layouts were listed.
    bound_of_unlisted: Option<f64>,
    /// Least memory of a layout that does not fit.
    least_needed: Option<Bytes>,
    /// The compiler's message about a layout that it refused.
    refusal: Option<Mistake>,
}

impl<'a> Searcher<'a> {
    pub(super) fn new(request: &'a Request<'a>, bounds: Bounds<'a>) -> Self {
        Self {
            request,
            bounds,
            search: Search::default(),
            incumbents: Incumbents::new(request),
            offloaded_too_large: OffloadedTooLarge::default(),
            refits: Refits::default(),
            queue: BinaryHeap::new(),
            corrections: Corrections::default(),
            known: KnownLayouts::default(),
            tried: HashSet::new(),
            climbed: BTreeSet::new(),
            bound_of_unlisted: None,
            least_needed: None,
            refusal: None,
        }
    }

    pub(super) fn run(mut self) -> Result<SearchResult, PlannerError> {
        let usual = self.bounds.space.usual_families(&|| self.is_over());
        self.try_experts(&usual)?;
        // If bounds are cheap, they find the best of the usual families sooner than a climb.
        if !self.best_has_cheap_bounds() {
            self.climb()?;
        }
        let ranked = self.ranked(&usual);
        self.probe(ranked)?;
        // Climb from layouts of other manners too, which the probe may have found.
        self.climb()?;
        self.fill_queue()?;
        let (predicted, left) = loop {
            // The bound on every layout also holds for the layouts left.
            let left = self.look_at_queue()?.or(self.bound_of_unlisted).map(|left| left.max(self.bounds.least_value()));
            // Decide this before a simpler and slower layout may be preferred.
            let is_unsettled = left.is_some_and(|left| !self.incumbents.settles_by_value(left));
            if let Some(value) = self.request.must_beat {
                self.incumbents.list.retain(|incumbent| incumbent.value < value);
                if self.incumbents.is_empty() {
                    self.search.is_cut_off |= is_unsettled;
                    break (Vec::new(), left);
                }
            }
            if self.incumbents.is_empty() {
                if self.bound_of_unlisted.is_some() {
                    return Err(self.out_of_time());
                }
                let (blocks, limit) = (self.bounds.space.model.blocks, self.bounds.memory_limit);
                return Err(nothing_found(self.request, blocks, self.least_needed, limit, self.refusal));
            }
            self.improve_locally()?;
            if let Some(predicted) = self.predict_returned()? {
                self.search.is_cut_off |= is_unsettled;
                break (predicted, left);
            }
        };
        self.search.bounded_out += self.queue.iter().map(|Reverse(entry)| entry.layouts).sum::<usize>();
        self.search.stopped = self.queue.iter().map(|Reverse(entry)| entry.stopped()).sum();
        Ok(self.answer(predicted, left))
    }

    /// Works through the queue until nothing in it can be among the best. Returns the least bound
    /// that is left, if any.
    fn look_at_queue(&mut self) -> Result<Option<f64>, PlannerError> {
        while let Some(Reverse(next)) = self.queue.peek() {
            if !self.has_answer() && self.is_over() {
                return Err(self.out_of_time());
            }
            self.report(next.bound.max(self.bounds.least_value()));
            if self.incumbents.settles(next.bound) {
                return Ok(Some(next.bound));
            }
            match next.content {
                QueueContent::UnboundedFamily(_) => self.bound_families()?,
                QueueContent::Family(_) => self.open_families(),
                QueueContent::Layouts(_) => self.run_round()?,
            }
        }
        Ok(None)
    }

    /// Reports the best layout so far to the caller, if there is one. `bound` is the least bound of
    /// what is left.
    pub(super) fn report(&self, bound: f64) {
        if let Some(best) = self.incumbents.best() {
            let simulated = self.search.simulated + self.search.probed;
            (self.request.watch)(Progress { best, bound: bound.min(best), simulated });
        }
    }

    /// Returns `true` if bounds cost far less than simulations for layouts like the best one.
    pub(super) fn best_has_cheap_bounds(&self) -> bool {
        self.incumbents.list.first().is_some_and(|candidate| self.bounds.has_cheap_bounds(&candidate.plan.layout))
    }

    /// Returns `true` if the search has to end now, with the answer that it has or without one.
    pub(super) fn is_over(&self) -> bool {
        if self.has_answer() { self.request.stop.is_raised() } else { self.request.give_up.is_raised() }
    }

    fn out_of_time(&self) -> PlannerError {
        PlannerError::OutOfTime { layouts: self.search.layouts, out_of_memory: self.search.out_of_memory }
    }

    /// Queues every family of the space with its arithmetic bound, and counts the layouts.
    /// Simulates the layouts that estimates rank first.
    fn fill_queue(&mut self) -> Result<(), PlannerError> {
        let listed = if self.is_over() { None } else { self.bounds.space.families_until(&|| self.is_over()) };
        let Some(families) = listed else { return self.leave_unlisted() };
        let families = with_sharded_operators(self.request, families, &|| self.is_over());
        let ranked = self.ranked(&families);
        self.probe(ranked)?;
        let (bounds, space) = (&self.bounds, &self.bounds.space);
        let entry = |(number, family): (usize, Family)| {
            if self.is_over() {
                return None;
            }
            let variants = space.variants(&family).len();
            let (duplicates, forms) = (space.duplicates(&family, variants), bounds.forms(&family.layout));
            let bound = bounds.arithmetic_time(&family.layout).value() * bounds.value_per_second(&family.layout);
            let content = QueueContent::UnboundedFamily(Box::new(family));
            let (index, layouts) = (LayoutIndex { family: number, variant: 0 }, variants * forms);
            Some((QueueEntry { bound, index, layouts, content }, variants, duplicates, forms))
        };
        let entries: Option<Vec<_>> = families.into_par_iter().enumerate().map(entry).collect();
        let Some(entries) = entries else { return self.leave_unlisted() };
        for (entry, variants, duplicates, forms) in entries {
            self.search.layouts += (variants + duplicates) * forms;
            self.incumbents.layouts_of_space += variants + duplicates;
            self.search.alike += duplicates * forms;
            self.queue.push(Reverse(entry));
        }
        Ok(())
    }

    /// Ends the listing of the space before its time. The bound on every layout then stands for all
    /// layouts.
    fn leave_unlisted(&mut self) -> Result<(), PlannerError> {
        self.bound_of_unlisted = Some(self.bounds.least_value());
        if self.has_answer() { Ok(()) } else { Err(self.out_of_time()) }
    }

    /// Bounds the families at the head of the queue by all their variants.
    fn bound_families(&mut self) -> Result<(), PlannerError> {
        let mut families = Vec::new();
        while families.len() < FAMILIES_PER_BOUNDING
            && let Some(Reverse(next)) = self.queue.peek()
            && matches!(next.content, QueueContent::UnboundedFamily(_))
            && let Some(Reverse(entry)) = self.queue.pop()
            && let QueueContent::UnboundedFamily(family) = entry.content
        {
            families.push((entry.bound, entry.index.family, entry.layouts, family));
        }
        // A family that cannot beat the best layout need not be bounded tightly.
        let best = self.incumbents.value_to_beat(None);
        // `Err` with the unchanged family if the search ended meanwhile.
        let bounded = families.into_par_iter().map(|(arithmetic, number, layouts, family)| {
            if self.is_over() {
                return Err((arithmetic, number, layouts, family));
            }
            let enough = best.map(|best| Seconds::new(best / self.bounds.value_per_second(&family.layout)));
            let bounded = self.bounds.family(&family, enough);
            let smaller = match bounded {
                Ok(Bound { time: None, .. }) if self.is_over() => return Err((arithmetic, number, layouts, family)),
                Ok(Bound { time: None, memory: needed }) => self.smaller_families(&family, needed),
                _ => Vec::new(),
            };
            let variants = self.bounds.space.variants(&family).len();
            Ok((arithmetic, number, *family, variants, bounded, smaller))
        });
        let bounded: Vec<_> = bounded.collect();
        for bounded in bounded {
            let (arithmetic, number, family, variants, bounded, smaller) = match bounded {
                Ok(bounded) => bounded,
                Err((bound, number, layouts, family)) => {
                    let index = LayoutIndex { family: number, variant: 0 };
                    let content = QueueContent::UnboundedFamily(family);
                    self.queue.push(Reverse(QueueEntry { bound, index, layouts, content }));
                    continue;
                }
            };
            for (bounded, family) in std::iter::once((bounded, family)).chain(smaller) {
                if let Some(bound) = self.admit((number, None), bounded, &family.layout, variants) {
                    let index = LayoutIndex { family: number, variant: 0 };
                    let layouts = variants * self.bounds.forms(&family.layout);
                    let content = QueueContent::Family(Box::new(family));
                    self.queue.push(Reverse(QueueEntry { bound: bound.max(arithmetic), index, layouts, content }));
                }
            }
        }
        if !self.has_answer() && self.is_over() { Err(self.out_of_time()) } else { Ok(()) }
    }

    /// Returns the bound on the value of `layouts` layouts like `layout`. Returns `None`, and
    /// counts the layouts as excluded, if they need no search.
    pub(super) fn value_bound(&mut self, bounded: Bounded, layout: &Layout, layouts: usize) -> Option<f64> {
        match bounded {
            Ok(Bound { time: Some(time), .. }) => return Some(time.value() * self.bounds.value_per_second(layout)),
            Ok(Bound { time: None, memory }) => {
                self.search.out_of_memory += layouts;
                self.least_needed = Some(self.least_needed.map_or(memory, |least| least.min(memory)));
            }
            Err(Excluded::Indivisible(reason)) => {
                self.search.indivisible += layouts;
                self.refusal.get_or_insert(reason);
            }
            Err(Excluded::HostMemory) => self.search.out_of_memory += layouts,
        }
        None
    }

    /// Replaces the families at the head of the queue by their layouts, each with its own bound.
    fn open_families(&mut self) {
        let mut opened = Vec::new();
        while opened.len() < LAYOUTS_PER_OPENING
            && let Some(Reverse(next)) = self.queue.peek()
            && matches!(next.content, QueueContent::Family(_))
            && let Some(Reverse(entry)) = self.queue.pop()
            && let QueueContent::Family(family) = entry.content
        {
            let variants = self.bounds.variants(&family).into_iter().enumerate();
            opened.extend(variants.map(|(variant, layout)| {
                let index = LayoutIndex { family: entry.index.family, variant };
                (entry.bound, index, layout, family.micro_batches)
            }));
        }
        let bounded = opened.into_par_iter().map(|(of_family, index, layout, micro_batches)| {
            if self.is_over() {
                // Without a bound of its own, the layout keeps the bound of its family.
                return (of_family, index, layout, micro_batches, None, Vec::new());
            }
            let (bounded, layout, smaller) = self.bounded_with_forms(layout, micro_batches);
            (of_family, index, layout, micro_batches, Some(bounded), smaller)
        });
        let bounded: Vec<_> = bounded.collect();
        let mut layouts = Vec::new();
        for (of_family, index, layout, micro_batches, bounded, smaller) in bounded {
            let Some(bounded) = bounded else {
                layouts.push(QueuedLayout { bound: of_family, index, layout, is_stopped: false });
                continue;
            };
            let is_too_large = matches!(bounded, Ok(Bound { time: None, .. }));
            layouts.extend(self.queued(bounded, index, of_family, layout.clone()));
            for (bounded, layout) in smaller {
                layouts.extend(self.queued(bounded, index, of_family, layout));
            }
            if is_too_large && let Some(both) = self.offloading_both(index, &layout) {
                layouts.extend(self.queued(self.bounds.layout(&both, micro_batches), index, of_family, both));
            }
        }
        self.push_layouts(layouts);
    }

    /// Queues layouts, those with the same Program together.
    pub(super) fn push_layouts(&mut self, layouts: Vec<QueuedLayout>) {
        let groups = grouped_by_program(layouts, |layout| self.bounds.forms(layout));
        self.queue.extend(groups.into_iter().map(Reverse));
    }

    /// Takes the groups of layouts with the least bounds from the queue. Families among them are
    /// opened if their bounds are near the least.
    fn next_round(&mut self) -> Result<Vec<Vec<QueuedLayout>>, PlannerError> {
        let mut round: Vec<Vec<QueuedLayout>> = Vec::new();
        let most = if self.incumbents.is_empty() { GROUPS_OF_FIRST_ROUND } else { GROUPS_PER_ROUND };
        let mut least = f64::INFINITY;
        while round.len() < most
            && let Some(Reverse(next)) = self.queue.peek()
            && !self.incumbents.settles(next.bound)
        {
            least = least.min(next.bound);
            let is_near = self.incumbents.may_be_in_round(next.bound, least);
            match next.content {
                QueueContent::UnboundedFamily(_) if is_near => self.bound_families()?,
                QueueContent::Family(_) if is_near => self.open_families(),
                QueueContent::UnboundedFamily(_) | QueueContent::Family(_) => break,
                QueueContent::Layouts(_) => {
                    if let Some(Reverse(QueueEntry { content: QueueContent::Layouts(layouts), .. })) = self.queue.pop() {
                        let layouts = self.without_known(layouts);
                        round.extend(Some(layouts).filter(|layouts| !layouts.is_empty()));
                    }
                }
            }
        }
        Ok(round)
    }

    /// Removes the layouts of a group whose results are known already, and records these results as
    /// if they came from this round.
    fn without_known(&mut self, layouts: Vec<QueuedLayout>) -> Vec<QueuedLayout> {
        let mut unknown = Vec::new();
        for queued in layouts {
            match self.known.get(&queued.layout).cloned() {
                Some(Known::Simulated) => {
                    self.incumbents.rename(&queued.layout, NEIGHBOURS, queued.index);
                    self.count_simulated(queued.index, &queued.layout);
                }
                Some(Known::AtLeast(at_least)) if !queued.is_stopped => {
                    let bound = at_least.max(queued.bound);
                    self.push_layouts(vec![QueuedLayout { bound, is_stopped: true, ..queued }]);
                }
                Some(Known::TooLarge(held)) => self.found_too_large(queued.index, queued.bound, &queued.layout, &held),
                _ => unknown.push(queued),
            }
        }
        self.incumbents.sort();
        unknown
    }

    /// Simulates the layouts of one round.
    fn run_round(&mut self) -> Result<(), PlannerError> {
        let round = self.next_round()?;
        let simulations = Simulations { bounds: &self.bounds, incumbents: &self.incumbents };
        let first =
            round.par_iter().map(|layouts| simulations.first(layouts)).collect::<Result<Vec<FirstOutcome>, PlannerError>>()?;
        let best = first.iter().filter_map(|first| first.outcome.as_ref()?.value()).reduce(f64::min);
        let outcomes: Vec<Vec<Outcome>> = round
            .par_iter()
            .zip(first)
            .map(|(layouts, first)| simulations.rest(layouts, first, best))
            .collect::<Result<_, PlannerError>>()?;
        for (layouts, outcomes) in round.into_iter().zip(outcomes) {
            self.take_outcomes(layouts, outcomes);
        }
        self.incumbents.sort();
        Ok(())
    }

    /// Records the outcomes of the first layouts of a group, and queues the group's other layouts
    /// again.
    fn take_outcomes(&mut self, layouts: Vec<QueuedLayout>, outcomes: Vec<Outcome>) {
        let mut layouts = layouts.into_iter();
        let mut left: Vec<QueuedLayout> = Vec::new();
        let count = outcomes.len();
        for (layout, outcome) in layouts.by_ref().take(count).collect::<Vec<_>>().into_iter().zip(outcomes) {
            let QueuedLayout { bound, index, layout, is_stopped } = layout;
            self.known.note(&layout, &outcome);
            let place = (index.family, Some(index.variant));
            match outcome {
                Outcome::Indivisible(reason) => drop(self.admit(place, Err(Excluded::Indivisible(reason)), &layout, 1)),
                Outcome::OutOfMemory(held) => self.found_too_large(index, bound, &layout, &held),
                Outcome::OutOfHostMemory => drop(self.admit(place, Err(Excluded::HostMemory), &layout, 1)),
                Outcome::Stopped(at_least) => {
                    left.push(QueuedLayout { bound: at_least.max(bound), index, layout, is_stopped: true });
                }
                // The layout returns to the queue, so that its bound counts in the gap.
                Outcome::Interrupted => left.push(QueuedLayout { bound, index, layout, is_stopped }),
                Outcome::Simulated(incumbent) => {
                    self.count_simulated(index, &layout);
                    self.incumbents.list.push(*incumbent);
                }
            }
        }
        left.extend(layouts);
        self.push_layouts(left);
    }
}
