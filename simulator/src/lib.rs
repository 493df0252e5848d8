//! The interpreter of Programs that predicts.
//!
//! The nouns: a [`CostModel`] says how long one kernel or message takes alone, from a profile or else from the data sheet, and
//! which of the two; a [`Simulation`] is the foretold [`Timeline`](foretell_program::Timeline) of one step with what it was spent
//! on; a [`Prediction`] sums up some of them in the contract's form, with the interval that their spread and the model's own
//! [`Uncertainty`] leave; a [`CriticalPath`] says
//! what the step time is made of; a [`WhatIf`] asks again for other devices and links.
//!
//! The flow: a Program is *lowered* on a topology (dependencies turned around, groups and messages paired, routes taken) and then
//! *interpreted*: an event queue, per rank its streams, and max-min fair sharing of links and processors wherever two things want
//! the same. Simulated time is whole picoseconds. It is pure and deterministic, and knows no schedules, layouts, search or
//! kernels' code: a special case here for one kind of layout would be a fault in the compiler.
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
//! let kernel = Kernel::AdamW { elements: 1 << 28, controlled: false };
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
//! #     list_of_rank: Program::one_list_a_stage(&mesh),
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
mod lowering;
mod network;
mod si;

pub use answers::*;
pub use cost::{CostModel, Estimate, HostWaits, KernelCost, LinkEfficiency, Parameters, Quantile, Residual, Source, Uncertainty};
pub use engine::{Breakdown, Deadline, EventQueue, Recording};
pub use equivalence::Folding;
pub use error::SimulationError;
pub use lowering::Oversubscription;
pub use network::{ActivityId, Collectives, FairShare, ResourceId};
