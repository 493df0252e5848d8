//! Writes Programs and plans in the formats of other tools, and reads plans back.
//!
//! The nouns: [`Chakra`] makes an MLCommons Chakra execution trace of each rank of a
//! [`Program`](foretell_program::Program), and lists the members of each communicator. [`AstraSim`]
//! has the configuration files with which ASTRA-sim 2 runs such traces on a topology.
//!
//! [`export_job`] writes a plan as a job of another framework, and [`import_plan`] reads one.
//!
//! [`KinetoTrace`] reads a trace of PyTorch's profiler. Its steps are matched with a Program.
//!
//! The flow: a Program and a [`Timeline`](foretell_program::Timeline) → nodes, one or two per
//! instruction → bytes. The caller writes the files. This crate depends on neither simulator nor
//! executor: durations come from the timeline, predicted or measured.
//!
//! ```
//! use foretell_export::Chakra;
//! use foretell_models::Model;
//! use foretell_program::{
//!     InstructionId, Layout, Origin, Plan, Rank, RankTimeline, Span, Timeline, compile,
//! };
//! use foretell_units::Picoseconds;
//! let plan = Plan::new(Layout { data: 2, micro_batch: 16, ..Layout::default() }, 32);
//! let program = compile(&Model::named("mlp")?, "mlp", &plan)?.training;
//! // Any timeline of the Program will do. In this one everything takes no time.
//! let instructions = program.lists[0].instructions.len() as u32;
//! let span = |instruction| Span { instruction, start: Picoseconds::ZERO, end: Picoseconds::ZERO };
//! let spans: Vec<Span> = (0..instructions).map(InstructionId).map(span).collect();
//! let rank = || RankTimeline { spans: spans.clone(), end: Picoseconds::ZERO }.into();
//! let timeline = Timeline { origin: Origin::Predicted, ranks: vec![rank(), rank()] };
//!
//! let chakra = Chakra::new(&program, &timeline)?;
//! assert!(chakra.trace(Rank(0))?.len() > 1000);
//! assert_eq!(chakra.communicators(), r#"{"1":[0,1]}"#);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod astra_sim;
mod chakra;
mod error;
mod frameworks;
mod kineto;
mod wire;

pub use astra_sim::AstraSim;
pub use chakra::Chakra;
pub use error::ExportError;
pub use frameworks::{
    ChangedFile, Framework, FrameworkError, ImportedPlan, Job, JobFiles, PlanForm, Surroundings, change_file, check_stack,
    export_job, import_plan, words,
};
pub use kineto::{KinetoError, KinetoTrace, MatchedStep, TraceStep, TracedMachine, Unmatched, traced_profile, unmatched};
