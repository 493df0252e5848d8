//! The cost of a step: the price of its nodes' time, and the energy of its devices by activity.
//!
//! Energy covers the devices only: no hosts, switches, power supplies or cooling. A device draws a
//! share of its maximum power that depends on its activity ([`PowerModel`]). The input is a
//! timeline, so a measured step works as well.

use super::failures::Reliability;
use crate::gpu::traced::TracedTime;
use foretell_models::Kernel;
use foretell_program::{Operation, Program, Rank, RankTimeline, StageProgram, Timeline};
use foretell_topologies::{DeviceId, DeviceKind, NodeId, Topology};
use foretell_units::{Bytes, BytesPerSecond, DataType, Joules, Picoseconds, Seconds};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The share of its maximum power that a device draws, by activity.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PowerModel {
    /// A kernel that is limited by arithmetic according to the data sheet.
    pub arithmetic: f64,
    /// A kernel that is limited by memory bandwidth according to the data sheet.
    pub memory: f64,
    /// Communication alone, including waiting for other members.
    pub communication: f64,
    /// An idle device, if the device's file states no idle power.
    pub idle: f64,
}

impl Default for PowerModel {
    /// Values from Patel et al. 2023 ("POLCA", arXiv 2308.12908), who trained language models on
    /// A100. Power peaks at or above the limit during computation. While ranks synchronise it falls
    /// to 75 %, 50 % or 20 % of the limit, depending on how much computation overlaps. An idle
    /// device draws 20 %.
    ///
    /// Two values are assumptions: the middle one for communication alone, and 75 % for
    /// memory-bound kernels.
    fn default() -> Self {
        Self { arithmetic: 1.0, memory: 0.75, communication: 0.5, idle: 0.2 }
    }
}

/// The cost of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct RunningCost {
    /// Number of nodes with at least one rank.
    pub nodes: usize,
    /// Number of devices with at least one rank.
    pub devices: usize,
    /// The price of these nodes per hour, in the currency of the topology's file; `None` if one has
    /// no price.
    pub price_per_hour: Option<f64>,
    /// Names of the node groups without a price.
    pub unpriced: Vec<String>,
    /// The energy of the devices for one step; `None` if the power of one is unknown.
    pub step_energy: Option<Joules>,
    /// Names of the kinds of device whose power is unknown.
    pub unpowered: Vec<String>,
}

impl RunningCost {
    /// Returns the price of the nodes for a duration; `None` if one has no price.
    pub fn price(&self, duration: Seconds) -> Option<f64> {
        const HOUR: f64 = 3600.0;
        Some(self.price_per_hour? * duration.value() / HOUR)
    }
}

/// Returns the price per hour of the nodes that hold the first `devices` devices; `None` if one has
/// no price.
pub fn price_per_hour(topology: &Topology, devices: usize) -> Option<f64> {
    nodes_of(topology, devices).into_iter().map(|node| topology.node_groups()[topology.group_of(node)].price_per_hour).sum()
}

/// A fact that a question needs and the topology does not state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingFact {
    /// The missing fact.
    pub what: &'static str,
    /// The line of the topology file that would state it.
    pub hint: &'static str,
}

/// Returns the reliability of a run on the first `devices` devices, with a checkpoint of `state`
/// bytes. `storage` is the rate at which checkpoints are written and read. Training stops while one
/// is written.
///
/// # Errors
/// [`MissingFact`] if the topology does not state how often nodes fail, how fast checkpoints are
/// written, or how long a restart takes.
pub fn reliability(
    topology: &Topology,
    devices: usize,
    state: Bytes,
    storage: Option<BytesPerSecond>,
) -> Result<Reliability, MissingFact> {
    let between = |node: NodeId| topology.node_groups()[topology.group_of(node)].mean_time_between_failures;
    let rates: Option<f64> =
        nodes_of(topology, devices).into_iter().map(|node| between(node).map(|time| 1.0 / time.value())).sum();
    let never = MissingFact { what: "of every node how often it fails", hint: "mean_time_between_failures: 5000h" };
    let failures_a_second = rates.filter(|rate| *rate > 0.0).ok_or(never)?;
    let slow = MissingFact { what: "how fast checkpoints are written", hint: "storage: {bandwidth: 40GB/s}" };
    let storage = storage.ok_or(slow)?;
    let restart = topology.restart_time().ok_or(MissingFact { what: "how long a restart takes", hint: "restart_time: 10min" })?;
    Ok(Reliability {
        mean_time_between_failures: Seconds::new(1.0 / failures_a_second),
        checkpoint: state / storage,
        write: Seconds::ZERO,
        restart: restart + state / storage,
    })
}

fn nodes_of(topology: &Topology, devices: usize) -> BTreeSet<NodeId> {
    (0..devices).map(|device| topology.node_of(DeviceId(device))).collect()
}

/// Returns the cost of one step. Rank r runs on device r modulo the number of devices, as in a
/// simulation.
pub fn running_cost(program: &Program, topology: &Topology, timeline: &Timeline, model: &PowerModel) -> RunningCost {
    let ranks = program.mesh.world_size().min(timeline.ranks.len());
    let cost = cost_of_devices(topology, ranks.min(topology.device_count()));
    let energy = || step_energy(program, topology, timeline, model, cost.devices);
    RunningCost { step_energy: cost.unpowered.is_empty().then(energy), ..cost }
}

