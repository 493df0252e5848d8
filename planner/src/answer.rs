//! What the planner answers.

use crate::request::Request;
use foretell_models::ModelError;
use foretell_program::Plan;
use foretell_simulator::{Prediction, SimulationError};
use foretell_topologies::Architecture;
use foretell_units::Bytes;
use serde::Serialize;
use thiserror::Error;

/// A layout that was simulated.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The whole plan.
    pub plan: Plan,
    /// What is foretold of it.
    pub prediction: Prediction,
}

/// What the search did: the contract's `search`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Search {
    /// Layouts in the space.
    pub layouts: usize,
    /// Layouts that are the same Program as another of the space, such as buckets larger than all gradients: they are looked at once.
    pub alike: usize,
    /// Layouts that do not divide the model or the batch.
    pub indivisible: usize,
    /// Layouts that offload, or compute some blocks again, where the same fits without: they do the same, and more beside it.
    pub needless: usize,
    /// Layouts that a lower bound showed to be slower than those returned, or that recompute what fits without.
    pub bounded_out: usize,
    /// Layouts that do not fit.
    pub out_of_memory: usize,
    /// Of those that a lower bound showed to be slower, such as were simulated until they could no longer be the best: the bound is what their steps
    /// take at least by then.
    pub stopped: usize,
    /// Layouts that were simulated to their end.
    pub simulated: usize,
    /// The best step time.
    pub best_seconds: f64,
    /// No layout of the space is faster than this.
    pub lower_bound_seconds: f64,
    /// Best over bound, less one.
    pub gap: f64,
    /// How long it took; whoever has a clock fills it in.
    pub wall_seconds: f64,
}

/// The answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// The best layouts, the fastest first; none only where nothing is better than what was found [elsewhere](crate::Request::elsewhere).
    pub candidates: Vec<Candidate>,
    /// What the best is worth, in terms of the objective: the less the better.
    pub value: f64,
    /// What the search did.
    pub search: Search,
}

impl Planned {
    /// What is found where the answers of two searches for the least time are both open, such as with other number formats: the fastest
    /// `top` of both.
    #[must_use]
    pub fn with(mut self, other: Self, top: usize) -> Self {
        self.candidates.extend(other.candidates);
        self.candidates.sort_by(|a, b| a.prediction.step_seconds.value().total_cmp(&b.prediction.step_seconds.value()));
        self.candidates.truncate(top.max(1));
        self.value = self.value.min(other.value);
        self.search.add(&other.search);
        self
    }

    /// The same answer, where another search, on other devices, found nothing that is better.
    #[must_use]
    pub fn beside(mut self, other: &Self) -> Self {
        // In terms of what is best here.
        let best_seconds = self.search.best_seconds;
        let share = (other.value / (1.0 + other.search.gap) / self.value).min(1.0);
        self.search.add(&Search { best_seconds, lower_bound_seconds: best_seconds * share, ..other.search.clone() });
        self
    }
}

impl Search {
    /// What two searches did together.
    fn add(&mut self, other: &Self) {
        self.layouts += other.layouts;
        self.alike += other.alike;
        self.needless += other.needless;
        self.indivisible += other.indivisible;
        self.bounded_out += other.bounded_out;
        self.out_of_memory += other.out_of_memory;
        self.stopped += other.stopped;
        self.simulated += other.simulated;
        self.best_seconds = self.best_seconds.min(other.best_seconds);
        self.lower_bound_seconds = self.lower_bound_seconds.min(other.lower_bound_seconds);
        self.gap =
            if self.lower_bound_seconds > 0.0 { self.best_seconds / self.lower_bound_seconds - 1.0 } else { f64::INFINITY };
    }
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum PlannerError {
    /// The model's sizes contradict each other.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Nothing in the space can be laid out.
    #[error("no layout of `{model}` with global batch {global_batch} divides {devices} devices as asked{reason}; hint: {hint}")]
    NoLayout {
        /// The model.
        model: String,
        /// The batch.
        global_batch: usize,
        /// The devices.
        devices: usize,
        /// What the compiler said of one of them.
        reason: String,
        /// The mend.
        hint: String,
    },
    /// Everything is too large.
    #[error("no layout fits: the smallest needs {needed} on a device of `{device}`, which has {limit}; hint: {hint}")]
    OutOfMemory {
        /// The least that any layout needs.
        needed: Bytes,
        /// The device.
        device: String,
        /// What a rank may use.
        limit: Bytes,
        /// The mend.
        hint: String,
    },
    /// The search was given up before it had found anything.
    #[error(
        "nothing was found in time: of {layouts} layouts that were looked at {out_of_memory} do not fit, and none of the others was simulated yet; \
         hint: allow more time, or `--fix` some of the layout"
    )]
    OutOfTime {
        /// Layouts of which something is known.
        layouts: usize,
        /// Of these, such as do not fit.
        out_of_memory: usize,
    },
    /// The topology does not say what the objective needs.
    #[error("`{topology}` does not say {what}; hint: write `{hint}` in its file")]
    Objective {
        /// The topology.
        topology: String,
        /// What is missing.
        what: String,
        /// The line that says it.
        hint: String,
    },
    /// A layout could not be simulated.
    #[error(transparent)]
    Simulation(#[from] SimulationError),
}

