//! Tables, plots, traces and pages of Timelines.
//!
//! The nouns: a [`Comparison`] attributes the difference between a predicted and a measured
//! [`Timeline`](foretell_program::Timeline) of one [`Program`](foretell_program::Program) to kinds
//! of time and to instructions, each with its cause. A [`CheckDocument`] is a comparison as JSON. A
//! [`Plot`] is a drawing that becomes SVG or PNG. A [`Section`] is a part of the HTML page.
//!
//! The flow: Program and Timelines → [`compare`], [`write_trace`], [`Plot::timeline`],
//! [`Plot::memory`] → [`check_table`] for the terminal, [`page()`] for the browser. This crate
//! knows neither how a Timeline was made nor where a report is kept. It returns text and bytes, and
//! the caller writes files.
//!
//! ```
//! use foretell_program::{InstructionId, Origin, RankTimeline, Span, Timeline};
//! use foretell_reports::{CheckDocument, check_table, compare};
//! use foretell_units::{Bytes, Picoseconds, Seconds};
//! # use foretell_program::{Few, Instruction, Mesh, Operation, Phase, Program, StageProgram, Stream, StreamId};
//! # let relu = Instruction {
//! #     name: 0,
//! #     operation: Operation::Compute { kernel: foretell_models::Kernel::Relu { elements: 1 }, accumulate: false, group: None }.into(),
//! #     stream: StreamId(0), after: Few::new(), reads: Few::new(), writes: Few::new(), micro_batch: Some(0), phase: Phase::Forward,
//! # };
//! # let stage = StageProgram {
//! #     stage: 0, streams: vec![Stream::Compute], peers: vec![], groups: vec![], buffers: vec![], instructions: vec![relu],
//! #     names: vec!["activation".into()], passes: vec![], metrics: vec![], arena: Bytes::ZERO, host_arena: Bytes::ZERO,
//! # };
//! # let program = Program {
//! #     mesh: Mesh::new(|_| 1, &[]).expect("one rank"), precision: foretell_units::DataType::Fp32, format: foretell_units::DataType::Fp32, lists: vec![stage], list_of_rank: vec![0], samples: 1,
//! #     predictions: 1, tokens: None, model_flops: foretell_units::Flops::ZERO, hardware_flops: foretell_units::Flops::ZERO,
//! # };
//! // `program` has one rank and one instruction: a ReLU that took 1.25 ms instead of 1 ms.
//! let timeline = |origin, microseconds: u64| {
//!     let end = Picoseconds(microseconds * 1_000_000);
//!     let spans = vec![Span { instruction: InstructionId(0), start: Picoseconds::ZERO, end }];
//!     Timeline { origin, ranks: vec![std::sync::Arc::new(RankTimeline { spans, end })] }
//! };
//! let comparison = compare(&program, &timeline(Origin::Predicted, 1000), &timeline(Origin::Measured, 1250));
//! assert!((comparison.error + 0.2).abs() < 1e-9);
//! assert_eq!(comparison.by_kind[0].kind, "compute: relu");
//! assert_eq!(comparison.worst[0].cause.phrase(), "kernel slower than its calibration");
//!
//! let interval = (Seconds::new(0.9e-3), Seconds::new(1.1e-3));
//! let document = CheckDocument::new(comparison, interval.0, interval.1, Bytes::new(64), Some(Bytes::new(64)));
//! assert!(check_table(&document).contains("-20.0 %"));
//! ```

mod activity;
mod attribute;
mod check_document;
mod compare;
mod error;
mod page;
mod plots;
mod residency;
#[cfg(test)]
mod sample;
mod shown;
mod tables;
mod trace;

pub use check_document::{AtPace, CheckDocument, CheckpointCheck, InputCheck};
pub use compare::{Cause, Comparison, KindRow, WorstRow, compare};
pub use error::ReportError;
pub use page::{Chart, Fact, GapPoint, LayoutPoint, Section, page};
pub use plots::{CurvePoint, LossPoint, Plot, ScatterPoint};
pub use tables::{
    Alignment, Breakdown, Column, LayoutRow, PredictionSummary, check_table, layouts_table, prediction_table, table,
};
pub use trace::{differing_ranks, write_trace, write_trace_of};
