//! Lower bounds on the step time and memory of layouts, cheap enough for every layout of a space.
//!
//! No bound exceeds what the simulator and the compiler answer. From the cheapest to the tightest:
//!
//! 1. `model_state.rs`: does the model's persistent state fit into all devices together?
//! 2. `arithmetic.rs`: matrix products at the devices' best rate, for a mesh and micro-batch.
//! 3. [`Bounds::family`]: pipelines of truncated models in closed form, for all variants of a family.
//! 4. [`Bounds::layout`]: the same with all data-parallel ranks, pass by pass, for one layout.
//!
//! Layers, each of which imports only those before it: `passes` (one instruction list), `truncated`
//! (any number of blocks), `pipeline` (all stages), then one file for each kind of layout, and
//! `fitting` with `variants`, which choose cuts and recomputation by these bounds.

mod arithmetic;
mod bound;
mod context;
mod fitting;
mod hosts;
mod layouts;
mod memo;
mod model_state;
mod passes;
mod pipeline;
mod stage_meshes;
mod truncated;
mod unequal_shares;
mod variants;
mod whole_program;

pub(crate) use bound::{Bound, Bounded, Excluded, ROUNDING};
pub(crate) use context::Bounds;
pub(crate) use fitting::MOST_REFITS;
