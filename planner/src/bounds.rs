//! Lower bounds on the step time and memory of layouts, cheap enough for every layout of a space.
//!
//! No bound exceeds what the simulator and the compiler answer, for these reasons:
//!
//! - An instruction takes no less time in a run than alone. So a step takes at least as long as any
//!   chain of dependent instructions, and as all instructions of one stream together.
//! - A truncated model's chains extrapolate to a lower bound, because the longest chain is convex
//!   in the number of equal blocks (`truncated.rs`).
//! - Costs that may differ between the layout and the compiled model count as zero: bucket
//!   boundaries, messages to other meshes, sharding among data-parallel ranks.
//! - A stage holds its persistent memory all the time, and the schedule's order tells how many
//!   micro-batches it holds at once.
//!
//! The bounds, from the cheapest to the tightest:
//!
//! 1. `model_state.rs`: the model's persistent state against the memory of all devices.
//! 2. `arithmetic.rs`: matrix products at the devices' best rate, for a mesh and micro-batch.
//! 3. `kernel_work.rs`: all kernels at the devices' best rates, for a number of devices. It holds
//!    for every layout that a plan file can state.
//! 4. [`Bounds::family`]: pipelines of truncated models in closed form, for all variants of a
//!    family. For models that are no stack of equal blocks, one replica is compiled instead and
//!    shared by families (`whole_program.rs`), unless a cheaper bound suffices.
//! 5. [`Bounds::layout`]: the same with all data-parallel ranks, pass by pass, for one layout.
//!
//! The layers, each of which imports only those before it: `passes` (one instruction list),
//! `truncated` (any number of blocks), `pipeline` (all stages), one file for each kind of layout,
//! and last `fitting` and `variants`, which choose cuts and recomputation by these bounds. A bound
//! must not know the search: it asks neither which layouts are left nor for the best layout so far.

mod arithmetic;
mod bound;
mod context;
mod fitting;
mod fixed_sizes;
mod hosts;
mod kernel_work;
mod layouts;
mod memo;
mod model_state;
mod passes;
mod pipeline;
mod replicas;
mod stage_meshes;
mod truncated;
mod unequal_shares;
mod variants;
mod whole_program;

pub(crate) use bound::{Bound, Bounded, Excluded, ROUNDING};
pub(crate) use context::Bounds;
pub(crate) use fitting::MOST_REFITS;
