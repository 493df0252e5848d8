//! How long things take on graphics processors that nobody here has timed: by device kind, link kind and software stack, from the profile
//! files in `profiles/`, each value with its source beside it.
//!
//! The nouns: a [`GpuKind`] is a device with its multiprocessors and what it reaches of its data sheet; a [`LinkKind`] is what joins the
//! devices of a node; a [`StackKind`] is what a framework makes of both (fusions, overlap, host costs, number formats); a [`Cluster`]
//! joins devices, links and a network. [`GpuCosts`] answers for kernels (`product`, `kernels`) and [`Reachable`] groups of ranks for
//! collectives by NCCL's own rule (`nccl`); a [`StageMemory`] says what a device holds under the stack.
//! Nothing here knows a model, a layout or a run: two rows of a table differ by what the compiler made of them, and by nothing else.

mod format;
mod kernels;
mod memory;
mod nccl;
mod parameter;
mod product;
mod profile;
mod stack;

pub use format::ProductFormat;
pub use kernels::{GpuCosts, KernelTime, Trained, Workload};
pub use memory::StageMemory;
pub use nccl::{Algorithm, Protocol, Reachable};
pub use product::{Product, product_time};
pub use profile::{Cluster, GpuKind, LinkKind, Network, ProfileError, Profiles, Tiling};
pub use stack::{AttentionKind, Category, MemoryRules, StackKind};
