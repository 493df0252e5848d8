//! The compiler: from a model and a plan to Programs. Its passes, in order:
//!
//! 1. Build the graph of one micro-batch over all ranks of a stage, with gradients
//!    (`foretell-models`).
//! 2. Choose a strategy for every operator, and so the placement of every tensor
//!    ([`crate::strategy`]).
//! 3. Fuse operators ([`crate::fusion`]), give products eight-bit operands
//!    ([`crate::quantisation`]), and find the parts that run a few positions at a time
//!    ([`tiling`]). Passes 1 to 3 run once for each distinct mesh of a stage, as if every stage had
//!    it ([`lowering`]).
//! 4. Cut the model into chunks and assign them to stages ([`cuts`]).
//! 5. Find which ranks send what to which where stages have different meshes, and so which ranks
//!    share an instruction list ([`reshard`]).
//! 6. Put the parameters of each stage into buckets, with gradients and optimizer state
//!    ([`state`]).
//! 7. Emit each list in the order of its stage's schedule: operators, conversions between
//!    placements, messages between stages, the update ([`emit`], [`messages`]).
//! 8. Remove eight-bit copies that no instruction reads ([`unread`]).
//! 9. Weave pairs of passes, if the plan says so ([`weave`]).
//! 10. Find the dependencies between streams ([`dependencies`]), give every buffer an offset in the
//!     arena ([`crate::memory`]), and drop dependencies that others imply.
//! 11. Derive the Program of a checkpoint from the state in the training step's buffers
//!     ([`saving`]).
//!
//! Layouts end here: a Program has only instructions. The compiler must not know times: devices,
//! links and costs belong to the simulator.

mod cache;
mod compiler;
mod cuts;
mod dependencies;
mod emit;
mod limits;
mod lowering;
mod messages;
mod programs;
mod recipe;
mod reshard;
mod saving;
mod state;
mod tiling;
mod unread;
mod wanted;
mod weave;

pub use compiler::Compiler;
pub use cuts::{cuts_by_speed, usual_cuts, work_of_blocks};
pub(crate) use lowering::training_graph;
pub use programs::{Compiled, Session};
pub use state::BUCKET_ALIGNMENT;

use crate::plan::{Plan, PlanError};
use crate::program::Program;
use foretell_models::Model;

/// Compiles a training step and an evaluation of `model` as `plan` lays them out. Error messages
/// call the model `name`.
///
/// # Errors
/// [`PlanError`] if the plan does not fit the model: sizes that do not divide, sizes beyond any
/// machine, more stages than blocks, or a layout that this version cannot compile.
pub fn compile(model: &Model, name: &str, plan: &Plan) -> Result<Compiled, PlanError> {
    Compiler::new(model, name).compile(plan)
}

/// Compiles the training step alone, for callers that only simulate it.
///
/// # Errors
/// As [`compile`].
pub fn compile_training(model: &Model, name: &str, plan: &Plan) -> Result<Program, PlanError> {
    Compiler::new(model, name).training(plan)
}
