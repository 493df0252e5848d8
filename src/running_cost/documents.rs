//! The cost of a step and a run as JSON.

use super::Answers;
use foretell_units::{Joules, Seconds};
use schemars::JsonSchema;
use serde::Serialize;

impl Answers {
    /// The answer as JSON: `cost`, and `goodput` if the failure rate is known.
    pub fn documents(&self) -> (CostAnswer, Option<GoodputAnswer>) {
        let energy = |energy: Option<Joules>| energy.map(Joules::value);
        let cost = CostAnswer {
            nodes: self.cost.nodes,
            devices: self.cost.devices,
            price_per_hour: self.cost.price_per_hour,
            currency: self.currency.clone(),
            step_price: self.cost.price(self.step),
            step_energy_joules: energy(self.cost.step_energy),
            unpriced: self.cost.unpriced.clone(),
            unpowered: self.cost.unpowered.clone(),
            run: self.steps.map(|steps| RunCostAnswer {
                steps,
                seconds: self.run_time().map(Seconds::value),
                price: self.run_time().and_then(|time| self.cost.price(time)),
                energy_joules: energy(self.run_energy()),
            }),
        };
        let goodput = self.goodput.as_ref().map(|failing| GoodputAnswer {
            goodput: failing.goodput,
            expected_goodput: failing.expected,
            checkpoint_every_steps: failing.every,
            is_best: failing.is_best,
            mean_seconds_between_failures: failing.reliability.mean_time_between_failures.value(),
            checkpoint_bytes: failing.state.count(),
            checkpoint_seconds: failing.reliability.checkpoint.value(),
            checkpoint_write_seconds: (failing.reliability.checkpoint + failing.reliability.write).value(),
            restart_seconds: failing.reliability.restart.value(),
            young_seconds: failing.reliability.young().value(),
            daly_seconds: failing.reliability.daly().value(),
        });
        (cost, goodput)
    }
}

/// The price and energy of a step.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Cost")]
pub struct CostAnswer {
    /// Nodes with at least one rank.
    nodes: usize,
    /// Devices with at least one rank.
    devices: usize,
    /// Price of the nodes per hour; null if one has no price.
    price_per_hour: Option<f64>,
    /// Currency of the prices; absent if the topology file names none.
    #[serde(skip_serializing_if = "Option::is_none")]
    currency: Option<String>,
    /// Price of a step.
    step_price: Option<f64>,
    /// Energy of the devices for a step; null if the power of one is unknown.
    step_energy_joules: Option<f64>,
    /// Node kinds without a price.
    unpriced: Vec<String>,
    /// Device kinds without a power.
    unpowered: Vec<String>,
    /// The whole run, if its steps were given.
    #[serde(skip_serializing_if = "Option::is_none")]
    run: Option<RunCostAnswer>,
}

/// The price and energy of a run.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "RunCost")]
struct RunCostAnswer {
    /// Its steps.
    steps: f64,
    /// Its duration, failures included if they were asked for.
    seconds: Option<f64>,
    /// Its price.
    price: Option<f64>,
    /// Its energy.
    energy_joules: Option<f64>,
}

/// The share of a run's time that makes progress.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Goodput")]
pub struct GoodputAnswer {
    /// The share, simulated.
    goodput: f64,
    /// The share by the closed form.
    expected_goodput: f64,
    /// Steps between checkpoints.
    checkpoint_every_steps: f64,
    /// Whether that interval is the best one.
    is_best: bool,
    /// Mean time between failures of the nodes together.
    mean_seconds_between_failures: f64,
    /// Size of a checkpoint.
    checkpoint_bytes: u64,
    /// Time that a step waits for it.
    checkpoint_seconds: f64,
    /// Time until it is on storage.
    checkpoint_write_seconds: f64,
    /// Time of a restart.
    restart_seconds: f64,
    /// The best interval by Young's formula.
    young_seconds: f64,
    /// The best interval by Daly's formula.
    daly_seconds: f64,
}
