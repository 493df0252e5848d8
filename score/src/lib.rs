//! Compares predictions with training runs that others have measured and published.
//!
//! The nouns: a [`Row`] is one measured run in the columns of `tests/published/INDEX.md`. A [`Run`]
//! is the row as a simulation input: a model, a plan, a cluster and a software stack. A
//! [`ScoredRow`] has the prediction beside the measurement. A [`Summary`] has the error statistics
//! of many rows.
//!
//! The flow: [`read_rows`] → [`Run::of`] → [`CompiledRun::new`] → [`CompiledRun::predict`], which
//! simulates one representative rank per stage. [`score`] does this for a whole table. A row that
//! cannot be predicted is refused with a reason.
//!
//! Durations come from the simulator's profiles of devices, links and stacks. [`fit`] fits them on
//! the rows that [`Split`] allows for it, and [`score_left_out`] refits without whole sources,
//! devices, stacks or models and scores those. The crate reads no files and gives the same result
//! on any number of threads.
//!
//! It must not know the executor or the planner.
//!
//! ```
//! use foretell_score::{Split, read_rows, score};
//! use foretell_simulator::gpu::Profiles;
//! let text = "\
//!     row_id,model,layers,hidden,heads,vocab,seq,gpu,n_gpus,dp,mbs,gbs,precision,framework\n\
//!     a-1,GPT,24,1024,16,50257,1024,A100-SXM4-80GB,8,8,4,32,fp16,Megatron-DeepSpeed\n\
//!     a-2,GPT,24,1024,16,50257,1024,abacus,8,8,4,32,fp16,Megatron-DeepSpeed\n";
//! let rows = read_rows(text)?;
//! let scores = score(&rows, &Split::library()?, Profiles::library()?);
//! assert!(scores.rows[0].predicted_step_seconds.is_some());
//! assert!(scores.rows[1].refused.as_ref().is_some_and(|reason| reason.contains("abacus")));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod csv_rows;
mod fitting;
mod interval;
mod layout;
mod memory_figure;
mod model;
mod names;
mod post_training;
mod prediction;
mod published;
mod refusal;
mod row;
mod run;
mod scoring;
mod statistics;
mod table;
mod traced;
mod traced_prediction;
mod unclear;

pub use csv_rows::to_csv;
pub use fitting::{
    Case, Fit, FitError, LeaveOut, Progress, Quantity, declared, fit, fit_json, print_fit, print_memory_fit, score_left_out,
    yaml_of_fit,
};
pub use interval::{Coverage, IntervalBasis};
pub use memory_figure::memory_figure;
pub use post_training::{RolloutErrors, RolloutScores, ScoredRollout, are_rollouts, is_held_out, score_rollouts};
pub use prediction::{CompiledRun, StepPrediction, predict};
pub use published::{Split, SplitError, Subset, published};
pub use refusal::Refusal;
pub use row::{Row, read_rows};
pub use run::Run;
pub use scoring::{Overall, ScoredRow, Scores, score};
pub use statistics::{Summary, SummaryTable};
pub use table::{TableError, read_table};
