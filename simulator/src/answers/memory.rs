//! Memory that a run needs on devices and hosts, and whether it fits: [`memory_use`] decides.
//!
//! Under our own executor a device holds the arena of the Program. Under another software stack it
//! holds what the stack's profile makes of the same buffers ([`crate::gpu::StageMemory`]).

use crate::cost::CostModel;
use foretell_program::{Footprint, Program, Rank, StageProgram};
use foretell_topologies::{Architecture, NodeId, Topology};
use foretell_units::{Bytes, DataType};
use std::collections::{BTreeMap, BTreeSet};

/// Memory that a run needs, and where there is too little of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemoryUse {
    /// For each stage, the bytes that its fullest rank holds on a device.
    pub peak_by_stage: Vec<Bytes>,
    /// The same plus what a rank on a processor offloads to its host, whose memory is the device's.
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

/// Memory that a run needs whose ranks go round the topology's devices as in a simulation. The
/// evaluation, if there is one, shares the arena with training.
pub fn memory_use(training: &Program, evaluation: Option<&Program>, topology: &Topology, costs: &CostModel) -> MemoryUse {
    let mesh = &training.mesh;
    let (ranks, devices) = (mesh.world_size(), topology.device_count());
    let zero = vec![Bytes::ZERO; mesh.stage_count()];
    let mut found = MemoryUse { peak_by_stage: zero.clone(), needed_by_stage: zero, ..MemoryUse::default() };
    let mut known: BTreeMap<(usize, usize, usize), [Bytes; 2]> = BTreeMap::new();
    let mut last: Option<((usize, usize, usize), [Bytes; 2])> = None;
    let mut memory_of = |rank: Rank, kind: usize| {
        let lists = [Some(training), evaluation].map(|program| program.map(|program| program.list_index(rank)));
        let key = (lists[0].unwrap_or_default(), lists[1].unwrap_or_default(), kind);
        // Neighbouring ranks mostly run the same lists.
        if let Some((_, memory)) = last.filter(|(other, _)| *other == key) {
            return memory;
        }
        let memory = *known.entry(key).or_insert_with(|| {
            let list = &training.lists[key.0];
            let evaluation = evaluation.map(|program| &program.lists[key.1]);
            let peak = match costs.profiled_gpu(kind).filter(|gpu| !gpu.holds_arena()) {
                Some(gpu) => gpu.memory(list, training.precision).total(),
                None => evaluation.map_or(list.arena, |other| list.arena.max(other.arena)),
            };
            let host = evaluation.map_or(list.host_arena, |other| list.host_arena.max(other.host_arena));
            let is_processor = topology.device_kinds()[kind].architecture == Architecture::Cpu;
            [peak, if is_processor { peak + host } else { peak }]
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
            let [peak, needed] = memory_of(rank, kind);
            let stage = mesh.stage_of(rank);
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
                stage: fullest.map_or(0, |(_, rank)| mesh.stage_of(rank)),
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

/// Memory that a device of a kind holds for a list, by component. `kind` is an index into the
/// topology's kinds of device. Takes as long as going through the list's buffers and instructions.
pub fn device_memory(list: &StageProgram, precision: DataType, costs: &CostModel, kind: usize) -> Footprint {
    costs.profiled_gpu(kind).map_or_else(|| Footprint::of(list), |gpu| gpu.memory(list, precision))
}

/// For each stage, what its fullest rank holds on a device, by component.
pub fn device_memory_by_stage(program: &Program, topology: &Topology, costs: &CostModel) -> Vec<Footprint> {
    if (0..costs.kind_count()).all(|kind| costs.profiled_gpu(kind).is_none_or(|gpu| gpu.holds_arena())) {
        return Footprint::of_stages(program);
    }
    let kind_of = |rank: usize| topology.kind_index(topology.device_of_rank(rank));
    let different: BTreeSet<(usize, usize)> =
        (0..program.mesh.world_size()).map(|rank| (program.list_index(Rank(rank)), kind_of(rank))).collect();
    let mut fullest = vec![Footprint::default(); program.mesh.stage_count()];
    for (list, kind) in different {
        let list = &program.lists[list];
        let held = device_memory(list, program.precision, costs, kind);
        if held.total() > fullest[list.stage].total() {
            fullest[list.stage] = held;
        }
    }
    fullest
}

/// Memory that a Program needs on hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// Bytes that the ranks of the fullest node keep there together. Ranks on processors do not
    /// count, since their device's memory is the host's.
    pub fullest_node: Bytes,
    /// Whether every host whose memory is known has enough.
    pub fits: bool,
}

/// Memory that a Program needs on hosts, whose ranks go round the topology's devices.
pub fn host_memory(program: &Program, topology: &Topology) -> HostMemory {
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
