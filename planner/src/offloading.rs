//! Whether layouts may have the optimizer's state on the hosts, and what that takes.
//!
//! A layout that offloads does all that the same layout does without, and copies beside it. So it is in the space only where that does not fit
//! (`Space::offloaded`): where it does, offloading is needless, and counted so. Faster it is as one kernel more may make a step faster: an
//! accident of what meets on a link (Graham 1969).

use crate::devices::Devices;
use crate::pipeline::Offloaded;
use crate::request::Request;
use foretell_program::{Layout, Offload, Plan};
use foretell_simulator::CostModel;
use foretell_topologies::Architecture;
use foretell_units::{Bytes, DataType};

/// What is known of the devices' hosts.
#[derive(Clone, Debug)]
pub(crate) struct Offloading {
    /// Whether layouts that offload are considered beside those that do not.
    pub(crate) is_open: bool,
    /// By the place of a device's kind among those in use, picoseconds in which it copies a byte to its host.
    pub(crate) paces: Vec<f64>,
    /// The memory of the first node's host, and how many devices share it.
    first_node: Option<(Bytes, usize)>,
}

impl Offloading {
    pub(crate) fn new(request: &Request<'_>, devices: &Devices) -> Self {
        let Request { topology, base, costs, fixed, .. } = request;
        let groups = topology.node_groups();
        let are_known = groups
            .iter()
            .all(|group| group.host_memory.is_some() && topology.device_kinds()[group.kind].architecture != Architecture::Cpu);
        let is_left_open = fixed.offload.is_none() && base.layout.offload.is_none() && base.stack.is_own();
        Self {
            is_open: are_known && is_left_open && keeps_state(base),
            paces: devices.kinds.iter().map(|&kind| pace(costs, kind)).collect(),
            first_node: groups.first().and_then(|group| Some((group.host_memory?, group.devices))),
        }
    }

    /// What of a layout lies on the hosts, if it offloads.
    pub(crate) fn of<'a>(&self, layout: &Layout, paces: &'a [f64], shards: usize) -> Option<Offloaded<'a>> {
        (layout.offload == Offload::Optimizer).then_some(Offloaded { paces, shards })
    }

    /// The pace of a kind by its number in the topology; of the fastest where it is not said.
    pub(crate) fn pace_of(&self, devices: &Devices, kind: Option<usize>) -> f64 {
        let place = kind.and_then(|kind| devices.kinds.iter().position(|&other| other == kind));
        place.map_or_else(|| self.paces.iter().copied().fold(f64::INFINITY, f64::min), |place| self.paces[place])
    }

    /// Whether a host has not enough for its ranks, each of which has at least so many bytes there.
    pub(crate) fn is_too_much(&self, bytes: f64, ranks: usize) -> bool {
        self.first_node.is_some_and(|(memory, devices)| bytes * devices.min(ranks) as f64 > memory.value())
    }
}

/// Whether anything is kept of each parameter beside the parameter that operators read.
fn keeps_state(plan: &Plan) -> bool {
    plan.optimizer_states() > 0 || plan.precision.size() < DataType::Fp32.size()
}

/// Picoseconds a byte.
fn pace(costs: &CostModel, kind: usize) -> f64 {
    costs.copy_seconds_per_byte(kind).value() * 1e12
}
