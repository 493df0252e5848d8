//! The search for the devices of each role of RL post-training (a placement).
//!
//! For each split of the devices between actor and engines, the search over layouts finds the
//! actor's fastest layouts within the memory that other roles leave. For the best of them, the step
//! is predicted with engines of every size, each with as much memory as fits. The answer is the
//! fastest step.
//!
//! It must not know how long a token takes, or the name of any framework.

mod framework;

pub use framework::Framework;

use crate::error::PlannerError;
use crate::search::plan;
use crate::space::Request;
use foretell_program::{Plan, PolicyMethod, Rollout, RolloutOffload, RolloutPlacement};
use foretell_simulator::{ActorCosts, ActorJob, PostTrainingError, PostTrainingPrediction, RoleSetting};
use foretell_units::Bytes;
use miette::Diagnostic;
use schemars::JsonSchema;
use serde::Serialize;
use thiserror::Error;

/// The number of the actor's layouts that are tried with each placement.
const LAYOUTS: usize = 3;

/// The most searches for a layout that leaves other roles enough memory.
const ATTEMPTS: usize = 3;

/// The largest share of a device's memory that an engine reserves: vLLM's `gpu_memory_utilization`.
const MOST_MEMORY_SHARE: f64 = 0.9;

/// The share of memory is a multiple of one over this number.
const MEMORY_STEPS: f64 = 100.0;

/// Why RL post-training has no plan.
#[derive(Clone, Debug, PartialEq, Error, Diagnostic)]
pub enum PostTrainingPlanError {
    /// No placement fits.
    #[error("no placement of the roles fits: the smallest needs {needed} of a device, which has {limit} ({holder})")]
    #[diagnostic(code(planner::roles_out_of_memory), help("{hint}"))]
    OutOfMemory {
        /// The least memory that a device needs.
        needed: Bytes,
        /// Memory that a device may hold.
        limit: Bytes,
        /// The role or phase that needs the memory.
        holder: String,
        /// What to change.
        hint: String,
    },
    /// No placement is possible.
    #[error("no placement of the roles is possible on {devices} devices")]
    #[diagnostic(code(planner::no_placement), help("use more devices, or state less of the `rollout`"))]
    NoPlacement {
        /// Devices that may be used.
        devices: usize,
    },
    /// The actor cannot be planned.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Planner(#[from] PlannerError),
    /// The roles cannot be predicted.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Prediction(#[from] PostTrainingError),
}

/// The rollout's fields that the user has fixed. The search chooses those that are `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FixedRollout {
    /// Number of devices of an engine.
    pub tensor: Option<usize>,
    /// Devices that run the engines.
    pub placement: Option<RolloutPlacement>,
    /// Share of a device's memory that an engine reserves.
    pub memory_share: Option<f64>,
    /// The actor's state that is moved to hosts while engines generate.
    pub offload: Option<RolloutOffload>,
}

/// The job of a search for placements.
#[derive(Clone)]
pub struct PostTrainingRequest<'a> {
    /// Method of training.
    pub method: PolicyMethod,
    /// The rollout. The search replaces fields that are not fixed.
    pub rollout: &'a Rollout,
    /// The rollout's fields that the user has fixed.
    pub fixed: FixedRollout,
    /// The placements that the framework supports. `None`: all.
    pub framework: Option<&'a Framework>,
    /// The plan. Its global batch is the number of responses of an update.
    pub base: &'a Plan,
    /// The request of the search over layouts of the actor's training, from [`ActorJob::new`].
    pub actor: Request<'a>,
}

/// A placement that fits.
#[derive(Clone, Debug)]
pub struct PlacedRoles {
    /// The plan. Its global batch is the number of responses of an update.
    pub plan: Plan,
    /// Its rollout.
    pub rollout: Rollout,
    /// The prediction of a step.
    pub prediction: PostTrainingPrediction,
}

/// Counts of a search for placements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct PlacementSearch {
    /// Splits of the devices that were tried.
    pub placements: usize,
    /// Layouts of the actor that were simulated.
    pub layouts: usize,
    /// Steps that were predicted.
    pub predicted: usize,
    /// Predicted steps whose roles do not fit.
    pub out_of_memory: usize,
}

/// The answer of a search for placements.
#[derive(Clone, Debug)]
pub struct PlannedRoles {
    /// Placements that fit, the fastest first: one for each split of the devices, or one for each
    /// layout if the split is fixed.
    pub candidates: Vec<PlacedRoles>,
    /// What the search did.
    pub search: PlacementSearch,
}

/// A step whose roles do not fit.
struct Overfull {
    needed: Bytes,
    limit: Bytes,
    holder: String,
}

