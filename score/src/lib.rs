//! Predictions beside measurements that others published.
//!
//! The nouns: a [`Row`] is one measured run in the unified schema of `validation/INDEX.md`, read from CSV without believing it; a [`Run`] is
//! what the row says in our terms: a model, a plan, a cluster and a software stack; a [`Scored`] row has prediction and measurement;
//! [`Summary`] is what many of them say of the simulator.
//!
//! The flow: [`read_rows`] → [`Run::of`] → [`predict`] (the compiler's Program, one representative rank a stage) → [`score`]. Nothing is
//! fitted here: what durations are made of lies in the simulator's profiles, by device, link and stack. This crate is pure and
//! deterministic on any number of threads.
//!
//! ```
//! use foretell_score::{Split, read_rows, score};
//! use foretell_simulator::gpu::Profiles;
//! let text = "row_id,table,model,layers,hidden,heads,vocab,seq,gpu,n_gpus,dp,tp,pp,mbs,gbs,precision,framework,step_s\n\
//!             a-1,mine,GPT-L24h1024,24,1024,16,50257,1024,A100-SXM4-80GB,8,8,1,1,4,32,fp16,Megatron-DeepSpeed (1F1B),0.2\n\
//!             a-2,mine,GPT-L24h1024,24,1024,16,50257,1024,abacus,8,8,1,1,4,32,fp16,Megatron-DeepSpeed (1F1B),0.2\n";
//! let rows = read_rows(text)?;
//! let scored = score(&rows, &Split::library()?, Profiles::library()?);
//! assert!(scored.rows[0].predicted_step_seconds.is_some());
//! assert!(scored.rows[1].refused.as_ref().is_some_and(|reason| reason.contains("abacus")));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod layout;
mod model;
mod names;
mod predict;
mod row;
mod run;
mod scoring;
mod split;
mod statistics;
mod table;

pub use predict::{Predicted, Prepared, predict, prepare};
pub use row::{Row, read_rows};
pub use run::{Refusal, Run};
pub use scoring::{Scored, Scores, published, score, stated_memory, to_csv};
pub use split::{Part, Split, SplitError};
pub use statistics::{Summary, Table};
pub use table::{TableError, read_table};
