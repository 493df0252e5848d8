//! A plan on changed hardware: predicted from its framework's own operators if these were traced,
//! else from its Program.

use super::costs::plan_costs;
use super::error::PlanPredictionError;
use crate::answers::{Options, Prediction, WhatIf, predict_with, traced_prediction};
use crate::cost::CostModel;
use foretell_models::Model;
use foretell_program::{Plan, Profile, Program, compile_training};
use foretell_topologies::{DeviceId, Topology};

/// A plan, ready to be predicted on changed hardware.
pub struct ChangeablePlan<'a> {
    plan: &'a Plan,
    model: &'a Model,
    topology: &'a Topology,
    costs: CostModel,
    /// `None` if the framework's own operators predict the step.
    program: Option<Program>,
}

impl<'a> ChangeablePlan<'a> {
    /// Prepares a plan for the model called `name`.
    ///
    /// # Errors
    /// [`PlanPredictionError`] if the plan has no costs or cannot be compiled.
    pub fn new(
        (model, name): (&'a Model, &str),
        plan: &'a Plan,
        topology: &'a Topology,
        profile: Option<&Profile>,
    ) -> Result<Self, PlanPredictionError> {
        let costs = plan_costs(profile, topology, plan, model)?;
        let is_traced = traced_prediction(plan, model, topology, &costs).is_ok();
        let program = if is_traced { None } else { Some(compile_training(model, name, plan)?) };
        Ok(Self { plan, model, topology, costs, program })
    }

    /// Predicts the step after a change.
    ///
    /// # Errors
    /// [`PlanPredictionError`] if the changed plan cannot be predicted.
    /// [`PlanPredictionError::Measured`] if the framework measured its operators on the unchanged
    /// devices.
    pub fn predict(&self, what_if: &WhatIf) -> Result<Prediction, PlanPredictionError> {
        let (topology, costs) = (what_if.topology(self.topology)?, what_if.costs(&self.costs));
        match &self.program {
            Some(program) => Ok(predict_with(program, &topology, &costs, &Options::default())?.0),
            None if costs.framework(topology.kind_index(DeviceId(0))).is_some() => Err(PlanPredictionError::Measured),
            None => Ok(traced_prediction(self.plan, self.model, &topology, &costs)?.prediction),
        }
    }
}
