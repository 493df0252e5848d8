//! How long ago the memory that an instruction touches was last touched: what decides whether it is still in a processor's caches.
//!
//! A calibration that times a kernel on memory which is as long untouched as in the step finds it as near to the processor as the step
//! does. Knows no caches and no durations. The host's memory lies behind the device's as if they were one, as a processor's are.

use crate::program::{Buffer, MemoryKind, StageProgram};
use foretell_units::Bytes;

/// The arena is looked at in so many parts at most.
const MOST_PARTS: u64 = 4096;

/// Parts are not smaller: a page.
const LEAST_PART: u64 = 4096;

/// Of each instruction's reads and then writes the bytes that the stage's instructions have touched since the last touch, in the order of the
/// list and round the end of the step; the mean over an operand's parts.
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
    // The first time round finds who touched what last in the step before.
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
                    let since = all.map(|one| touched[one].map_or(now, |last| now - last)).sum::<u64>();
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
    fn what_was_just_made_is_near_and_weights_are_a_step_away() {
        let model = Model::Mlp(Mlp { widths: vec![4096, 4096, 4096, 4096] });
        let plan = Plan::new(Layout { micro_batch: 64, ..Layout::default() }, 64);
        let compiled = compile(&model, "m", &plan).expect("a plan that fits");
        let stage = &compiled.training.lists[0];
        let distances = reuse_distances(stage);
        assert_eq!(distances.len(), stage.instructions.len());
        let products: Vec<usize> =
            (0..distances.len()).filter(|&at| stage.instructions[at].operation.kind() == "matmul").collect();
        let [activation, weight] = [distances[products[1]][0], distances[products[1]][1]];
        assert!(activation < Bytes::new(1 << 20), "the second product reads what the first just wrote: {activation}");
        assert!(weight > Bytes::new(64 << 20), "its weight was last touched by the update of the step before: {weight}");
    }
}
