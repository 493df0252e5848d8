//! The answer in the form that the command line prints: `simulate --json` of the contract.

use super::memory::{MemoryUse, memory_use};
use super::simulation::{Options, Simulation, lower, run, run_from};
use crate::cost::{CostModel, Interval, Quantile};
use crate::engine::{Breakdown, QuotaPeriods, Recording, Runnable, Scenario};
use crate::equivalence::Folding;
use crate::error::SimulationError;
use crate::lowering::Oversubscription;
use crate::si;
use foretell_program::{Footprint, Program};
use foretell_topologies::{DeviceKind, Topology};
use foretell_units::{Bytes, DataType, FlopsPerSecond, Seconds};
use serde::{Deserialize, Serialize};

/// What is foretold of a step, with an interval. Serialises to the contract's document: plain numbers in SI base units.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// The step time.
    #[serde(with = "si")]
    pub step_seconds: Seconds,
    /// One run in twenty is faster than this: with the 95th percentile a 90 % interval.
    #[serde(with = "si", default)]
    pub step_seconds_p05: Seconds,
    /// One run in ten is faster than this.
    #[serde(with = "si")]
    pub step_seconds_p10: Seconds,
    /// One run in ten is slower than this.
    #[serde(with = "si")]
    pub step_seconds_p90: Seconds,
    /// One run in twenty is slower than this.
    #[serde(with = "si", default)]
    pub step_seconds_p95: Seconds,
    /// Samples of all ranks a second.
    pub samples_per_second: f64,
    /// Tokens of all ranks a second, where samples are sequences.
    pub tokens_per_second: Option<f64>,
    /// Model arithmetic, without recomputation, that one device does a second.
    #[serde(with = "si")]
    pub model_flops_per_device_per_second: FlopsPerSecond,
    /// That over the dense peak of the Program's number format.
    pub mfu: f64,
    /// The same with recomputation counted.
    pub hfu: f64,
    /// The arena of each stage.
    #[serde(with = "si::sizes")]
    pub peak_memory_bytes: Vec<Bytes>,
    /// What a rank of each stage has in its host's memory.
    #[serde(with = "si::sizes", default)]
    pub host_memory_bytes: Vec<Bytes>,
    /// What the largest arena of each stage holds when it holds the most.
    #[serde(with = "si::footprints", default)]
    pub memory_by_component: Vec<Footprint>,
    /// Whether each stage's arena fits the devices that run it, and what is on hosts fits these.
    pub fits: bool,
    /// What the last rank spends the step on.
    pub breakdown_seconds: Breakdown,
    /// Whether every duration follows from a measurement.
    pub calibrated: bool,
    /// What was answered by a data sheet for want of a measurement.
    pub uncalibrated: Vec<String>,
    /// Events that the median simulation took.
    pub events: u64,
    /// Ranks that were simulated one by one.
    pub simulated_ranks: usize,
    /// How long the simulation took; whoever has a clock fills it in.
    #[serde(with = "si")]
    pub wall_seconds: Seconds,
}

impl Prediction {
    /// The same with the memory that a run needs. A prediction of a training Program alone has its
    /// own; call this for a run that also evaluates.
    #[must_use]
    pub fn with_memory(self, memory: MemoryUse) -> Self {
        let fits = memory.fits();
        let MemoryUse { peak_by_stage, components_by_stage, .. } = memory;
        let memory_by_component = if components_by_stage.is_empty() { self.memory_by_component } else { components_by_stage };
        Self { peak_memory_bytes: peak_by_stage, memory_by_component, fits, ..self }
    }

    /// The same where each step waits so much longer for its samples than it takes by itself.
    #[must_use]
    pub fn waiting_for_input(mut self, wait: Seconds) -> Self {
        let before = self.step_seconds;
        for step in [
            &mut self.step_seconds,
            &mut self.step_seconds_p05,
            &mut self.step_seconds_p10,
            &mut self.step_seconds_p90,
            &mut self.step_seconds_p95,
        ] {
            *step += wait;
        }
        self.breakdown_seconds.data += wait;
        let pace = if self.step_seconds > Seconds::ZERO { before / self.step_seconds } else { 1.0 };
        self.samples_per_second *= pace;
        self.tokens_per_second = self.tokens_per_second.map(|tokens| tokens * pace);
        self.model_flops_per_device_per_second = self.model_flops_per_device_per_second * pace;
        self.mfu *= pace;
        self.hfu *= pace;
        self
    }
}

