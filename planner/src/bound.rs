//! Lower bounds on a step's time, cheap enough to compute for every layout, and never above what the simulator answers.

use foretell_program::{Operation, Program, Stream};
use foretell_simulator::{CostModel, Quantile};
use foretell_topologies::Topology;
use foretell_units::{Picoseconds, Seconds};
use std::collections::HashMap;

/// The longest time that any stage's kernels take one after the other, with what a rank adds to each and to the step: a rank has one
/// compute stream, so no step is shorter, whatever is overlapped. Of unequal devices the fastest kind counts. No device is faster than its
/// costs say ([`CostModel::paces`] are at least 1), and durations are rounded as the simulator rounds them.
pub fn compute_bound(program: &Program, topology: &Topology, costs: &CostModel) -> Seconds {
    let fastest = |time: &dyn Fn(usize) -> Seconds| {
        let times = (0..topology.device_kinds().len()).map(|kind| Picoseconds::from(time(kind)));
        times.min().unwrap_or(Picoseconds::ZERO)
    };
    let mut known = HashMap::new();
    let mut longest = Picoseconds::ZERO;
    for stage in &program.lists {
        let mut total = Picoseconds::ZERO;
        for instruction in &stage.instructions {
            if let Operation::Compute { kernel, accumulate, .. } = &instruction.operation
                && stage.streams[instruction.stream.0 as usize] == Stream::Compute
            {
                total += *known.entry((*kernel, *accumulate)).or_insert_with(|| {
                    fastest(&|kind| {
                        let time = costs.kernel_time(kernel, *accumulate, program.precision, kind);
                        time.at(Quantile::Median) + costs.parameters(kind).instruction_overhead.at(Quantile::Median)
                    })
                });
            }
        }
        longest = longest.max(total);
    }
    (longest + fastest(&|kind| costs.parameters(kind).step_overhead.at(Quantile::Median))).into()
}
