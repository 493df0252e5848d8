//! Reuse distances: how many bytes a step touches between two uses of the same memory. They decide
//! whether the memory is still in a CPU's caches.
//!
//! A calibration that times a kernel on memory with the step's reuse distances finds the operands
//! in the same level of the memory hierarchy as the step does. This module knows no caches and no
//! durations. It treats the host's arena as the continuation of the device's, since on a CPU they
//! are one memory.

use crate::program::{Buffer, MemoryKind, StageProgram};
use foretell_units::Bytes;

/// The most parts that the arena is divided into.
const MOST_PARTS: u64 = 4096;

/// The smallest size of a part: a page.
const LEAST_PART: u64 = 4096;

/// The reuse distances of each instruction's reads, then writes: the bytes that the list touches
/// between the last use of the operand and this one, as a mean over the operand's parts. At the
/// start of a step, the last uses are those of the step before.
pub fn reuse_distances(stage: &StageProgram) -> Vec<Vec<Bytes>> {
    let all = stage.arena + stage.host_arena;
    let part = (all.count() / MOST_PARTS).max(LEAST_PART);
    let parts = (all.count() / part + 1) as usize;
    let place = |buffer: &Buffer| match buffer.memory {
        MemoryKind::Device => buffer.offset,
        MemoryKind::Host => stage.arena + buffer.offset,
    };
    let mut touched = vec![None::<u64>; parts];
    let mut now = 0u64;
    let mut distances = Vec::new();
    // The first round finds the last uses in the step before.
    for round in 0..2 {
        for instruction in &stage.instructions {
            let operands = || instruction.reads.iter().chain(&instruction.writes).map(|&id| stage.buffer(id));
            let range = |offset: Bytes, bytes: Bytes| {
                let last = (offset.count() + bytes.count().max(1) - 1) / part;
                (offset.count() / part) as usize..=(last as usize).min(parts - 1)
            };
            if round == 1 {
                let distance = |buffer: &Buffer| {
                    let all = range(place(buffer), buffer.bytes);
                    let count = all.clone().count().max(1) as u64;
                    let since = all.map(|buffer| touched[buffer].map_or(now, |last| now - last)).sum::<u64>();
                    Bytes::new(since / count)
                };
                distances.push(operands().map(distance).collect());
            }
            for buffer in operands() {
                now += buffer.bytes.count();
            }
            for buffer in operands() {
                for one in range(place(buffer), buffer.bytes) {
                    touched[one] = Some(now);
                }
            }
        }
    }
    distances
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Layout, Plan, compile};
    use foretell_models::{Mlp, Model};

    #[test]
    fn fresh_results_are_near_and_weights_are_a_step_away() {
        let model = Model::Mlp(Mlp { widths: vec![4096, 4096, 4096, 4096] });
        let plan = Plan::new(Layout { micro_batch: 64, ..Layout::default() }, 64);
        let compiled = compile(&model, "m", &plan).expect("a plan that fits");
        let stage = &compiled.training.lists[0];
        let distances = reuse_distances(stage);
        assert_eq!(distances.len(), stage.instructions.len());
        let products: Vec<usize> =
            (0..distances.len()).filter(|&at| stage.instructions[at].operation.kind() == "matmul").collect();
        let [activation, weight] = [distances[products[1]][0], distances[products[1]][1]];
        assert!(activation < Bytes::new(1 << 20), "the second product reads the result of the first: {activation}");
        assert!(weight > Bytes::new(64 << 20), "its weight was last touched by the update of the previous step: {weight}");
    }
}
