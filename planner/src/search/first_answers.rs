//! The first answers of a search: layouts with good estimates, simulated before anything is proven.
//!
//! Estimates rank families without compiling anything. The best few are opened, and with them the
//! best of each manner: data parallelism alone, with `tensor`, with a pipeline, with both. Their
//! layouts are bounded, and those with the least bounds are simulated. So a search has an answer
//! within a few simulations, however large its space is, with which bounds can be compared.
//!
//! Nothing is proven here: each family of the queue stays in the queue.

use super::incumbents::Incumbent;
use super::queue::{LayoutIndex, PROBED, QueuedLayout};
use super::records::{Known, Manner, MeshSizes, manner, mesh};
use super::searcher::Searcher;
use super::simulation::{Outcome, Simulations, most};
use crate::bounds::{Bound, Bounded};
use crate::error::PlannerError;
use crate::space::Family;
use foretell_program::Layout;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// The families that are opened in each round. Rounds that open families of new manners may open
/// twice as many.
const ROUNDS: [usize; 4] = [4, 6, 6, 6];

/// The further rounds while nothing fits.
const FURTHER_ROUNDS: usize = 8;

/// Shares of the memory limit. If nothing fits, families are opened whose estimated memory is
/// between the first and the second share, then between the second and the third, and so on:
/// `ROOMY_FAMILIES` of each range, with different meshes.
const MEMORY_BANDS: [f64; 4] = [0.75, 0.5, 0.3, 0.15];
const ROOMY_FAMILIES: usize = 8;

/// The families of each of these ranges that are opened first if bounds on memory cost as much as
/// simulations.
const SURE_FAMILIES: usize = 1;

/// The most layouts that are compiled in a round, whether they fit or not.
const MOST_COMPILED: usize = 16;

/// The largest ratio of estimated memory to the limit with which a family may fit. Good estimates
/// are within a fifth of the compiler's memory.
pub(super) const MAY_FIT: f64 = 1.2;

/// The most families of one mesh, and of one manner, that are ranked.
const FAMILIES_OF_MESH: usize = 3;
const FAMILIES_OF_MANNER: usize = 64;

/// A family is opened if its corrected estimate is at most this many times the best value.
const WORTH_OPENING: f64 = 1.05;

/// The most layouts that are simulated in a round. If bounds rank them, the first is nearly always
/// the best; estimates are less reliable.
const SIMULATED_BY_BOUND: usize = 2;
const SIMULATED_BY_ESTIMATE: usize = 4;

/// A layout is simulated early only if its bound is below this times the best value. The queue
/// reaches other layouts in the order of their bounds.
const LEAST_GAIN: f64 = 0.95;

/// The layouts that are simulated in parallel. A first answer with a bound is simulated alone: its
/// value saves the simulation of most others, or stops them early.
const AT_ONCE: usize = 2;

/// A layout that may be a good answer.
struct Promising {
    is_bounded: bool,
    /// Bound on its value, or its estimate if it is not bounded.
    value: f64,
    /// The estimate of its family's value.
    estimate: f64,
    /// The number of layouts of its family that come before it, if estimates rank them.
    turn: usize,
    micro_batches: usize,
    layout: Layout,
}

/// A family that is opened.
struct Chosen {
    /// The estimate of its value, corrected by simulations of its manner.
    value: f64,
    /// The estimate of its value.
    estimate: f64,
    family: Family,
}

/// Families ranked by estimates.
pub(super) struct Ranked {
    /// Estimates of the value, each with its family, the best first.
    families: Vec<(f64, Family)>,
    /// For each share of [`MEMORY_BANDS`], the same for the best families with memory within that
    /// share and above the next.
    memory_bands: Vec<Vec<(f64, Family)>>,
}

