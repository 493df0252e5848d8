//! The layouts that an expert would try first, simulated before the search bounds its space.
//!
//! They are the usual families that [`is_experts_choice`](crate::space::Space::is_experts_choice)
//! accepts: every mesh inside the usual limits, with micro-batches of up to four samples, each with
//! the least recomputation and the least stage of ZeRO that fit. Manners of layouts (which
//! parallelisms they combine) take turns: data parallelism alone, `tensor` inside nodes, a pipeline
//! over nodes, both, experts, context, and their combinations. Then estimates decide, corrected by
//! the simulations of their manner. A layout with many micro-batches is first judged by two short
//! steps. The number of layouts is limited, so the best may be missed here; the search itself finds
//! it later.
//!
//! That number is fixed, so the answer depends on the clock only if the time limit ends the search.
//! Nothing is proven here: each family stays in the queue.

use super::first_answers::MAY_FIT;
use super::queue::{LayoutIndex, PROBED, QueuedLayout};
use super::records::{Known, Manner, MeshSizes, manner, mesh};
use super::searcher::Searcher;
use super::simulation::{Outcome, Simulations};
use crate::bounds::Bound;
use crate::error::PlannerError;
use crate::estimate::Estimate;
use crate::space::Family;
use foretell_program::{Layout, Recompute};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// The most families of which layouts are compiled, and the most layouts that are simulated, to the
/// end or until they are too slow. The other layouts do not fit.
const MOST_COMPILED: usize = 64;
const MOST_SIMULATED: usize = 32;

/// Once every manner has had its turn, families are tried until this many rounds with simulations
/// have not improved the value below `WORTHWHILE` times the best. Without cheap bounds there are
/// more rounds, since the queue then hardly finds anything better.
const VAIN_ROUNDS: usize = 3;
const VAIN_ROUNDS_WITHOUT_BOUNDS: usize = 10;
const WORTHWHILE: f64 = 0.995;

/// The most families of one mesh, micro-batch and manner: those whose schedules have the best
/// estimates.
const FAMILIES_OF_SIZE: usize = 2;

/// The most families of a manner that are tried with priority while none of the manner has been
/// simulated.
const FIRST_OF_MANNER: usize = 3;

/// After this many rounds, if nothing fits yet, one family of each round is the one with the least
/// estimated memory.
const ROUNDS_BY_TIME: usize = 3;

/// Families that are tried in parallel.
const AT_ONCE: usize = 2;

/// Steps with more passes than this, over all stages, take seconds to simulate. Until there is an
/// answer, shorter steps come first.
const MANY_PASSES: usize = 2048;

/// The most layouts with long steps that are judged by short ones, and the most of them that are
/// then simulated in full, those with the best short steps.
const MOST_LONG_TRIED: usize = 12;
const MOST_LONG: usize = 3;

/// A long step is simulated in full at once if its short steps suggest a value below this times the
/// best.
const BETTER: f64 = 0.985;

/// Keeps the first families of each mesh, micro-batch and manner.
pub(super) fn retain_best_of_size(sorted: &mut Vec<Expert>) {
    let mut of_size: BTreeMap<(MeshSizes, usize, Manner), usize> = BTreeMap::new();
    sorted.retain(|expert| {
        let layout = &expert.family.layout;
        let count = of_size.entry((mesh(layout), layout.micro_batch, expert.manner)).or_default();
        *count += 1;
        *count <= FAMILIES_OF_SIZE
    });
}

/// A family that an expert would try.
pub(super) struct Expert {
    /// The estimate of its value, with the least recomputation whose estimated memory fits.
    pub(super) estimate: f64,
    pub(super) seems_too_large: bool,
    /// Its estimated memory with the most recomputation, relative to the memory limit.
    least_memory: f64,
    pub(super) manner: Manner,
    pub(super) family: Family,
}

impl Expert {
    fn is_long(&self) -> bool {
        self.family.micro_batches * self.family.layout.pipeline * self.family.layout.virtual_stages > MANY_PASSES
    }
}

