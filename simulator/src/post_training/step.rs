//! A step of RL post-training: its phases on the actor's and the engines' devices, one after
//! another or overlapping with the next step, and the memory of both.
//!
//! It must not know frameworks, or how an actor's step is laid out.

use super::actor::{ActorCosts, ActorJob};
use super::engine::{Engine, Generation};
use super::error::PostTrainingError;
use super::memory::{self, PhaseMemory, Residents};
use super::token_work::TokenWork;
use super::transfer::transfer;
use crate::answers::Prediction;
use crate::cost::CostModel;
use crate::gpu::ProductFormat;
use crate::lengths::Lengths;
use crate::phases::{Phase, PhaseSpan, course};
use foretell_models::Model;
use foretell_program::{Plan, PolicyMethod, Reward, Rollout, RolloutPlacement};
use foretell_topologies::Topology;
use foretell_units::{Bytes, Seconds};
use schemars::JsonSchema;
use serde::Serialize;

/// Index of the group of the actor's devices.
const ACTOR: usize = 0;

/// Index of the group of the engines' devices, if these are different devices.
const ENGINES: usize = 1;

/// A group of devices that phases occupy.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct DeviceGroup {
    /// The roles on them.
    pub roles: String,
    /// Number of devices.
    pub devices: usize,
}

/// The rollout engines of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct EngineAnswer {
    /// Number of engines.
    pub engines: usize,
    /// Devices per engine.
    pub tensor: usize,
    /// Responses that each engine generates in a step.
    pub responses: usize,
    /// Tokens for whose keys and values each engine has memory.
    pub cached_tokens: u64,
    /// Largest number of sequences that each engine generates together.
    pub concurrent: usize,
    /// Number of sequences generated together, averaged over the time of generation.
    pub mean_concurrent: f64,
    /// Tokens of the longest response, which ends the phase.
    pub longest_response: usize,
    /// Tokens that all engines together generate per second of generation.
    pub tokens_per_second: f64,
}

/// The prediction of a step of RL post-training.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct PostTrainingPrediction {
    /// The step time: from the end of one step to the end of the next.
    pub step_seconds: f64,
    /// Seconds in which engines generate.
    pub generation_seconds: f64,
    /// The part of `generation_seconds` for the prompts' forward passes.
    pub prefill_seconds: f64,
    /// Seconds of forward passes for log-probabilities, values and rewards.
    pub forward_seconds: f64,
    /// Seconds of updates of actor and critic.
    pub training_seconds: f64,
    /// Seconds in which weights are sent to engines, and state to hosts and back.
    pub transfer_seconds: f64,
    /// Responses per second.
    pub samples_per_second: f64,
    /// Tokens of prompts and responses that are trained on, per second.
    pub tokens_per_second: f64,
    /// The groups of devices.
    pub groups: Vec<DeviceGroup>,
    /// The phases of a step in the steady state.
    pub phases: Vec<PhaseSpan>,
    /// The engines. `None` if they have too little memory for one sequence.
    pub engine: Option<EngineAnswer>,
    /// Memory of a device in each phase, by what holds it.
    pub memory: Vec<PhaseMemory>,
    /// Memory that a device has.
    pub device_memory_bytes: u64,
    /// Memory that the fullest device needs.
    pub peak_memory_bytes: u64,
    /// The phase and the largest holders of that memory.
    pub memory_peak: String,
    /// Whether all roles fit into memory in all phases.
    pub fits: bool,
    /// The prediction of one update of the actor.
    pub update: Prediction,
    /// The assumptions, one sentence each.
    pub assumptions: Vec<String>,
}

/// The roles on devices: everything of a step that does not depend on the rollout's settings.
#[derive(Clone, Debug)]
pub struct RoleSetting<'a> {
    /// The training method.
    pub method: PolicyMethod,
    /// The actor's plan.
    pub plan: &'a Plan,
    /// Number of ranks of the actor.
    pub ranks: usize,
    /// The time and memory of the actor.
    pub actor: &'a ActorCosts,
    /// The work of one token of the model.
    pub work: TokenWork,
    /// The devices.
    pub topology: &'a Topology,
    /// The cost model of these devices.
    pub costs: &'a CostModel,
}

impl<'a> RoleSetting<'a> {
    /// Places the actor on the first devices.
    ///
    /// # Errors
    /// [`PostTrainingError`] if the devices are of several kinds or have no profile, or the model
    /// has no tokens.
    pub fn new(
        method: PolicyMethod,
        model: &Model,
        plan: &'a Plan,
        actor: &'a ActorCosts,
        topology: &'a Topology,
        costs: &'a CostModel,
    ) -> Result<Self, PostTrainingError> {
        let refuse = |reason: &str| PostTrainingError::Devices { topology: topology.name().into(), reason: reason.into() };
        if topology.device_kinds().len() != 1 {
            return Err(refuse("its devices are of several kinds"));
        }
        costs.cluster(0).ok_or_else(|| refuse("its devices have no profile of a GPU"))?;
        if model.sample().tokens().is_none() {
            return Err(PostTrainingError::NoSequences);
        }
        let ranks = plan.mesh()?.world_size();
        Ok(Self { method, plan, ranks, actor, work: TokenWork::of(model)?, topology, costs })
    }

