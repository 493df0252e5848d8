//! Other frameworks: their jobs as plans and back, and traces of their runs.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails may panic")]

mod copied;
mod fine_tuning;
mod forms;
mod kineto;
mod launches;
mod mutations;
mod plans;
mod preferences;
mod scripts;
mod spellings;
mod tools;
