//! What a simulation is asked and what it answers.

use crate::cost::CostModel;
use crate::disturbance::Disturbance;
use crate::error::SimulationError;
use crate::interpreter::{self, Periods};
use crate::lowering::{Lowered, Threads};
use crate::rings::Collectives;
use crate::si;
use foretell_program::{Program, Timeline};
use foretell_topologies::Topology;
use foretell_units::{Picoseconds, Seconds};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

/// Which of the durations that a thing can take is assumed, for all things at once: a bad day is bad for every kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Quantile {
    /// One run in ten is faster.
    P10,
    /// Half of the runs are faster.
    #[default]
    Median,
    /// One run in ten is slower.
    P90,
}

/// What may happen when there are more ranks than devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Oversubscription {
    /// It is refused.
    #[default]
    Refused,
    /// Rank r runs on device r modulo the number of devices, and shares its processor.
    Allowed,
}

/// Whether ranks that must behave alike are simulated once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Folding {
    /// One of them stands for all: the same answer, sooner.
    #[default]
    On,
    /// Everyone is simulated.
    Off,
}

/// What is kept of a simulation beside when each rank ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Recording {
    /// When each instruction of each rank that is simulated began and ended.
    #[default]
    Spans,
    /// No more: memory is then that of what goes on at one time.
    Ends,
}

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

/// When a simulation may stop, with [`SimulationError::Later`]: as soon as it is certain that the step ends later than this.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Deadline {
    /// A step that ends later need not be simulated to its end.
    pub step: Picoseconds,
    /// Of each list of the Program some instructions, ascending, and how long the step goes on at least after each has ended, what a step takes
    /// beside its instructions included.
    pub rest: Vec<Vec<(u32, Picoseconds)>>,
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

/// What the last rank to finish spends a step on. Every instant counts once, so the parts sum to the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Breakdown {
    /// Kernels of the forward and backward pass, whatever else goes on beside them.
    #[serde(with = "si")]
    pub compute: Seconds,
    /// No kernel, but data on the move from or to this rank.
    #[serde(with = "si")]
    pub exposed_communication: Seconds,
    /// Nothing: waiting for other ranks, and what it costs to hand over between streams and steps.
    #[serde(with = "si")]
    pub bubble: Seconds,
    /// No kernel and no communication, but samples being read.
    #[serde(with = "si")]
    pub data: Seconds,
    /// Kernels that update the parameters.
    #[serde(with = "si")]
    pub optimizer: Seconds,
}

impl Breakdown {
    /// The sum of the parts: the step.
    pub fn total(&self) -> Seconds {
        self.compute + self.exposed_communication + self.bubble + self.data + self.optimizer
    }
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

/// A Program made ready on a topology, to be simulated as often as one likes.
#[derive(Debug)]
pub struct Prepared<'a> {
    lowered: Lowered<'a>,
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
    Ok(Prepared { lowered: lower(program, topology, costs, options, &paces)?, paces })
}

impl Prepared<'_> {
    /// Foretells one step.
    ///
    /// # Errors
    /// [`SimulationError`] where the Program would never end.
    pub fn simulate(&self, quantile: Quantile, recording: Recording) -> Result<Simulation, SimulationError> {
        run(&self.lowered, &Scenario { quantile, recording, paces: self.paces.clone(), ..Scenario::default() })
    }
}

/// Makes a Program ready to be run, by ranks that go at these paces.
pub(crate) fn lower<'a>(
    program: &'a Program,
    topology: &'a Topology,
    costs: &'a CostModel,
    options: &Options,
    paces: &[f64],
) -> Result<Lowered<'a>, SimulationError> {
    // Ranks of which each has a pace of its own are not worth comparing.
    let is_worth_folding = options.folding == Folding::On && options.disturbance.jitter == 0.0;
    let lowered = Lowered::new(program, topology, costs, options, Threads::All, is_worth_folding.then_some(paces))?;
    Ok(if is_worth_folding { lowered.folded(paces) } else { lowered })
}

/// What a run assumes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scenario {
    pub(crate) quantile: Quantile,
    pub(crate) recording: Recording,
    /// How much slower than its costs each rank's device is, by rank of the Program; empty where none is.
    pub(crate) paces: Vec<f64>,
    /// Until when it goes on.
    pub(crate) deadline: Option<Arc<Deadline>>,
    /// Whether ranks are taken ahead of the event queue. The answer is the same.
    pub(crate) pacing: Pacing,
    /// Where devices that have a share of a processor stand when the step begins.
    pub(crate) periods: Periods,
}

/// Whether what follows of itself is worked out at once, or event by event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Pacing {
    #[default]
    Ahead,
    /// The oracle of tests.
    #[cfg(test)]
    Each,
}

/// One run of a Program that has been made ready.
pub(crate) fn run(lowered: &Lowered<'_>, scenario: &Scenario) -> Result<Simulation, SimulationError> {
    Ok(run_from(lowered, scenario)?.0)
}

/// The same, and where devices that have a share of a processor stand then.
pub(crate) fn run_from(lowered: &Lowered<'_>, scenario: &Scenario) -> Result<(Simulation, Periods), SimulationError> {
    let run = interpreter::interpret(lowered, scenario)?;
    let uncalibrated = lowered.uncalibrated(&run);
    let simulation = Simulation {
        step: run.timeline.step(),
        breakdown: of_last_rank(lowered, &run, 0..run.timeline.ranks.len()),
        events: run.events,
        simulated_ranks: lowered.ranks.len(),
        calibrated: uncalibrated.is_empty(),
        uncalibrated,
        timeline: run.timeline,
    };
    Ok((simulation, run.periods))
}

/// One run of several Programs beside each other, which have so many ranks each: a simulation of each of them. The events, the ranks simulated
/// and what is not calibrated are those of all.
pub(crate) fn run_each(lowered: &Lowered<'_>, scenario: &Scenario, worlds: &[usize]) -> Result<Vec<Simulation>, SimulationError> {
    let run = interpreter::interpret(lowered, scenario)?;
    let uncalibrated = lowered.uncalibrated(&run);
    let mut first = 0;
    let simulations = worlds.iter().map(|world| {
        let ranks = first..first + world;
        first = ranks.end;
        let timeline = Timeline { origin: run.timeline.origin, ranks: run.timeline.ranks[ranks.clone()].to_vec() };
        Simulation {
            step: timeline.step(),
            breakdown: of_last_rank(lowered, &run, ranks),
            events: run.events,
            simulated_ranks: lowered.ranks.len(),
            calibrated: uncalibrated.is_empty(),
            uncalibrated: uncalibrated.clone(),
            timeline,
        }
    });
    Ok(simulations.collect())
}

/// What that rank of some that finishes last spends the step on; of several the first.
fn of_last_rank(lowered: &Lowered<'_>, run: &interpreter::Run, ranks: Range<usize>) -> Breakdown {
    let timelines = run.timeline.ranks.iter().enumerate().take(ranks.end).skip(ranks.start);
    let last = timelines.max_by_key(|(index, rank)| (rank.end, std::cmp::Reverse(*index)));
    last.map_or_else(Breakdown::default, |(index, _)| run.breakdowns[lowered.of_rank[index] as usize])
}
