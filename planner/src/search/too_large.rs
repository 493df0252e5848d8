//! Layouts that do not fit, and the smaller forms in which they are searched again.
//!
//! The *forms* of a layout are the same layout with part of its blocks recomputed, or with
//! offloading: of the optimizer state, of activations, or of both. They are searched only if the
//! layout does not fit, and the form that offloads both only if neither of the other two fits. A
//! fitted layout that the compiler finds too large is refitted.

use super::queue::{LayoutIndex, QueuedLayout};
use super::records::Place;
use super::searcher::Searcher;
use super::simulation::most;
use crate::bounds::{Bound, Bounded, Excluded, MOST_REFITS};
use crate::space::Family;
use foretell_program::{Layout, Offload, Plan};
use foretell_units::Bytes;

impl Searcher<'_> {
    /// Bounds the smaller forms of a family whose layouts all need at least `needed`.
    pub(super) fn smaller_families(&self, family: &Family, needed: Bytes) -> Vec<(Bounded, Family)> {
        let (bounds, space) = (&self.bounds, &self.bounds.space);
        let mut smaller = if bounds.has_fitted_cuts(&family.layout) {
            bounds.fitted_family(family, needed).into_iter().collect()
        } else {
            let recomputed = space.partly_recomputed(&family.layout).into_iter();
            let recomputed = recomputed.map(|layout| Family { layout, ..family.clone() });
            up_to_first_that_may_fit(recomputed, |family| (bounds.family(&family, None), family))
        };
        if !space.is_partly_recomputed(&family.layout) {
            let is_open = space.offloads.contains(&Offload::Optimizer);
            let is_hopeless = is_open && bounds.offloaded_state_does_not_fit(&space.variants(family), needed);
            smaller.extend(offloaded_forms(
                |offload| space.offloaded_family(family, offload),
                |family| match family.layout.offload {
                    Offload::Optimizer if is_hopeless => Ok(Bound::too_large(needed)),
                    _ => bounds.family(family, None),
                },
            ));
        }
        smaller
    }

    /// Bounds the smaller forms of a layout that needs at least `needed`.
    pub(super) fn smaller_layouts(&self, layout: &Layout, micro_batches: usize, needed: Bytes) -> Vec<(Bounded, Layout)> {
        let (bounds, space) = (&self.bounds, &self.bounds.space);
        let recomputed = bounds.partly_recomputed(layout, micro_batches).into_iter();
        let mut smaller = up_to_first_that_may_fit(recomputed, |layout| bounds.layout_refitted(layout, micro_batches));
        if !space.is_partly_recomputed(layout) {
            let is_hopeless = bounds.offloaded_state_does_not_fit(std::slice::from_ref(layout), needed);
            smaller.extend(offloaded_forms(
                |offload| space.offloaded(layout, offload),
                |layout| match layout.offload {
                    Offload::Optimizer if is_hopeless => Ok(Bound::too_large(needed)),
                    _ => bounds.layout(layout, micro_batches),
                },
            ));
        }
        smaller
    }

    /// Bounds a layout, refitted if it is a fitted one, and its smaller forms if it is too large.
    pub(super) fn bounded_with_forms(&self, layout: Layout, micro_batches: usize) -> (Bounded, Layout, Vec<(Bounded, Layout)>) {
        let (bounded, layout) = self.bounds.layout_refitted(layout, micro_batches);
        let smaller = match bounded {
            Ok(Bound { time: None, memory: needed }) if layout.offload.is_none() => {
                self.smaller_layouts(&layout, micro_batches, needed)
            }
            _ => Vec::new(),
        };
        (bounded, layout, smaller)
    }

    /// Returns the bound on the value of `layouts` layouts at `place`. Returns `None`, and counts
    /// the layouts as excluded, if they need no search. The forms of a layout count together with
    /// it, unless it does not fit: then they are searched themselves.
    pub(super) fn admit(&mut self, place: Place, bounded: Bounded, layout: &Layout, layouts: usize) -> Option<f64> {
        match bounded {
            Ok(Bound { time: None, .. }) => {
                self.value_bound(bounded, layout, layouts);
                self.add_too_large(place, layout, layouts);
                None
            }
            Err(Excluded::HostMemory) if layout.offload == Offload::Activations => {
                self.value_bound(bounded, layout, layouts);
                // The hosts cannot hold both either.
                if self.offloaded_too_large.contains(place, Offload::Optimizer) {
                    self.search.bounded_out -= layouts;
                    self.value_bound(Err(Excluded::HostMemory), layout, layouts);
                } else {
                    self.offloaded_too_large.insert(place, Offload::Both);
                }
                None
            }
            _ => self.value_bound(bounded, layout, layouts * self.bounds.forms(layout)),
        }
    }

    /// Records an offloaded form that does not fit. Offloading both is no better than offloading
    /// activations alone, so the form that offloads both counts as bounded out as long as the form
    /// that offloads activations may fit.
    fn add_too_large(&mut self, place: Place, layout: &Layout, layouts: usize) {
        if !self.bounds.space.offloads.contains(&Offload::Both) {
            return;
        }
        let known = &self.offloaded_too_large;
        match layout.offload {
            Offload::Optimizer if known.contains(place, Offload::Both) => {
                self.value_bound(Err(Excluded::HostMemory), layout, layouts);
            }
            Offload::Optimizer if !known.contains(place, Offload::Activations) => self.search.bounded_out += layouts,
            Offload::Activations if known.contains(place, Offload::Optimizer) => self.search.bounded_out -= layouts,
            _ => {}
        }
        self.offloaded_too_large.insert(place, layout.offload);
    }

    /// Counts a simulated layout. Its smaller forms count as needless.
    pub(super) fn count_simulated(&mut self, index: LayoutIndex, layout: &Layout) {
        let both = self.forms_counted_with_activations(index, layout);
        self.search.simulated += 1;
        self.search.needless += self.bounds.forms(layout) - 1 + both;
        self.search.bounded_out -= both;
    }

    /// Undoes [`count_simulated`](Self::count_simulated): the layout does not fit after all.
    pub(super) fn uncount_simulated(&mut self, index: LayoutIndex, layout: &Layout) {
        let both = self.forms_counted_with_activations(index, layout);
        self.search.simulated -= 1;
        self.search.needless -= self.bounds.forms(layout) - 1 + both;
        self.search.bounded_out += both;
    }

    /// Returns 1 if a layout offloads activations and the form that offloads both counts as bounded
    /// out because of it, else 0.
    fn forms_counted_with_activations(&self, index: LayoutIndex, layout: &Layout) -> usize {
        let place = (index.family, Some(index.variant));
        let known = &self.offloaded_too_large;
        let is_counted = known.contains(place, Offload::Optimizer) && !known.contains(place, Offload::Both);
        usize::from(layout.offload == Offload::Activations && is_counted)
    }

    /// For a layout that does not fit with offloaded optimizer state or activations: returns the
    /// form that offloads both, if the layout does not fit with the other one either.
    pub(super) fn offloading_both(&self, index: LayoutIndex, layout: &Layout) -> Option<Layout> {
        let other = match layout.offload {
            Offload::Optimizer => Offload::Activations,
            Offload::Activations => Offload::Optimizer,
            Offload::None | Offload::Both | Offload::State => return None,
        };
        let place = (index.family, Some(index.variant));
        let known = &self.offloaded_too_large;
        let fits_with_neither = known.contains(place, other) && !known.contains(place, Offload::Both);
        if fits_with_neither { self.bounds.space.offloaded(layout, Offload::Both) } else { None }
    }

    /// Returns a queue entry for a bounded layout, unless it needs no search. Its bound is at least
    /// `at_least`.
    pub(super) fn queued(&mut self, bounded: Bounded, index: LayoutIndex, at_least: f64, layout: Layout) -> Option<QueuedLayout> {
        let bound = self.admit((index.family, Some(index.variant)), bounded, &layout, 1)?.max(at_least);
        Some(QueuedLayout { bound, index, layout, is_stopped: false })
    }

    /// Handles a layout that does not fit although its bound does: its stages hold `held` weighted
    /// bytes. A fitted layout is refitted; any other layout is counted, and its smaller forms are
    /// queued.
    pub(super) fn found_too_large(&mut self, index: LayoutIndex, bound: f64, layout: &Layout, held: &[f64]) {
        let plan = Plan { layout: layout.clone(), ..self.request.base.clone() };
        let micro_batches = plan.micro_batches().expect("invariant: the layout was compiled");
        if let Some(next) = self.refitted(index, layout, micro_batches, held) {
            let (bounded, next) = next;
            let queued = self.queued(bounded, index, bound, next);
            self.push_layouts(queued.into_iter().collect());
            return;
        }
        let needed = most(held);
        self.admit((index.family, Some(index.variant)), Ok(Bound::too_large(needed)), layout, 1);
        let mut layouts = Vec::new();
        if layout.offload.is_none() {
            for (bounded, layout) in self.smaller_layouts(layout, micro_batches, needed) {
                layouts.extend(self.queued(bounded, index, bound, layout));
            }
        } else if let Some(both) = self.offloading_both(index, layout) {
            layouts.extend(self.queued(self.bounds.layout(&both, micro_batches), index, bound, both));
        }
        self.push_layouts(layouts);
    }

    /// Refits a fitted layout whose stages hold `held` weighted bytes. `None` if the layout is not
    /// fitted, does not change, or was refitted too often.
    fn refitted(&mut self, index: LayoutIndex, layout: &Layout, micro_batches: usize, held: &[f64]) -> Option<(Bounded, Layout)> {
        let budgets = self.bounds.budgets_after_overshoot(layout, micro_batches, held)?;
        let (refits, smallest) = self.refits.entry(index).or_insert_with(|| (0, vec![f64::INFINITY; budgets.len()]));
        *refits += 1;
        // A stage's budget never grows again after an earlier refit reduced it.
        smallest.iter_mut().zip(budgets).for_each(|(smallest, budget)| *smallest = smallest.min(budget));
        let next = self.bounds.refitted(layout, micro_batches, smallest).filter(|_| *refits <= MOST_REFITS)?;
        Some(self.bounds.layout_refitted(next, micro_batches))
    }
}

/// Bounds `forms`, each smaller than the one before, up to the first that may fit. The later ones
/// are needless if that one fits.
fn up_to_first_that_may_fit<T>(forms: impl Iterator<Item = T>, bound: impl Fn(T) -> (Bounded, T)) -> Vec<(Bounded, T)> {
    let mut found = Vec::new();
    for form in forms {
        let (bounded, form) = bound(form);
        let is_too_large = matches!(bounded, Ok(Bound { time: None, .. }));
        found.push((bounded, form));
        if !is_too_large {
            break;
        }
    }
    found
}

/// Bounds the forms that offload the optimizer state and activations; and the one that offloads
/// both, if neither fits.
fn offloaded_forms<T>(form: impl Fn(Offload) -> Option<T>, bound: impl Fn(&T) -> Bounded) -> Vec<(Bounded, T)> {
    let bounded = |offload| form(offload).map(|form| (bound(&form), form));
    let mut found: Vec<(Bounded, T)> = [Offload::Optimizer, Offload::Activations].into_iter().filter_map(bounded).collect();
    if found.iter().all(|(bounded, _)| matches!(bounded, Ok(Bound { time: None, .. }))) {
        found.extend(bounded(Offload::Both));
    }
    found
}
