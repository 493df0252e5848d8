//! Removing eight-bit copies that no instruction reads.
//!
//! A quantisation kernel writes a straight and a transposed copy of a matrix, and a pass may read
//! only one of them. If a block is recomputed, its forward pass needs no transposed activations. If
//! parameters are gathered for each pass (ZeRO 3), each pass quantises them again. Which copies are
//! read is known once the list is complete.

use crate::program::{Operation, StageProgram};
use foretell_models::Kernel;
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// Removes the writes of quantisation kernels that no instruction reads.
pub(super) fn remove_unread_copies(program: &mut StageProgram) {
    let quantises = |operation: &Operation| matches!(operation, Operation::Compute { kernel: Kernel::Quantise { .. }, .. });
    if !program.instructions.iter().any(|instruction| quantises(&instruction.operation)) {
        return;
    }
    let mut is_read = vec![false; program.buffers.len()];
    for buffer in program.instructions.iter().flat_map(|instruction| &instruction.reads) {
        is_read[buffer.0 as usize] = true;
    }
    // Instructions that share an operation share its replacement. The map also keeps the original
    // alive, so that no other operation gets its address.
    let mut replacements: FxHashMap<(*const Operation, bool, bool), [Arc<Operation>; 2]> = FxHashMap::default();
    for instruction in program.instructions.iter_mut().filter(|instruction| quantises(&instruction.operation)) {
        let (own, writes) = (&instruction.operation, &mut instruction.writes);
        let Operation::Compute { kernel, accumulate, group } = **own else { continue };
        let Kernel::Quantise { straight, transposed, .. } = kernel else { continue };
        // The first write is the scaling factor.
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
        let [_, reduced] = replacements.entry((Arc::as_ptr(own), reads_straight, reads_transposed)).or_insert_with(|| {
            let mut reduced = kernel;
            if let Kernel::Quantise { straight, transposed, .. } = &mut reduced {
                (*straight, *transposed) = (reads_straight, reads_transposed);
            }
            [Arc::clone(own), Arc::new(Operation::Compute { kernel: reduced, accumulate, group })]
        });
        instruction.operation = Arc::clone(reduced);
    }
}
