//! What is known of a plan: what its prices depend on, its costs, its step, and its step on changed
//! hardware; by its framework's own operators where these were traced, else by its Program.
//!
//! It knows plans and layouts, as the layers before it must not.

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
