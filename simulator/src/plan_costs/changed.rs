//! A plan on changed hardware: by its framework's own operators if these predict it, else by its
//! Program.

use super::{PlanCostError, plan_costs};
use crate::answers::{Options, Prediction, WhatIf, predict_with, traced_prediction};
use crate::cost::CostModel;
use crate::error::SimulationError;
use foretell_models::Model;
use foretell_program::traced::Untraced;
use foretell_program::{Plan, PlanError, Profile, Program, compile_training};
use foretell_topologies::{DeviceId, Topology, TopologyError};
use miette::Diagnostic;
use thiserror::Error;

/// Why a plan cannot be predicted on changed hardware.
#[derive(Debug, Error, Diagnostic)]
pub enum ChangedPlanError {
    /// The plan has no costs.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Costs(#[from] PlanCostError),
    /// The plan cannot be compiled.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Plan(#[from] PlanError),
    /// The changed topology is not sound.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Topology(#[from] TopologyError),
    /// The step cannot be simulated.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Simulation(#[from] SimulationError),
    /// The operators do not predict the step.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Untraced(#[from] Untraced),
    /// The framework measured its operators on these devices, and nothing says what others do.
    #[error("the framework measured its own operators on these devices, and nothing is known of changed ones")]
    #[diagnostic(code(what_if::measured), help("leave out `--profile`"))]
    Measured,
}

/// A plan, ready to be predicted on changed hardware.
pub struct ChangeablePlan<'a> {
    plan: &'a Plan,
    model: &'a Model,
    topology: &'a Topology,
    costs: CostModel,
    /// `None` where the framework's own operators predict the step.
    program: Option<Program>,
}

impl<'a> ChangeablePlan<'a> {
    /// Prepares a plan of a model with a name.
    ///
    /// # Errors
    /// [`ChangedPlanError`] if it has no costs or cannot be compiled.
    pub fn new(
        (model, name): (&'a Model, &str),
        plan: &'a Plan,
        topology: &'a Topology,
        profile: Option<&Profile>,
    ) -> Result<Self, ChangedPlanError> {
        let costs = plan_costs(profile, topology, plan, model)?;
        let is_traced = traced_prediction(plan, model, topology, &costs).is_ok();
        let program = if is_traced { None } else { Some(compile_training(model, name, plan)?) };
        Ok(Self { plan, model, topology, costs, program })
    }

    /// Predicts the step after a change.
    ///
    /// # Errors
    /// [`ChangedPlanError`] if nothing is known of the change.
    pub fn predict(&self, what_if: &WhatIf) -> Result<Prediction, ChangedPlanError> {
        let (topology, costs) = (what_if.topology(self.topology)?, what_if.costs(&self.costs));
        match &self.program {
            Some(program) => Ok(predict_with(program, &topology, &costs, &Options::default())?.0),
            None if costs.framework(topology.kind_index(DeviceId(0))).is_some() => Err(ChangedPlanError::Measured),
            None => Ok(traced_prediction(self.plan, self.model, &topology, &costs)?.prediction),
        }
    }
}