    /// What other roles hold on the actor's devices beside engines.
    pub fn residents(&self, rollout: &Rollout) -> Residents {
        let footprints = self.actor.update.memory_by_component.iter();
        let actor = footprints.copied().max_by_key(|footprint| footprint.total()).expect("invariant: a plan has a stage");
        let layout = &self.plan.layout;
        let shards = layout.tensor * layout.pipeline * if layout.zero == 3 { layout.data } else { 1 };
        let parameters = self.work.parameters - self.work.experts + self.work.experts / layout.expert as f64;
        let frozen_models = [("reference", rollout.reference), ("reward model", rollout.reward == Reward::Model)];
        Residents {
            actor,
            frozen: Bytes::new((2.0 * parameters / shards as f64) as u64),
            frozen_models: frozen_models.into_iter().filter(|(_, is_there)| *is_there).map(|(role, _)| role).collect(),
            has_critic: self.method.has_critic(),
        }
    }

    /// The engine of a rollout in this setting.
    pub fn engine(&self, rollout: &Rollout) -> Engine {
        let cluster = self.costs.cluster(0).expect("invariant: a setting has devices with a profile");
        Engine::new(self.work, rollout, ProductFormat::of_plan(self.plan), cluster)
    }

    /// Predicts a step.
    ///
    /// # Errors
    /// [`PostTrainingError`] if the engines do not divide the devices, or there are too few.
    pub fn predict(&self, rollout: &Rollout) -> Result<PostTrainingPrediction, PostTrainingError> {
        let own = rollout.own_devices();
        let devices = self.topology.device_count();
        if self.ranks + own > devices {
            return Err(PostTrainingError::TooFewDevices {
                actor: self.ranks,
                engines: own,
                topology: self.topology.name().into(),
                devices,
                hint: "use a smaller layout, fewer devices in `placement`, or more nodes".into(),
            });
        }
        let (actor, tensor) = (self.actor, rollout.tensor);
        let of_engines = if own == 0 { self.ranks } else { own };
        if !of_engines.is_multiple_of(tensor) {
            return Err(PostTrainingError::Indivisible { tensor, devices: of_engines });
        }
        let cluster = self.costs.cluster(0).expect("invariant: a setting has devices with a profile");
        let (engine, lengths, residents) = (self.engine(rollout), Lengths::of(rollout), self.residents(rollout));
        let (engines, responses) = (of_engines / tensor, rollout.responses());
        let of_engine = responses.div_ceil(engines);
        let generation = engine.generate(&lengths, of_engine, responses);
        let memory = memory::phases(rollout, &engine, &residents, rollout.longest());
        let device_memory = self.topology.device_kind(self.topology.device_of_rank(0)).memory;
        let fullest = memory.iter().max_by_key(|phase| phase.bytes).expect("invariant: a step has phases");
        let weights = Bytes::new((2.0 * self.work.parameters) as u64);
        let transferred = transfer(weights, &self.plan.layout, self.ranks, rollout.placement, cluster);
        let offloaded = residents.offloaded(rollout.offload);
        let copied = if offloaded > Bytes::ZERO { self.costs.copy_time(0, offloaded).median * 2.0 } else { Seconds::ZERO };
        let times = StepTimes {
            transfer: transferred + copied,
            generation: generation.map_or(Seconds::ZERO, |generation| generation.duration),
            forward: actor.forward * actor.updates as f64,
            update: actor.update.step_seconds * actor.updates as f64,
        };
        let phases = times.phases(self.method, rollout);
        let course = course(&phases);
        let total = |names: &[&str]| -> f64 {
            phases.iter().filter(|phase| names.contains(&&*phase.name)).map(|phase| phase.duration.value()).sum()
        };
        let tokens = responses as f64 * (rollout.prompt as f64 + lengths.mean());
        let step = course.step.value();
        let of = |amount: f64| if step > 0.0 { amount / step } else { 0.0 };
        let needed = engine.least_memory(rollout.longest());
        let assumptions = self.assumptions(rollout, &lengths, generation);
        Ok(PostTrainingPrediction {
            step_seconds: step,
            generation_seconds: times.generation.value(),
            prefill_seconds: generation.map_or(0.0, |generation| generation.prefill.value()),
            forward_seconds: total(&["log-probabilities", "values", "rewards"]),
            training_seconds: total(&["training"]),
            transfer_seconds: times.transfer.value(),
            samples_per_second: of(responses as f64),
            tokens_per_second: of(tokens),
            groups: self.groups(rollout),
            phases: course.spans,
            engine: generation.map(|Generation { duration, concurrent, mean_concurrent, .. }| EngineAnswer {
                engines,
                tensor,
                responses: of_engine,
                cached_tokens: engine.cached_tokens() as u64,
                concurrent,
                mean_concurrent,
                longest_response: lengths.longest_of(responses).round() as usize,
                tokens_per_second: responses as f64 * lengths.mean() / duration.value(),
            }),
            device_memory_bytes: device_memory.count(),
            peak_memory_bytes: fullest.bytes,
            memory_peak: fullest.peak_in_words(),
            fits: generation.is_some() && needed <= engine.memory() && fullest.bytes <= device_memory.count(),
            memory,
            update: actor.update.clone(),
            assumptions,
        })
    }