/// Steps that are simulated where devices change their pace: enough for quartiles to be steady.
const DRAWS: usize = 16;

/// Foretells a step and how far it may be off: with every duration at its 10th percentile, its median and its 90th percentile; and where the
/// calibration found that devices change their pace, over steps in which each rank's device has a pace of its own, drawn from what was
/// found; and with what the model itself is off by, as far as is known ([`crate::Uncertainty`]). Returns the median simulation beside the summary.
///
/// # Errors
/// As [`crate::simulate`].
pub fn predict(
    program: &Program,
    topology: &Topology,
    costs: &CostModel,
    oversubscription: Oversubscription,
    folding: Folding,
) -> Result<(Prediction, Simulation), SimulationError> {
    predict_with(program, topology, costs, &Options { oversubscription, folding, ..Options::default() })
}

/// The same with all options; their quantile does not count.
///
/// # Errors
/// As [`crate::simulate`].
pub fn predict_with(
    program: &Program,
    topology: &Topology,
    costs: &CostModel,
    options: &Options,
) -> Result<(Prediction, Simulation), SimulationError> {
    predict_with_memory(program, memory_use(program, None, topology, costs), topology, costs, options)
}

/// The same for a run whose memory is known, which may also evaluate: finding it takes time under
/// another software stack than ours.
///
/// # Errors
/// As [`crate::simulate`].
pub fn predict_with_memory(
    program: &Program,
    memory: MemoryUse,
    topology: &Topology,
    costs: &CostModel,
    options: &Options,
) -> Result<(Prediction, Simulation), SimulationError> {
    let own_paces = options.disturbance.paces(program.mesh.world_size());
    let runnable = lower_for_draws(program, topology, costs, options, &own_paces)?;
    let scenario = |quantile, recording| Scenario { quantile, recording, paces: own_paces.clone(), ..Scenario::default() };
    let at = |quantile, recording| run(&runnable, &scenario(quantile, recording));
    // Where devices change their pace the median of several steps counts, which is not this one.
    let has_draws = has_draws(&runnable, costs);
    let deadline = options.deadline.clone().filter(|_| !has_draws);
    let usual = run(&runnable, &Scenario { deadline, ..scenario(Quantile::Median, options.recording) })?;
    let over_usual = |simulation: Simulation| simulation.step.0 as f64 / usual.step.0.max(1) as f64;
    // Where the spread of such runs as a whole is known, nobody asks for that of their parts.
    let (fastest, slowest) = match costs.step_spread {
        Some(_) => (1.0, 1.0),
        None => (over_usual(at(Quantile::P10, Recording::Ends)?), over_usual(at(Quantile::P90, Recording::Ends)?)),
    };
    let mut steps = if has_draws { draws(&runnable, costs, &own_paces, options.recording)? } else { vec![usual] };
    let quantile = |share: f64| place_of(&steps, share);
    let fast = Seconds::from(steps[quantile(0.1)].step) * fastest;
    let slow = Seconds::from(steps[quantile(0.9)].step) * slowest;
    let median = steps.swap_remove(quantile(0.5));
    let step: Seconds = median.step.into();
    let kernels = median.breakdown.compute + median.breakdown.optimizer;
    // A faster kernel can make a step slower (Graham 1969): then the spread on that side is taken as none.
    let interval = match costs.step_spread {
        Some(spread) => Interval::of_spread(step, spread),
        None => Interval::new(&costs.uncertainty, step, kernels, fast, slow),
    };
    let world = program.mesh.world_size() as f64;
    // The sum of all ranks' peaks, so that devices of several kinds count each at its own.
    let all = runnable.lowered.representative_of.iter().map(|&place| &runnable.lowered.ranks[place as usize]);
    let peak: FlopsPerSecond = all.filter_map(|rank| peak_of(topology.device_kind(rank.device), program.format)).sum();
    // An empty Program takes no time, and then there is no rate.
    let per_second = |amount: f64| if step > Seconds::ZERO { amount / step.value() } else { 0.0 };
    let utilisation = |flops: f64| if peak.value() > 0.0 { per_second(flops) / peak.value() } else { 0.0 };
    let prediction = Prediction {
        step_seconds: step,
        step_seconds_p05: interval.p05,
        step_seconds_p10: interval.p10,
        step_seconds_p90: interval.p90,
        step_seconds_p95: interval.p95,
        samples_per_second: per_second(program.samples as f64),
        tokens_per_second: program.tokens.map(|tokens| per_second(tokens as f64)),
        model_flops_per_device_per_second: FlopsPerSecond::new(per_second(program.model_flops.value()) / world),
        mfu: utilisation(program.model_flops.value()),
        hfu: utilisation(program.hardware_flops.value()),
        peak_memory_bytes: Vec::new(),
        host_memory_bytes: program.host_arenas(),
        memory_by_component: if memory.components_by_stage.is_empty() { Footprint::of_stages(program) } else { Vec::new() },
        fits: true,
        breakdown_seconds: median.breakdown,
        calibrated: median.calibrated,
        uncalibrated: median.uncalibrated.clone(),
        events: median.events,
        simulated_ranks: median.simulated_ranks,
        wall_seconds: Seconds::ZERO,
    };
    Ok((prediction.with_memory(memory), median))
}

