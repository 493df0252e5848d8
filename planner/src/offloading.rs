//! What layouts may have on the hosts, and what that takes.
//!
//! A layout that offloads does all that the same layout does without, and copies beside it. So it is in the space only where that does not fit
//! (`search/hosts.rs`): where it does, offloading is needless, and counted so. Faster it is as one kernel more may make a step faster: an
//! accident of what meets on a link (Graham 1969).

use crate::bounds::share_of_arena;
use crate::devices::Devices;
use crate::pipeline::{Offloaded, UNEVEN};
use crate::request::Request;
use foretell_program::{Layout, Offload, Plan};
use foretell_simulator::CostModel;
use foretell_topologies::Architecture;
use foretell_units::{Bytes, DataType};

/// What is known of the devices' hosts.
#[derive(Clone, Debug)]
pub(crate) struct Offloading {
    /// What layouts are considered with on the hosts beside nothing: where devices have hosts of which it is known how much memory they have, and
    /// the user leaves it open. The optimizer's state only if there is any.
    pub(crate) open: &'static [Offload],
    /// By the place of a device's kind among those in use, picoseconds in which it copies a byte to its host.
    pub(crate) paces: Vec<f64>,
    /// Bytes of each parameter, of its gradient, and of what the optimizer keeps of it.
    of_parameter: [f64; 3],
    /// Bytes that our arena has at most on the device with the least memory, where a layout fits.
    limit: f64,
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
            open: match are_known && is_left_open {
                false => &[],
                true if copies(base) == 0 => &[Offload::Activations],
                true => &[Offload::Optimizer, Offload::Activations, Offload::Both],
            },
            paces: devices.kinds.iter().map(|&kind| pace(costs, kind)).collect(),
            of_parameter: [base.storage().size().value(), SINGLE_PRECISION, SINGLE_PRECISION * copies(base) as f64],
            limit: devices.least_memory().value() / share_of_arena(base),
            first_node: groups.first().and_then(|group| Some((group.host_memory?, group.devices))),
        }
    }

    /// Bytes that devices have of each parameter at least, all together.
    pub(crate) fn bytes_of_each_parameter(&self, state_may_lie_on_hosts: bool) -> f64 {
        let [parameter, gradient, state] = self.of_parameter;
        parameter + gradient + if state_may_lie_on_hosts { 0.0 } else { state }
    }

    /// What of a layout lies on the hosts, if it offloads.
    pub(crate) fn of<'a>(&self, layout: &Layout, paces: &'a [f64], shards: usize) -> Option<Offloaded<'a>> {
        (!layout.offload.is_none()).then_some(Offloaded { what: layout.offload, paces, shards, limit: self.limit })
    }

    /// The pace of a kind by its number in the topology; of the fastest where it is not said.
    pub(crate) fn pace_of(&self, devices: &Devices, kind: Option<usize>) -> f64 {
        let place = kind.and_then(|kind| devices.kinds.iter().position(|&other| other == kind));
        place.map_or_else(|| self.paces.iter().copied().fold(f64::INFINITY, f64::min), |place| self.paces[place])
    }

    /// Whether nothing of some layouts fits in `limit` with the optimizer's state on the hosts, of which none holds less than `needed` without: they
    /// differ in ZeRO's stage, and with the first stage of it a layout holds no more than with none.
    pub(crate) fn is_hopeless(&self, layouts: &[Layout], needed: Bytes, limit: Bytes) -> bool {
        let [parameter, gradient, state] = self.of_parameter;
        // What is left at least of what is kept, as a share.
        let left = |layout: &Layout| match layout.zero {
            1 => {
                let own = layout.stages.iter().flatten().map(|stage| stage.data).min().unwrap_or(layout.data);
                let ranks = layout.shard_group.unwrap_or(own) as f64;
                (parameter / ranks + gradient) / ((parameter + state) / ranks + gradient)
            }
            _ => (parameter + gradient) / (parameter + gradient + state),
        };
        let shared_out = layouts.iter().filter(|layout| layout.zero > 0).map(left).reduce(f64::min);
        let left = shared_out.or_else(|| layouts.first().map(left)).unwrap_or(0.0);
        (needed.value() + UNEVEN) * left - UNEVEN > limit.value()
    }

    /// Whether a host has not enough for its ranks, each of which has at least so many bytes there.
    pub(crate) fn is_too_much(&self, bytes: f64, ranks: usize) -> bool {
        self.first_node.is_some_and(|(memory, devices)| bytes * devices.min(ranks) as f64 > memory.value())
    }
}

/// What is kept of each parameter beside the one that operators read.
fn copies(plan: &Plan) -> usize {
    plan.optimizer_states() + usize::from(plan.storage().size() < DataType::Fp32.size())
}

/// Bytes of a gradient, and of each thing that the optimizer keeps.
const SINGLE_PRECISION: f64 = 4.0;

/// Picoseconds a byte.
fn pace(costs: &CostModel, kind: usize) -> f64 {
    costs.copy_seconds_per_byte(kind).value() * 1e12
}
