//! What a device holds of a Program: our arena, or what the software stack makes of the same buffers where that is another's; and what the hosts
//! of devices do.

use crate::cost::CostModel;
use foretell_program::{Footprint, Program, Rank, StageProgram};
use foretell_topologies::{Architecture, NodeId, Topology};
use foretell_units::{Bytes, DataType};
use std::collections::{BTreeMap, BTreeSet};

/// What a device of a kind (an index into the topology's kinds, as the costs have them) holds of a list of a Program in a number format, by component:
/// its total is what has to fit. It takes as long as going through the list's buffers and instructions once.
pub fn device_memory(list: &StageProgram, precision: DataType, costs: &CostModel, kind: usize) -> Footprint {
    costs.profiled_gpu(kind).map_or_else(|| Footprint::of(list), |profiled_gpu| profiled_gpu.memory(list, precision))
}

/// The same of the fullest rank of each stage, where ranks go round the topology's devices as in a simulation.
pub fn device_memory_by_stage(program: &Program, topology: &Topology, costs: &CostModel) -> Vec<Footprint> {
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

/// What of a Program lies in the memory of hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// What the ranks of the fullest node have there together; of processors, whose memory it is, nothing counts.
    pub fullest_node: Bytes,
    /// Whether every node that says how much it has has enough.
    pub fits: bool,
}

/// That of a Program whose ranks go round the topology's devices as in a simulation.
pub fn host_memory(program: &Program, topology: &Topology) -> HostMemory {
    let mut found = HostMemory { fits: true, ..HostMemory::default() };
    if topology.device_count() == 0 || program.lists.iter().all(|list| list.host_arena == Bytes::ZERO) {
        return found;
    }
    let mut of_node: BTreeMap<usize, Bytes> = BTreeMap::new();
    for rank in 0..program.mesh.world_size() {
        let device = topology.device_of_rank(rank);
        if topology.device_kind(device).architecture != Architecture::Cpu {
            *of_node.entry(topology.node_of(device).0).or_default() += program.list_of(Rank(rank)).host_arena;
        }
    }
    for (node, held) in of_node {
        found.fullest_node = found.fullest_node.max(held);
        let group = &topology.node_groups()[topology.group_of(NodeId(node))];
        found.fits &= group.host_memory.is_none_or(|memory| held <= memory);
    }
    found
}

/// What a rank needs of its device's memory: all of it, where the host's memory is the same.
pub(crate) fn device_needs(list: &StageProgram, architecture: Architecture) -> Bytes {
    if architecture == Architecture::Cpu { list.arena + list.host_arena } else { list.arena }
}
