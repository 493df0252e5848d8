//! A local climb from the best layouts so far, with simulation of neighbours one move of the mesh
//! away.
//!
//! Estimates of neighbours are off by much the same factor, more so than those of all layouts of
//! one manner. So estimates of neighbours are corrected by the error of the climb's current layout,
//! and the best few neighbours are simulated. The climb moves to the first that is better. The
//! first climb starts at the best layout, further ones at the best layouts of other manners whose
//! values are close.
//!
//! The numbers of steps and neighbours are fixed, so the answer depends on the clock only where the
//! limit ends the search. A climb proves nothing: each family stays in the queue.

use super::experts::{Expert, retain_best_of_size};
use super::queue::{LayoutIndex, PROBED};
use super::records::{Manner, MeshSizes, manner, mesh};
use super::searcher::Searcher;
use crate::error::PlannerError;
use crate::space::Family;
use foretell_program::{Layout, Plan, Recompute};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// The most layouts from which a climb starts, and (`CLOSE`) the most that their values may be over
/// the best, as a factor.
const STARTS: usize = 3;
const CLOSE: f64 = 1.25;

/// The most steps of a climb.
const STEPS: usize = 12;

/// For a step: the most rounds of neighbours in which a layout is compiled; the same if bounds are
/// cheap, so that the queue finds other layouts quickly; and the neighbours of a round. Rounds
/// without compilation count up to three times this limit in all.
const ROUNDS: usize = 8;
const ROUNDS_WITH_BOUNDS: usize = 3;
const AT_ONCE: usize = 2;

/// The most that a neighbour's corrected estimate may be over the value of the climb's current
/// layout, as a factor.
const PROMISING: f64 = 1.3;

/// Share of the value that a step must save.
const LEAST_GAIN: f64 = 1e-3;

/// A climb is needless if the best value is at most this factor over the bound on every layout.
const NEAR_BOUND: f64 = 1.02;

impl Searcher<'_> {
    /// Climbs from the best layout so far of each manner from which no climb has started.
    ///
    /// # Errors
    /// [`PlannerError`] if a layout cannot be simulated.
    pub(super) fn climb(&mut self) -> Result<(), PlannerError> {
        while self.climbed.len() < STARTS {
            let Some(best) = self.incumbents.best() else { break };
            if self.is_over() || best <= NEAR_BOUND * self.bounds.least_value() {
                break;
            }
            let is_open = |manner: &Manner| !self.climbed.contains(manner);
            let start = self.incumbents.list.iter().find(|candidate| is_open(&manner(&candidate.plan.layout)));
            let Some(start) = start.filter(|candidate| candidate.value <= CLOSE * best) else { break };
            let (value, layout) = (start.value, start.plan.layout.clone());
            self.climbed.insert(manner(&layout));
            self.climb_from(value, layout)?;
        }
        Ok(())
    }

    fn climb_from(&mut self, mut value: f64, mut layout: Layout) -> Result<(), PlannerError> {
        for _ in 0..STEPS {
            if self.is_over() {
                break;
            }
            let neighbours = self.promising_neighbours(value, &layout);
            let mut better = None;
            let mut neighbours = neighbours.into_iter();
            let mut compiled = 0;
            let most = if self.bounds.has_cheap_bounds(&layout) { ROUNDS_WITH_BOUNDS } else { ROUNDS };
            for _ in 0..3 * most {
                let round: Vec<Expert> = neighbours.by_ref().take(AT_ONCE).collect();
                if round.is_empty() || compiled == most || self.is_over() {
                    break;
                }
                self.tried.extend(round.iter().map(|expert| expert.family.layout.clone()));
                let is_compiled;
                (is_compiled, better) = self.try_neighbours(&round, value)?;
                compiled += usize::from(is_compiled);
                if better.is_some() {
                    break;
                }
            }
            let Some(found) = better else { break };
            (value, layout) = found;
        }
        Ok(())
    }

    /// Simulates neighbours. Returns whether any was compiled, and the best of them with its value,
    /// if it is better than `value`.
    fn try_neighbours(&mut self, round: &[Expert], value: f64) -> Result<(bool, Option<(f64, Layout)>), PlannerError> {
        let trials = self.try_all(round)?;
        let first_found = self.search.probed;
        let is_compiled = trials.iter().any(|trial| !trial.outcomes.is_empty() || !trial.long.is_empty());
        let mut long = Vec::new();
        for (expert, trial) in round.iter().zip(trials) {
            long.extend(trial.long);
            self.take_trial(expert, trial.outcomes);
        }
        self.incumbents.sort();
        self.simulate_long(long)?;
        self.report_bounded();
        let is_new = |index: LayoutIndex| index.family == PROBED && index.variant >= first_found;
        let found =
            self.incumbents.list.iter().find(|candidate| is_new(candidate.index) && candidate.value < value * (1.0 - LEAST_GAIN));
        Ok((is_compiled, found.map(|candidate| (candidate.value, candidate.plan.layout.clone()))))
    }

    /// Returns the families one move away from `layout`, whose value is `value`, that may be
    /// better, ordered by corrected estimates.
    fn promising_neighbours(&self, value: f64, layout: &Layout) -> Vec<Expert> {
        let plan = Plan { layout: layout.clone(), ..self.request.base.clone() };
        let Ok(micro_batches) = plan.micro_batches() else { return Vec::new() };
        let of_own = Layout { recompute: Recompute::None, ..layout.clone() };
        let Some(own) = self.estimated(&Family { layout: of_own, micro_batches }) else { return Vec::new() };
        let correction = value / own.estimate.max(f64::MIN_POSITIVE);
        let is_open = |family: &Family| {
            let keeps_all = family.layout.recompute == Recompute::None || self.bounds.space.fixed.recompute.is_some();
            keeps_all && !self.tried.contains(&family.layout)
        };
        // Estimates of another manner are corrected by that manner's factor, if it is known.
        let own_manner = manner(layout);
        let corrected = |expert: &Expert| {
            let of_manner = self.corrections.get(&expert.manner).filter(|_| expert.manner != own_manner);
            expert.estimate * of_manner.copied().unwrap_or(correction)
        };
        let families = self.bounds.space.families_near(layout);
        let near = families.into_par_iter().filter(is_open).filter_map(|family| self.estimated(&family));
        let mut near: Vec<(f64, Expert)> = near.map(|expert| (corrected(&expert), expert)).collect();
        near.retain(|(corrected, _)| *corrected <= PROMISING * value);
        near.sort_by(|(a, left), (b, right)| left.seems_too_large.cmp(&right.seems_too_large).then(a.total_cmp(b)));
        let mut near: Vec<Expert> = near.into_iter().map(|(_, expert)| expert).collect();
        retain_best_of_size(&mut near);
        // Every mesh has one turn before any mesh has its next.
        let mut turns: BTreeMap<MeshSizes, usize> = BTreeMap::new();
        let turn_of = |expert: &Expert| {
            let turn = turns.entry(mesh(&expert.family.layout)).or_default();
            *turn += 1;
            *turn
        };
        let mut in_turns: Vec<(usize, Expert)> = Vec::new();
        let numbers: Vec<usize> = near.iter().map(turn_of).collect();
        in_turns.extend(numbers.into_iter().zip(near));
        in_turns.sort_by_key(|(turn, expert)| (expert.seems_too_large, *turn));
        in_turns.into_iter().map(|(_, expert)| expert).collect()
    }
}
