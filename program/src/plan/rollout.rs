//! RL post-training: a policy generates responses, is rewarded, and trains on them. This module has
//! the step's sizes, and which devices run which role. The layout of a plan is that of the actor,
//! the role that trains.
//!
//! It knows no durations and no memory: the simulator prices the roles.

use super::PlanError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A method of reinforcement learning from rewards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PolicyMethod {
    /// Group relative policy optimisation (Shao et al. 2024): rewards are compared among the
    /// responses to one prompt.
    Grpo,
    /// Proximal policy optimisation (Schulman et al. 2017): a critic, trained beside the actor,
    /// estimates rewards.
    Ppo,
}

impl PolicyMethod {
    /// The name in plan files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Grpo => "grpo",
            Self::Ppo => "ppo",
        }
    }

    /// Whether a critic is trained beside the actor.
    pub const fn has_critic(self) -> bool {
        matches!(self, Self::Ppo)
    }

    /// The usual number of responses to a prompt: TRL's `num_generations`, and one for PPO.
    pub const fn usual_samples(self) -> usize {
        match self {
            Self::Grpo => 8,
            Self::Ppo => 1,
        }
    }
}

/// The devices that run the rollout engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RolloutPlacement {
    /// On the actor's devices, which alternate between generation and training.
    #[default]
    Colocated,
    /// On this number of separate devices, numbered after the actor's.
    Split(usize),
}

/// The actor's state that is moved to the hosts' memory while colocated engines generate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RolloutOffload {
    /// None.
    #[default]
    None,
    /// The optimizer's state.
    Optimizer,
    /// The optimizer's state, the parameters and their gradients.
    All,
}

impl RolloutOffload {
    /// All variants, in order of how much they move.
    pub const ALL: [Self; 3] = [Self::None, Self::Optimizer, Self::All];

    /// The name in plan files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Optimizer => "optimizer",
            Self::All => "all",
        }
    }
}

/// The source of a response's reward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Reward {
    /// A function on CPUs, assumed to take no time.
    #[default]
    Verifier,
    /// A frozen model of the actor's size, which costs a forward pass.
    Model,
}

/// The generation of a step, and its roles beside the actor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rollout {
    /// The number of prompts of a step.
    pub prompts: usize,
    /// The number of responses to each prompt.
    pub samples: usize,
    /// The mean length of a prompt, in tokens.
    pub prompt: usize,
    /// The mean length of a response, in tokens.
    pub response: usize,
    /// The 95th percentile of the lengths of responses, in tokens. If left out, it is twice the
    /// mean, but at most `response_max`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response_p95: Option<usize>,
    /// The most tokens of a response: generation stops there.
    pub response_max: usize,
    /// The number of devices of each engine, over which tensor parallelism shards the model.
    #[serde(default = "one")]
    pub tensor: usize,
    /// The devices that run the engines.
    #[serde(default)]
    pub placement: RolloutPlacement,
    /// The share of a device's memory that an engine reserves for weights, KV cache and workspace.
    #[serde(default = "usual_memory_share")]
    pub memory_share: f64,
    /// The most sequences that an engine generates at once.
    #[serde(default = "usual_concurrency")]
    pub concurrency: usize,
    /// By how many steps the weights that generate may lag those that train: 0, or 1 if generation
    /// overlaps training.
    #[serde(default)]
    pub off_policy: usize,
    /// Whether colocated engines free their memory while the actor trains.
    #[serde(default = "yes")]
    pub sleep: bool,
    /// The actor's state that is moved to the hosts' memory while colocated engines generate.
    #[serde(default)]
    pub offload: RolloutOffload,
    /// Whether a frozen copy of the actor computes log-probabilities for the KL penalty.
    #[serde(default = "yes")]
    pub reference: bool,
    /// The source of rewards.
    #[serde(default)]
    pub reward: Reward,
    /// Whether training packs responses into sequences of the greatest length. Otherwise each
    /// response is padded to the longest of its micro-batch.
    #[serde(default = "yes")]
    pub packing: bool,
    /// The framework that runs the step. The planner's search respects its limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub framework: Option<String>,
}

/// vLLM's `max_num_seqs`.
pub const USUAL_CONCURRENCY: usize = 256;

/// NeMo RL's `gpu_memory_utilization`.
pub const USUAL_MEMORY_SHARE: f64 = 0.6;

/// The most tokens of a prompt or of a response.
const MOST_TOKENS: usize = 1 << 24;

/// The most responses of a step.
const MOST_RESPONSES: usize = 1 << 24;

fn one() -> usize {
    1
}

fn yes() -> bool {
    true
}

fn usual_memory_share() -> f64 {
    USUAL_MEMORY_SHARE
}

fn usual_concurrency() -> usize {
    USUAL_CONCURRENCY
}

impl Rollout {
    /// A colocated rollout of responses of these lengths, with the usual defaults for all else.
    pub fn new([prompts, samples]: [usize; 2], [prompt, response, response_max]: [usize; 3]) -> Self {
        Self {
            prompts,
            samples,
            prompt,
            response,
            response_p95: None,
            response_max,
            tensor: 1,
            placement: RolloutPlacement::Colocated,
            memory_share: USUAL_MEMORY_SHARE,
            concurrency: USUAL_CONCURRENCY,
            off_policy: 0,
            sleep: true,
            offload: RolloutOffload::None,
            reference: true,
            reward: Reward::Verifier,
            packing: true,
            framework: None,
        }
    }