/// Finds the fastest placements.
///
/// # Errors
/// [`PostTrainingPlanError`] if none fits, or none is possible.
pub fn plan_post_training(request: &PostTrainingRequest<'_>) -> Result<PlannedRoles, PostTrainingPlanError> {
    let mut found = Found { request, candidates: Vec::new(), search: PlacementSearch::default(), overfull: None, refused: None };
    for placement in placements(request) {
        found.search.placements += 1;
        found.place(placement)?;
    }
    let Found { mut candidates, search, overfull, refused, .. } = found;
    candidates.sort_by(|one, other| one.prediction.step_seconds.total_cmp(&other.prediction.step_seconds));
    if search.placements > 1 {
        let mut seen: Vec<RolloutPlacement> = Vec::new();
        candidates.retain(|placed| {
            let is_new = !seen.contains(&placed.rollout.placement);
            seen.push(placed.rollout.placement);
            is_new
        });
    }
    candidates.truncate(request.actor.top.max(1));
    match (candidates.is_empty(), overfull, refused) {
        (false, ..) => Ok(PlannedRoles { candidates, search }),
        (true, Some(Overfull { needed, limit, holder }), _) => Err(PostTrainingPlanError::OutOfMemory {
            needed,
            limit,
            holder,
            hint: "use more devices, a lower `response-max`, or `--adapter rank=16`".into(),
        }),
        (true, None, Some(refused)) => Err(refused),
        (true, None, None) => Err(PostTrainingPlanError::NoPlacement { devices: request.actor.devices }),
    }
}

/// The placements to try: the user's, or else engines on the actor's devices, and on a fourth, a
/// half and three fourths of all devices, rounded to whole nodes if there are several.
fn placements(request: &PostTrainingRequest<'_>) -> Vec<RolloutPlacement> {
    if let Some(placement) = request.fixed.placement {
        return vec![placement];
    }
    let (devices, framework) = (request.actor.devices, request.framework);
    let of_node = request.actor.topology.node_groups().first().map_or(1, |group| group.devices);
    let unit = if devices > of_node { of_node } else { 1 };
    let is_colocated = framework.is_none_or(|framework| framework.colocated) && request.rollout.off_policy == 0;
    let mut placements = if is_colocated { vec![RolloutPlacement::Colocated] } else { Vec::new() };
    for fourths in 1..4 {
        let own = (devices * fourths / 4) / unit * unit;
        let placement = RolloutPlacement::Split(own);
        let is_split = framework.is_none_or(|framework| framework.split);
        if is_split && own > 0 && own < devices && !placements.contains(&placement) {
            placements.push(placement);
        }
    }
    placements
}

/// The candidates so far.
struct Found<'r, 'a> {
    request: &'r PostTrainingRequest<'a>,
    candidates: Vec<PlacedRoles>,
    search: PlacementSearch,
    /// The smallest step that does not fit.
    overfull: Option<Overfull>,
    /// Why the first placement without a layout has no layout.
    refused: Option<PostTrainingPlanError>,
}

impl Found<'_, '_> {
    /// The memory of a device that roles may use.
    fn limit(&self) -> Bytes {
        let Request { topology, memory_limit, headroom, .. } = &self.request.actor;
        let device = Bytes::new((topology.least_memory().value() * (1.0 - headroom)) as u64);
        memory_limit.map_or(device, |limit| limit.min(device))
    }

    fn place(&mut self, placement: RolloutPlacement) -> Result<(), PostTrainingPlanError> {
        let request = self.request;
        // Engines on separate devices need no offloading of the actor.
        let offload = match (placement, request.fixed.offload) {
            (RolloutPlacement::Split(_), None) => RolloutOffload::None,
            _ => request.rollout.offload,
        };
        let rollout = Rollout { placement, offload, ..request.rollout.clone() };
        let devices = request.actor.devices.saturating_sub(rollout.own_devices());
        if devices == 0 {
            let topology = request.actor.topology;
            let error = PostTrainingError::TooFewDevices {
                actor: 1,
                engines: rollout.own_devices(),
                topology: topology.name().into(),
                devices: topology.device_count(),
                hint: "leave the actor some devices".into(),
            };
            self.refused.get_or_insert(error.into());
            return Ok(());
        }
        let limit = self.limit();
        let mut left = limit;
        for _ in 0..ATTEMPTS {
            let global_batch = request.actor.base.global_batch.next_multiple_of(devices);
            let base = Plan { global_batch, ..request.actor.base.clone() };
            let actor =
                Request { base: &base, devices, memory_limit: Some(left), top: LAYOUTS, headroom: 0.0, ..request.actor.clone() };
            let planned = match plan(&actor) {
                Ok(planned) => planned,
                Err(PlannerError::OutOfMemory { needed, .. }) => {
                    self.note_overfull(needed, limit, "actor, while it trains");
                    return Ok(());
                }
                Err(error) => {
                    self.refused.get_or_insert(error.into());
                    return Ok(());
                }
            };
            let mut excess = None::<u64>;
            for candidate in planned.candidates {
                self.search.layouts += 1;
                let layout = candidate.plan.layout;
                let over = self.engines(&rollout, &Plan { layout, ..request.base.clone() })?;
                excess = match (excess, over) {
                    (Some(least), Some(over)) => Some(least.min(over)),
                    (None, over) => over,
                    (_, None) => Some(0),
                };
            }
            // Other roles need more memory than these layouts leave. Search again with less.
            match excess {
                Some(over) if over > 0 && over < left.count() => left = Bytes::new(left.count() - over),
                _ => return Ok(()),
            }
        }
        Ok(())
    }

