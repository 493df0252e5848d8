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
    /// Step time divided by goodput, which is the share of a long run that makes progress, given
    /// the failure rates of the nodes in use and the best checkpoint interval (Daly 2006).
    Goodput,
}

/// The progress of a search: the best value so far, and a bound on every value.
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
    /// Every part of the plan but the layout, and the value of each layout field that the search
    /// does not vary.
    pub base: &'a Plan,
    /// Layout fields that the user has fixed.
    pub fixed: Fixed,
    /// Number of devices that may be used: the first ones of the topology. If it exceeds the
    /// topology's devices, ranks share devices.
    pub devices: usize,
    /// Whether several ranks may share a device.
    pub oversubscription: Oversubscription,
    /// Memory limit of a rank. The device's own memory applies where it is smaller.
    pub memory_limit: Option<Bytes>,
    /// Number of candidates to return.
    pub top: usize,
    /// Quantity to minimise.
    pub objective: Objective,
    /// Gap at which the search may end: how far the best candidate may be above the lower bound, as
    /// a fraction of the bound. Small spaces are always searched until the gap is zero.
    pub tolerance: f64,
    /// Whether neighbours of the answer outside of the space are simulated: other buckets, cuts
    /// block by block, recomputation by stage.
    pub searches_locally: bool,
    /// How much slower a simpler layout may be to be preferred, as a fraction of its value.
    pub simplicity_margin: f64,
    /// Share of a GPU's memory that is left free: for the driver, the libraries, and what an
    /// allocator loses between blocks.
    pub headroom: f64,
    /// Value of the best layout that another search found, for example on fewer devices. Only
    /// better layouts are returned.
    pub must_beat: Option<f64>,
    /// Checked repeatedly once there is a candidate. When raised, the search ends with its best
    /// candidates so far.
    pub stop: Stop,
    /// Checked repeatedly until there is a candidate. When raised, the search ends with an error.
    pub give_up: Stop,
    /// Called with the progress of the search: with the first answers, and between its rounds.
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