/// The step time that [`predict_with`] foretells, without what it says beside it.
///
/// # Errors
/// As [`crate::simulate`].
pub fn predict_step(
    program: &Program,
    topology: &Topology,
    costs: &CostModel,
    options: &Options,
) -> Result<Seconds, SimulationError> {
    let own_paces = options.disturbance.paces(program.mesh.world_size());
    let runnable = lower_for_draws(program, topology, costs, options, &own_paces)?;
    let step = if has_draws(&runnable, costs) {
        let steps = draws(&runnable, costs, &own_paces, Recording::Ends)?;
        steps[place_of(&steps, 0.5)].step
    } else {
        let usual = Scenario { quantile: Quantile::Median, recording: Recording::Ends, paces: own_paces, ..Scenario::default() };
        run(&runnable, &usual)?.step
    };
    Ok(step.into())
}

/// Makes a Program ready. Devices that change their pace do so each for itself.
fn lower_for_draws<'a>(
    program: &'a Program,
    topology: &'a Topology,
    costs: &'a CostModel,
    options: &Options,
    paces: &[f64],
) -> Result<Runnable<'a>, SimulationError> {
    let folding = if costs.paces.len() > 1 { Folding::Off } else { options.folding };
    lower(program, topology, costs, &Options { folding, ..options.clone() }, paces)
}

/// Whether one step is not as another: devices change their pace, or begin a step where the last one has left them in their periods.
fn has_draws(runnable: &Runnable<'_>, costs: &CostModel) -> bool {
    costs.paces.len() > 1 || runnable.lowered.has_quotas()
}

/// Steps one after the other, in which each rank's device has a pace of its own, the fastest first.
fn draws(
    runnable: &Runnable<'_>,
    costs: &CostModel,
    own_paces: &[f64],
    recording: Recording,
) -> Result<Vec<Simulation>, SimulationError> {
    let mut periods = QuotaPeriods::default();
    let mut steps = Vec::with_capacity(DRAWS);
    for draw in 0..DRAWS {
        let mut paces =
            if costs.paces.len() > 1 { paces(&costs.paces, runnable.lowered.ranks.len(), draw) } else { own_paces.to_vec() };
        if costs.paces.len() > 1 {
            paces.iter_mut().zip(own_paces).for_each(|(pace, own)| *pace *= own);
        }
        let (step, after) =
            run_from(runnable, &Scenario { quantile: Quantile::Median, recording, paces, periods, ..Scenario::default() })?;
        steps.push(step);
        periods = after;
    }
    steps.sort_by_key(|simulation| simulation.step);
    Ok(steps)
}

/// Where a quantile stands among steps in order.
fn place_of(steps: &[Simulation], share: f64) -> usize {
    ((steps.len() - 1) as f64 * share).round() as usize
}

/// What a device computes at most with the share that it has of itself.
fn peak_of(kind: &DeviceKind, precision: DataType) -> Option<FlopsPerSecond> {
    Some(kind.peak_rate(precision)? * kind.speed())
}

/// Each rank's pace in one of [`DRAWS`] steps. Every rank goes once through all quantiles, each in an order of its own, so that ranks are
/// independent and the draws cover the distribution evenly (a Latin hypercube; McKay et al. 1979).
fn paces(quantiles: &[f64], ranks: usize, draw: usize) -> Vec<f64> {
    (0..ranks)
        .map(|rank| {
            // Odd factors permute the residues modulo a power of two.
            let position = (draw * (2 * (rank * 5 % (DRAWS / 2)) + 1) + rank * 7) % DRAWS;
            quantiles[position * quantiles.len() / DRAWS]
        })
        .collect()
}
