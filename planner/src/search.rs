//! The search: compile every layout, drop what does not fit, bound the rest, simulate in the order of the bounds until no bound left
//! can be among the best.

use crate::bound::compute_bound;
use crate::space::{Fixed, layouts};
use foretell_models::{GraphOptions, Model, ModelError};
use foretell_program::{Layout, MOST_RANKS, MOST_SAMPLES, Plan, Recompute, compile};
use foretell_simulator::{CostModel, Folding, Oversubscription, Prediction, SimulationError, predict};
use foretell_topologies::Topology;
use foretell_units::{Bytes, Seconds};
use rayon::prelude::*;
use serde::Serialize;
use thiserror::Error;

/// Layouts that are simulated before the incumbents are looked at again: fixed, so that the answer does not depend on the number of threads.
const ROUND: usize = 8;

/// What is to be laid out where.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The model.
    pub model: &'a Model,
    /// Its name.
    pub name: &'a str,
    /// The devices.
    pub topology: &'a Topology,
    /// What things cost on them.
    pub costs: &'a CostModel,
    /// Everything but the layout; of the layout, what the search does not choose.
    pub base: &'a Plan,
    /// What the user has chosen.
    pub fixed: Fixed,
    /// The devices that may be used; all of the topology's if more.
    pub devices: usize,
    /// Whether several ranks may share a device.
    pub oversubscription: Oversubscription,
    /// Memory that a rank may use; the device's if there is less of it.
    pub memory_limit: Option<Bytes>,
    /// How many candidates to return.
    pub top: usize,
}

impl<'a> Request<'a> {
    /// A request for the best of all layouts on all devices.
    pub fn new(model: &'a Model, name: &'a str, topology: &'a Topology, costs: &'a CostModel, base: &'a Plan) -> Self {
        Self {
            model,
            name,
            topology,
            costs,
            base,
            fixed: Fixed::default(),
            devices: topology.device_count(),
            oversubscription: Oversubscription::Refused,
            memory_limit: None,
            top: 1,
        }
    }
}

/// A layout that was simulated.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The whole plan.
    pub plan: Plan,
    /// What is foretold of it.
    pub prediction: Prediction,
}

/// What the search did: the contract's `search`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Search {
    /// Layouts in the space.
    pub layouts: usize,
    /// Layouts that do not divide the model or the batch.
    pub indivisible: usize,
    /// Layouts that a lower bound showed to be slower than those returned, or that recompute what fits without.
    pub bounded_out: usize,
    /// Layouts that do not fit.
    pub out_of_memory: usize,
    /// Layouts that were simulated.
    pub simulated: usize,
    /// The best step time.
    pub best_seconds: f64,
    /// No layout of the space is faster than this.
    pub lower_bound_seconds: f64,
    /// Best over bound, less one.
    pub gap: f64,
    /// How long it took; whoever has a clock fills it in.
    pub wall_seconds: f64,
}

