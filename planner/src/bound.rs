//! Lower bounds on a step's time, cheap enough to compute for every layout, and never above what the simulator answers.

use foretell_program::{Operation, Program, Stream};
use foretell_simulator::{CostModel, Quantile};
use foretell_topologies::Topology;
use foretell_units::Seconds;
use std::collections::HashMap;

/// The longest time that any stage's kernels take one after the other: a rank has one compute stream, so no step is shorter, whatever
/// is overlapped. Of unequal devices the fastest kind counts.
pub fn compute_bound(program: &Program, topology: &Topology, costs: &CostModel) -> Seconds {
    let kinds = 0..topology.device_kinds().len();
    let mut known = HashMap::new();
    let mut longest = Seconds::ZERO;
    for stage in &program.stages {
        let mut total = Seconds::ZERO;
        for instruction in &stage.instructions {
            if let Operation::Compute { kernel, accumulate, .. } = &instruction.operation
                && stage.streams[instruction.stream.0 as usize] == Stream::Compute
            {
                total += *known.entry((*kernel, *accumulate)).or_insert_with(|| {
                    let time = |kind| costs.kernel_time(kernel, *accumulate, program.precision, kind).at(Quantile::Median);
                    kinds.clone().map(time).reduce(Seconds::min).unwrap_or(Seconds::ZERO)
                });
            }
        }
        longest = longest.max(total);
    }
    longest
}
