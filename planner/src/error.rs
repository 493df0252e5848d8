//! Errors of the planner.

use crate::space::{Fixed, Request};
use foretell_models::ModelError;
use foretell_program::PlanError;
use foretell_simulator::SimulationError;
use foretell_simulator::gpu::StackLimits;
use foretell_units::Bytes;
use foretell_units::diagnostic::help;
use miette::Diagnostic;
use thiserror::Error;

/// The hint for a request without possible layouts, if nothing more precise is known.
pub(crate) fn usual_hint(request: &Request<'_>) -> String {
    let less = if fixes_anything(request) { ", or `--fix` less" } else { "" };
    format!("choose a global batch with more divisors{less}")
}

/// Whether the user has fixed a field, besides those that the stack fixes.
pub(crate) fn fixes_anything(request: &Request<'_>) -> bool {
    let mut of_stack = Fixed::default();
    if let Some(limits) = StackLimits::of(&request.base.stack) {
        of_stack.within(limits);
    }
    request.fixed != of_stack
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Error, Diagnostic)]
pub enum PlannerError {
    /// The model's sizes contradict each other.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Model(#[from] ModelError),
    /// No layout of the space is possible.
    #[error("no layout of `{model}` with global batch {global_batch} divides {devices} devices as asked{reason}")]
    #[diagnostic(code(planner::no_layout), help("{hint}"))]
    NoLayout {
        /// Name of the model.
        model: String,
        /// Samples of a step.
        global_batch: usize,
        /// Devices that may be used.
        devices: usize,
        /// What contradicts the request, in parentheses after a space; may be empty.
        reason: String,
        /// What to change.
        hint: String,
    },
    /// No layout fits into memory.
    #[error("no layout fits: the smallest needs {needed} on a device of `{device}`, which has {limit}")]
    #[diagnostic(code(planner::out_of_memory), help("{hint}"))]
    OutOfMemory {
        /// Least memory that any layout needs on a device.
        needed: Bytes,
        /// Name of the device kind.
        device: String,
        /// Memory limit of a rank.
        limit: Bytes,
        /// What to change.
        hint: String,
    },
    /// The search was given up before it had a candidate.
    #[error("nothing was found in time: of {layouts} layouts so far, {out_of_memory} do not fit and none was simulated")]
    #[diagnostic(code(planner::out_of_time), help("allow more time, or `--fix` some of the layout"))]
    OutOfTime {
        /// Layouts of the space, as far as they were listed.
        layouts: usize,
        /// Layouts that do not fit into memory.
        out_of_memory: usize,
    },
    /// The topology does not state a figure that the objective needs.
    #[error("`{topology}` does not say {what}")]
    #[diagnostic(code(planner::objective), help("{hint}"))]
    Objective {
        /// Name of the topology.
        topology: String,
        /// The missing figure.
        what: String,
        /// How to state it.
        hint: String,
    },
    /// A layout could not be simulated.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Simulation(#[from] SimulationError),
}

impl PlannerError {
    /// Returns the error of a request without possible layouts. `reason` may be empty.
    pub(crate) fn no_layout(request: &Request<'_>, reason: String, hint: &str) -> Self {
        Self::NoLayout {
            model: request.name.into(),
            global_batch: request.base.global_batch,
            devices: request.devices,
            reason: if reason.is_empty() { reason } else { format!(" ({reason})") },
            hint: hint.into(),
        }
    }

    /// Returns the error of a request whose plan contradicts its model.
    pub(crate) fn of_plan(request: &Request<'_>, error: PlanError) -> Self {
        match error {
            PlanError::Model(error) => Self::Model(error),
            error => Self::impossible(request, &error),
        }
    }

    /// Returns the error of a request whose plan cannot be compiled.
    pub(crate) fn impossible(request: &Request<'_>, error: &dyn Diagnostic) -> Self {
        let usual = usual_hint(request);
        let hint = help(error).map_or_else(|| usual.clone(), |help| format!("{help}; or {usual}"));
        Self::no_layout(request, error.to_string(), &hint)
    }

    /// Returns the error of a request none of whose layouts fits. It names the topology's first
    /// kind of device.
    pub(crate) fn out_of_memory(request: &Request<'_>, needed: Bytes, limit: Bytes, hint: String) -> Self {
        let kind = request.topology.device_kinds().first().expect("invariant: a topology has a kind of device");
        let device = kind.name.clone();
        Self::OutOfMemory { needed, device, limit, hint }
    }
}
