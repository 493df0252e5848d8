//! The hosts of the devices, for layouts that offload to them.
//!
//! A layout that offloads does the same work as without offloading, and copies as well. So such
//! layouts are searched only if nothing fits without offloading (`search/too_large.rs`); otherwise
//! offloading counts as needless. It could be faster only by a scheduling anomaly (Graham 1969),
//! when a delay happens to relieve a link.

use super::pipeline::{BUCKET_ROUNDING, PipelineOffload};
use crate::space::{DeviceKinds, Request, optimizer_tensors};
use foretell_program::Layout;
use foretell_simulator::MemoryRates;
use foretell_units::Bytes;

/// Bytes of a gradient, and of each value that the optimizer keeps for a parameter.
const SINGLE_PRECISION: f64 = 4.0;

/// Facts about the hosts and devices of a request that bounds on offloading need.
#[derive(Clone, Debug)]
pub(super) struct Hosts {
    /// Picoseconds in which a device copies a byte to its host, indexed by kind among the kinds in
    /// use.
    pub(super) copy_time_per_byte: Vec<f64>,
    /// Bytes on a device for each parameter.
    parameter: f64,
    /// Bytes on a device for each parameter's gradient.
    gradient: f64,
    /// Bytes on a device for each parameter's optimizer state.
    optimizer_state: f64,
    /// Smallest memory limit of a device, less what the stack holds for any Program.
    device_limit: f64,
    /// Bytes on a device for each byte of activations.
    activations: f64,
    /// Memory of the first node's host, and the devices that share it. `None` if that is not known.
    first_node: Option<(Bytes, usize)>,
}

impl Hosts {
    pub(super) fn new(request: &Request<'_>, kinds: &DeviceKinds, rates: &MemoryRates) -> Self {
        let Request { topology, base, costs, .. } = request;
        let copy_time = |&kind: &usize| costs.copy_seconds_per_byte(kind).value() * 1e12;
        Self {
            copy_time_per_byte: kinds.kinds.iter().map(copy_time).collect(),
            parameter: base.storage().size().value() * rates.parameters,
            gradient: SINGLE_PRECISION * rates.gradients,
            optimizer_state: SINGLE_PRECISION * optimizer_tensors(base) as f64 * rates.optimizer_state,
            device_limit: kinds.smallest_memory_limit().value() - rates.fixed.value() * kinds.weight_of(None),
            // Gathered parameters may count as transient memory or as parameters.
            activations: rates.transient.min(rates.parameters),
            first_node: topology.node_groups().first().and_then(|group| Some((group.host_memory?, group.devices))),
        }
    }

    /// Returns the least bytes of a model's state on all devices together: its parameters, the
    /// gradients of trained parameters and, unless it may be on the hosts, their optimizer state.
    pub(super) fn bytes_of_state(&self, parameters: usize, trained: usize, state_may_be_on_hosts: bool) -> f64 {
        let of_trained = self.gradient + if state_may_be_on_hosts { 0.0 } else { self.optimizer_state };
        parameters as f64 * self.parameter + trained as f64 * of_trained
    }

    /// Returns what a layout keeps on the hosts, if it offloads. The optimizer state in its costs
    /// is sharded over at most `shards` ranks.
    pub(super) fn offload<'a>(
        &self,
        layout: &Layout,
        copy_time_per_byte: &'a [f64],
        shards: usize,
    ) -> Option<PipelineOffload<'a>> {
        let Self { device_limit, activations, .. } = *self;
        let offload = layout.offload;
        (!offload.is_none()).then_some(PipelineOffload { offload, copy_time_per_byte, shards, device_limit, activations })
    }

    /// Returns the copy time per byte of a kind of the topology, or the shortest of all for `None`.
    pub(super) fn copy_time_of(&self, kinds: &DeviceKinds, kind: Option<usize>) -> f64 {
        let times = &self.copy_time_per_byte;
        let place = kind.and_then(|kind| kinds.place_of_kind(kind));
        place.map_or_else(|| times.iter().copied().fold(f64::INFINITY, f64::min), |place| times[place])
    }

    /// Returns `true` if none of `layouts` fits into `limit` even with the optimizer state on the
    /// hosts, given that each holds at least `needed` bytes with the state on the devices.
    ///
    /// The layouts differ only in ZeRO. ZeRO 1 holds no more than ZeRO 0, so ZeRO 0 counts only if
    /// it is the only one. Offloading removes at most the state's share of persistent memory.
    pub(super) fn offloaded_state_does_not_fit(&self, layouts: &[Layout], needed: Bytes, limit: Bytes) -> bool {
        let Self { parameter, gradient, optimizer_state, .. } = self;
        let share_left = |layout: &Layout| match layout.zero {
            1 => {
                let fewest = layout.stages.iter().flatten().map(|stage| stage.data).min().unwrap_or(layout.data);
                let ranks = layout.shard_group.unwrap_or(fewest) as f64;
                (parameter / ranks + gradient) / ((parameter + optimizer_state) / ranks + gradient)
            }
            _ => (parameter + gradient) / (parameter + gradient + optimizer_state),
        };
        let with_zero = layouts.iter().filter(|layout| layout.zero > 0).map(share_left).reduce(f64::min);
        let share = with_zero.or_else(|| layouts.first().map(share_left)).unwrap_or(0.0);
        (needed.value() + BUCKET_ROUNDING) * share - BUCKET_ROUNDING > limit.value()
    }

    /// Returns `true` if the first node's host cannot hold `bytes` for each of its ranks, of a
    /// layout with `ranks` ranks.
    pub(super) fn exceeds_host_memory(&self, bytes: f64, ranks: usize) -> bool {
        self.first_node.is_some_and(|(memory, devices)| bytes * devices.min(ranks) as f64 > memory.value())
    }
}
