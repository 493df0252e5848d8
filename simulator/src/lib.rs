//! Predicts how a Program runs, without running it.
//!
//! A [`CostModel`] has the duration of one kernel, collective or message without contention: from a
//! profile if one covers it, else from the data sheet. A [`Simulation`] is the predicted
//! [`Timeline`](foretell_program::Timeline) of one step. A [`Prediction`] summarises several
//! simulations in the form of `simulate --json`, with an interval. A [`CriticalPath`] says what
//! determines the step time, and a [`WhatIf`] predicts for other devices or links.
//!
//! The layers, each of which imports only those before it:
//!
//! | folder | contents |
//! | --- | --- |
//! | [`gpu`] | profiles of GPUs, their links and software stacks that were fitted on published runs |
//! | `cost` | durations of single kernels and messages without contention |
//! | `network` | the links that communication loads, and max-min fair sharing |
//! | `lowering` | a Program resolved on a topology: groups, messages, routes and durations |
//! | `equivalence` | which ranks are equivalent, so that one represents all |
//! | `engine` | the interpreter: an event queue, and the streams of every simulated rank |
//! | `answers` | predictions, what-if questions, the critical path, money and energy, failures |
//! | `lengths` | lengths of samples, and how samples share batches |
//! | `plan` | a plan: its costs, its step, and its step on changed hardware |
//! | `phases` | phases of a repeated step on groups of devices |
//! | `post_training` | RL post-training: generation, and the roles of a step |
//!
//! Simulated time is in whole picoseconds. The crate is pure and deterministic. It must not know
//! schedules, layouts, search or the code of kernels: a special case for one kind of layout belongs
//! in the compiler.
//!
//! ```
//! use foretell_models::Kernel;
//! use foretell_simulator::{CostModel, Source};
//! use foretell_topologies::Topology;
//! use foretell_units::{DataType, Seconds};
//! # use foretell_program::{Axis, Mesh, Program, StageProgram, Stream};
//! # use foretell_program::{Few, Instruction, Operation, Phase, StreamId};
//! # use foretell_units::{Bytes, Flops};
//! let topology = Topology::library("hgx-h200")?;
//! let costs = CostModel::new(None, &topology);
//! let kernel = Kernel::AdamW { elements: 1 << 28, controlled: false, exempt: false };
//! let estimate = costs.kernel_time(&kernel, false, DataType::Bf16, 0);
//! assert_eq!(estimate.source, Source::Roofline);
//!
//! # let instruction = Instruction {
//! #     name: 0,
//! #     operation: Operation::Compute { kernel, accumulate: false, group: None }.into(),
//! #     stream: StreamId(0),
//! #     after: Few::new(),
//! #     reads: Few::new(),
//! #     writes: Few::new(),
//! #     micro_batch: None,
//! #     phase: Phase::Update,
//! # };
//! # let stage = StageProgram {
//! #     stage: 0,
//! #     streams: vec![Stream::Compute],
//! #     groups: vec![],
//! #     peers: vec![],
//! #     buffers: vec![],
//! #     instructions: vec![instruction],
//! #     names: vec!["parameters".into()],
//! #     passes: vec![],
//! #     metrics: vec![],
//! #     arena: Bytes::new(7 << 30),
//! #     host_arena: Bytes::ZERO,
//! # };
//! # let mesh = Mesh::new(|axis| if axis == Axis::Data { 8 } else { 1 }, &[]).ok_or("no mesh")?;
//! # let program = Program {
//! #     list_of_rank: Program::one_list_per_stage(&mesh),
//! #     mesh,
//! #     precision: DataType::Bf16,
//! #     format: DataType::Bf16,
//! #     lists: vec![stage],
//! #     samples: 8,
//! #     predictions: 8,
//! #     tokens: None,
//! #     model_flops: Flops::ZERO,
//! #     hardware_flops: Flops::ZERO,
//! # };
//! // `program`: eight ranks, each with this one kernel to run.
//! let (prediction, simulation) = foretell_simulator::predict(&program, &topology, &costs, Default::default(), Default::default())?;
//! assert!(prediction.step_seconds >= estimate.median && !prediction.calibrated);
//! assert_eq!(simulation.timeline.ranks.len(), 8);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod answers;
mod cost;
mod engine;
mod equivalence;
mod error;
pub mod gpu;
mod interpolation;
mod lengths;
mod lowering;
mod network;
mod phases;
mod plan;
mod post_training;
mod si;

pub use answers::*;
pub use cost::{CostModel, Estimate, HostWaits, KernelCost, LinkEfficiency, Parameters, Quantile, Residual, Source, Uncertainty};
pub use engine::{Breakdown, Deadline, EventQueue, Recording, Stop};
pub use equivalence::Folding;
pub use error::SimulationError;
pub use gpu::MemoryRates;
pub use lengths::*;
pub use lowering::Oversubscription;
pub use network::{ActivityId, Collectives, FairShare, ResourceId};
pub use phases::{Phase, PhaseCourse, PhaseSpan, course};
pub use plan::*;
pub use post_training::*;
