//! The local search around the answer: neighbours that the bounds do not cover, and simpler layouts
//! that are about as good.

use super::incumbents::Incumbent;
use super::neighbours::{buckets, neighbours, simpler};
use super::queue::{LayoutIndex, NEIGHBOURS, QueuedLayout};
use super::records::Known;
use super::searcher::Searcher;
use super::simulation::{Outcome, Simulations};
use crate::bounds::Bound;
use crate::error::PlannerError;
use foretell_program::{Layout, Plan};
use rayon::prelude::*;

/// The most rounds of neighbours.
const ROUNDS: usize = 4;

/// The most neighbours that are simulated in a round.
const SIMULATED: usize = 12;

/// Neighbours that are simulated in parallel. The search may be stopped between two such groups.
const AT_ONCE: usize = 4;

/// The most runners-up whose other bucket sizes are tried.
const RUNNERS_UP: usize = 2;

/// The most that these layouts may be worse than the best, as a fraction. Other bucket sizes hardly
/// ever gain more.
const CLOSE: f64 = 0.1;

/// The fraction of the value by which a neighbour must be better. A smaller gain is not worth an
/// unusual choice.
const LEAST_GAIN: f64 = 1e-3;

impl Searcher<'_> {
    /// Improves the best incumbent in three steps. First tries other buckets of the runners-up.
    /// Then replaces the best by a better neighbour, for at most `ROUNDS` rounds. Last, prefers
    /// simpler layouts that are at most [`Request::simplicity_margin`] slower.
    ///
    /// # Errors
    /// [`PlannerError`] if a layout cannot be simulated.
    ///
    /// [`Request::simplicity_margin`]: crate::Request::simplicity_margin
    pub(super) fn improve_locally(&mut self) -> Result<(), PlannerError> {
        if !self.request.searches_locally || self.is_over() {
            return Ok(());
        }
        for layout in self.runners_up() {
            let Some((value, _)) = self.best() else { break };
            let close = buckets(&self.bounds, &layout);
            self.simulate_close(close, &layout, value * (1.0 - LEAST_GAIN), 0.0)?;
        }
        for _ in 0..ROUNDS {
            let Some((value, layout)) = self.best() else { break };
            let close = neighbours(&self.bounds, &layout);
            let found = self.simulate_close(close, &layout, value * (1.0 - LEAST_GAIN), 0.0)?;
            if found.is_empty() || self.is_over() {
                break;
            }
        }
        let margin = self.request.simplicity_margin;
        let Some((best, _)) = self.best() else { return Ok(()) };
        let mut preferred = self.without_context(best * (1.0 + margin)).filter(|_| margin > 0.0);
        preferred.iter().for_each(|index| self.incumbents.prefer(*index));
        while margin > 0.0 && !self.is_over() {
            let Some((_, layout)) = self.best() else { break };
            let simple = simpler(&self.bounds, &layout);
            let found = self.simulate_close(simple, &layout, best * (1.0 + margin), margin)?;
            preferred = found.first().copied().or(preferred);
            preferred.iter().for_each(|index| self.incumbents.prefer(*index));
            if found.is_empty() {
                break;
            }
        }
        Ok(())
    }

    /// The best incumbent of a value of at most `good_enough` with less context parallelism than
    /// the best layout, no more stages and no larger `tensor`. It may differ in all other fields.
    fn without_context(&self, good_enough: f64) -> Option<LayoutIndex> {
        let (_, best) = self.best()?;
        let is_simpler =
            |layout: &Layout| layout.context < best.context && layout.pipeline <= best.pipeline && layout.tensor <= best.tensor;
        let others = self.incumbents.list.iter().filter(|other| other.value <= good_enough);
        others.into_iter().find(|other| is_simpler(&other.plan.layout)).map(|other| other.index)
    }

    /// Runners-up among the layouts to return, which may become the best with other bucket sizes.
    /// None in large spaces, where each simulation takes long.
    fn runners_up(&self) -> Vec<Layout> {
        let Some((best, _)) = self.best() else { return Vec::new() };
        let places = if self.incumbents.is_small_space() { self.incumbents.returned() } else { Vec::new() };
        let others = places.into_iter().skip(1).map(|place| &self.incumbents.list[place]);
        let close = others.filter(|other| other.value <= best * (1.0 + CLOSE));
        close.take(RUNNERS_UP).map(|other| other.plan.layout.clone()).collect()
    }

    pub(super) fn best(&self) -> Option<(f64, Layout)> {
        self.incumbents.list.first().map(|best| (best.value, best.plan.layout.clone()))
    }

    /// Simulates those of the layouts `close` to `layout` whose values may be at most `to_beat`, at
    /// most `SIMULATED` of them. Returns the indices of those whose values are at most `to_beat`,
    /// in the order of simulation: with a margin that of `close`, else by bound. If there are none,
    /// returns the first incumbent of `close` that is good enough, if there is one.
    ///
    /// A layout's bound is compared with the bound of `layout`, since both are below their
    /// simulations by much the same amount. It may be larger by the fraction `margin`.
    fn simulate_close(
        &mut self,
        mut close: Vec<Layout>,
        layout: &Layout,
        to_beat: f64,
        margin: f64,
    ) -> Result<Vec<LayoutIndex>, PlannerError> {
        // With a margin, `close` lists the layouts in order of preference. So the first one that is
        // known to be good enough, and those after it, need no simulation.
        let known = if margin > 0.0 { self.first_known(&close, to_beat) } else { None };
        close.truncate(known.map_or(close.len(), |(place, _)| place));
        let own = self.value_of_bound(layout).unwrap_or(0.0);
        let is_open = |layout: &Layout| match self.known.get(layout) {
            None => true,
            // The layout is no better than the best, but may be simpler and good enough.
            Some(Known::AtLeast(at_least)) => margin > 0.0 && *at_least <= to_beat,
            Some(Known::Simulated | Known::TooLarge(_)) => false,
        };
        let bounded = close
            .into_par_iter()
            .filter(is_open)
            .filter(|_| !self.is_over())
            .filter_map(|layout| Some((self.value_of_bound(&layout)?, layout)));
        let mut bounded: Vec<(f64, Layout)> = bounded.collect();
        // The best bucket size depends on how much of the last reduction is exposed, which bounds
        // barely see. So layouts that differ only in bucket size are tried whatever their bound, up
        // to `to_beat`. So are cut pipelines of other lengths, because how far a bound lies below
        // its simulation depends on the number of stages.
        let has_other_bucket = |other: &Layout| Layout { bucket: layout.bucket, ..other.clone() } == *layout;
        let is_always_tried =
            |other: &Layout| has_other_bucket(other) || other.pipeline != layout.pipeline && other.cuts.is_some();
        let limit = own * (1.0 + margin) * (1.0 + LEAST_GAIN);
        bounded.retain(|(bound, other)| *bound <= if is_always_tried(other) { to_beat } else { limit.min(to_beat) });
        if margin == 0.0 {
            bounded.sort_by(|a, b| is_always_tried(&b.1).cmp(&is_always_tried(&a.1)).then(a.0.total_cmp(&b.0)));
        }
        bounded.truncate(SIMULATED);
        let mut found = Vec::new();
        for group in bounded.chunks(AT_ONCE) {
            if self.is_over() {
                break;
            }
            let simulations = Simulations { bounds: &self.bounds, incumbents: &self.incumbents };
            let simulated = group.par_iter().map(|(bound, layout)| {
                let index = LayoutIndex { family: NEIGHBOURS, variant: 0 };
                // A simpler layout may be a little slower, so with a margin the simulation is not
                // stopped early.
                let queued = QueuedLayout { bound: *bound, index, layout: layout.clone(), is_stopped: margin > 0.0 };
                simulations.first(&[queued])
            });
            let simulated = simulated.collect::<Result<Vec<_>, PlannerError>>()?;
            for (outcome, (_, layout)) in simulated.into_iter().zip(group) {
                let Some(outcome) = outcome.outcome else { continue };
                match &outcome {
                    // The layout becomes no incumbent. When its turn comes, it is simulated again.
                    Outcome::Simulated(one) if one.value > to_beat => self.known.note_at_least(layout, one.value),
                    outcome => self.known.note(layout, outcome),
                }
                let Outcome::Simulated(incumbent) = outcome else { continue };
                let index = LayoutIndex { family: NEIGHBOURS, variant: self.search.probed };
                self.search.probed += 1;
                if incumbent.value <= to_beat {
                    found.push(index);
                    self.incumbents.list.push(Incumbent { index, ..*incumbent });
                }
            }
            // The first of the simpler layouts is the simplest.
            if margin > 0.0 && !found.is_empty() {
                break;
            }
        }
        self.incumbents.sort();
        if found.is_empty() {
            found.extend(known.map(|(_, index)| index));
        }
        Ok(found)
    }

    /// Returns the first layout of `close` that is an incumbent with a value of at most `to_beat`:
    /// its position in `close` and its index.
    fn first_known(&self, close: &[Layout], to_beat: f64) -> Option<(usize, LayoutIndex)> {
        let index_of = |layout: &Layout| {
            let is_it = |incumbent: &&Incumbent| incumbent.value <= to_beat && incumbent.plan.layout == *layout;
            self.incumbents.list.iter().find(is_it).map(|incumbent| incumbent.index)
        };
        close.iter().enumerate().find_map(|(place, layout)| Some((place, index_of(layout)?)))
    }

    /// Returns the bound on a layout's value, or zero if it would cost as much as a simulation.
    /// `None` if the layout does not fit or does not divide the model.
    fn value_of_bound(&self, layout: &Layout) -> Option<f64> {
        let bounds = &self.bounds;
        let plan = Plan { layout: layout.clone(), ..self.request.base.clone() };
        let micro_batches = plan.micro_batches().ok()?;
        if !bounds.has_cheap_bounds(layout) {
            return Some(0.0);
        }
        match bounds.layout(layout, micro_batches) {
            Ok(Bound { time: Some(time), .. }) => Some(time.value() * bounds.value_per_second(layout)),
            _ => None,
        }
    }
}
