//! The prediction of a step in the form of `foretell simulate --json`.

use super::load::Load;
use super::memory::{MemoryUse, memory_use};
use super::paced::PacedPrediction;
use super::rates::StepAmounts;
use super::saving::CheckpointCost;
use super::simulation::{Options, Simulation, lower, run, run_from};
use crate::cost::{CostModel, Interval, Quantile};
use crate::engine::{Breakdown, QuotaPeriods, Recording, Runnable, Scenario};
use crate::equivalence::Folding;
use crate::error::SimulationError;
use crate::lowering::Oversubscription;
use crate::si;
use foretell_program::{Footprint, Program};
use foretell_topologies::{DeviceKind, Topology};
use foretell_units::{Bytes, DataType, FlopsPerSecond, Seconds, quantile_place};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The prediction of a step, with intervals. Serialises to plain numbers in SI base units.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Prediction {
    /// The median step time.
    #[serde(with = "si")]
    #[schemars(with = "f64")]
    pub step_seconds: Seconds,
    /// The 5th percentile of the step time. With the 95th it forms a 90 % interval.
    #[serde(with = "si", default)]
    #[schemars(with = "f64")]
    pub step_seconds_p05: Seconds,
    /// The 10th percentile of the step time.
    #[serde(with = "si")]
    #[schemars(with = "f64")]
    pub step_seconds_p10: Seconds,
    /// The 90th percentile of the step time.
    #[serde(with = "si")]
    #[schemars(with = "f64")]
    pub step_seconds_p90: Seconds,
    /// The 95th percentile of the step time.
    #[serde(with = "si", default)]
    #[schemars(with = "f64")]
    pub step_seconds_p95: Seconds,
    /// Samples per second, of all ranks.
    pub samples_per_second: f64,
    /// Tokens per second, of all ranks; `None` if samples are not sequences.
    pub tokens_per_second: Option<f64>,
    /// Model FLOP per second and device, without recomputation.
    #[serde(with = "si")]
    #[schemars(with = "f64")]
    pub model_flops_per_device_per_second: FlopsPerSecond,
    /// Model FLOP per second over the dense peak of the devices in the number format of the
    /// Program.
    pub mfu: f64,
    /// As `mfu`, with recomputation counted.
    pub hfu: f64,
    /// The bytes that the fullest rank of each stage holds on a device.
    #[serde(with = "si::sizes")]
    #[schemars(with = "Vec<u64>")]
    pub peak_memory_bytes: Vec<Bytes>,
    /// The bytes that a rank of each stage keeps in host memory.
    #[serde(with = "si::sizes", default)]
    #[schemars(with = "Vec<u64>")]
    pub host_memory_bytes: Vec<Bytes>,
    /// Device memory of the fullest rank of each stage at its peak, by component.
    #[serde(with = "si::footprints", default)]
    #[schemars(with = "Vec<si::footprints::Parts>")]
    pub memory_by_component: Vec<Footprint>,
    /// Whether every device and every host has enough memory.
    pub fits: bool,
    /// The chance that a device runs out of memory; `None` unless the prediction has the
    /// framework's own traced allocations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chance_of_running_out: Option<f64>,
    /// What holds the device's memory at its peak, in words; `None` as for `chance_of_running_out`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_peak: Option<String>,
    /// The breakdown of the step time of the last rank to finish.
    pub breakdown_seconds: Breakdown,
    /// Whether every duration derives from a measurement.
    pub calibrated: bool,
    /// Names of the operations without a measurement, whose durations come from a data sheet.
    pub uncalibrated: Vec<String>,
    /// Number of events of the median simulation.
    pub events: u64,
    /// Number of ranks that were simulated; equivalent ranks count once.
    pub simulated_ranks: usize,
    /// The kinds of steps in a cycle, if steps differ; all other figures are then those of the mean
    /// step.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cycle: Vec<StepKind>,
    /// The paces of workers that do not wait for each other; `None` if all make each step together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paces: Option<PacedPrediction>,
    /// The load of servers and links; `None` in the synchronous mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<Load>,
    /// Seconds for which a step waits for a checkpoint of the state. Ranks then write the
    /// checkpoint while later steps run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_seconds: Option<f64>,
    /// Seconds from the end of a step until the checkpoint after it is on storage; `None` if the
    /// rate of storage is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_write_seconds: Option<f64>,
    /// Duration of the simulation itself. It is 0 until a caller with a clock sets it.
    #[serde(with = "si")]
    #[schemars(with = "f64")]
    pub wall_seconds: Seconds,
}

