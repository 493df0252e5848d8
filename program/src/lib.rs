//! The compiler from a model and a plan to a Program, and the types that both of its interpreters share.
//!
//! The nouns: a [`Plan`] states a [`Layout`]: the sizes of the [`Mesh`], a [`Schedule`], what is recomputed. [`compile`] makes a
//! [`Program`] of it: for each pipeline stage, or the ranks of one that do alike, a list of [`Instruction`]s on [`Stream`]s, with explicit dependencies, and a memory plan
//! that gives every [`Buffer`] its place in one arena. A [`Timeline`] says when each instruction ran, foretold or measured; a [`Profile`]
//! holds what a calibration measured.
//!
//! All communication is the conversion of one [`Placement`] into another ([`conversion`]). What interprets a Program needs to know no layout:
//! a special case for one outside this crate is a fault in this crate.
//!
//! ```
//! use foretell_models::Model;
//! use foretell_program::{Layout, Plan, compile};
//! let model = Model::named("mlp")?;
//! let layout = Layout { data: 2, micro_batch: 16, ..Layout::default() };
//! let compiled = compile(&model, "mlp", &Plan::new(layout, 64))?;
//! let stage = &compiled.training.lists[0];
//! assert!(stage.instructions.iter().any(|instruction| instruction.operation.kind() == "all_reduce"));
//! # Ok::<(), foretell_program::PlanError>(())
//! ```

mod choices;
mod collective;
mod compile;
mod footprint;
mod fusion;
mod memory;
mod mesh;
mod placement;
mod plan;
mod print;
mod profile;
mod program;
mod quantisation;
mod reuse;
mod schedule;
mod strategy;
mod timeline;

pub use choices::{Choice, Choices};
pub use collective::{Collective, CollectiveAlgorithm, CollectiveRole};
pub use compile::{BUCKET_ALIGNMENT, Compiled, Compiler, compile, compile_training, cuts_by_speed, usual_cuts, work_of_blocks};
pub use footprint::Footprint;
pub use memory::in_place_input;
pub use mesh::{Axis, Coordinates, Group, Mesh, Rank, StageMesh};
pub use placement::{Action, Conversion, Move, Placement, Placements, conversion, moves};
pub use plan::{
    ContextMethod, Keep, Kept, Layout, LossScale, MOST_RANKS, MOST_SAMPLES, Mode, Offload, OperatorShares, Optimizer, Overlap,
    Plan, PlanError, Recompute, Share, Stack, StageLayout, Training,
};
pub use profile::{Exchange, ExchangeSample, KernelSample, MachineIdentity, Profile, Reach, RelativeSpeed, Sample, Slowdown};
pub use program::{
    Buffer, BufferId, BufferRole, Few, GroupId, Initial, InitialShare, Instruction, InstructionId, MemoryKind, Metric,
    MetricKind, Operation, Pass, Peer, PeerId, Phase, Program, StageProgram, Stream, StreamId,
};
pub use reuse::reuse_distances;
pub use schedule::{PassTimes, Schedule, StagePass, Task, pass_starts};
pub use timeline::{Origin, RankTimeline, Span, Timeline};
