//! What a simulation is asked and what it answers.

use super::disturbance::Disturbance;
use crate::cost::{CostModel, Quantile};
use crate::engine::{Breakdown, Deadline, QuotaPeriods, Recording, RunOutcome, Runnable, Scenario, interpret};
use crate::equivalence::{self, Folding};
use crate::error::SimulationError;
use crate::lowering::Oversubscription;
use crate::network::Collectives;
use foretell_program::{Program, Timeline};
use foretell_topologies::Topology;
use foretell_units::Picoseconds;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// How a Program is simulated.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// Which duration of each thing.
    pub quantile: Quantile,
    /// What to do with more ranks than devices.
    pub oversubscription: Oversubscription,
    /// Whether ranks that must behave alike are simulated once.
    pub folding: Folding,
    /// How collectives are run.
    pub collectives: Collectives,
    /// What is kept.
    pub recording: Recording,
    /// What makes ranks differ.
    pub disturbance: Disturbance,
    /// Until when the median run of [`predict_with`](crate::predict_with) is worth going on; for ever if nothing is said.
    pub deadline: Option<Arc<Deadline>>,
}

/// A foretold step.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation {
    /// Every rank's spans, where they are kept ([`Recording`]).
    pub timeline: Timeline,
    /// How long the step takes: until the last rank has finished.
    pub step: Picoseconds,
    /// What the last rank spends it on.
    pub breakdown: Breakdown,
    /// Events that the simulation took: those of the queue, and the ends of kernels and collectives that were worked out ahead of it.
    pub events: u64,
    /// Ranks that were simulated one by one.
    pub simulated_ranks: usize,
    /// Whether every duration follows from a measurement.
    pub calibrated: bool,
    /// What was answered by a data sheet for want of a measurement, sorted.
    pub uncalibrated: Vec<String>,
}

/// Foretells one step of a Program on a topology.
///
/// # Errors
/// [`SimulationError`] where the Program does not fit the topology, contradicts itself, or would never end.
pub fn simulate(
    program: &Program,
    topology: &Topology,
    costs: &CostModel,
    options: &Options,
) -> Result<Simulation, SimulationError> {
    prepare(program, topology, costs, options)?.simulate(options.quantile, options.recording)
}

/// Foretells one step of a Program by one rank a stage, whose devices are of the kind that `kind_of_stage` says: where a stage has several kinds,
/// the slowest, for which the others wait. Links are shared as the rule for collectives has it ([`crate::gpu`]), and by nothing else.
///
/// # Errors
/// [`SimulationError::NoRepresentative`] where ranks of a stage do not do alike or a kind is not in the profiles of GPUs, and as [`crate::simulate`].
pub fn simulate_representatives(
    program: &Program,
    costs: &CostModel,
    kind_of_stage: impl Fn(usize) -> usize,
) -> Result<Simulation, SimulationError> {
    let lowered = equivalence::one_rank_per_stage::lower(program, costs, kind_of_stage)?;
    run(&Runnable::new(lowered), &Scenario { quantile: Quantile::Median, recording: Recording::Spans, ..Scenario::default() })
}

/// A Program made ready on a topology, to be simulated as often as one likes.
#[derive(Debug)]
pub struct Prepared<'a> {
    runnable: Runnable<'a>,
    paces: Vec<f64>,
}

/// Makes a Program ready: pairs groups and messages, takes routes, folds. The options' quantile and recording do not count.
///
/// # Errors
/// [`SimulationError`] where the Program does not fit the topology or contradicts itself.
pub fn prepare<'a>(
    program: &'a Program,
    topology: &'a Topology,
    costs: &'a CostModel,
    options: &Options,
) -> Result<Prepared<'a>, SimulationError> {
    let paces = options.disturbance.paces(program.mesh.world_size());
    Ok(Prepared { runnable: lower(program, topology, costs, options, &paces)?, paces })
}