/// The steps of one kind in a cycle.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StepKind {
    /// How many steps of the cycle are of this kind.
    pub steps: usize,
    /// The median time of such a step.
    #[serde(with = "si")]
    #[schemars(with = "f64")]
    pub step_seconds: Seconds,
    /// The time for which such a step waits for communication.
    #[serde(with = "si")]
    #[schemars(with = "f64")]
    pub exposed_communication_seconds: Seconds,
}

impl Prediction {
    /// Whether the prediction is from a framework's own traced operators
    /// ([`super::traced_prediction`]).
    pub fn is_traced(&self) -> bool {
        self.chance_of_running_out.is_some()
    }

    /// Whether running out of memory is likelier than not, where that chance is known.
    pub fn probably_runs_out(&self) -> bool {
        self.chance_of_running_out.is_some_and(|chance| chance > 0.5)
    }

    /// Replaces the memory. A prediction has that of the training Program alone; call this for a
    /// run that also evaluates.
    #[must_use]
    pub fn with_memory(self, memory: MemoryUse) -> Self {
        let fits = memory.fits();
        let MemoryUse { peak_by_stage, components_by_stage, .. } = memory;
        let memory_by_component = if components_by_stage.is_empty() { self.memory_by_component } else { components_by_stage };
        Self { peak_memory_bytes: peak_by_stage, memory_by_component, fits, ..self }
    }

    /// Replaces the step time and its 80 % interval, and changes the rates accordingly.
    #[must_use]
    pub fn with_step(mut self, step: Seconds, [p10, p90]: [Seconds; 2]) -> Self {
        let pace = if step > Seconds::ZERO { self.step_seconds / step } else { 1.0 };
        let scale = |bound: Seconds, inner: Seconds| if inner > Seconds::ZERO { step * (bound / inner) } else { step };
        (self.step_seconds_p05, self.step_seconds_p95) =
            (scale(self.step_seconds_p05, self.step_seconds), scale(self.step_seconds_p95, self.step_seconds));
        (self.step_seconds, self.step_seconds_p10, self.step_seconds_p90) = (step, p10, p90);
        self.scale_rates(pace);
        self
    }

    /// Adds the cost of a checkpoint.
    #[must_use]
    pub fn with_checkpoint(self, cost: CheckpointCost) -> Self {
        let checkpoint_write_seconds = cost.written.map(Seconds::value);
        Self { checkpoint_seconds: Some(cost.wait.value()), checkpoint_write_seconds, ..self }
    }

    fn scale_rates(&mut self, pace: f64) {
        self.samples_per_second *= pace;
        self.tokens_per_second = self.tokens_per_second.map(|tokens| tokens * pace);
        self.model_flops_per_device_per_second = self.model_flops_per_device_per_second * pace;
        self.mfu *= pace;
        self.hfu *= pace;
        self.load = self.load.take().map(|load| load.at_pace(pace));
    }

    /// Adds a wait for samples to each step, and lowers the rates accordingly.
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
        self.scale_rates(pace);
        self
    }
}

/// Number of steps to simulate if devices change their pace: enough for stable quartiles.
const DRAWS: usize = 16;

/// Predicts a step and the intervals of its time. Returns the summary and the median simulation.
///
/// The intervals combine up to three sources:
/// - the spread of durations, from runs at the 10th and the 90th percentile of every duration;
/// - changes of pace, if the calibration found any, from steps in which each rank has a random
///   pace;
/// - the known error of the model itself ([`crate::Uncertainty`]).
///
/// If the cost model knows the spread of whole steps, that spread alone gives the intervals.
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

/// Predicts a step as [`predict`] does, with all options. Ignores their quantile.
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

