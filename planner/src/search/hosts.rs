//! What of the search is about layouts that do not fit. Such a one is looked at with some of what it keeps on the hosts: first with the optimizer's
//! state there, and with activations; where it fits with neither, with both. And with some of its blocks computed again.

use super::{Member, Searcher, most};
use crate::bounds::Verdict;
use crate::fitting::MOST_TRIES;
use crate::space::Family;
use foretell_program::{Layout, Offload, Plan};
use foretell_units::Bytes;
use std::collections::BTreeSet;

/// A layout's family, and its number in it; of all the family's where none is said.
type Place = (usize, Option<usize>);

/// Which layouts do not fit though they have something on the hosts.
#[derive(Default)]
pub(super) struct Misfits(BTreeSet<(usize, Option<usize>, Offload)>);

impl Misfits {
    fn add(&mut self, (family, member): Place, offload: Offload) {
        self.0.insert((family, member, offload));
    }

    fn has(&self, (family, member): Place, offload: Offload) -> bool {
        self.0.contains(&(family, member, offload)) || self.0.contains(&(family, None, offload))
    }
}

impl Searcher<'_> {
    /// What is known of a family on the hosts, none of whose layouts holds less than `needed` with everything on the devices.
    pub(super) fn family_on_hosts(&self, family: &Family, needed: Bytes) -> Vec<(Verdict, Family)> {
        let space = &self.bounds.space;
        let mut found = if self.bounds.is_fitted(&family.layout) {
            self.bounds.fitted_family(family, needed).into_iter().collect()
        } else {
            let some = space.partly_recomputed(&family.layout).into_iter().map(|layout| Family { layout, ..family.clone() });
            with_some_recomputed(some, |family| (self.bounds.of_family(&family), family))
        };
        if !space.is_partly_recomputed(&family.layout) {
            let is_open = space.offloads.contains(&Offload::Optimizer);
            let is_hopeless = is_open && self.is_hopeless(&space.members(family), needed);
            found.extend(on_hosts(
                |offload| space.offloaded_family(family, offload),
                |family| match family.layout.offload {
                    Offload::Optimizer if is_hopeless => Verdict::OutOfMemory(needed),
                    _ => self.bounds.of_family(family),
                },
            ));
        }
        found
    }

    /// The same of a layout.
    pub(super) fn layout_on_hosts(&self, layout: &Layout, micro_batches: usize, needed: Bytes) -> Vec<(Verdict, Layout)> {
        let space = &self.bounds.space;
        let some = self.bounds.partly_recomputed(layout, micro_batches).into_iter();
        let mut found = with_some_recomputed(some, |layout| self.bounds.of_fitted(layout, micro_batches));
        if !space.is_partly_recomputed(layout) {
            let is_hopeless = self.is_hopeless(std::slice::from_ref(layout), needed);
            found.extend(on_hosts(
                |offload| space.offloaded(layout, offload),
                |layout| match layout.offload {
                    Offload::Optimizer if is_hopeless => Verdict::OutOfMemory(needed),
                    _ => self.bounds.of_member(layout, micro_batches),
                },
            ));
        }
        found
    }

    /// Whether none of some layouts fits with the optimizer's state on the hosts, where none needs less than so much without.
    fn is_hopeless(&self, layouts: &[Layout], needed: Bytes) -> bool {
        self.bounds.offloading.is_hopeless(layouts, needed, self.bounds.memory_limit)
    }

    /// Counts so many layouts if there is no need to look at them, and else says their bound. What they stand for is counted with them unless it is
    /// looked at because they do not fit.
    pub(super) fn admit(&mut self, place: Place, verdict: Verdict, layout: &Layout, layouts: usize) -> Option<f64> {
        match verdict {
            Verdict::OutOfMemory(_) => {
                self.judge(verdict, layouts);
                self.add_misfit(place, layout.offload, layouts);
                None
            }
            Verdict::OutOfHostMemory if layout.offload == Offload::Activations => {
                self.judge(Verdict::OutOfHostMemory, layouts);
                // Nor is there room for both.
                if self.misfits.has(place, Offload::Optimizer) {
                    self.search.bounded_out -= layouts;
                    self.judge(Verdict::OutOfHostMemory, layouts);
                } else {
                    self.misfits.add(place, Offload::Both);
                }
                None
            }
            _ => self.judge(verdict, layouts * self.bounds.forms(layout)),
        }
    }

    /// Remembers what does not fit. What has both on the hosts can be no better than with activations alone there, as long as these may fit.
    fn add_misfit(&mut self, place: Place, offload: Offload, layouts: usize) {
        if !self.bounds.space.offloads.contains(&Offload::Both) {
            return;
        }
        match offload {
            Offload::Optimizer if self.misfits.has(place, Offload::Both) => drop(self.judge(Verdict::OutOfHostMemory, layouts)),
            Offload::Optimizer if !self.misfits.has(place, Offload::Activations) => self.search.bounded_out += layouts,
            Offload::Activations if self.misfits.has(place, Offload::Optimizer) => self.search.bounded_out -= layouts,
            _ => {}
        }
        self.misfits.add(place, offload);
    }

    /// Counts a layout that was simulated, and as needless what has more on the hosts or computes more again.
    pub(super) fn count_simulated(&mut self, (family, member): (usize, usize), layout: &Layout) {
        let both = self.counts_with_activations((family, Some(member)), layout);
        self.search.simulated += 1;
        self.search.needless += self.bounds.forms(layout) - 1 + both;
        self.search.bounded_out -= both;
    }

    /// Takes that back: the layout does not fit after all.
    pub(super) fn uncount_simulated(&mut self, (family, member): (usize, usize), layout: &Layout) {
        let both = self.counts_with_activations((family, Some(member)), layout);
        self.search.simulated -= 1;
        self.search.needless -= self.bounds.forms(layout) - 1 + both;
        self.search.bounded_out += both;
    }

    /// One, if what has both on the hosts is counted as no better than this, and else none.
    fn counts_with_activations(&self, place: Place, layout: &Layout) -> usize {
        let is_counted = self.misfits.has(place, Offload::Optimizer) && !self.misfits.has(place, Offload::Both);
        usize::from(layout.offload == Offload::Activations && is_counted)
    }

    /// A layout that does not fit with one thing on the hosts, with both there, if it does not fit with the other either.
    pub(super) fn with_both(&self, (family, member): (usize, usize), layout: &Layout) -> Option<Layout> {
        let other = match layout.offload {
            Offload::Optimizer => Offload::Activations,
            Offload::Activations => Offload::Optimizer,
            Offload::None | Offload::Both => return None,
        };
        let place = (family, Some(member));
        let fits_nowhere = self.misfits.has(place, other) && !self.misfits.has(place, Offload::Both);
        if fits_nowhere { self.bounds.space.offloaded(layout, Offload::Both) } else { None }
    }

    /// A layout that was not compiled yet as one that may be looked at, if it may be.
    pub(super) fn member(&mut self, verdict: Verdict, index: (usize, usize), at_least: f64, layout: Layout) -> Option<Member> {
        let bound = self.admit((index.0, Some(index.1)), verdict, &layout, 1)?.max(at_least);
        Some(Member { bound, index, layout, is_stopped: false })
    }

    /// A layout whose stages hold so many bytes, each weighed, did not fit when it was compiled: it is fitted anew, or counted and looked at with more on
    /// the hosts.
    pub(super) fn does_not_fit(&mut self, index: (usize, usize), bound: f64, layout: &Layout, held: &[f64]) {
        let micro_batches = (Plan { layout: layout.clone(), ..self.request.base.clone() }).micro_batches().unwrap_or(1);
        if let Some(rooms) = self.bounds.rooms_beside(layout, micro_batches, held) {
            let (tries, known) = self.fitted.entry(index).or_insert_with(|| (0, vec![f64::INFINITY; rooms.len()]));
            *tries += 1;
            // No stage is given more than it was found to have.
            known.iter_mut().zip(rooms).for_each(|(known, room)| *known = known.min(room));
            let next = self.bounds.fitted_anew(layout, micro_batches, known).filter(|_| *tries <= MOST_TRIES);
            if let Some(next) = next {
                let (verdict, next) = self.bounds.of_fitted(next, micro_batches);
                let member = self.member(verdict, index, bound, next);
                self.push_members(member.into_iter().collect());
                return;
            }
        }
        let needed = most(held);
        self.admit((index.0, Some(index.1)), Verdict::OutOfMemory(needed), layout, 1);
        self.push_on_hosts(index, bound, layout, needed);
    }

    fn push_on_hosts(&mut self, index: (usize, usize), bound: f64, layout: &Layout, needed: Bytes) {
        let Ok(micro_batches) = (Plan { layout: layout.clone(), ..self.request.base.clone() }).micro_batches() else { return };
        let mut members = Vec::new();
        if layout.offload.is_none() {
            for (verdict, layout) in self.layout_on_hosts(layout, micro_batches, needed) {
                members.extend(self.member(verdict, index, bound, layout));
            }
        } else if let Some(both) = self.with_both(index, layout) {
            members.extend(self.member(self.bounds.of_member(&both, micro_batches), index, bound, both));
        }
        self.push_members(members);
    }
}

/// What is known of things of which more and more is computed again, up to the first that may fit: it stands for those after it, which are needless if
/// it does.
fn with_some_recomputed<T>(things: impl Iterator<Item = T>, look: impl Fn(T) -> (Verdict, T)) -> Vec<(Verdict, T)> {
    let mut found = Vec::new();
    for thing in things {
        let (verdict, thing) = look(thing);
        let may_fit = !matches!(verdict, Verdict::OutOfMemory(_));
        found.push((verdict, thing));
        if may_fit {
            break;
        }
    }
    found
}

/// What is known of a thing by what of it is on the hosts: of each that is looked at, in the order of [`Offload::ALL`].
fn on_hosts<T>(form: impl Fn(Offload) -> Option<T>, verdict: impl Fn(&T) -> Verdict) -> Vec<(Verdict, T)> {
    let of = |offload| form(offload).map(|one| (verdict(&one), one));
    let mut found: Vec<(Verdict, T)> = [Offload::Optimizer, Offload::Activations].into_iter().filter_map(of).collect();
    if found.iter().all(|(verdict, _)| matches!(verdict, Verdict::OutOfMemory(_))) {
        found.extend(of(Offload::Both));
    }
    found
}