/// Returns the cost of a topology's first devices, without the energy of a step.
pub fn cost_of_devices(topology: &Topology, devices: usize) -> RunningCost {
    let nodes = nodes_of(topology, devices);
    let groups: Vec<usize> = nodes.iter().map(|&node| topology.group_of(node)).collect();
    let price_of = |group: &usize| topology.node_groups()[*group].price_per_hour;
    let mut unpriced: Vec<String> = groups
        .iter()
        .filter(|group| price_of(group).is_none())
        .map(|&group| topology.node_groups()[group].name.clone())
        .collect();
    unpriced.dedup();
    let kinds: BTreeSet<usize> = (0..devices).map(|device| topology.kind_index(DeviceId(device))).collect();
    let kinds = kinds.into_iter().map(|kind| &topology.device_kinds()[kind]);
    let unpowered: Vec<String> = kinds.filter(|kind| kind.power.is_none()).map(|kind| kind.name.clone()).collect();
    RunningCost {
        nodes: nodes.len(),
        devices,
        price_per_hour: price_per_hour(topology, devices),
        step_energy: None,
        unpriced,
        unpowered,
    }
}

/// Returns the energy of the devices of `ranks` ranks in a step of a traced framework; `None` if
/// their power is unknown. Matrix products and attention count as arithmetic, other kernels as
/// memory-bound, and communication counts only while kernels wait for it.
pub fn traced_energy(time: &TracedTime, ranks: usize, topology: &Topology, model: &PowerModel) -> Option<Joules> {
    let kind = topology.device_kind(DeviceId(0));
    let power = kind.power?;
    let idle = kind.idle_power.map_or(model.idle, |idle| idle / power);
    let over_idle = |time: Seconds, share: f64| time.value() * (share - idle).max(0.0);
    let busy = over_idle(time.arithmetic, model.arithmetic)
        + over_idle(time.memory_bound, model.memory)
        + over_idle(time.exposed, model.communication);
    Some(power * Seconds::new((busy + idle * time.step.value()) * ranks as f64))
}

/// Returns the energy of all devices until the slowest rank ends its step.
fn step_energy(program: &Program, topology: &Topology, timeline: &Timeline, model: &PowerModel, devices: usize) -> Joules {
    let step: Seconds = timeline.step().into();
    // Folded ranks share a timeline, so on one kind of device they use the same energy.
    let mut known: BTreeMap<(*const RankTimeline, usize), Spent> = BTreeMap::new();
    let mut total = Joules::ZERO;
    for device in 0..devices {
        let kind_index = topology.kind_index(DeviceId(device));
        let kind = &topology.device_kinds()[kind_index];
        let power = kind.power.expect("invariant: every power is known");
        let idle = kind.idle_power.map_or(model.idle, |idle| idle / power);
        let busy: f64 = (device..timeline.ranks.len())
            .step_by(devices.max(1))
            .map(|rank| {
                let spans = &timeline.ranks[rank];
                let list = program.list_of(Rank(rank));
                let spent = known
                    .entry((Arc::as_ptr(spans), kind_index))
                    .or_insert_with(|| Spent::of(list, spans, program.precision, kind));
                spent.over_idle(model, idle)
            })
            .sum();
        // Ranks on one device together draw at most the device's maximum.
        let most = step.value() * (model.arithmetic - idle).max(0.0);
        total += power * Seconds::new(busy.min(most) + idle * step.value());
    }
    total
}

/// Time of a step by activity. Overlapping activities count as the first of them in the order of
/// the fields.
#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    arithmetic: Picoseconds,
    memory: Picoseconds,
    communication: Picoseconds,
}

impl Spent {
    fn of(list: &StageProgram, timeline: &RankTimeline, precision: DataType, kind: &DeviceKind) -> Self {
        let mut changes: Vec<(Picoseconds, usize, i32)> = Vec::with_capacity(2 * timeline.spans.len());
        for (span, instruction) in timeline.spans.iter().zip(&list.instructions) {
            let category = match *instruction.operation {
                Operation::Compute { kernel, .. } => usize::from(!is_bound_by_arithmetic(&kernel, precision, kind)),
                // Most of a framework's operators move memory; `traced_energy` knows which do not.
                Operation::Traced { .. } => 1,
                // The host loads samples, and copies draw little power on the device.
                Operation::Load { .. } | Operation::Copy { .. } | Operation::Save { .. } | Operation::Write { .. } => continue,
                Operation::Collective { .. } | Operation::Send { .. } | Operation::Receive { .. } => 2,
            };
            changes.push((span.start, category, 1));
            changes.push((span.end, category, -1));
        }
        changes.sort_unstable();
        let (mut active, mut spent) = ([0i32; 3], [Picoseconds::ZERO; 3]);
        let mut before = Picoseconds::ZERO;
        for (time, category, change) in changes {
            if let Some(first) = active.iter().position(|&count| count > 0) {
                spent[first] += time.saturating_sub(before);
            }
            before = time;
            active[category] += change;
        }
        Self { arithmetic: spent[0], memory: spent[1], communication: spent[2] }
    }

    /// Returns the energy above idle, as seconds at maximum power.
    fn over_idle(&self, model: &PowerModel, idle: f64) -> f64 {
        let part = |time: Picoseconds, share: f64| Seconds::from(time).value() * (share - idle).max(0.0);
        part(self.arithmetic, model.arithmetic) + part(self.memory, model.memory) + part(self.communication, model.communication)
    }
}

fn is_bound_by_arithmetic(kernel: &Kernel, precision: DataType, kind: &DeviceKind) -> bool {
    let format = if kernel.is_matrix_product() { kernel.format(precision) } else { DataType::Fp32 };
    let peak = kind.peak_rate(format).or_else(|| kind.peak.values().copied().next());
    peak.is_some_and(|peak| kernel.flops() / peak >= kernel.bytes(precision) / kind.memory_bandwidth)
}
