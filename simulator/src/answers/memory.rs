//! Memory that a run needs on devices and hosts, and whether it fits: [`memory_use`] decides.
//!
//! Under our own executor a device holds the arena of the Program. Under another software stack,
//! its memory is computed from the same buffers by the stack's profile
//! ([`crate::gpu::StageMemory`]).

use crate::cost::{CostModel, ProfiledGpu};
use foretell_program::{Footprint, Program, Rank, StageProgram};
use foretell_topologies::{Architecture, NodeId, Topology};
use foretell_units::Bytes;
use std::collections::BTreeMap;

/// The memory that a run needs, and the first device and the host that have too little.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemoryUse {
    /// For each stage, the bytes that its fullest rank holds on a device.
    pub peak_by_stage: Vec<Bytes>,
    /// `peak_by_stage` by component, for training. Empty if all ranks hold arenas: then
    /// [`Footprint::of_stages`] has the components.
    pub components_by_stage: Vec<Footprint>,
    /// `peak_by_stage` plus the bytes that ranks on CPUs offload: there, the host's memory is the
    /// device's.
    pub needed_by_stage: Vec<Bytes>,
    /// The first device whose ranks need more memory than it has.
    pub overfull_device: Option<OverfullDevice>,
    /// Bytes that the ranks of the fullest node keep on its host, if that host has less memory.
    pub overfull_host: Option<Bytes>,
}

/// A device whose ranks need more memory than it has.
#[derive(Clone, Debug, PartialEq)]
pub struct OverfullDevice {
    /// The stage of the rank that needs the most.
    pub stage: usize,
    /// Number of ranks on the device.
    pub ranks: usize,
    /// Bytes that they need together.
    pub needed: Bytes,
    /// The name of the kind of device.
    pub kind: String,
    /// The memory of the device.
    pub memory: Bytes,
}

impl MemoryUse {
    /// Whether every device and every host has enough memory.
    pub fn fits(&self) -> bool {
        self.overfull_device.is_none() && self.overfull_host.is_none()
    }
}

/// Returns the memory that a run needs. Rank r runs on device r modulo the number of devices, as in
/// a simulation. Evaluation shares the arena with training.
pub fn memory_use(training: &Program, evaluation: Option<&Program>, topology: &Topology, costs: &CostModel) -> MemoryUse {
    let mesh = &training.mesh;
    let (ranks, devices) = (mesh.world_size(), topology.device_count());
    let zero = vec![Bytes::ZERO; mesh.stage_count()];
    let mut found = MemoryUse { peak_by_stage: zero.clone(), needed_by_stage: zero, ..MemoryUse::default() };
    let has_other_stack = (0..costs.kind_count()).any(|kind| other_stack(costs, kind).is_some());
    if has_other_stack {
        found.components_by_stage = vec![Footprint::default(); mesh.stage_count()];
    }
    let mut known: BTreeMap<(usize, usize, usize), RankMemory> = BTreeMap::new();
    let mut last: Option<((usize, usize, usize), RankMemory)> = None;
    let mut memory_of = |rank: Rank, kind: usize| {
        let key = (training.list_index(rank), evaluation.map_or(0, |program| program.list_index(rank)), kind);
        // Neighbouring ranks mostly run the same lists.
        if let Some((_, memory)) = last.filter(|(other, _)| *other == key) {
            return memory;
        }
        let memory = *known.entry(key).or_insert_with(|| {
            let evaluation = evaluation.map(|program| &program.lists[key.1]);
            let mut memory = rank_memory(training, &training.lists[key.0], evaluation, topology, costs, kind);
            if has_other_stack && memory.components.is_none() {
                memory.components = Some(Footprint::of(&training.lists[key.0]));
            }
            memory
        });
        last = Some((key, memory));
        memory
    };
    for (index, device) in topology.devices().take(ranks).enumerate() {
        let kind = topology.kind_index(device);
        let mut needed_on_device = Bytes::ZERO;
        let mut fullest: Option<(Bytes, Rank)> = None;
        let ranks_here = || (index..ranks).step_by(devices).map(Rank);
        for rank in ranks_here() {
            let RankMemory { peak, needed, components } = memory_of(rank, kind);
            let stage = mesh.stage_of(rank);
            if let Some(components) = components.filter(|_| peak > found.peak_by_stage[stage]) {
                found.components_by_stage[stage] = components;
            }
            found.peak_by_stage[stage] = found.peak_by_stage[stage].max(peak);
            found.needed_by_stage[stage] = found.needed_by_stage[stage].max(needed);
            needed_on_device += needed;
            if fullest.is_none_or(|(most, _)| needed > most) {
                fullest = Some((needed, rank));
            }
        }
        let device = topology.device_kind(device);
        if needed_on_device > device.memory && found.overfull_device.is_none() {
            found.overfull_device = Some(OverfullDevice {
                stage: mesh.stage_of(fullest.expect("invariant: the device has a rank").1),
                ranks: ranks_here().count(),
                needed: needed_on_device,
                kind: device.name.clone(),
                memory: device.memory,
            });
        }
    }
    let hosts = host_memory(training, topology);
    found.overfull_host = (!hosts.fits).then_some(hosts.fullest_node);
    found
}

