//! Lower bounds on the step time and memory of a pipeline whose chunk costs are known.
//!
//! [`PipelineCosts`] places the costs of truncated models in the chunks of a pipeline. From them
//! follow a bound in closed form for every layout (`closed_form.rs`), one pass by pass in schedule
//! order for promising layouts (`by_pass.rs`), the least memory of the fullest stage (`memory.rs`),
//! and the time from each pass to the end of the step (`time_left.rs`).
//!
//! Nothing here compiles or times a Program.

mod by_pass;
mod closed_form;
mod costs;
mod cuts;
mod in_flight;
mod memory;
mod tables;
mod time_left;
mod timetable;

pub(super) use closed_form::OptimizerUpdate;
pub(super) use costs::{BUCKET_ROUNDING, PipelineCosts, PipelineOffload};
pub(super) use cuts::PipelineCuts;
pub(super) use in_flight::InFlight;
pub(super) use memory::stage_memory;
pub(super) use tables::PipelineTables;
pub(super) use timetable::Timetable;
