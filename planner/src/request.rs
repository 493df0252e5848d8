//! What is asked of the planner.

use crate::fixed::Fixed;
use crate::objective::Objective;
use foretell_models::Model;
use foretell_program::Plan;
use foretell_simulator::{CostModel, Oversubscription};
use foretell_topologies::Topology;
use foretell_units::Bytes;

/// What is to be laid out where.
#[derive(Clone)]
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
    /// What to make best.
    pub objective: Objective,
    /// How far the best may be above the least bound that is left when the search ends, as a share; small spaces are searched to the end.
    pub tolerance: f64,
    /// What the best is worth that was found on other devices: nothing that is no better is returned.
    pub elsewhere: Option<f64>,
    /// Whether to stop with what there is: asked now and then once there is something.
    pub stop: &'a (dyn Fn() -> bool + Sync),
    /// Whether to give up with nothing: asked again and again until there is something.
    pub give_up: &'a (dyn Fn() -> bool + Sync),
}

impl<'a> Request<'a> {
    /// A request for the fastest of all layouts on all devices.
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
            objective: Objective::Time,
            tolerance: 0.01,
            elsewhere: None,
            stop: &|| false,
            give_up: &|| false,
        }
    }
}