/// Memory that one rank needs.
#[derive(Clone, Copy)]
struct RankMemory {
    /// Bytes that it holds on its device.
    peak: Bytes,
    /// `peak` plus the rank's host arena if the device is a CPU.
    needed: Bytes,
    /// The components of `peak`; `None` if it is the arena.
    components: Option<Footprint>,
}

/// Returns the memory of a rank that runs these lists of training and evaluation on a device of a
/// kind.
fn rank_memory(
    program: &Program,
    training: &StageProgram,
    evaluation: Option<&StageProgram>,
    topology: &Topology,
    costs: &CostModel,
    kind: usize,
) -> RankMemory {
    let components = other_stack(costs, kind).map(|gpu| gpu.memory(training, program.precision));
    let arena = evaluation.map_or(training.arena, |evaluation| training.arena.max(evaluation.arena));
    let host = evaluation.map_or(training.host_arena, |evaluation| training.host_arena.max(evaluation.host_arena));
    let peak = components.map_or(arena, |components| components.total());
    let is_processor = topology.device_kinds()[kind].architecture == Architecture::Cpu;
    RankMemory { peak, needed: if is_processor { peak + host } else { peak }, components }
}

/// Returns the costs of a kind of device under a software stack that does not use our arena; `None`
/// if the device holds our arena.
fn other_stack(costs: &CostModel, kind: usize) -> Option<&ProfiledGpu> {
    costs.profiled_gpu(kind).filter(|gpu| !gpu.holds_arena())
}

/// Memory that a Program needs on hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct HostMemory {
    /// Bytes that the ranks of the fullest node keep on its host together. Ranks on CPUs do not
    /// count, since their device's memory is the host's.
    fullest_node: Bytes,
    /// Whether every host whose memory is known has enough.
    fits: bool,
}

/// Returns the memory that a Program needs on hosts. Rank r runs on device r modulo the number of
/// devices.
fn host_memory(program: &Program, topology: &Topology) -> HostMemory {
    let mut found = HostMemory { fits: true, ..HostMemory::default() };
    if topology.device_count() == 0 || program.lists.iter().all(|list| list.host_arena == Bytes::ZERO) {
        return found;
    }
    let mut by_node: BTreeMap<usize, Bytes> = BTreeMap::new();
    for rank in 0..program.mesh.world_size() {
        let device = topology.device_of_rank(rank);
        if topology.device_kind(device).architecture != Architecture::Cpu {
            *by_node.entry(topology.node_of(device).0).or_default() += program.list_of(Rank(rank)).host_arena;
        }
    }
    for (node, held) in by_node {
        found.fullest_node = found.fullest_node.max(held);
        let group = &topology.node_groups()[topology.group_of(NodeId(node))];
        found.fits &= group.host_memory.is_none_or(|memory| held <= memory);
    }
    found
}
