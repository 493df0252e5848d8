//! What a step costs: money by the hour of the nodes that it runs on, and energy by what its devices do.
//!
//! Energy is that of the devices alone: not of hosts, switches, power supplies and cooling. A device's power is a share of the most that it draws,
//! by what it does at that instant ([`PowerModel`]). It works on a timeline, so it answers for a measured step as well.

use super::failures::Reliability;
use foretell_models::Kernel;
use foretell_program::{Operation, Program, Rank, RankTimeline, StageProgram, Timeline};
use foretell_topologies::{DeviceId, DeviceKind, NodeId, Topology};
use foretell_units::{Bytes, DataType, Joules, Picoseconds, Seconds};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// How much of the most that it draws a device draws, by what it does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PowerModel {
    /// A kernel that its data sheet has bound by arithmetic.
    pub arithmetic: f64,
    /// A kernel that its data sheet has bound by memory.
    pub memory: f64,
    /// Only communication, or waiting in it for others.
    pub communication: f64,
    /// Nothing, where the device's file does not say.
    pub idle: f64,
}

impl Default for PowerModel {
    /// Patel et al. 2023 ("POLCA", arXiv 2308.12908) on training language models on A100: power peaks at the limit or above it while they
    /// compute; where ranks synchronise it falls to 75 %, 50 % or 20 % of the limit, by how much of the computation goes on beside, and 20 % is that
    /// of an idle device. That communication alone takes the middle one, and kernels bound by memory something between that
    /// and all, are assumptions.
    fn default() -> Self {
        Self { arithmetic: 1.0, memory: 0.75, communication: 0.5, idle: 0.2 }
    }
}

/// What a step costs.
#[derive(Clone, Debug, PartialEq)]
pub struct RunningCost {
    /// Nodes that hold at least one rank.
    pub nodes: usize,
    /// Devices that hold at least one rank.
    pub devices: usize,
    /// What these nodes cost an hour together, in the currency of the topology's file, if all have a price.
    pub price_per_hour: Option<f64>,
    /// Groups of nodes without a price.
    pub unpriced: Vec<String>,
    /// What the devices take for one step, if the power of all is known.
    pub step_energy: Option<Joules>,
    /// Kinds of device whose power is not known.
    pub unpowered: Vec<String>,
}

impl RunningCost {
    /// What the nodes cost for so long.
    pub fn price(&self, duration: Seconds) -> Option<f64> {
        const HOUR: f64 = 3600.0;
        Some(self.price_per_hour? * duration.value() / HOUR)
    }
}

/// What an hour of the nodes costs on which the first so many devices are, if all have a price.
pub fn price_per_hour(topology: &Topology, devices: usize) -> Option<f64> {
    nodes_of(topology, devices).into_iter().map(|node| topology.node_groups()[topology.group_of(node)].price_per_hour).sum()
}

/// What a topology does not say that a question needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingFact {
    /// What is missing.
    pub what: &'static str,
    /// The line that would say it.
    pub hint: &'static str,
}

/// What makes a long run lose time on the first so many devices, if a checkpoint of it is so large.
///
/// # Errors
/// [`MissingFact`]: how often nodes fail, how fast checkpoints are written, how long a restart takes.
pub fn reliability(topology: &Topology, devices: usize, state: Bytes) -> Result<Reliability, MissingFact> {
    let between = |node: NodeId| topology.node_groups()[topology.group_of(node)].mean_time_between_failures;
    let rates: Option<f64> =
        nodes_of(topology, devices).into_iter().map(|node| between(node).map(|time| 1.0 / time.value())).sum();
    let never = MissingFact { what: "of every node how often it fails", hint: "mean_time_between_failures: 5000h" };
    let failures_a_second = rates.filter(|rate| *rate > 0.0).ok_or(never)?;
    let slow = MissingFact { what: "how fast checkpoints are written", hint: "storage: {bandwidth: 40GB/s}" };
    let storage = topology.storage_bandwidth().ok_or(slow)?;
    let restart = topology.restart_time().ok_or(MissingFact { what: "how long a restart takes", hint: "restart_time: 10min" })?;
    Ok(Reliability {
        mean_time_between_failures: Seconds::new(1.0 / failures_a_second),
        checkpoint: state / storage,
        restart: restart + state / storage,
    })
}

fn nodes_of(topology: &Topology, devices: usize) -> BTreeSet<NodeId> {
    (0..devices).map(|device| topology.node_of(DeviceId(device))).collect()
}

/// What one step costs. Rank r runs on device r modulo their number, as in a simulation.
pub fn running_cost(program: &Program, topology: &Topology, timeline: &Timeline, model: &PowerModel) -> RunningCost {
    let ranks = program.mesh.world_size().min(timeline.ranks.len());
    let devices = ranks.min(topology.device_count());
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
        step_energy: unpowered.is_empty().then(|| step_energy(program, topology, timeline, model, devices)),
        unpriced,
        unpowered,
    }
}

/// The sum over devices of what each draws for as long as the slowest rank's step takes.
fn step_energy(program: &Program, topology: &Topology, timeline: &Timeline, model: &PowerModel, devices: usize) -> Joules {
    let step: Seconds = timeline.step().into();
    // Ranks that were simulated as one, on devices of one kind, do alike.
    let mut known: BTreeMap<(*const RankTimeline, usize), Spent> = BTreeMap::new();
    let mut total = Joules::ZERO;
    for device in 0..devices {
        let kind_index = topology.kind_index(DeviceId(device));
        let kind = &topology.device_kinds()[kind_index];
        let power = kind.power.unwrap_or_default();
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
        // Ranks that share a device share its power.
        let most = step.value() * (model.arithmetic - idle).max(0.0);
        total += power * Seconds::new(busy.min(most) + idle * step.value());
    }
    total
}

/// What a rank's step is spent on; of several things at once the first.
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
                // The host reads samples, and copies take little of the device.
                Operation::Load { .. } | Operation::Copy { .. } => continue,
                _ => 2,
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

    /// Seconds at full power that it takes more than doing nothing.
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
