//! Copies in eight bits that nobody reads are not made. One kernel makes a matrix's copy as it lies and its transposed one, of which a pass may read
//! one alone: where a block is computed again, its forward pass needs no transposed activations, and where weights come and go (ZeRO 3), each pass
//! makes copies of its own. Which are read is known when the list is there.

use crate::program::{Operation, StageProgram};
use foretell_models::Kernel;
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// Has no kernel of a list make a copy that no instruction reads.
pub(super) fn remove_unread_copies(program: &mut StageProgram) {
    let quantises = |operation: &Operation| matches!(operation, Operation::Compute { kernel: Kernel::Quantise { .. }, .. });
    if !program.instructions.iter().any(|instruction| quantises(&instruction.operation)) {
        return;
    }
    let mut is_read = vec![false; program.buffers.len()];
    for buffer in program.instructions.iter().flat_map(|instruction| &instruction.reads) {
        is_read[buffer.0 as usize] = true;
    }
    // Instructions that share an operation share the one that takes its place. The former is kept, so that no other has its address.
    let mut known: FxHashMap<(*const Operation, bool, bool), [Arc<Operation>; 2]> = FxHashMap::default();
    for instruction in program.instructions.iter_mut().filter(|instruction| quantises(&instruction.operation)) {
        let (own, writes) = (&instruction.operation, &mut instruction.writes);
        let Operation::Compute { kernel, accumulate, group } = **own else { continue };
        let Kernel::Quantise { straight, transposed, .. } = kernel else { continue };
        // The factor, and then the copies that there are.
        let mut copies = writes.iter().skip(1).map(|buffer| is_read[buffer.0 as usize]);
        let reads_straight = straight && copies.next() == Some(true);
        let reads_transposed = transposed && copies.next() == Some(true);
        if (reads_straight, reads_transposed) == (straight, transposed) {
            continue;
        }
        let mut place = 0;
        writes.retain(|buffer| {
            place += 1;
            place == 1 || is_read[buffer.0 as usize]
        });
        let [_, less] = known.entry((Arc::as_ptr(own), reads_straight, reads_transposed)).or_insert_with(|| {
            let mut less = kernel;
            if let Kernel::Quantise { straight, transposed, .. } = &mut less {
                (*straight, *transposed) = (reads_straight, reads_transposed);
            }
            [Arc::clone(own), Arc::new(Operation::Compute { kernel: less, accumulate, group })]
        });
        instruction.operation = Arc::clone(less);
    }
}
