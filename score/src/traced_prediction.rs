//! What the operators of a traced framework predict for a row, in addition to its step.

use foretell_simulator::gpu::traced::TracedMemory;
use foretell_units::Bytes;

/// Memory of a row whose framework was traced.
#[derive(Clone, Debug, PartialEq)]
pub struct TracedPrediction {
    /// Memory that the allocator hands out and holds.
    pub memory: TracedMemory,
    /// Bytes outside the allocator: the device's context, and NCCL's buffers.
    pub outside: Bytes,
}