/// Predicts a step as [`predict_with`] does, for a run whose memory is already known. Finding the
/// memory takes time under another software stack, and the run may also evaluate.
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
    let scenario = |quantile, recording| Scenario {
        quantile,
        recording,
        paces: own_paces.clone(),
        stop: options.stop.clone(),
        ..Scenario::default()
    };
    let at = |quantile, recording| run(&runnable, &scenario(quantile, recording));
    // If devices change their pace, the answer is the median of several steps, so the deadline
    // cannot apply to this one.
    let has_draws = has_draws(&runnable, costs, options);
    let deadline = options.deadline.clone().filter(|_| !has_draws);
    let usual = run(&runnable, &Scenario { deadline, ..scenario(Quantile::Median, options.recording) })?;
    let over_usual = |simulation: Simulation| simulation.step.0 as f64 / usual.step.0.max(1) as f64;
    // A known spread of whole steps makes the spread of the parts unnecessary.
    let (fastest, slowest) = match costs.step_spread {
        Some(_) => (1.0, 1.0),
        None => (over_usual(at(Quantile::P10, Recording::Ends)?), over_usual(at(Quantile::P90, Recording::Ends)?)),
    };
    let mut steps = if has_draws { draws(&runnable, costs, &own_paces, options)? } else { vec![usual] };
    let quantile = |share: f64| place_of(&steps, share);
    let fast = Seconds::from(steps[quantile(0.1)].step) * fastest;
    let slow = Seconds::from(steps[quantile(0.9)].step) * slowest;
    let median = steps.swap_remove(quantile(0.5));
    let step: Seconds = median.step.into();
    let kernels = median.breakdown.compute + median.breakdown.optimizer;
    // A faster kernel can make a step slower (Graham 1969). The spread on that side then counts as
    // 0.
    let interval = match costs.step_spread {
        Some(spread) => Interval::of_spread(step, spread),
        None => Interval::new(&costs.uncertainty, step, kernels, fast, slow),
    };
    let world = program.mesh.world_size() as f64;
    // The sum of the peaks of all ranks, since devices may be of several kinds.
    let all = runnable.lowered.representative_of.iter().map(|&place| &runnable.lowered.ranks[place as usize]);
    let peak: FlopsPerSecond = all.filter_map(|rank| peak_of(topology.device_kind(rank.device), program.format)).sum();
    let amounts = StepAmounts {
        samples: program.samples as f64,
        tokens: program.tokens.map(|tokens| tokens as f64),
        model_flops: program.model_flops.value(),
        hardware_flops: program.hardware_flops.value(),
        devices: world,
        peak,
    };
    let rates = amounts.rates(step);
    let prediction = Prediction {
        step_seconds: step,
        step_seconds_p05: interval.p05,
        step_seconds_p10: interval.p10,
        step_seconds_p90: interval.p90,
        step_seconds_p95: interval.p95,
        samples_per_second: rates.samples_per_second,
        tokens_per_second: rates.tokens_per_second,
        model_flops_per_device_per_second: rates.model_flops_per_device_per_second,
        mfu: rates.mfu,
        hfu: rates.hfu,
        peak_memory_bytes: Vec::new(),
        host_memory_bytes: program.host_arenas(),
        memory_by_component: if memory.components_by_stage.is_empty() { Footprint::of_stages(program) } else { Vec::new() },
        fits: true,
        chance_of_running_out: None,
        memory_peak: None,
        breakdown_seconds: median.breakdown,
        calibrated: median.calibrated,
        uncalibrated: median.uncalibrated.clone(),
        events: median.events,
        simulated_ranks: median.simulated_ranks,
        cycle: Vec::new(),
        paces: None,
        load: None,
        checkpoint_seconds: None,
        checkpoint_write_seconds: None,
        wall_seconds: Seconds::ZERO,
    };
    Ok((prediction.with_memory(memory), median))
}