    /// The number of responses of a step.
    pub const fn responses(&self) -> usize {
        self.prompts * self.samples
    }

    /// The tokens of a mean prompt with the longest response.
    pub const fn longest(&self) -> usize {
        self.prompt + self.response_max
    }

    /// The number of devices that only the engines use.
    pub const fn own_devices(&self) -> usize {
        match self.placement {
            RolloutPlacement::Colocated => 0,
            RolloutPlacement::Split(devices) => devices,
        }
    }

    /// Refuses sizes that contradict each other, on a plan whose updates have `update` responses.
    ///
    /// # Errors
    /// [`PlanError::Invalid`] with the field and a hint, [`PlanError::Indivisible`].
    pub fn validate(&self, update: usize) -> Result<(), PlanError> {
        let refuse =
            |field, reason: String, hint: &str| Err(PlanError::Invalid { field, reason, hint: format!("{hint} in `rollout`") });
        let sizes = [
            ("prompts", self.prompts, MOST_RESPONSES),
            ("samples", self.samples, MOST_RESPONSES),
            ("prompt", self.prompt, MOST_TOKENS),
            ("response", self.response, MOST_TOKENS),
            ("response_max", self.response_max, MOST_TOKENS),
            ("tensor", self.tensor, crate::MOST_RANKS),
            ("concurrency", self.concurrency, MOST_RESPONSES),
        ];
        for (field, value, most) in sizes {
            if value == 0 || value > most {
                return refuse(field, format!("{value} is not from 1 to {most}"), "write another size");
            }
        }
        if self.prompts.checked_mul(self.samples).is_none_or(|all| all > MOST_RESPONSES) {
            return refuse("samples", format!("a step has more than {MOST_RESPONSES} responses"), "lower `prompts` or `samples`");
        }
        if self.response > self.response_max {
            let reason = format!("{} is less than the mean, {}", self.response_max, self.response);
            return refuse("response_max", reason, "raise `response_max` or lower `response`");
        }
        if let Some(p95) = self.response_p95.filter(|p95| !(self.response..=self.response_max).contains(p95)) {
            let reason = format!("{p95} is not between the mean, {}, and the most, {}", self.response, self.response_max);
            return refuse("response_p95", reason, "write a length between them");
        }
        if !(self.memory_share > 0.0 && self.memory_share < 1.0) {
            return refuse("memory_share", format!("{} is no share", self.memory_share), "write a share such as 0.6");
        }
        if self.off_policy > 1 {
            return refuse("off_policy", format!("{} steps are not planned", self.off_policy), "write 0 or 1");
        }
        match self.placement {
            RolloutPlacement::Colocated if self.off_policy > 0 => {
                let reason = "engines on the actor's devices cannot generate while it trains".to_owned();
                return refuse("off_policy", reason, "write `off_policy: 0`, or `placement: {split: DEVICES}`");
            }
            RolloutPlacement::Split(devices) if devices == 0 || !devices.is_multiple_of(self.tensor) => {
                return Err(PlanError::Indivisible {
                    what: "rollout.placement.split".into(),
                    value: devices,
                    by: "rollout.tensor".into(),
                    divisor: self.tensor,
                    hint: "give engines a multiple of `tensor` devices".into(),
                });
            }
            RolloutPlacement::Split(_) if self.offload != RolloutOffload::None => {
                let reason = "engines on devices of their own drive nothing out".to_owned();
                return refuse("offload", reason, "leave `offload` out, or write `placement: colocated`");
            }
            _ => {}
        }
        if update == 0 || !self.responses().is_multiple_of(update) {
            return Err(PlanError::Indivisible {
                what: "rollout's responses, prompts x samples".into(),
                value: self.responses(),
                by: "global_batch, the responses of an update".into(),
                divisor: update,
                hint: "choose a global batch that divides the responses of a step".into(),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradictions_are_refused_and_the_usual_is_not() {
        let usual = Rollout::new([64, 8], [512, 1024, 4096]);
        assert_eq!(usual.validate(512), Ok(()));
        assert_eq!(usual.validate(128), Ok(()));
        type Change = fn(&mut Rollout);
        let wrong: [Change; 9] = [
            |rollout| rollout.prompts = 0,
            |rollout| rollout.response = 5000,
            |rollout| rollout.response_p95 = Some(512),
            |rollout| rollout.memory_share = 1.0,
            |rollout| rollout.off_policy = 1,
            |rollout| rollout.off_policy = 2,
            |rollout| (rollout.placement, rollout.tensor) = (RolloutPlacement::Split(6), 4),
            |rollout| rollout.placement = RolloutPlacement::Split(0),
            |rollout| (rollout.placement, rollout.offload) = (RolloutPlacement::Split(4), RolloutOffload::All),
        ];
        for change in wrong {
            let mut rollout = usual.clone();
            change(&mut rollout);
            assert!(rollout.validate(512).is_err(), "{rollout:?}");
        }
        assert!(usual.validate(100).is_err());
    }
}
