//! What a device holds of a Program: our arena, or what the software stack makes of the same buffers where that is another's.

use crate::cost::CostModel;
use foretell_program::{Footprint, Program, Rank, StageProgram};
use foretell_topologies::{DeviceId, Topology};
use foretell_units::DataType;
use std::collections::BTreeSet;

/// What a device of a kind (an index into the topology's kinds, as the costs have them) holds of a list of a Program in a number format, by component:
/// its total is what has to fit. It takes as long as going through the list's buffers and instructions once.
pub fn device_memory(list: &StageProgram, precision: DataType, costs: &CostModel, kind: usize) -> Footprint {
    costs.graphics(kind).map_or_else(|| Footprint::of(list), |graphics| graphics.memory(list, precision))
}

/// The same of the fullest rank of each stage, where ranks go round the topology's devices as in a simulation.
pub fn device_memory_by_stage(program: &Program, topology: &Topology, costs: &CostModel) -> Vec<Footprint> {
    let kind_of = |rank: usize| topology.kind_index(DeviceId(rank % topology.device_count().max(1)));
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
