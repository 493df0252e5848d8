//! The answer in the form that the command line prints: `simulate --json` of the contract.

use crate::cost::CostModel;
use crate::error::SimulationError;
use crate::lowering::Lowered;
use crate::si;
use crate::simulation::{Breakdown, Oversubscription, Quantile, Simulation, run};
use foretell_program::{Axis, Program};
use foretell_topologies::Topology;
use foretell_units::{Bytes, FlopsPerSecond, Seconds};
use serde::{Deserialize, Serialize};

/// What is foretold of a step, with an interval. Serialises to the contract's document: plain numbers in SI base units.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// The step time.
    #[serde(with = "si")]
    pub step_seconds: Seconds,
    /// One run in ten is faster than this.
    #[serde(with = "si")]
    pub step_seconds_p10: Seconds,
    /// One run in ten is slower than this.
    #[serde(with = "si")]
    pub step_seconds_p90: Seconds,
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
    /// Whether each stage's arena fits the devices that run it.
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

/// Foretells a step and how far it may be off: three simulations, with every duration at its 10th percentile, its median and
/// its 90th percentile. Returns the median simulation beside the summary.
///
/// # Errors
/// As [`crate::simulate`].
pub fn predict(
    program: &Program,
    topology: &Topology,
    costs: &CostModel,
    oversubscription: Oversubscription,
) -> Result<(Prediction, Simulation), SimulationError> {
    let lowered = Lowered::new(program, topology, costs, oversubscription)?;
    let fast: Seconds = run(&lowered, Quantile::P10)?.step.into();
    let slow: Seconds = run(&lowered, Quantile::P90)?.step.into();
    let median = run(&lowered, Quantile::Median)?;
    let step: Seconds = median.step.into();
    let world = program.mesh.world_size() as f64;
    // The sum of all ranks' peaks, so that devices of several kinds count each at its own.
    let peak: FlopsPerSecond =
        lowered.ranks.iter().filter_map(|rank| topology.device_kind(rank.device).peak_rate(program.precision)).sum();
    // An empty Program takes no time, and then there is no rate.
    let per_second = |amount: f64| if step > Seconds::ZERO { amount / step.value() } else { 0.0 };
    let utilisation = |flops: f64| if peak.value() > 0.0 { per_second(flops) / peak.value() } else { 0.0 };
    let fits = lowered.ranks.iter().all(|rank| {
        let stage = program.mesh.coordinates(rank.rank).along(Axis::Pipeline);
        program.stages[stage].arena <= topology.device_kind(rank.device).memory
    });
    let prediction = Prediction {
        step_seconds: step,
        // A faster kernel can make a step slower (Graham 1969), so the order has to be seen to.
        step_seconds_p10: fast.min(step),
        step_seconds_p90: slow.max(step),
        samples_per_second: per_second(program.samples as f64),
        tokens_per_second: program.tokens.map(|tokens| per_second(tokens as f64)),
        model_flops_per_device_per_second: FlopsPerSecond::new(per_second(program.model_flops.value()) / world),
        mfu: utilisation(program.model_flops.value()),
        hfu: utilisation(program.hardware_flops.value()),
        peak_memory_bytes: program.arenas(),
        fits,
        breakdown_seconds: median.breakdown,
        calibrated: median.calibrated,
        uncalibrated: median.uncalibrated.clone(),
        events: median.events,
        simulated_ranks: median.simulated_ranks,
        wall_seconds: Seconds::ZERO,
    };
    Ok((prediction, median))
}
