//! The value of a layout in a request's objective. The search minimises it.
//!
//! The value grows with step time, so a lower bound on the time bounds the value.

use crate::error::PlannerError;
use crate::space::{Objective, Request};
use foretell_models::{Graph, GraphOptions, Model, Tensor};
use foretell_program::{Plan, PlanError, Program};
use foretell_simulator::{
    Options, PowerModel, Recording, SimulationError, Stop, predict_step, price_per_hour, reliability, running_cost, simulate,
};
use foretell_topologies::DeviceId;
use foretell_units::Bytes;

/// Checks that the topology states the figures that the objective needs.
///
/// # Errors
/// [`PlannerError::Objective`] names the missing figure.
pub(crate) fn check(request: &Request<'_>) -> Result<(), PlannerError> {
    let topology = request.topology;
    let missing = |what: &str, hint: &str| {
        Err(PlannerError::Objective { topology: topology.name().into(), what: what.into(), hint: hint.into() })
    };
    match request.objective {
        Objective::Cost if topology.node_groups().iter().any(|group| group.price_per_hour.is_none()) => {
            missing("what an hour of every node costs", "write `price_per_hour: 32.77` in its file, or add `--device-price 2USD`")
        }
        Objective::Energy if topology.device_kinds().iter().any(|kind| kind.power.is_none()) => {
            missing("how much power every device draws", "write `power: 700W` in its file")
        }
        Objective::Goodput => {
            let state = checkpoint_bytes(request.model, request.name, request.base);
            let state = state.map_err(|error| PlannerError::of_plan(request, error))?;
            let storage = request.costs.storage_rate(topology);
            reliability(topology, topology.device_count(), state, storage)
                .map(|_| ())
                .or_else(|unsaid| missing(unsaid.what, &format!("write `{}` in its file", unsaid.hint)))
        }
        Objective::Time | Objective::SlowEnd | Objective::Cost | Objective::Energy => Ok(()),
    }
}

/// Simulates a Program and returns its value. `value_per_second` is that of its number of ranks;
/// see [`value_per_second`].
///
/// # Errors
/// As [`simulate`].
pub(crate) fn simulated_value(
    request: &Request<'_>,
    program: &Program,
    value_per_second: f64,
    stop: &Stop,
) -> Result<f64, SimulationError> {
    let options = Options { oversubscription: request.oversubscription, stop: stop.clone(), ..Options::default() };
    if request.objective == Objective::Energy {
        let options = Options { recording: Recording::Spans, ..options };
        let simulation = simulate(program, request.topology, request.costs, &options)?;
        let cost = running_cost(program, request.topology, &simulation.timeline, &PowerModel::default());
        return Ok(cost.step_energy.expect("invariant: `check` has found every power").value());
    }
    Ok(predict_step(program, request.topology, request.costs, &options)?.value() * value_per_second)
}

/// Returns the least value of a second of step time on `ranks` ranks. For time, cost and goodput it
/// is exact. For energy it is the power of idle devices.
pub(crate) fn value_per_second(request: &Request<'_>, ranks: usize) -> f64 {
    let topology = request.topology;
    let devices = ranks.min(topology.device_count());
    match request.objective {
        Objective::Time => 1.0,
        // If the spread of whole steps is known, the slow end is later by its upper factor.
        Objective::SlowEnd => request.costs.step_spread.map_or(1.0, |[_, slow]| slow.max(1.0)),
        Objective::Cost => price_per_hour(topology, devices).expect("invariant: `check` has found every price"),
        Objective::Energy => {
            let model = PowerModel::default();
            let idle = |device: usize| {
                let kind = &topology.device_kinds()[topology.kind_index(DeviceId(device))];
                let power = kind.power.expect("invariant: `check` has found every power");
                kind.idle_power.unwrap_or(power * model.idle).value()
            };
            (0..devices).map(idle).sum()
        }
        Objective::Goodput => {
            let state = checkpoint_bytes(request.model, request.name, request.base);
            let state = state.expect("invariant: `check` has counted the state");
            let storage = request.costs.storage_rate(topology);
            let reliability = reliability(topology, devices, state, storage).expect("invariant: `check` has found every fact");
            1.0 / reliability.expected_goodput(reliability.daly()).max(f64::MIN_POSITIVE)
        }
    }
}

/// Returns the bytes of a checkpoint, all in single precision: the parameters, with those of
/// adapters, and the optimizer states of those that are trained.
///
/// # Errors
/// [`PlanError`] if the model's sizes contradict each other, or if adapters match no layer.
pub fn checkpoint_bytes(model: &Model, name: &str, base: &Plan) -> Result<Bytes, PlanError> {
    const SINGLE_PRECISION: usize = 4;
    let graph = base.training.graph(model, name, &GraphOptions::ONE)?;
    let matrices = graph.hidden_matrices();
    let is_trained = |tensor: &Tensor| !base.training.is_frozen(&tensor.name);
    let trained = graph.parameters().filter(|(_, tensor)| is_trained(tensor));
    let states: usize =
        trained.map(|(id, tensor)| tensor.elements() * base.optimizer_states_of(matrices.contains_key(&id))).sum();
    let values = graph.parameter_count() + states;
    Ok(Bytes::new((values * SINGLE_PRECISION) as u64))
}

/// Returns the number of elements of all parameters of a graph that a plan trains.
pub(crate) fn trained_parameters(base: &Plan, graph: &Graph) -> usize {
    let trained = graph.parameters().filter(|(_, tensor)| !base.training.is_frozen(&tensor.name));
    trained.map(|(_, tensor)| tensor.elements()).sum()
}
