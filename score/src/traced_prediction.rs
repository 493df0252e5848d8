//! What a traced framework's own operators predict of a row, beside its step.

use foretell_simulator::gpu::traced::TracedMemory;
use foretell_units::Bytes;

/// Memory of a row whose framework was traced.
#[derive(Clone, Debug, PartialEq)]
pub struct TracedPrediction {
    /// What the allocator hands out and holds.
    pub memory: TracedMemory,
    /// Bytes outside of the allocator: the device's context, and buffers of NCCL.
    pub outside: Bytes,
}
