//! The compiler from a model and a plan to a Program, and the types that both of its interpreters
//! share.
//!
//! A [`Plan`] states a [`Layout`]: the sizes of the [`Mesh`], a [`Schedule`], what is sharded,
//! recomputed and offloaded. [`compile()`] turns it into a [`Program`]: an instruction list for
//! each pipeline stage, or several if the ranks of a stage run different instructions. An
//! [`Instruction`] runs on a [`Stream`] and states its dependencies. Every [`Buffer`] has an offset
//! in the arena of its rank.
//!
//! The simulator and the executor interpret the same Program. Each returns a [`Timeline`]: the span
//! of every instruction, predicted or measured. A [`Profile`] has the measurements of a
//! calibration.
//!
//! All communication within a stage is a [`conversion`] from one [`Placement`] to another.
//! Interpreters know no layouts: if one needs a special case for a layout, this crate is at fault.
//! The crate knows neither durations nor the code of kernels.
//!
//! ```
//! use foretell_models::Model;
//! use foretell_program::{Layout, Plan, compile};
//!
//! // A perceptron on two data-parallel ranks: its gradients are summed by an all-reduce.
//! let model = Model::named("mlp")?;
//! let layout = Layout { data: 2, micro_batch: 16, ..Layout::default() };
//! let compiled = compile(&model, "mlp", &Plan::new(layout, 64))?;
//! let list = &compiled.training.lists[0];
//! let mut kinds = list.instructions.iter().map(|instruction| instruction.operation.kind());
//! assert!(kinds.any(|kind| kind == "all_reduce"));
//! # Ok::<(), foretell_program::PlanError>(())
//! ```

mod check;
mod choices;
mod collective;
mod compile;
mod cycle;
mod footprint;
mod fusion;
mod memory;
mod mesh;
mod pacing;
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
pub mod traced;

pub use check::Unsound;
pub use choices::{Choice, Choices};
pub use collective::{Collective, CollectiveAlgorithm, CollectiveRole};
pub use compile::{
    BUCKET_ALIGNMENT, Compiled, Compiler, Session, compile, compile_training, cuts_by_speed, usual_cuts, work_of_blocks,
};
pub use cycle::Cycle;
pub use footprint::Footprint;
pub use memory::in_place_input;
pub use mesh::{Axis, Coordinates, Group, Mesh, Rank, StageMesh};
pub use pacing::{Effect, Pacing, StalenessDistribution, Turn, Versions};
pub use placement::{Action, Conversion, Move, Placement, Placements, conversion, moves};
pub use plan::{
    AttentionKernel, AveragingGraph, ContextMethod, ContextOrder, DecayExemptions, Decentralised, Keep, Kept, Layout,
    LayoutDimension, LearningRateSchedule, LocalSgd, Lora, LossKernel, LossScale, MOST_RANKS, MOST_SAMPLES, Mode, MomentFormat,
    NamePatterns, Offload, OperandFormat, OperatorPatterns, Optimizer, OuterOptimizer, OuterRule, Overlap, ParameterServer,
    Period, Plan, PlanError, PlannedWorkload, PolicyMethod, Preference, Recompute, Reward, Rollout, RolloutOffload,
    RolloutPlacement, Routing, RunLength, ShardedPart, Stack, StageLayout, Staleness, Trained, Training, USUAL_CONCURRENCY,
    USUAL_MEMORY_SHARE, WarmUp,
};
pub use profile::{
    Exchange, ExchangeSample, FrameworkProfile, InputCosts, KernelSample, MachineIdentity, MovesSample, OperatorSample, Profile,
    Reach, RelativeSpeed, Sample, Slowdown, StorageCosts,
};
pub use program::{
    Buffer, BufferId, BufferRole, Few, GroupId, Instruction, InstructionId, MemoryKind, Metric, MetricKind, Operation, Peer,
    PeerId, Phase, Program, ScheduledPass, StageProgram, StateContents, StateValue, Stream, StreamId, TensorShard,
};
pub use reuse::reuse_distances;
pub use schedule::{PassTimes, Schedule, StagePass, Task, WovenOrders, pass_starts};
pub use timeline::{Origin, RankTimeline, Span, Timeline};