/// The result of trying one family.
#[derive(Default)]
pub(super) struct Trial {
    /// The layouts that were compiled, in order.
    pub(super) outcomes: Vec<(Layout, Outcome)>,
    /// Whether none of its layouts fits.
    is_too_large: bool,
    /// Layouts with so many micro-batches that only a shorter step was simulated, each with the
    /// value extrapolated from it.
    pub(super) long: Vec<(f64, Layout)>,
}

/// The forms of a layout that differ in what they recompute, the least first.
struct Forms {
    /// Forms with the same recomputation in all blocks.
    whole: Vec<Layout>,
    /// Forms that recompute only some blocks; empty unless the last of `whole` recomputes all.
    in_part: Vec<Layout>,
}

/// Whether a layout fits.
enum Fit {
    /// It fits, or is known to be no better without being simulated.
    Fits,
    TooLarge,
    /// The family is given up: the time is over, or the layout does not divide the model.
    Over,
}

impl Searcher<'_> {
    /// Simulates the layouts that an expert would try first, out of the usual families.
    ///
    /// # Errors
    /// [`PlannerError`] if a layout cannot be simulated.
    pub(super) fn try_experts(&mut self, usual: &[Family]) -> Result<(), PlannerError> {
        // Skipped on several kinds of devices, where stages are cut for each kind: in the jobs that
        // we examined, the search with its estimates by speed was as good.
        if !self.bounds.space.devices.speeds.is_empty() {
            return Ok(());
        }
        let mut left = self.experts(usual);
        let (mut best, mut vain) = (f64::INFINITY, 0);
        let mut long: Vec<(f64, Layout)> = Vec::new();
        let mut long_tried = 0;
        let mut turns: BTreeMap<Manner, usize> = BTreeMap::new();
        let manners = left.iter().map(|expert| expert.manner).collect::<BTreeSet<_>>().len();
        let (mut rounds, mut compiled, mut simulated) = (0, 0, 0);
        while compiled < MOST_COMPILED && simulated < MOST_SIMULATED && long_tried < MOST_LONG_TRIED && !self.is_over() {
            let round = self.next_experts(&mut left, &mut turns, rounds);
            rounds += 1;
            if round.is_empty() {
                break;
            }
            let simulated_before = simulated;
            self.tried.extend(round.iter().map(|expert| expert.family.layout.clone()));
            let trials = self.try_all(&round)?;
            for (expert, trial) in round.iter().zip(trials) {
                for &(value, _) in &trial.long {
                    self.correct(expert.manner, expert.estimate, value);
                }
                compiled += usize::from(!trial.outcomes.is_empty() || !trial.long.is_empty());
                long_tried += trial.long.len();
                long.extend(trial.long);
                simulated += self.take_trial(expert, trial.outcomes);
                if trial.is_too_large {
                    // Larger micro-batches on this mesh need no less memory.
                    let (sizes, samples) = (mesh(&expert.family.layout), expert.family.layout.micro_batch);
                    left.retain(|expert| mesh(&expert.family.layout) != sizes || expert.family.layout.micro_batch < samples);
                }
            }
            self.incumbents.sort();
            self.report_bounded();
            self.simulate_promising(&mut long)?;
            let now = self.incumbents.best().unwrap_or(f64::INFINITY);
            vain = if now < best * WORTHWHILE { 0 } else { vain + usize::from(simulated > simulated_before) };
            best = best.min(now);
            let most_vain = if self.best_has_cheap_bounds() { VAIN_ROUNDS } else { VAIN_ROUNDS_WITHOUT_BOUNDS };
            if vain >= most_vain && best.is_finite() && turns.len() == manners {
                break;
            }
        }
        self.simulate_long(long)?;
        self.try_buckets()
    }

    /// Simulates the best layout with the other bucket sizes of the space, if it has one stage: the
    /// time may be over before the search reaches them.
    fn try_buckets(&mut self) -> Result<(), PlannerError> {
        let Some((_, layout)) = self.best().filter(|(_, layout)| layout.pipeline == 1) else { return Ok(()) };
        let others = self.bounds.space.different_buckets(&layout).iter().filter(|&&bucket| bucket != layout.bucket);
        let others = others.map(|&bucket| (0.0, Layout { bucket, ..layout.clone() }));
        self.simulate_long(others.filter(|(_, other)| self.known.get(other).is_none()).collect())
    }

    /// Returns the families that an expert would try, those with the best estimates first, apart
    /// from families that seem too large.
    fn experts(&self, usual: &[Family]) -> Vec<Expert> {
        let estimated = |family: &Family| {
            if self.is_over() || !self.bounds.space.is_experts_choice(family) {
                return None;
            }
            self.estimated(family)
        };
        let mut all: Vec<Expert> = usual.par_iter().filter_map(estimated).collect();
        all.sort_by(|a, b| a.seems_too_large.cmp(&b.seems_too_large).then(a.estimate.total_cmp(&b.estimate)));
        retain_best_of_size(&mut all);
        all
    }

    /// Returns a family with its estimate, if it has one.
    pub(super) fn estimated(&self, family: &Family) -> Option<Expert> {
        let bounds = &self.bounds;
        let forms = self.recomputations(&family.layout).into_iter();
        let estimates = forms.filter_map(|recompute| {
            let layout = Layout { recompute, ..family.layout.clone() };
            bounds.estimates.of(&Family { layout, ..family.clone() })
        });
        let estimates: Vec<Estimate> = estimates.collect();
        let memory = |estimate: &Estimate| bounds.estimates.memory_over_limit(estimate);
        let least_memory = estimates.iter().map(memory).fold(f64::INFINITY, f64::min);
        let estimate = *estimates.iter().find(|estimate| memory(estimate) <= 1.0).or(estimates.last())?;
        Some(Expert {
            estimate: estimate.time.value() * bounds.value_per_second(&family.layout),
            seems_too_large: memory(&estimate) > MAY_FIT,
            least_memory,
            manner: manner(&family.layout),
            family: family.clone(),
        })
    }

    /// Takes the next families to try: first those of manners that have not been simulated, then
    /// those with the best corrected estimates. After [`ROUNDS_BY_TIME`] rounds without an answer,
    /// one of them is the family with the least estimated memory.
    fn next_experts(&self, left: &mut Vec<Expert>, turns: &mut BTreeMap<Manner, usize>, rounds: usize) -> Vec<Expert> {
        let mut round = Vec::new();
        while round.len() < AT_ONCE && !left.is_empty() {
            let key = |expert: &Expert| {
                let (correction, turn) = (self.corrections.get(&expert.manner), turns.get(&expert.manner).copied().unwrap_or(0));
                // Every manner has one turn, then manners of which nothing has been simulated have
                // further turns.
                let is_known = turn > 0 && (correction.is_some() || turn >= FIRST_OF_MANNER);
                let is_long = !self.has_answer() && expert.is_long();
                let value = expert.estimate * correction.copied().unwrap_or(1.0);
                (is_known, turn.min(FIRST_OF_MANNER) * usize::from(!is_known), is_long, expert.seems_too_large, value)
            };
            let order = |(place, left): &(usize, &Expert), (other_place, right): &(usize, &Expert)| {
                let (a, b) = (key(left), key(right));
                let coarse = (a.0, a.1, a.2, a.3).cmp(&(b.0, b.1, b.2, b.3));
                coarse.then(a.4.total_cmp(&b.4)).then(place.cmp(other_place))
            };
            let by_memory = |(_, left): &(usize, &Expert), (_, right): &(usize, &Expert)| {
                left.least_memory.total_cmp(&right.least_memory).then(left.estimate.total_cmp(&right.estimate))
            };
            let is_by_memory = round.is_empty() && rounds >= ROUNDS_BY_TIME && !self.has_answer();
            let all = left.iter().enumerate();
            let next = if is_by_memory { all.min_by(by_memory) } else { all.min_by(order) };
            let Some((place, _)) = next else { break };
            let one = left.remove(place);
            *turns.entry(one.manner).or_default() += 1;
            round.push(one);
        }
        round
    }

    pub(super) fn try_all(&self, round: &[Expert]) -> Result<Vec<Trial>, PlannerError> {
        round.par_iter().map(|expert| self.try_expert(expert)).collect()
    }

    /// Tries the forms of a family, with the least stage of ZeRO first, until one fits without
    /// recomputation. For each stage of ZeRO it simulates the form with the least recomputation
    /// that fits.
    fn try_expert(&self, expert: &Expert) -> Result<Trial, PlannerError> {
        let micro_batches = expert.family.micro_batches;
        let mut trial = Trial { is_too_large: true, ..Trial::default() };
        for base in self.bases(&expert.family) {
            let Forms { whole, in_part } = self.forms_to_try(&base, micro_batches);
            let mut fits = None;
            for (place, layout) in whole.iter().enumerate() {
                match self.try_form(layout, micro_batches, &mut trial)? {
                    Fit::Fits => {
                        fits = Some(place);
                        break;
                    }
                    Fit::TooLarge => {}
                    Fit::Over => return Ok(trial),
                }
            }
            trial.is_too_large &= fits.is_none();
            // The layout fits with all blocks recomputed: bisect for fewer. Forms before `least` do
            // not fit.
            let (mut least, mut most) = (0, in_part.len());
            while fits.is_some_and(|place| place + 1 == whole.len()) && least < most {
                let middle = least.midpoint(most);
                match self.try_form(&in_part[middle], micro_batches, &mut trial)? {
                    Fit::Fits => most = middle,
                    Fit::TooLarge => least = middle + 1,
                    Fit::Over => return Ok(trial),
                }
            }
            if fits == Some(0) {
                break;
            }
        }
        Ok(trial)
    }

    /// Tries one layout.
    fn try_form(&self, layout: &Layout, micro_batches: usize, trial: &mut Trial) -> Result<Fit, PlannerError> {
        let bounds = &self.bounds;
        let simulations = Simulations { bounds, incumbents: &self.incumbents };
        let best = self.incumbents.value_to_beat(None);
        let over = |trial: &mut Trial| {
            trial.is_too_large = false;
            Ok(Fit::Over)
        };
        if self.is_over() {
            return over(trial);
        }
        match self.known.get(layout) {
            Some(Known::TooLarge(_)) => return Ok(Fit::TooLarge),
            Some(Known::Simulated | Known::AtLeast(_)) => return Ok(Fit::Fits),
            None => {}
        }
        let mut bound = 0.0;
        if bounds.has_cheap_bounds(layout) {
            match bounds.layout(layout, micro_batches) {
                Ok(Bound { time: Some(time), .. }) => bound = time.value() * bounds.value_per_second(layout),
                Ok(Bound { time: None, .. }) => return Ok(Fit::TooLarge),
                Err(_) => return over(trial),
            }
        } else if bounds.estimates.memory_of_layout(layout, micro_batches).is_some_and(|share| share > MAY_FIT) {
            return Ok(Fit::TooLarge);
        }
        if best.is_some_and(|best| bound >= best) {
            return Ok(Fit::Fits);
        }
        match simulations.value_by_short_steps(layout, micro_batches)? {
            // The whole step holds no less memory than the short one.
            Some(Outcome::OutOfMemory(held)) => {
                trial.outcomes.push((layout.clone(), Outcome::OutOfMemory(held)));
                return Ok(Fit::TooLarge);
            }
            Some(Outcome::Stopped(value)) => {
                trial.long.push((value, layout.clone()));
                return Ok(Fit::Fits);
            }
            Some(_) => return over(trial),
            None => {}
        }
        let index = LayoutIndex { family: PROBED, variant: 0 };
        let queued = QueuedLayout { bound, index, layout: layout.clone(), is_stopped: false };
        let Some(outcome) = simulations.first(&[queued])?.outcome else { return Ok(Fit::TooLarge) };
        let is_too_large = matches!(outcome, Outcome::OutOfMemory(_) | Outcome::OutOfHostMemory);
        trial.outcomes.push((layout.clone(), outcome));
        Ok(if is_too_large { Fit::TooLarge } else { Fit::Fits })
    }

    /// Returns the layouts of a family that differ in ZeRO: for each stage the first variant, which
    /// has the usual rank order, no shard group, and cuts by speed if devices differ. The
    /// optimizer's state is sharded wherever it can be.
    fn bases(&self, family: &Family) -> Vec<Layout> {
        let own = self.bounds.space.base.bucket;
        let variants = self.bounds.variants(family);
        let buckets = || variants.iter().map(|variant| variant.bucket);
        // Bucket sizes that hold all gradients are listed once, so the base plan's may be missing.
        let bucket = buckets().filter(|&bucket| bucket <= own).max().or_else(|| buckets().min());
        let mut found: Vec<Layout> = Vec::new();
        for variant in &variants {
            if Some(variant.bucket) == bucket && found.iter().all(|other| other.zero != variant.zero) {
                found.push(variant.clone());
            }
        }
        let shards_state = found.iter().any(|layout| layout.zero > 0);
        found.retain(|layout| !shards_state || layout.zero > 0);
        found
    }

    /// Returns a layout's forms, with more and more recomputation.
    fn forms_to_try(&self, base: &Layout, micro_batches: usize) -> Forms {
        let whole: Vec<Layout> =
            self.recomputations(base).into_iter().map(|recompute| Layout { recompute, ..base.clone() }).collect();
        let recomputes_all = whole.len() > 1 && whole.last().is_some_and(|layout| layout.recompute == Recompute::Full);
        let in_part = if recomputes_all { self.bounds.partly_recomputed(base, micro_batches) } else { Vec::new() };
        Forms { whole, in_part }
    }

    /// Returns what a layout's stages may recompute, the least first.
    fn recomputations(&self, layout: &Layout) -> Vec<Recompute> {
        if self.bounds.space.fixed.recompute.is_some() {
            return vec![layout.recompute.clone()];
        }
        let model = &self.bounds.space.model;
        let selective = model.has_attention.then_some(Recompute::Selective);
        let full = model.is_recomputable.then_some(Recompute::Full);
        [Recompute::None].into_iter().chain(selective).chain(full).collect()
    }

    /// Records the outcomes of a family's layouts. Returns how many were simulated.
    pub(super) fn take_trial(&mut self, expert: &Expert, outcomes: Vec<(Layout, Outcome)>) -> usize {
        let mut simulated = 0;
        for (layout, outcome) in outcomes {
            self.known.note(&layout, &outcome);
            match outcome {
                Outcome::Simulated(incumbent) => {
                    simulated += 1;
                    self.correct(expert.manner, expert.estimate, incumbent.value);
                    self.take_probed(*incumbent);
                }
                Outcome::Stopped(_) => simulated += 1,
                Outcome::Indivisible(_) | Outcome::OutOfMemory(_) | Outcome::OutOfHostMemory | Outcome::Interrupted => {}
            }
        }
        simulated
    }

    /// Simulates the whole step of the layout with the best short steps at once, if these promise a
    /// value clearly below the best.
    fn simulate_promising(&mut self, long: &mut Vec<(f64, Layout)>) -> Result<(), PlannerError> {
        let best = self.incumbents.best().unwrap_or(f64::INFINITY);
        let least = (0..long.len()).min_by(|&a, &b| long[a].0.total_cmp(&long[b].0));
        match least.filter(|&place| long[place].0 < best * BETTER) {
            Some(place) => {
                let one = long.remove(place);
                self.simulate_long(vec![one])
            }
            None => Ok(()),
        }
    }

    /// Simulates the whole steps of the layouts with the best short steps, best first, while one
    /// may still beat the best layout.
    pub(super) fn simulate_long(&mut self, mut long: Vec<(f64, Layout)>) -> Result<(), PlannerError> {
        long.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (value, layout) in long.into_iter().take(MOST_LONG) {
            if self.is_over() || self.incumbents.value_to_beat(None).is_some_and(|best| value >= best) {
                break;
            }
            let index = LayoutIndex { family: PROBED, variant: self.search.probed };
            let queued = QueuedLayout { bound: 0.0, index, layout: layout.clone(), is_stopped: false };
            let simulations = Simulations { bounds: &self.bounds, incumbents: &self.incumbents };
            let Some(outcome) = simulations.first(&[queued])?.outcome else { continue };
            self.known.note(&layout, &outcome);
            if let Outcome::Simulated(incumbent) = outcome {
                self.take_probed(*incumbent);
                self.incumbents.sort();
                self.report_bounded();
            }
        }
        Ok(())
    }
}
