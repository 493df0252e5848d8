//! The search space: the request, the layouts that it allows, and the facts that limit them.
//!
//! A [`Request`] states the model, the devices and the [`Fixed`] layout fields. A [`Space`] follows
//! from it. The space lists its layouts in two steps: families ([`Space::families`]), which differ
//! in mesh, micro-batch, schedule and recomputation, and the variants of a family
//! ([`Space::variants`]), which differ in ZeRO, rank order, cuts and buckets. Nothing here knows
//! how long a layout takes.

mod devices;
mod divisors;
mod families;
mod fixed;
mod from_request;
mod meshes;
mod moves;
mod pattern;
mod request;
mod schedules;
mod shares;
mod sizes;
mod stage_meshes;
mod statement;
mod usual;
mod variants;

pub(crate) use devices::DeviceKinds;
pub use fixed::{Fixed, FixedError};
use foretell_simulator::gpu::StackLimits;
pub(crate) use from_request::optimizer_tensors;
pub(crate) use pattern::{BlockPattern, FEWEST_REPEATS};
pub use request::{Objective, Progress, Request};
pub(crate) use sizes::{inner_ranks, most_shards, most_shards_of_stage, optimizer_shards, ranks_of_stage, world_size};
pub use statement::Dimension;

use foretell_program::{Layout, Offload};
use foretell_units::Bytes;
use stage_meshes::DeviceRun;

/// All layouts that a search considers, described by the open choices and the facts that limit
/// them.
#[derive(Clone, Debug)]
pub(crate) struct Space<'a> {
    /// Values of the layout fields that the search does not vary.
    pub(crate) base: &'a Layout,
    /// Layout fields that the user has fixed.
    pub(crate) fixed: &'a Fixed,
    /// The limits of the plan's software stack; `None` if it has no known limits.
    pub(crate) limits: Option<&'static StackLimits>,
    /// Samples of a step.
    pub(crate) global_batch: usize,
    /// Facts about the model.
    pub(crate) model: ModelFacts,
    /// Facts about the devices that may be used.
    pub(crate) devices: DeviceFacts,
    /// Bucket sizes to consider, ascending; at least one.
    pub(crate) bucket_sizes: Vec<Bytes>,
    /// Offloads to consider for layouts that do not fit otherwise. Empty if the user fixed the
    /// offload or the hosts' memory is not known.
    pub(crate) offloads: &'static [Offload],
}

/// Facts about a model that limit its search space.
#[derive(Clone, Debug, Default)]
pub(crate) struct ModelFacts {
    /// Number of blocks, the first and the last included.
    pub(crate) blocks: usize,
    /// FLOPs of each block.
    pub(crate) work: Vec<f64>,
    /// Positions of a sample, if the model has attention, so that several ranks can divide them.
    pub(crate) sequence: Option<usize>,
    /// Number of experts, if the model has any.
    pub(crate) experts: Option<usize>,
    /// Fewest heads of an attention operator, if the model has attention.
    pub(crate) heads: Option<usize>,
    /// Whether selective recomputation (attention only) makes a difference.
    pub(crate) has_attention: bool,
    /// Whether some blocks may be recomputed.
    pub(crate) is_recomputable: bool,
    /// The pattern of its blocks, if some repeat. With a pattern, truncated models bound the
    /// model's layouts.
    pub(crate) pattern: Option<BlockPattern>,
    /// Whether two blocks read the same parameter, as with tied embeddings.
    pub(crate) shares_parameters: bool,
    /// Bytes of all gradients in buckets on a rank that has the whole model.
    pub(crate) bucketed_gradients: Bytes,
}

impl ModelFacts {
    /// Returns `true` for a stack of equal blocks between two others. In such a stack, part of the
    /// blocks may be recomputed, and it does not matter which.
    pub(crate) fn is_plain_stack(&self) -> bool {
        self.pattern.as_ref().is_some_and(BlockPattern::is_plain)
    }
}

/// Facts about devices that limit the search space.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeviceFacts {
    /// Number of devices.
    pub(crate) count: usize,
    /// Devices of a node; of the smallest node if they differ.
    pub(crate) per_node: usize,
    /// Numbers of devices of the first node, of the first group of nodes, of the first two groups,
    /// and so on; only numbers below that of all devices.
    pub(crate) of_first_nodes: Vec<usize>,
    /// Matrix-product rate of each device, in operations per second. Empty if all are of one kind.
    pub(crate) speeds: Vec<f64>,
    /// Index of each device's kind in [`DeviceKinds::kinds`]. Empty if all are of one kind.
    pub(crate) kinds: Vec<usize>,
    /// Runs of devices of one kind, if stages may have their own meshes on them; else empty.
    pub(crate) runs: Vec<DeviceRun>,
    /// Whether kinds have different memory limits.
    pub(crate) memory_differs: bool,
}

/// Layouts with one mesh, micro-batch, schedule and recomputation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Family {
    /// Their common fields; without ZeRO, in the usual rank order.
    pub(crate) layout: Layout,
    /// Micro-batches of a step.
    pub(crate) micro_batches: usize,
}
