//! Simulation of one step: its options, its result, and the functions that run it.

use super::disturbance::Disturbance;
use crate::cost::{CostModel, Quantile};
use crate::engine::{Breakdown, Deadline, QuotaPeriods, Recording, RunOutcome, Runnable, Scenario, Stop, interpret};
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

/// Options of a simulation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// The quantile of every duration.
    pub quantile: Quantile,
    /// The treatment of more ranks than devices.
    pub oversubscription: Oversubscription,
    /// Whether equivalent ranks are simulated once.
    pub folding: Folding,
    /// The model of collectives.
    pub collectives: Collectives,
    /// The parts of the timeline that are recorded.
    pub recording: Recording,
    /// Jitter and stragglers.
    pub disturbance: Disturbance,
    /// The observed paces of each rank in some steps: the factors by which its device is slower
    /// than at calibration. They multiply the paces of the cost model, and the answer is the median
    /// over these steps. If empty, only the paces of the cost model count.
    pub observed_paces: Vec<Vec<f64>>,
    /// Which operators the step of a plan has, if those of its framework are known.
    pub operators: Operators,
    /// The deadline of the median run of [`predict_with`](crate::predict_with); `None` for no
    /// deadline.
    pub deadline: Option<Arc<Deadline>>,
    /// When a simulation ends without an answer; by default never.
    pub stop: Stop,
}

/// Which operators the step of a plan has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Operators {
    /// Those of the plan's framework, if they were traced.
    #[default]
    Framework,
    /// Ours: the step as our executor runs it.
    Own,
}

/// The predicted course of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation {
    /// The spans of every rank, if recorded ([`Recording`]).
    pub timeline: Timeline,
    /// The step time: the end of the last rank.
    pub step: Picoseconds,
    /// The breakdown of the step time of the last rank to finish.
    pub breakdown: Breakdown,
    /// Number of simulated events: those of the event queue, and the ends of kernels and
    /// collectives that the fast path computed.
    pub events: u64,
    /// Number of ranks that were simulated; equivalent ranks count once.
    pub simulated_ranks: usize,
    /// Whether every duration derives from a measurement.
    pub calibrated: bool,
    /// Names of the operations without a measurement, whose durations come from a data sheet,
    /// sorted.
    pub uncalibrated: Vec<String>,
}

/// Predicts one step of a Program on a topology.
///
/// # Errors
/// [`SimulationError`] if the Program does not fit the topology, contradicts itself, or would never
/// end.
pub fn simulate(
    program: &Program,
    topology: &Topology,
    costs: &CostModel,
    options: &Options,
) -> Result<Simulation, SimulationError> {
    let Prepared { runnable, paces } = prepare(program, topology, costs, options)?;
    let Options { quantile, recording, .. } = *options;
    run(&runnable, &Scenario { quantile, recording, paces, stop: options.stop.clone(), ..Scenario::default() })
}

/// Predicts one step of a Program with one rank per stage, on a device of kind
/// `kind_of_stage(stage)`.
///
/// If a stage has several kinds, return the slowest, since other ranks wait for it. Links are
/// shared only according to the GPU rules for collectives ([`crate::gpu`]).
///
/// # Errors
/// [`SimulationError::NoRepresentative`] if the ranks of a stage are not equivalent or a kind has
/// no GPU profile, and as [`crate::simulate`].
pub fn simulate_representatives(
    program: &Program,
    costs: &CostModel,
    kind_of_stage: impl Fn(usize) -> usize,
) -> Result<Simulation, SimulationError> {
    let lowered = equivalence::one_rank_per_stage::lower(program, costs, kind_of_stage)?;
    run(&Runnable::new(lowered), &Scenario { quantile: Quantile::Median, recording: Recording::Spans, ..Scenario::default() })
}

/// A Program prepared for a topology. It can be simulated any number of times.
#[derive(Debug)]
pub struct Prepared<'a> {
    runnable: Runnable<'a>,
    paces: Vec<f64>,
}

/// Prepares a Program: pairs groups and messages, finds routes, and folds equivalent ranks. Ignores
/// the quantile and recording of the options.
///
/// # Errors
/// [`SimulationError`] if the Program does not fit the topology or contradicts itself.
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
    /// Predicts one step.
    ///
    /// # Errors
    /// [`SimulationError`] if the Program would never end.
    pub fn simulate(&self, quantile: Quantile, recording: Recording) -> Result<Simulation, SimulationError> {
        run(&self.runnable, &Scenario { quantile, recording, paces: self.paces.clone(), ..Scenario::default() })
    }
}

/// Prepares a Program whose ranks have the paces `paces`.
pub(crate) fn lower<'a>(
    program: &'a Program,
    topology: &'a Topology,
    costs: &'a CostModel,
    options: &Options,
    paces: &[f64],
) -> Result<Runnable<'a>, SimulationError> {
    // With jitter every rank has its own pace, so no two are equivalent and comparing them is
    // wasted time.
    let folding = if options.disturbance.jitter == 0.0 { options.folding } else { Folding::Off };
    let modes = (options.oversubscription, options.collectives);
    Ok(Runnable::new(equivalence::lower(program, topology, costs, modes, folding, paces)?))
}

/// Runs a prepared Program once.
pub(crate) fn run(runnable: &Runnable<'_>, scenario: &Scenario) -> Result<Simulation, SimulationError> {
    Ok(run_from(runnable, scenario)?.0)
}

/// Runs a prepared Program once. Also returns, for devices with a processor quota, their positions
/// in the quota period at the end.
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

/// Runs several Programs at once, with `worlds` ranks each, and returns one simulation for each.
/// Events, simulated ranks and calibration are those of all Programs together.
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

/// Returns the breakdown of the last rank to finish among `ranks`, the first one on a tie.
fn of_last_rank(runnable: &Runnable<'_>, run: &RunOutcome, ranks: Range<usize>) -> Breakdown {
    let timelines = run.timeline.ranks.iter().enumerate().take(ranks.end).skip(ranks.start);
    let last = timelines.max_by_key(|(index, rank)| (rank.end, std::cmp::Reverse(*index)));
    last.map_or_else(Breakdown::default, |(index, _)| run.breakdowns[runnable.lowered.representative_of[index] as usize])
}

/// Returns the names of all operations whose costs come from a data sheet, sorted.
fn uncalibrated(runnable: &Runnable<'_>, run: &RunOutcome) -> Vec<String> {
    let kernels = &runnable.lowered.uncalibrated_kernels;
    kernels.iter().chain(&run.uncalibrated).cloned().collect::<BTreeSet<_>>().into_iter().collect()
}
