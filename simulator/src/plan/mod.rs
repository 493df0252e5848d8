//! The predictions of a plan: the inputs of its costs, its costs, its step, and its step on changed
//! hardware. A plan is predicted from its framework's own operators if these were traced, else from
//! its Program.
//!
//! This module knows plans and layouts. The modules that it imports must not.

mod changed;
mod costs;
mod error;
mod prediction;
mod pricing;
mod remarks;

pub use changed::ChangeablePlan;
pub use costs::{PlanCostError, plan_costs, require_products};
pub use error::PlanPredictionError;
pub use prediction::{PlanPrediction, PredictedInput, predict_plan};
