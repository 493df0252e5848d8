//! States of the optimizer in the host's memory, where DeepSpeed's `DeepSpeedCPUAdam` updates them
//! (`offload_optimizer: {device: cpu}`).
//!
//! Gradients are copied out as they are reduced, and updated parameters back. Source: the branches
//! of `offload_optimizer` in `zero/stage3.py` and of `cpu_offload` in `zero/stage_1_and_2.py`.

use super::{AllocationStream, Contents, Emitter, HostOptimizer, RankEvent};

/// Bytes of the host for an element that the rank updates, in single precision: its copy of the
/// parameter, two moments, and the gradient.
pub(super) const STATE_BYTES: u64 = 16;

/// Stage 3 adds the partition of a bucket's reduced gradients to those on the host
/// (`partition_grads`), and after the last micro-batch writes the sum there in single precision.
pub(super) fn partition_gradients<'a, V: FnMut(RankEvent<'a>)>(
    emitter: &mut Emitter<'a, V>,
    elements: u64,
    width: u64,
    is_first: bool,
) {
    let stream = AllocationStream::Reduce;
    // Out and back for the first micro-batch; back, added, and out for the others.
    emitter.send(RankEvent::HostCopy { bytes: 2 * elements * width, stream });
    if !is_first {
        let bytes = 3 * elements * width;
        emitter.send(RankEvent::Moves { name: "accumulation of the rank's gradients", bytes, launches: 1 });
    }
    if emitter.is_last_pass {
        emitter.send(RankEvent::HostCopy { bytes: 4 * elements, stream });
    }
}

/// Stage 1 or 2 copies a parameter's whole gradient out, of which `owned` elements are the rank's
/// (`copy_grads_in_partition`): what came before is added to it if the step has several
/// micro-batches.
pub(super) fn copy_gradient<'a, V: FnMut(RankEvent<'a>)>(
    emitter: &mut Emitter<'a, V>,
    [elements, owned]: [u64; 2],
    width: u64,
    is_first: bool,
) {
    let stream = AllocationStream::Compute;
    if !is_first {
        emitter.send(RankEvent::HostCopy { bytes: elements * width, stream });
        let bytes = 3 * elements * width;
        emitter.send(RankEvent::Moves { name: "accumulation of a gradient", bytes, launches: 1 });
    }
    if !is_first || !emitter.is_last_pass {
        emitter.send(RankEvent::HostCopy { bytes: elements * width, stream });
    }
    if emitter.is_last_pass {
        emitter.passing(4 * owned, Contents::Gradients, stream);
        emitter.send(RankEvent::HostCopy { bytes: 4 * owned, stream });
    }
}

/// The host updates a partition, and copies the model's parameters back if the device has them.
pub(super) fn update<'a, V: FnMut(RankEvent<'a>)>(emitter: &mut Emitter<'a, V>, elements: u64, width: u64) {
    emitter.send(RankEvent::HostUpdate { elements, by: HostOptimizer::OneLoop });
    if emitter.job.offloads_parameters {
        return;
    }
    emitter.send(RankEvent::HostCopy { bytes: elements * width, stream: AllocationStream::Compute });
}