/// The answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// The best layouts, the fastest first; never empty.
    pub candidates: Vec<Candidate>,
    /// What the search did.
    pub search: Search,
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum PlannerError {
    /// The model's sizes contradict each other.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Nothing in the space can be laid out.
    #[error("no layout of `{model}` with global batch {global_batch} divides {devices} devices as asked{reason}; hint: {hint}")]
    NoLayout {
        /// The model.
        model: String,
        /// The batch.
        global_batch: usize,
        /// The devices.
        devices: usize,
        /// What the compiler said of one of them.
        reason: String,
        /// The mend.
        hint: String,
    },
    /// Everything is too large.
    #[error("no layout fits: the smallest needs {needed} on a device of `{device}`, which has {limit}; hint: {hint}")]
    OutOfMemory {
        /// The least that any layout needs.
        needed: Bytes,
        /// The device.
        device: String,
        /// What a rank may use.
        limit: Bytes,
        /// The mend.
        hint: String,
    },
    /// A layout could not be simulated.
    #[error(transparent)]
    Simulation(#[from] SimulationError),
}

/// A layout that fits, with its bound. Its Programs are not kept: few survivors are simulated, and those are compiled again.
struct Survivor {
    index: usize,
    plan: Plan,
    /// The arena of each stage.
    arenas: Vec<Bytes>,
    bound: Seconds,
}

/// What became of a layout before simulation.
enum Fate {
    Indivisible(String),
    OutOfMemory(Bytes),
    Survives(Box<Survivor>),
}

/// Finds the fastest layouts.
///
/// # Errors
/// [`PlannerError`]: the model's or the request's sizes leave no layout, or none that fits.
pub fn plan(request: &Request<'_>) -> Result<Planned, PlannerError> {
    let options = GraphOptions::ONE;
    let blocks = request.model.graph(request.name, &options)?.blocks.len();
    let devices = request.devices;
    if devices > MOST_RANKS {
        return Err(no_layout(request, format!("more than {MOST_RANKS} are not laid out"), "use fewer nodes"));
    }
    if request.base.global_batch > MOST_SAMPLES {
        return Err(no_layout(request, format!("a step has {MOST_SAMPLES} samples at most"), "use a smaller global batch"));
    }
    let space = layouts(&request.base.layout, devices, blocks, request.base.global_batch, &request.fixed);
    let mut search = Search { layouts: space.len(), ..Search::default() };
    let limit = memory_limit(request);

    // What recomputes is only of use where its twin that keeps everything does not fit; so those that keep come first.
    let (keeping, recomputing): (Vec<_>, Vec<_>) =
        space.into_iter().enumerate().partition(|(_, layout)| layout.recompute == Recompute::None);
    let mut fates = examine(request, &keeping, limit);
    let fits = |layout: &Layout| {
        let wanted = Layout { recompute: Recompute::None, ..layout.clone() };
        keeping.iter().zip(&fates).any(|((_, twin), fate)| matches!(fate, Fate::Survives(_)) && *twin == wanted)
    };
    let (needless, needed): (Vec<_>, Vec<_>) = recomputing.into_iter().partition(|(_, layout)| fits(layout));
    search.bounded_out += needless.len();
    fates.extend(examine(request, &needed, limit));

    let mut survivors = Vec::new();
    let mut least: Option<Bytes> = None;
    let mut reason = None;
    for fate in fates {
        match fate {
            Fate::Indivisible(text) => {
                search.indivisible += 1;
                reason.get_or_insert(text);
            }
            Fate::OutOfMemory(bytes) => {
                search.out_of_memory += 1;
                least = Some(least.map_or(bytes, |least| least.min(bytes)));
            }
            Fate::Survives(survivor) => survivors.push(*survivor),
        }
    }
    if survivors.is_empty() {
        return Err(nothing_left(request, least, limit, reason));
    }
    decide(request, survivors, search)
}

fn memory_limit(request: &Request<'_>) -> Bytes {
    let least = request.topology.device_kinds().iter().map(|kind| kind.memory).min().unwrap_or(Bytes::ZERO);
    request.memory_limit.map_or(least, |limit| limit.min(least))
}

/// Compiles layouts and drops what does not divide or does not fit.
fn examine(request: &Request<'_>, layouts: &[(usize, Layout)], limit: Bytes) -> Vec<Fate> {
    layouts
        .par_iter()
        .map(|(index, layout)| {
            let plan = Plan { layout: layout.clone(), ..request.base.clone() };
            let compiled = match compile(request.model, request.name, &plan) {
                Ok(compiled) => compiled,
                Err(error) => return Fate::Indivisible(error.to_string()),
            };
            let arenas = compiled.arenas();
            let peak = arenas.iter().copied().max().unwrap_or(Bytes::ZERO);
            if peak > limit {
                return Fate::OutOfMemory(peak);
            }
            let bound = compute_bound(&compiled.training, request.topology, request.costs);
            Fate::Survives(Box::new(Survivor { index: *index, plan, arenas, bound }))
        })
        .collect()
}

/// Simulates survivors in the order of their bounds, until the next bound is beyond the last candidate that would be returned.
fn decide(request: &Request<'_>, mut survivors: Vec<Survivor>, mut search: Search) -> Result<Planned, PlannerError> {
    survivors.sort_by(|a, b| a.bound.value().total_cmp(&b.bound.value()).then(a.index.cmp(&b.index)));
    let mut candidates: Vec<(usize, Candidate)> = Vec::new();
    let mut next = 0;
    while next < survivors.len() {
        let worst_kept = candidates.get(request.top.max(1) - 1).map(|(_, kept)| kept.prediction.step_seconds);
        if worst_kept.is_some_and(|worst| survivors[next].bound > worst) {
            break;
        }
        let round = &survivors[next..survivors.len().min(next + ROUND)];
        let predicted: Vec<_> = round
            .par_iter()
            .map(|survivor| {
                // It was compiled once, so that it will be again.
                let compiled = compile(request.model, request.name, &survivor.plan)
                    .map_err(|error| no_layout(request, error.to_string(), USUAL_MEND))?;
                let (mut prediction, _) =
                    predict(&compiled.training, request.topology, request.costs, request.oversubscription, Folding::On)?;
                // Evaluation shares the arena.
                prediction.peak_memory_bytes = survivor.arenas.clone();
                Ok((survivor.index, Candidate { plan: survivor.plan.clone(), prediction }))
            })
            .collect::<Result<_, PlannerError>>()?;
        next += round.len();
        search.simulated += predicted.len();
        candidates.extend(predicted);
        candidates.sort_by(|(a_index, a), (b_index, b)| {
            let seconds = |candidate: &Candidate| candidate.prediction.step_seconds.value();
            seconds(a).total_cmp(&seconds(b)).then(a_index.cmp(b_index))
        });
    }
    search.bounded_out += survivors.len() - next;
    let best = candidates.first().map_or(0.0, |(_, best)| best.prediction.step_seconds.value());
    let left = survivors.get(next).map_or(best, |survivor| survivor.bound.value());
    search.best_seconds = best;
    search.lower_bound_seconds = best.min(left);
    search.gap = if search.lower_bound_seconds > 0.0 { best / search.lower_bound_seconds - 1.0 } else { 0.0 };
    let candidates = candidates.into_iter().take(request.top.max(1)).map(|(_, candidate)| candidate).collect();
    Ok(Planned { candidates, search })
}

fn nothing_left(request: &Request<'_>, least: Option<Bytes>, limit: Bytes, reason: Option<String>) -> PlannerError {
    match least {
        Some(needed) => PlannerError::OutOfMemory {
            needed,
            device: request.topology.device_kinds().first().map(|kind| kind.name.clone()).unwrap_or_default(),
            limit,
            hint: "use more devices, a smaller global batch, or a smaller model; `--fix` less".into(),
        },
        None => no_layout(request, reason.unwrap_or_default(), USUAL_MEND),
    }
}

const USUAL_MEND: &str = "choose a global batch with more divisors, or `--fix` less";

fn no_layout(request: &Request<'_>, reason: String, hint: &str) -> PlannerError {
    PlannerError::NoLayout {
        model: request.name.into(),
        global_batch: request.base.global_batch,
        devices: request.devices,
        reason: if reason.is_empty() { reason } else { format!(" ({reason})") },
        hint: hint.into(),
    }
}
