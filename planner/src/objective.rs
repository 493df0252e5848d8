//! What to make best, as a number that is to be small. It grows with the time of a step, so that a bound on that bounds it.

use crate::answer::PlannerError;
use crate::request::Request;
use foretell_models::{GraphOptions, Model, ModelError};
use foretell_program::{Plan, Program};
use foretell_simulator::{
    Options, PowerModel, Recording, SimulationError, predict_step, price_per_hour, reliability, running_cost, simulate,
};
use foretell_topologies::DeviceId;
use foretell_units::Bytes;

/// What to make best.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Objective {
    /// The time of a step.
    #[default]
    Time,
    /// What a step costs: the price of the nodes that it runs on for as long as it takes.
    Cost,
    /// What the devices take for a step.
    Energy,
    /// The time of a step over the share of a long run that is progress, with the failures of the nodes that it runs on and the best
    /// checkpoints (Daly 2006).
    Goodput,
}

impl Objective {
    /// Refuses what the topology does not say enough of.
    pub(crate) fn check(self, request: &Request<'_>) -> Result<(), PlannerError> {
        let topology = request.topology;
        let missing = |what: &str, hint: &str| {
            Err(PlannerError::Objective { topology: topology.name().into(), what: what.into(), hint: hint.into() })
        };
        let groups = topology.node_groups();
        match self {
            Self::Cost if groups.iter().any(|group| group.price_per_hour.is_none()) => {
                missing("what an hour of every node costs", "price_per_hour: 32.77")
            }
            Self::Energy if topology.device_kinds().iter().any(|kind| kind.power.is_none()) => {
                missing("how much power every device draws", "power: 700W")
            }
            Self::Goodput => {
                let state = checkpoint_bytes(request.model, request.name, request.base)?;
                reliability(topology, topology.device_count(), state)
                    .map(|_| ())
                    .or_else(|unsaid| missing(unsaid.what, unsaid.hint))
            }
            _ => Ok(()),
        }
    }

    /// The value of a Program, simulated, if a second of a step on so many ranks weighs so much.
    pub(crate) fn value(self, request: &Request<'_>, program: &Program, weight: f64) -> Result<f64, SimulationError> {
        let options = Options { oversubscription: request.oversubscription, ..Options::default() };
        if self == Self::Energy {
            let options = Options { recording: Recording::Spans, ..options };
            let simulation = simulate(program, request.topology, request.costs, &options)?;
            let cost = running_cost(program, request.topology, &simulation.timeline, &PowerModel::default());
            return Ok(cost.step_energy.map_or(f64::INFINITY, |energy| energy.value()));
        }
        Ok(predict_step(program, request.topology, request.costs, &options)?.value() * weight)
    }

    /// What a second of a step on so many ranks weighs: no layout has a smaller value than its time times this.
    pub(crate) fn weight(self, request: &Request<'_>, ranks: usize) -> f64 {
        let topology = request.topology;
        let devices = ranks.min(topology.device_count());
        match self {
            Self::Time => 1.0,
            Self::Cost => price_per_hour(topology, devices).unwrap_or(0.0),
            // Whatever they do, they draw what an idle device draws.
            Self::Energy => {
                let model = PowerModel::default();
                let idle = |device: usize| {
                    let kind = &topology.device_kinds()[topology.kind_index(DeviceId(device))];
                    let power = kind.power.unwrap_or_default();
                    kind.idle_power.unwrap_or(power * model.idle).value()
                };
                (0..devices).map(idle).sum()
            }
            Self::Goodput => {
                let state = checkpoint_bytes(request.model, request.name, request.base).unwrap_or(Bytes::ZERO);
                let reliability = reliability(topology, devices, state).ok();
                let share = reliability.map(|reliability| reliability.expected_goodput(reliability.daly()));
                1.0 / share.unwrap_or(1.0).max(f64::MIN_POSITIVE)
            }
        }
    }
}

/// Bytes of a checkpoint: parameters and the optimizer's state of each, all in single precision.
pub fn checkpoint_bytes(model: &Model, name: &str, base: &Plan) -> Result<Bytes, ModelError> {
    const SINGLE_PRECISION: usize = 4;
    let graph = model.graph(name, &GraphOptions::ONE)?;
    Ok(Bytes::new((graph.parameter_count() * SINGLE_PRECISION * (1 + base.optimizer_states())) as u64))
}