    /// Predicts a layout with engines of every size. If no engine fits, returns by how many bytes
    /// the roles exceed a device while the actor trains.
    fn engines(&mut self, rollout: &Rollout, plan: &Plan) -> Result<Option<u64>, PostTrainingPlanError> {
        let Request { model, name, topology, costs, .. } = self.request.actor;
        let (method, limit) = (self.request.method, self.limit());
        let Ok(job) = ActorJob::new(model, plan, rollout, None) else { return Ok(None) };
        let actor = match ActorCosts::of(&job, name, topology, costs) {
            Ok(actor) => actor,
            // Lengths of sequences are rounded for the layout, and may then be indivisible.
            Err(error) => {
                self.refused.get_or_insert(error.into());
                return Ok(None);
            }
        };
        let setting = RoleSetting::new(method, model, &job.plan, &actor, topology, costs)?;
        let on = if rollout.own_devices() > 0 { rollout.own_devices() } else { setting.ranks };
        let mut best: Option<PlacedRoles> = None;
        let mut excess: Option<u64> = None;
        for tensor in tensors(self.request, on) {
            for offload in offloads(self.request, rollout) {
                let mut rollout = Rollout { tensor, offload, ..rollout.clone() };
                rollout.memory_share = self.request.fixed.memory_share.unwrap_or_else(|| {
                    let beside =
                        if rollout.own_devices() > 0 { Bytes::ZERO } else { setting.residents(&rollout).beside(offload) };
                    memory_share(limit, beside, topology.least_memory())
                });
                if rollout.memory_share <= 0.0 {
                    continue;
                }
                let prediction = setting.predict(&rollout)?;
                self.search.predicted += 1;
                if !prediction.fits || prediction.peak_memory_bytes > limit.count() {
                    self.search.out_of_memory += 1;
                    let training =
                        prediction.memory.iter().filter(|phase| phase.phase == "training").map(|phase| phase.bytes).max();
                    let training = training.expect("invariant: a step trains");
                    let over = training.saturating_sub(limit.count());
                    excess = Some(excess.map_or(over, |least| least.min(over)));
                    self.note_overfull(Bytes::new(prediction.peak_memory_bytes), limit, &prediction.memory_peak);
                    continue;
                }
                if best.as_ref().is_none_or(|best| prediction.step_seconds < best.prediction.step_seconds) {
                    best = Some(PlacedRoles { plan: plan.clone(), rollout, prediction });
                }
            }
        }
        let fits = best.is_some();
        self.candidates.extend(best);
        Ok(excess.filter(|_| !fits))
    }

    fn note_overfull(&mut self, needed: Bytes, limit: Bytes, holder: &str) {
        if self.overfull.as_ref().is_none_or(|least| needed < least.needed) {
            self.overfull = Some(Overfull { needed, limit, holder: holder.into() });
        }
    }
}

/// The largest share of a device's memory for an engine that leaves `beside` to other roles.
fn memory_share(limit: Bytes, beside: Bytes, device: Bytes) -> f64 {
    let left = limit.count().saturating_sub(beside.count()) as f64 / device.value();
    ((left * MEMORY_STEPS).floor() / MEMORY_STEPS).min(MOST_MEMORY_SHARE)
}

/// The sizes of engines to try on `devices` devices.
fn tensors(request: &PostTrainingRequest<'_>, devices: usize) -> Vec<usize> {
    let doubling = std::iter::successors(Some(1usize), |size| size.checked_mul(2)).take_while(|size| *size <= devices);
    let fixed = request.fixed.tensor;
    let sizes = fixed.map_or_else(|| doubling.collect(), |tensor| vec![tensor]);
    sizes.into_iter().filter(|size| devices.is_multiple_of(*size)).collect()
}

/// The choices of the actor's state to offload while engines generate.
fn offloads(request: &PostTrainingRequest<'_>, rollout: &Rollout) -> Vec<RolloutOffload> {
    match (rollout.placement, request.fixed.offload, request.framework) {
        (RolloutPlacement::Split(_), ..) => vec![RolloutOffload::None],
        (_, Some(offload), _) => vec![offload],
        (_, None, Some(framework)) => framework.offloads.clone(),
        (_, None, None) => RolloutOffload::ALL.into(),
    }
}
