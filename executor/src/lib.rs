//! Executes Programs: trains a model for real, and calibrates the cost model.
//!
//! A [`TrainingJob`] names the model, the plan and the data. [`execute`] starts one process per
//! rank ([`run_rank`]), collects the reports of the ranks and returns an [`Outcome`].
//! [`read_timeline`] reads the measured spans of such a run. [`calibrate`] starts the same
//! processes to time kernels and communication, and returns a
//! [`Profile`](foretell_program::Profile).
//!
//! Inside a rank, the plan is compiled to a Program, the arenas that its memory plan asks for are
//! allocated, and the interpreter runs it: take the next instruction, wait for its dependencies,
//! call the [`backend`] or the [`transport`], record the span.
//!
//! The crate knows no layouts, no search and no cost model: all of that is in the Program.
//!
//! ```
//! use foretell_executor::data::{DataSource, Dataset, InputOptions};
//! use foretell_executor::{BackendKind, Length, OnDivergence, Start, TrainingJob, supported};
//! use foretell_models::{Mlp, Model};
//! use foretell_program::{Layout, Plan};
//!
//! let job = TrainingJob {
//!     model: Model::Mlp(Mlp { widths: vec![64, 32, 10] }),
//!     name: "digits".into(),
//!     plan: Plan::new(Layout { data: 2, ..Layout::default() }, 64),
//!     data: DataSource::Digits,
//!     input: InputOptions::default(),
//!     cores_per_rank: 1,
//!     seed: 0,
//!     length: Length::Epochs(1),
//!     evaluate: true,
//!     timeline: None,
//!     start: Start::Fresh,
//!     checkpoints: None,
//!     replay: None,
//!     on_divergence: OnDivergence::End,
//! };
//! supported(&job.plan, BackendKind::Cpu)?;
//! let dataset = Dataset::open(&job.data, &job.model.sample(), job.seed)?;
//! assert_eq!(dataset.steps_per_epoch(job.plan.global_batch)?, 22);
//! # Ok::<(), foretell_executor::ExecutorError>(())
//! ```
//!
//! With a binary that calls [`run_rank`] in its `rank` subcommand, `execute(&job, ..)` trains it.

// They panic if the stream is closed: see `log`.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod arena;
mod backend_kind;
mod batches;
mod calibrate;
mod calibration;
pub mod checkpoint;
mod checkpoint_error;
mod clock;
pub mod data;
mod departure;
mod disk;
mod environment;
mod error;
mod execute;
mod files;
mod generation;
mod hyperparameters;
mod initialise;
mod interpreter;
mod job;
mod launcher;
mod log;
pub mod machine;
mod member;
pub mod nvml;
mod rank;
mod rank_command;
mod recording;
mod reference;
pub mod regular;
mod rendezvous;
mod samples;
mod server;
mod serving;
mod signals;
mod state;
mod stopping;
mod training;
pub mod transport;
mod whole_file;

pub use foretell_kernels as backend;
pub(crate) use foretell_kernels::{fp8, half, loading};

pub use backend_kind::BackendKind;
pub use calibrate::{calibrate, message_sizes};
pub use calibration::{input_costs, storage_costs};
pub use error::{ExecutorError, stop_signal_name};
pub use execute::{
    Classification, Departure, Evaluation, LossScaling, MeasuredCheckpoint, ObservedPaces, Outcome, PerClass, RunEvent,
    StepMetrics, classification, execute,
};
pub use files::write_whole;
pub use generation::{Generator, NextToken, Sampling};
pub use job::{
    ArrivalOrder, CalibratedDevice, CalibratedGroup, CalibrationJob, Checkpoints, Length, OnDivergence, Start, TimedPlan,
    TrainingJob,
};
pub use launcher::{LaunchOptions, RankSlot};
pub use rank::run_rank;
pub use recording::{StepSpans, read_timeline, timeline_file};
pub use reference::{ObservedReference, References};
pub use rendezvous::{Starter, World};
pub use signals::StopSignals;
pub use transport::TransportKind;
pub use whole_file::remove_abandoned;

use foretell_models::Model;
use foretell_program::Plan;
use foretell_units::DataType;

/// Checks that this version can execute a plan on a backend. Every plan can be simulated.
///
/// # Errors
/// [`ExecutorError::Unsupported`], with a hint that names an alternative.
pub fn supported(plan: &Plan, backend: BackendKind) -> Result<(), ExecutorError> {
    if !plan.stack.has(plan.layout.collective) {
        return Err(ExecutorError::Unsupported {
            what: format!("`collective: {}`", plan.layout.collective.name()),
            hint: "use `collective: ring`, or leave it out".into(),
        });
    }
    if !plan.stack.is_own() {
        return Err(ExecutorError::Unsupported {
            what: format!("a plan for the software stack `{}`", plan.stack.name()),
            hint: "leave out `stack`, or use `stack: foretell`; other stacks can be simulated".into(),
        });
    }
    if plan.pacing().is_some() && backend != BackendKind::Cpu {
        return Err(ExecutorError::Unsupported {
            what: "a staleness above 0 or `backup_workers` on GPUs".into(),
            hint: "use `staleness: 0` without `backup_workers`; workers at their own pace run on CPUs, and can be simulated"
                .into(),
        });
    }
    match (plan.precision, backend) {
        (DataType::Fp32 | DataType::Bf16 | DataType::Fp16 | DataType::Fp8, _) | (DataType::Tf32, BackendKind::Cuda { .. }) => {
            Ok(())
        }
        (DataType::Tf32, BackendKind::Cpu) => Err(ExecutorError::Unsupported {
            what: "`precision: tf32` on CPUs, which have no such arithmetic,".into(),
            hint: "use `precision: fp32`, which takes the same memory and is more exact".into(),
        }),
        (precision, BackendKind::Cpu) => Err(ExecutorError::Unsupported {
            what: format!("`precision: {precision}` on CPUs"),
            hint: "use `precision: fp32`, `bf16`, `fp16` or `fp8`".into(),
        }),
        (precision, BackendKind::Cuda { .. }) => Err(ExecutorError::Unsupported {
            what: format!("`precision: {precision}` on GPUs"),
            hint: "use `precision: fp8`, `bf16`, `fp16`, `tf32` or `fp32`".into(),
        }),
    }
}

/// Refuses a model with parts that this version plans and simulates only.
///
/// # Errors
/// [`ExecutorError::Unsupported`], which names them.
pub fn executable(model: &Model) -> Result<(), ExecutorError> {
    let parts = model.planned_only();
    if parts.is_empty() {
        return Ok(());
    }
    Err(ExecutorError::Unsupported {
        what: format!("a model with {}", parts.join(", ")),
        hint: "leave these fields out of the model file; `plan` and `simulate` take them".into(),
    })
}