    fn groups(&self, rollout: &Rollout) -> Vec<DeviceGroup> {
        let mut roles = vec!["actor"];
        roles.extend(self.method.has_critic().then_some("critic"));
        roles.extend(self.residents(rollout).frozen_models);
        match rollout.placement {
            RolloutPlacement::Colocated => {
                roles.push("rollout engines");
                vec![DeviceGroup { roles: roles.join(", "), devices: self.ranks }]
            }
            RolloutPlacement::Split(devices) => vec![
                DeviceGroup { roles: roles.join(", "), devices: self.ranks },
                DeviceGroup { roles: "rollout engines".into(), devices },
            ],
        }
    }

    fn assumptions(&self, rollout: &Rollout, lengths: &Lengths, generation: Option<Generation>) -> Vec<String> {
        let mut found = self.actor.remarks.clone();
        if rollout.response_p95.is_none() && rollout.response < rollout.response_max {
            let p95 = lengths.quantile(0.95).round();
            found.push(format!("95 % of the responses are taken to have {p95} tokens at most; `response-p95` states it"));
        }
        if rollout.reward == Reward::Verifier {
            found.push("the verifier is taken to cost no time; `reward=model` adds a reward model".into());
        }
        if self.method.has_critic() || rollout.reward == Reward::Model {
            found.push("critic and reward model are taken to have the actor's size".into());
        }
        if generation.is_some() {
            found.push("generation is by a roofline, without an interval".into());
        }
        found
    }
}

/// Durations of a step's parts.
struct StepTimes {
    transfer: Seconds,
    generation: Seconds,
    forward: Seconds,
    update: Seconds,
}

impl StepTimes {
    /// The phases of a step, in the order in which devices take them.
    fn phases(&self, method: PolicyMethod, rollout: &Rollout) -> Vec<Phase> {
        let engines = if rollout.own_devices() > 0 { ENGINES } else { ACTOR };
        let phase = |name: &str, role: &str, groups: &[usize], duration, after: Vec<(usize, usize)>| Phase {
            name: name.into(),
            role: role.into(),
            groups: groups.into(),
            duration,
            after,
        };
        let both = if engines == ACTOR { vec![ACTOR] } else { vec![ACTOR, ENGINES] };
        // Generation waits for the last transfer of weights. The transfer sends the weights of the
        // previous update. With off-policy steps, that update overlapped with this step's
        // generation.
        let mut phases = Vec::new();
        let (generation, transfer) = if rollout.off_policy == 0 { (1, 0) } else { (0, 1) };
        let generate = |after| phase("generation", "rollout engine", &[engines], self.generation, after);
        let send = |after| phase("weights", "actor", &both, self.transfer, after);
        let mut trained = vec![("log-probabilities", "actor", self.forward)];
        trained.extend(rollout.reference.then_some(("log-probabilities", "reference", self.forward)));
        trained.extend((rollout.reward == Reward::Model).then_some(("rewards", "reward model", self.forward)));
        if method.has_critic() {
            trained.extend([("values", "critic", self.forward), ("training", "critic", self.update)]);
        }
        trained.push(("training", "actor", self.update));
        let last = 1 + trained.len();
        if rollout.off_policy == 0 {
            phases.extend([send(vec![(last, 1)]), generate(vec![(transfer, 0)])]);
        } else {
            phases.extend([generate(vec![(transfer, 1)]), send(vec![(generation, 0), (last, 1)])]);
        }
        for (name, role, duration) in trained {
            phases.push(phase(name, role, &[ACTOR], duration, vec![(generation, 0)]));
        }
        phases
    }
}

/// Predicts a step of RL post-training in which the actor trains as `job` says.
///
/// # Errors
/// [`PostTrainingError`] if actor or engines cannot be predicted.
pub fn predict_post_training(
    method: PolicyMethod,
    rollout: &Rollout,
    job: &ActorJob,
    name: &str,
    topology: &Topology,
    costs: &CostModel,
) -> Result<PostTrainingPrediction, PostTrainingError> {
    let actor = ActorCosts::of(job, name, topology, costs)?;
    RoleSetting::new(method, &job.model, &job.plan, &actor, topology, costs)?.predict(rollout)
}