/// Returns only the step time of [`predict_with`].
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
    let step = if has_draws(&runnable, costs, options) {
        let steps = draws(&runnable, costs, &own_paces, &Options { recording: Recording::Ends, ..options.clone() })?;
        steps[place_of(&steps, 0.5)].step
    } else {
        let (quantile, recording, stop) = (Quantile::Median, Recording::Ends, options.stop.clone());
        let usual = Scenario { quantile, recording, paces: own_paces, stop, ..Scenario::default() };
        run(&runnable, &usual)?.step
    };
    Ok(step.into())
}

/// Prepares a Program. Folding is off if devices change their pace, because each rank then has its
/// own pace.
fn lower_for_draws<'a>(
    program: &'a Program,
    topology: &'a Topology,
    costs: &'a CostModel,
    options: &Options,
    paces: &[f64],
) -> Result<Runnable<'a>, SimulationError> {
    let varies = costs.paces.len() > 1 || !options.observed_paces.is_empty();
    let folding = if varies { Folding::Off } else { options.folding };
    lower(program, topology, costs, &Options { folding, ..options.clone() }, paces)
}

/// Whether steps differ: devices change their pace, or each step starts at the point of the quota
/// period at which the previous step ended.
fn has_draws(runnable: &Runnable<'_>, costs: &CostModel, options: &Options) -> bool {
    costs.paces.len() > 1 || !options.observed_paces.is_empty() || runnable.lowered.has_quotas()
}

/// Simulates consecutive steps in which each rank has a random pace, times the observed one if
/// there is one. Returns them fastest first.
fn draws(
    runnable: &Runnable<'_>,
    costs: &CostModel,
    own_paces: &[f64],
    options: &Options,
) -> Result<Vec<Simulation>, SimulationError> {
    let recording = options.recording;
    let ranks = runnable.lowered.ranks.len();
    let observed = &options.observed_paces;
    // Observed steps are taken with a stride that has no common factor with their number, so that
    // their order is not that of the quantiles of paces.
    let stride = [7, 5, 3].into_iter().find(|&stride| !observed.len().is_multiple_of(stride)).unwrap_or(1);
    let mut periods = QuotaPeriods::default();
    let mut steps = Vec::with_capacity(DRAWS);
    // Round up, so that every observed step counts equally often.
    for draw in 0..DRAWS.next_multiple_of(observed.len().max(1)) {
        let mut paces = if costs.paces.len() > 1 { paces(&costs.paces, ranks, draw) } else { vec![1.0; ranks] };
        let observed = observed.get(draw * stride % observed.len().max(1)).map_or(&[][..], Vec::as_slice);
        for factors in [observed, own_paces] {
            paces.iter_mut().zip(factors).for_each(|(pace, factor)| *pace *= factor);
        }
        let stop = options.stop.clone();
        let scenario = Scenario { quantile: Quantile::Median, recording, paces, periods, stop, ..Scenario::default() };
        let (step, after) = run_from(runnable, &scenario)?;
        steps.push(step);
        periods = after;
    }
    steps.sort_by_key(|simulation| simulation.step);
    Ok(steps)
}

/// Returns the index of the quantile `share` among sorted steps.
fn place_of(steps: &[Simulation], share: f64) -> usize {
    quantile_place(steps.len(), share).expect("invariant: there is a step")
}

/// Returns the peak rate of a device, reduced to its share of a processor if it has a quota.
fn peak_of(kind: &DeviceKind, precision: DataType) -> Option<FlopsPerSecond> {
    Some(kind.peak_rate(precision)? * kind.speed())
}

/// Returns the pace of each rank in one of [`DRAWS`] steps.
///
/// Over all steps, every rank takes each quantile once, in an order that differs by rank. Ranks are
/// then nearly independent, and the draws cover the distribution evenly (Latin hypercube sampling;
/// McKay et al. 1979).
fn paces(quantiles: &[f64], ranks: usize, draw: usize) -> Vec<f64> {
    (0..ranks)
        .map(|rank| {
            // An odd factor permutes the residues modulo a power of two.
            let position = (draw * (2 * (rank * 5 % (DRAWS / 2)) + 1) + rank * 7) % DRAWS;
            quantiles[position * quantiles.len() / DRAWS]
        })
        .collect()
}