/// Why nothing is left: of what does not fit, that which needs the least; or what the compiler said.
pub(crate) fn nothing_left(
    request: &Request<'_>,
    blocks: usize,
    least: Option<Bytes>,
    limit: Bytes,
    reason: Option<String>,
) -> PlannerError {
    match least {
        Some(needed) => PlannerError::OutOfMemory {
            needed,
            device: first_device(request),
            limit,
            hint: format!("use more devices, a smaller global batch, or a smaller model; `--fix` less{}", untold_hosts(request)),
        },
        None => match contradiction(request, blocks) {
            Some((reason, hint)) => no_layout(request, reason, hint),
            None => no_layout(request, reason.unwrap_or_default(), USUAL_MEND),
        },
    }
}

/// What of the user's choices no layout of a model of so many blocks can have, if that is plain, and the mend.
fn contradiction(request: &Request<'_>, blocks: usize) -> Option<(String, &'static str)> {
    let (fixed, batch, devices) = (&request.fixed, request.base.global_batch, request.devices);
    let sizes = [fixed.data, fixed.tensor, fixed.pipeline, fixed.context, fixed.expert];
    let ranks = sizes.into_iter().flatten().fold(1, usize::saturating_mul);
    if ranks > devices {
        return Some((format!("what is fixed makes {ranks} ranks"), "`--fix` smaller sizes, or use more nodes"));
    }
    let chunks = fixed.pipeline.unwrap_or(1).saturating_mul(fixed.virtual_stages.unwrap_or(1));
    if chunks > blocks {
        let reason = format!("a pipeline of {chunks} chunks is fixed, and the model has {blocks} blocks to cut it between");
        return Some((reason, "`--fix` a shorter pipeline, or fewer `virtual_stages`"));
    }
    let at_once = [fixed.data, fixed.expert, fixed.micro_batch].into_iter().flatten().fold(1, usize::saturating_mul);
    if !batch.is_multiple_of(at_once) {
        let reason = format!("by what is fixed ranks take {at_once} samples at a time, which do not divide {batch}");
        return Some((reason, "choose a global batch that they divide, or `--fix` another `micro_batch`, `data` or `expert`"));
    }
    None
}

/// What the topology calls its first kind of device.
pub(crate) fn first_device(request: &Request<'_>) -> String {
    request.topology.device_kinds().first().map(|kind| kind.name.clone()).unwrap_or_default()
}

/// Where it is not said how much memory hosts have: that optimizer state could lie there.
fn untold_hosts(request: &Request<'_>) -> &'static str {
    let topology = request.topology;
    let is_untold = topology
        .node_groups()
        .iter()
        .any(|group| group.host_memory.is_none() && topology.device_kinds()[group.kind].architecture != Architecture::Cpu);
    if is_untold && request.base.stack.is_own() {
        "; or write `host_memory: 1TB` of the nodes into the topology's file, and optimizer state may lie there"
    } else {
        ""
    }
}

pub(crate) const USUAL_MEND: &str = "choose a global batch with more divisors, or `--fix` less";

pub(crate) fn no_layout(request: &Request<'_>, reason: String, hint: &str) -> PlannerError {
    PlannerError::NoLayout {
        model: request.name.into(),
        global_batch: request.base.global_batch,
        devices: request.devices,
        reason: if reason.is_empty() { reason } else { format!(" ({reason})") },
        hint: hint.into(),
    }
}