impl Prepared<'_> {
    /// Foretells one step.
    ///
    /// # Errors
    /// [`SimulationError`] where the Program would never end.
    pub fn simulate(&self, quantile: Quantile, recording: Recording) -> Result<Simulation, SimulationError> {
        run(&self.runnable, &Scenario { quantile, recording, paces: self.paces.clone(), ..Scenario::default() })
    }
}

/// Makes a Program ready to be run, by ranks that go at these paces.
pub(crate) fn lower<'a>(
    program: &'a Program,
    topology: &'a Topology,
    costs: &'a CostModel,
    options: &Options,
    paces: &[f64],
) -> Result<Runnable<'a>, SimulationError> {
    // Ranks of which each has a pace of its own are not worth comparing.
    let folding = if options.disturbance.jitter == 0.0 { options.folding } else { Folding::Off };
    let modes = (options.oversubscription, options.collectives);
    Ok(Runnable::new(equivalence::lower(program, topology, costs, modes, folding, paces)?))
}

/// One run of a Program that has been made ready.
pub(crate) fn run(runnable: &Runnable<'_>, scenario: &Scenario) -> Result<Simulation, SimulationError> {
    Ok(run_from(runnable, scenario)?.0)
}

/// The same, and where devices that have a share of a processor stand then.
pub(crate) fn run_from(runnable: &Runnable<'_>, scenario: &Scenario) -> Result<(Simulation, QuotaPeriods), SimulationError> {
    let run = interpret(runnable, scenario)?;
    let uncalibrated = uncalibrated(runnable, &run);
    let simulation = Simulation {
        step: run.timeline.step(),
        breakdown: of_last_rank(runnable, &run, 0..run.timeline.ranks.len()),
        events: run.events,
        simulated_ranks: runnable.lowered.ranks.len(),
        calibrated: uncalibrated.is_empty(),
        uncalibrated,
        timeline: run.timeline,
    };
    Ok((simulation, run.periods))
}

/// One run of several Programs beside each other, which have so many ranks each: a simulation of each of them. The events, the ranks simulated
/// and what is not calibrated are those of all.
pub(crate) fn run_each(
    runnable: &Runnable<'_>,
    scenario: &Scenario,
    worlds: &[usize],
) -> Result<Vec<Simulation>, SimulationError> {
    let run = interpret(runnable, scenario)?;
    let uncalibrated = uncalibrated(runnable, &run);
    let mut first = 0;
    let simulations = worlds.iter().map(|world| {
        let ranks = first..first + world;
        first = ranks.end;
        let timeline = Timeline { origin: run.timeline.origin, ranks: run.timeline.ranks[ranks.clone()].to_vec() };
        Simulation {
            step: timeline.step(),
            breakdown: of_last_rank(runnable, &run, ranks),
            events: run.events,
            simulated_ranks: runnable.lowered.ranks.len(),
            calibrated: uncalibrated.is_empty(),
            uncalibrated: uncalibrated.clone(),
            timeline,
        }
    });
    Ok(simulations.collect())
}

/// What that rank of some that finishes last spends the step on; of several the first.
fn of_last_rank(runnable: &Runnable<'_>, run: &RunOutcome, ranks: Range<usize>) -> Breakdown {
    let timelines = run.timeline.ranks.iter().enumerate().take(ranks.end).skip(ranks.start);
    let last = timelines.max_by_key(|(index, rank)| (rank.end, std::cmp::Reverse(*index)));
    last.map_or_else(Breakdown::default, |(index, _)| run.breakdowns[runnable.lowered.representative_of[index] as usize])
}

/// Everything that was answered by a data sheet, sorted.
fn uncalibrated(runnable: &Runnable<'_>, run: &RunOutcome) -> Vec<String> {
    let kernels = &runnable.lowered.uncalibrated_kernels;
    kernels.iter().chain(&run.uncalibrated).cloned().collect::<BTreeSet<_>>().into_iter().collect()
}
