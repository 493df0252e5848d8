//! The planner's input.

use super::fixed::Fixed;
use foretell_models::Model;
use foretell_program::Plan;
use foretell_simulator::{CostModel, Oversubscription, Stop};
use foretell_topologies::Topology;
use foretell_units::Bytes;

/// The quantity that a search minimises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Objective {
    /// Step time: the median.
    #[default]
    Time,
    /// Slower end of the step time's interval: its 90th percentile.
    SlowEnd,
    /// Price of a step: what the nodes in use cost for as long as the step takes.
    Cost,
    /// Energy that the devices draw during a step.
    Energy,
    /// Step time over goodput: over the share of a long run that makes progress, given the failure
    /// rates of the nodes in use and the best checkpoint interval (Daly 2006).
    Goodput,
}

/// How far a search is: what it has, and what is still possible.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Value of the best layout so far in the request's objective.
    pub best: f64,
    /// Lower bound on the value of every layout.
    pub bound: f64,
    /// Layouts simulated to the end.
    pub simulated: usize,
}

/// A model, the devices to train it on, and the choices that are already made.
#[derive(Clone)]
pub struct Request<'a> {
    /// Model to lay out.
    pub model: &'a Model,
    /// Name of the model, for messages.
    pub name: &'a str,
    /// Nodes, devices and links.
    pub topology: &'a Topology,
    /// Cost model of the simulator.
    pub costs: &'a CostModel,
    /// Every part of the plan but the layout, and the default of each layout field that the search
    /// leaves alone.
    pub base: &'a Plan,
    /// Layout fields that the user has fixed.
    pub fixed: Fixed,
    /// Devices that may be used: the first ones of the topology. More than the topology has means
    /// that ranks share devices.
    pub devices: usize,
    /// Whether several ranks may share a device.
    pub oversubscription: Oversubscription,
    /// Memory limit of a rank. The device's own memory applies where it is smaller.
    pub memory_limit: Option<Bytes>,
    /// Number of candidates to return.
    pub top: usize,
    /// Quantity to minimise.
    pub objective: Objective,
    /// Gap at which the search may end: how far the best candidate may lie above the lower bound,
    /// as a share of the bound. Small spaces are always searched until the gap is zero.
    pub tolerance: f64,
    /// Whether neighbours of the answer are simulated that no layout of the space is: other
    /// buckets, cuts block by block, recomputation by stage.
    pub searches_locally: bool,
    /// How much slower a simpler layout may be to be preferred, as a share.
    pub simplicity_margin: f64,
    /// Share of a GPU's memory that is left free: for the driver, the libraries, and what an
    /// allocator loses between blocks.
    pub headroom: f64,
    /// Value of the best layout that another search found, for example on fewer devices. Only
    /// better layouts are returned.
    pub must_beat: Option<f64>,
    /// Asked repeatedly once there is a candidate. `true` ends the search with what it has.
    pub stop: Stop,
    /// Asked repeatedly until there is a candidate. `true` ends the search with an error.
    pub give_up: Stop,
    /// Told how far the search is: with the first answers, and between its rounds.
    pub watch: &'a (dyn Fn(Progress) + Sync),
}

impl<'a> Request<'a> {
    /// Creates a request for the fastest layout on all devices of `topology`.
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
            searches_locally: false,
            simplicity_margin: 0.0,
            headroom: 0.0,
            must_beat: None,
            stop: Stop::default(),
            give_up: Stop::default(),
            watch: &|_| {},
        }
    }
}
