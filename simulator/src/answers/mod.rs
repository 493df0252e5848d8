//! The questions that the crate answers, one file each. They must not know layouts or schedules:
//! they ask the engine about Programs.

mod critical_path;
mod cycle;
mod disturbance;
mod failures;
mod input;
mod jobs;
mod least_times;
mod load;
mod memory;
mod paced;
mod paced_course;
mod paced_sharing;
mod paced_steps;
mod paces;
mod prediction;
mod rates;
mod running_cost;
mod saving;
mod simulation;
mod traced;
mod what_if;

pub use critical_path::{CriticalPath, PathSegment, PathTime, critical_path};
pub use cycle::predict_cycle;
pub use disturbance::Disturbance;
pub use failures::{FailingRun, Reliability};
pub use input::{InputBound, InputPipeline, InputRun};
pub use jobs::{Job, simulate_jobs};
pub use least_times::{LeastTimes, least_times, least_times_on};
pub use load::{LinkLoad, Load, ServerLoad, load};
pub use memory::{MemoryUse, OverfullDevice, memory_use};
pub use paced::PacedPrediction;
pub use prediction::{Prediction, StepKind, predict, predict_step, predict_with, predict_with_memory};
pub use running_cost::{
    MissingFact, PowerModel, RunningCost, cost_of_devices, price_per_hour, reliability, running_cost, traced_energy,
};
pub use saving::{CheckpointCost, checkpoint_cost};
pub use simulation::{Operators, Options, Prepared, Simulation, prepare, simulate, simulate_representatives};
pub use traced::{
    TracedOutcome, TracedPrediction, memory_within, repeated_time, traced_course, traced_ends, traced_plan, traced_prediction,
    traced_within,
};
pub use what_if::{WhatIf, WhatIfError};
