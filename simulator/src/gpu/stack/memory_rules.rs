//! Differences between a framework's memory and the Program's arena.

use foretell_units::Bytes;
use serde::Deserialize;

/// Differences between a framework's memory and the Program's arena.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryRules {
    /// Bytes per parameter.
    pub parameter: f64,
    /// Bytes of gradient per parameter.
    pub gradient: f64,
    /// Bytes of gradient per parameter of runs in IEEE half precision, if that differs.
    #[serde(default)]
    pub half_gradient: Option<f64>,
    /// Bytes of optimizer state per parameter, including the master copy.
    pub optimizer: f64,
    /// Ratio of the bytes of activations to the Program's.
    pub activations: f64,
    /// Bytes kept per attention score by attention that is not fused: softmax, dropout mask and
    /// result.
    #[serde(default)]
    pub score: f64,
    /// Bytes kept per logit in addition to the Program's: copies and gradients in single precision.
    #[serde(default)]
    pub logit: f64,
    /// Further bytes per logit if the loss is not compiled
    /// ([`Workload::has_eager_loss`](crate::gpu::Workload::has_eager_loss)).
    #[serde(default)]
    pub eager_loss: f64,
    /// Further bytes per logit if the loss is not compiled and the vocabulary is sharded.
    #[serde(default)]
    pub eager_loss_of_parts: f64,
    /// True if the gathered input of a sequence-parallel product is kept for the weight gradient,
    /// rather than gathered again.
    #[serde(default)]
    pub keeps_gathered: bool,
    /// Bytes that the framework allocates for any model: buckets of fixed size, workspaces.
    #[serde(default)]
    pub buffers: Bytes,
    /// Bytes outside the allocator: the CUDA context, NCCL's buffers, cuBLAS's workspaces.
    pub context: Bytes,
    /// Ratio of the bytes that the allocator reserves but does not use to the allocated bytes.
    pub fragmentation: f64,
    /// True if a run's printed peak, unless it says otherwise, includes memory that the allocator
    /// reserves but does not use.
    #[serde(default)]
    pub prints_reserved: bool,
    /// True if the memory is exactly the Program's arena, as in our own executor.
    #[serde(default)]
    pub is_arena: bool,
}