impl Searcher<'_> {
    /// Ranks the families that may fit by their estimates, as far as the time allows.
    pub(super) fn ranked(&self, families: &[Family]) -> Ranked {
        let bounds = &self.bounds;
        let estimated = |(place, family): (usize, &Family)| {
            if self.is_over() {
                return None;
            }
            let estimate = bounds.estimates.of(family)?;
            let value = estimate.time.value() * bounds.value_per_second(&family.layout);
            Some((bounds.estimates.memory_over_limit(&estimate), value, place))
        };
        let mut ranked: Vec<(f64, f64, usize)> = families.par_iter().enumerate().filter_map(estimated).collect();
        // Families that seem too large come last, whatever the excess, which is not known well.
        let seems_too_large = |estimate: &(f64, f64, usize)| estimate.0 > MAY_FIT;
        ranked.par_sort_unstable_by(|a, b| {
            seems_too_large(a).cmp(&seems_too_large(b)).then(a.1.total_cmp(&b.1)).then(a.2.cmp(&b.2))
        });
        let mesh = |place: usize| mesh(&families[place].layout);
        let mut of_mesh: BTreeMap<MeshSizes, usize> = BTreeMap::new();
        let mut of_manner: BTreeMap<Manner, usize> = BTreeMap::new();
        let mut chosen = Vec::new();
        for &(_, value, place) in &ranked {
            let of_mesh = of_mesh.entry(mesh(place)).or_default();
            let of_manner = of_manner.entry(manner(&families[place].layout)).or_default();
            if *of_mesh < FAMILIES_OF_MESH && *of_manner < FAMILIES_OF_MANNER {
                (*of_mesh, *of_manner) = (*of_mesh + 1, *of_manner + 1);
                chosen.push((value, families[place].clone()));
            }
        }
        let within = |(place, share): (usize, f64)| {
            let above = MEMORY_BANDS.get(place + 1).copied().unwrap_or(0.0);
            let mut meshes = BTreeSet::new();
            let is_within = |memory: f64| memory <= share && memory > above;
            let memory_bands = ranked.iter().filter(|(memory, _, place)| is_within(*memory) && meshes.insert(mesh(*place)));
            memory_bands.take(ROOMY_FAMILIES).map(|&(_, value, place)| (value, families[place].clone())).collect()
        };
        Ranked { families: chosen, memory_bands: MEMORY_BANDS.into_iter().enumerate().map(within).collect() }
    }

    /// Simulates the most promising layouts: first one of each manner, then those with the best
    /// estimates, corrected by the simulations of their manner.
    ///
    /// # Errors
    /// [`PlannerError`] if a layout cannot be simulated.
    pub(super) fn probe(&mut self, mut ranked: Ranked) -> Result<(), PlannerError> {
        let mut left: Vec<Promising> = Vec::new();
        let mut tried: HashSet<Layout> = HashSet::new();
        let is_bounded = |(_, family): &(f64, Family)| self.bounds.has_cheap_bounds(&family.layout);
        if !self.has_answer() && !ranked.families.first().is_none_or(is_bounded) {
            // Without cheap bounds, a layout that does not fit costs as much as one that fits. So
            // begin with memory_bands ones.
            self.probe_roomy(&mut ranked, SURE_FAMILIES, &mut left, &mut tried)?;
        }
        self.probe_in_rounds(&mut ranked, &mut left, &mut tried)?;
        // While nothing fits, continue with the remaining layouts and their smaller forms.
        for _ in 0..FURTHER_ROUNDS {
            if self.has_answer() || left.is_empty() || self.is_over() {
                break;
            }
            self.simulate_best(&mut left, &mut tried, None)?;
        }
        if self.has_answer() {
            return Ok(());
        }
        self.probe_roomy(&mut ranked, ROOMY_FAMILIES, &mut left, &mut tried)?;
        // The simulations so far now correct the estimates.
        if self.has_answer() { self.probe_in_rounds(&mut ranked, &mut left, &mut tried) } else { Ok(()) }
    }

    /// Opens families that seem to leave much memory free, `count` for each range of
    /// [`MEMORY_BANDS`], and simulates their best layouts until one fits.
    fn probe_roomy(
        &mut self,
        ranked: &mut Ranked,
        count: usize,
        left: &mut Vec<Promising>,
        tried: &mut HashSet<Layout>,
    ) -> Result<(), PlannerError> {
        for share in 0..ranked.memory_bands.len() {
            if self.has_answer() || self.is_over() {
                break;
            }
            let memory_bands = &mut ranked.memory_bands[share];
            let batch = memory_bands.drain(..count.min(memory_bands.len()));
            let batch = batch.map(|(estimate, family)| Chosen { value: estimate, estimate, family }).collect();
            // Simulated apart from the layouts left over from faster families, which did not fit.
            let mut opened = Vec::new();
            self.open_all(batch, &mut opened);
            self.simulate_best(&mut opened, tried, Some(1))?;
            left.append(&mut opened);
        }
        Ok(())
    }

    /// Opens the best remaining families, round by round, and simulates their best layouts.
    fn probe_in_rounds(
        &mut self,
        ranked: &mut Ranked,
        left: &mut Vec<Promising>,
        tried: &mut HashSet<Layout>,
    ) -> Result<(), PlannerError> {
        for count in ROUNDS {
            if self.is_over() {
                return Ok(());
            }
            let batch = self.next_families(ranked, count);
            if batch.is_empty() && left.is_empty() {
                return Ok(());
            }
            self.open_all(batch, left);
            self.simulate_best(left, tried, None)?;
        }
        Ok(())
    }

    /// Adds the layouts of some families that may fit to `left`.
    fn open_all(&self, batch: Vec<Chosen>, left: &mut Vec<Promising>) {
        let opened: Vec<Vec<Promising>> = batch.into_par_iter().map(|chosen| self.open(&chosen)).collect();
        left.extend(opened.into_iter().flatten());
    }

    /// Takes the best families: one of each manner that has not been simulated, at most
    /// `2 * count`; if there is none, `count` whose corrected estimates are close enough to the
    /// best value ([`WORTH_OPENING`]).
    fn next_families(&self, ranked: &mut Ranked, count: usize) -> Vec<Chosen> {
        let correction = |family: &Family| self.corrections.get(&manner(&family.layout)).copied();
        let mut manners = BTreeSet::new();
        let is_new = |(_, family): &(f64, Family)| correction(family).is_none() && manners.insert(manner(&family.layout));
        let (new, others): (Vec<_>, Vec<_>) = std::mem::take(&mut ranked.families).into_iter().partition(is_new);
        let as_estimated = |(estimate, family)| Chosen { value: estimate, estimate, family };
        let mut taken: Vec<Chosen> = new.into_iter().map(as_estimated).collect();
        taken.sort_by(|a, b| a.estimate.total_cmp(&b.estimate));
        let postponed = taken.split_off(taken.len().min(2 * count));
        let best = self.incumbents.best().unwrap_or(f64::INFINITY);
        let corrected = others.into_iter().map(|(estimate, family)| {
            let value = estimate * correction(&family).unwrap_or(1.0);
            Chosen { value, estimate, family }
        });
        let mut corrected: Vec<Chosen> = corrected.filter(|expert| expert.value <= best * WORTH_OPENING).collect();
        corrected.sort_by(|a, b| a.value.total_cmp(&b.value));
        let mut corrected = corrected.into_iter();
        if taken.is_empty() {
            taken.extend(corrected.by_ref().take(count));
        }
        ranked.families = postponed.into_iter().chain(corrected).map(|expert| (expert.estimate, expert.family)).collect();
        taken
    }

    /// Returns the layouts of a family that may fit, with values that rank them.
    fn open(&self, chosen: &Chosen) -> Vec<Promising> {
        let Chosen { value: value_of_family, estimate, ref family } = *chosen;
        let (bounds, micro_batches) = (&self.bounds, family.micro_batches);
        if self.is_over() {
            return Vec::new();
        }
        let is_bounded = bounds.has_cheap_bounds(&family.layout);
        let promising =
            |value: f64, turn: usize, layout: Layout| Promising { is_bounded, value, estimate, turn, micro_batches, layout };
        if !is_bounded {
            // Bounds would cost as much as simulations, so rank variants by simplicity and by
            // ascending stage of ZeRO.
            let (usual_bucket, fixed) = (bounds.space.base.bucket, bounds.space.fixed);
            let is_usual = |layout: &Layout| layout.bucket == usual_bucket || fixed.bucket.is_some();
            let mut variants: Vec<Layout> = bounds.variants(family).into_iter().filter(is_usual).collect();
            variants.sort_by_cached_key(|layout| {
                let memory = bounds.estimates.memory_of_layout(layout, micro_batches);
                let seems_too_large = memory.is_some_and(|memory| memory > MAY_FIT);
                (seems_too_large, layout.placement.is_some(), layout.shard_group.is_some(), layout.zero)
            });
            return variants.into_iter().enumerate().map(|(turn, layout)| promising(value_of_family, turn, layout)).collect();
        }
        let with_value = |(bounded, layout): (Bounded, Layout)| {
            let Ok(Bound { time: Some(time), .. }) = bounded else { return None };
            Some(promising(time.value() * bounds.value_per_second(&layout), 0, layout))
        };
        let mut found = Vec::new();
        for layout in bounds.variants(family) {
            if self.is_over() {
                break;
            }
            let (bounded, layout, smaller) = self.bounded_with_forms(layout, micro_batches);
            found.extend(std::iter::once((bounded, layout)).chain(smaller).filter_map(with_value));
        }
        found
    }

    /// Simulates the layouts of `left` with the least values, until `most` fit or no remaining
    /// layout seems better.
    fn simulate_best(
        &mut self,
        left: &mut Vec<Promising>,
        tried: &mut HashSet<Layout>,
        most: Option<usize>,
    ) -> Result<(), PlannerError> {
        let (mut simulated, mut compiled) = (0, 0);
        left.sort_by(|a, b| b.turn.cmp(&a.turn).then(b.value.total_cmp(&a.value)));
        let is_bounded = left.iter().all(|expert| expert.is_bounded);
        let most = most.unwrap_or(if is_bounded { SIMULATED_BY_BOUND } else { SIMULATED_BY_ESTIMATE });
        while simulated < most && compiled < MOST_COMPILED && !left.is_empty() && !self.is_over() {
            let round = self.next_promising(left, tried, &mut simulated);
            if round.is_empty() {
                break;
            }
            compiled += round.len();
            let index = LayoutIndex { family: PROBED, variant: self.search.probed };
            let queued = round.iter().map(|expert| {
                vec![QueuedLayout { bound: expert.value, index, layout: expert.layout.clone(), is_stopped: false }]
            });
            let queued: Vec<Vec<QueuedLayout>> = queued.collect();
            let simulations = Simulations { bounds: &self.bounds, incumbents: &self.incumbents };
            let outcomes = queued.par_iter().map(|layout| simulations.first(layout)).collect::<Result<Vec<_>, PlannerError>>()?;
            for (one, outcome) in round.into_iter().zip(outcomes) {
                let Some(outcome) = outcome.outcome else { continue };
                self.known.note(&one.layout, &outcome);
                match outcome {
                    Outcome::Simulated(incumbent) => {
                        simulated += 1;
                        self.correct(manner(&one.layout), one.estimate, incumbent.value);
                        self.take_probed(*incumbent);
                    }
                    Outcome::OutOfMemory(held) => left.extend(self.smaller_forms(&one, &held, tried)),
                    Outcome::Stopped(_) => simulated += 1,
                    Outcome::Indivisible(_) | Outcome::OutOfHostMemory | Outcome::Interrupted => {}
                }
            }
            self.incumbents.sort();
            self.report_bounded();
            left.sort_by(|a, b| b.turn.cmp(&a.turn).then(b.value.total_cmp(&a.value)));
        }
        Ok(())
    }

    /// Takes a layout that was simulated for a first answer among the incumbents.
    pub(super) fn take_probed(&mut self, incumbent: Incumbent) {
        let index = LayoutIndex { family: PROBED, variant: self.search.probed };
        self.search.probed += 1;
        self.incumbents.list.push(Incumbent { index, ..incumbent });
    }

    /// Corrects the estimates of a manner by the simulated value of a layout and its estimate.
    pub(super) fn correct(&mut self, manner: Manner, estimate: f64, value: f64) {
        let correction = value / estimate.max(f64::MIN_POSITIVE);
        let known = self.corrections.entry(manner).or_insert(f64::INFINITY);
        *known = known.min(correction);
    }

    /// Reports the best layout so far to the caller, if there is a lower bound to report with it.
    pub(super) fn report_bounded(&self) {
        let bound = self.bounds.least_value();
        if bound > 0.0 {
            self.report(bound);
        }
    }

    /// Takes the next layouts to simulate from the end of `left`. Layouts that were simulated
    /// before are added to `simulated`.
    fn next_promising(&self, left: &mut Vec<Promising>, tried: &mut HashSet<Layout>, simulated: &mut usize) -> Vec<Promising> {
        let best = self.incumbents.best().unwrap_or(f64::INFINITY);
        let is_sure = left.last().is_some_and(|expert| expert.is_bounded);
        let at_once = if self.incumbents.is_empty() && is_sure { 1 } else { AT_ONCE };
        let mut round = Vec::new();
        while round.len() < at_once
            && let Some(one) = left.pop()
        {
            // Estimates may be far off, so only bounds exclude a layout.
            if one.is_bounded && one.value >= best * LEAST_GAIN {
                continue;
            }
            match self.known.get(&one.layout) {
                None => round.push(one),
                Some(Known::Simulated | Known::AtLeast(_)) => *simulated += 1,
                Some(Known::TooLarge(held)) => left.extend(self.smaller_forms(&one, held, tried)),
            }
        }
        round
    }

    /// Returns the forms that may fit of a layout that does not, given the weighted bytes that its
    /// stages hold. Forms that were returned before are left out.
    fn smaller_forms(&self, one: &Promising, held: &[f64], tried: &mut HashSet<Layout>) -> Vec<Promising> {
        let bounded = if one.layout.offload.is_none() {
            self.smaller_layouts(&one.layout, one.micro_batches, most(held))
        } else {
            Vec::new()
        };
        let may_fit = |(bounded, layout): (Bounded, Layout)| {
            let Ok(Bound { time: Some(time), .. }) = bounded else { return None };
            let value = (time.value() * self.bounds.value_per_second(&layout)).max(one.value);
            Some(Promising { value, layout, ..*one })
        };
        let is_new = |promising: &Promising| tried.insert(promising.layout.clone());
        bounded.into_iter().filter_map(may_fit).filter(is_new).collect()
    }

    /// Returns `true` if this or another search has a layout to return.
    pub(super) fn has_answer(&self) -> bool {
        !self.incumbents.is_empty() || self.request.must_beat.is_some()
    }
}
