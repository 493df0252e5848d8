//! The interpreter of Programs that predicts.
mod breakdown;
mod cost;
mod critical_path;
mod engine;
mod error;
mod exchange;
mod fairness;
mod interpreter;
mod kernels;
mod lowering;
mod prediction;
mod roofline;
mod si;
mod simulation;

pub use cost::{CostModel, Estimate, LinkEfficiency, Parameters, Source};
pub use critical_path::{CriticalPath, PathSegment, critical_path};
pub use error::SimulationError;
pub use prediction::{Prediction, predict};
pub use simulation::{Breakdown, Options, Oversubscription, Quantile, Simulation, simulate};
