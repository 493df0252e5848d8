//! The interpreter of Programs that trains.
//!
//! The nouns: a [`TrainingJob`] says what is to be trained and how it is laid out; [`execute`] starts a process for each rank
//! ([`run_rank`]), collects what they report and returns an [`Outcome`] with the measured Timeline. [`calibrate`] starts the same
//! processes to time kernels and transport, and returns a Profile.
//!
//! The flow inside a rank: compile → one arena → the interpreter, which takes the next instruction, waits for what it depends on, calls
//! the [`backend`] or the [`transport`], and records the span. This crate knows no layout, no search and no cost model.
//!
//! ```
//! use foretell_executor::data::{DataSource, Dataset, SampleShape, Split};
//! let shape = SampleShape::Features { width: 64, classes: 10 };
//! let digits = Dataset::open(&DataSource::Digits, &shape, 0)?;
//! assert_eq!(digits.len(Split::Training) + digits.len(Split::Evaluation), 1797);
//! # Ok::<(), foretell_executor::data::DataError>(())
//! ```

mod arena;
pub mod backend;
mod backend_kind;
mod calibrate;
mod calibration;
mod clock;
pub mod data;
mod environment;
mod error;
mod execute;
mod files;
mod fp8;
mod half;
mod hyperparameters;
mod initialise;
mod interpreter;
mod job;
mod launcher;
mod loading;
pub mod machine;
mod member;
pub mod nvml;
mod rank;
mod rank_command;
mod recording;
mod rendezvous;
mod samples;
mod training;
pub mod transport;

pub use backend_kind::BackendKind;
pub use calibrate::{calibrate, message_sizes};
pub use error::ExecutorError;
pub use execute::{Evaluation, LossScaling, Outcome, RunEvent, StepMetrics, execute};
pub use files::write_whole;
pub use job::{CalibratedDevice, CalibratedGroup, CalibrationJob, Length, TimedStep, TrainingJob};
pub use launcher::{LaunchOptions, RankSlot, TransportKind};
pub use rank::run_rank;
pub use recording::read_timeline;
pub use rendezvous::{Starter, World};

use foretell_program::{CollectiveAlgorithm, Plan};
use foretell_units::DataType;

/// Refuses what can be simulated but not executed by this version on a backend.
///
/// # Errors
/// [`ExecutorError::Unsupported`], naming what can be used instead.
pub fn supported(plan: &Plan, backend: BackendKind) -> Result<(), ExecutorError> {
    if plan.layout.collective == CollectiveAlgorithm::Tree {
        return Err(ExecutorError::Unsupported {
            what: "`collective: tree`".into(),
            hint: "use `collective: ring`, or leave it out".into(),
        });
    }
    if !plan.stack.is_own() {
        return Err(ExecutorError::Unsupported {
            what: format!("a run of the stack `{}`", plan.stack.name()),
            hint: "leave out `stack`, or use `stack: foretell`; others can be simulated".into(),
        });
    }
    match (plan.precision, backend) {
        (DataType::Fp32 | DataType::Bf16 | DataType::Fp16 | DataType::Fp8, _) | (DataType::Tf32, BackendKind::Cuda { .. }) => {
            Ok(())
        }
        (DataType::Tf32, BackendKind::Cpu) => Err(ExecutorError::Unsupported {
            what: "precision tf32 on processors, which have no such arithmetic".into(),
            hint: "use `precision: fp32`, which takes as much memory and is more exact".into(),
        }),
        (precision, BackendKind::Cpu) => Err(ExecutorError::Unsupported {
            what: format!("precision {precision} on processors"),
            hint: "use `precision: fp32`, `bf16`, `fp16` or `fp8`".into(),
        }),
        (precision, BackendKind::Cuda { .. }) => Err(ExecutorError::Unsupported {
            what: format!("precision {precision} on GPUs"),
            hint: "use `precision: fp8`, `bf16`, `fp16`, `tf32` or `fp32`".into(),
        }),
    }
}
