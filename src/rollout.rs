//! `--rollout`: the generation of a step of RL post-training, and its roles. Values that it leaves
//! out come from the plan file, from the framework, or from defaults, which the answer names.

use foretell_planner::{FixedRollout, Framework};
use foretell_program::{PolicyMethod, Reward, Rollout, RolloutOffload, RolloutPlacement};
use foretell_units::diagnostic::Mistake;
use foretell_units::suggest;
use std::str::FromStr;

/// The default framework: it runs every method and placement.
const USUAL_FRAMEWORK: &str = "verl";

/// Default numbers of prompts of a step, and of tokens of a prompt and of a response.
const USUAL_PROMPTS: usize = 64;
const USUAL_PROMPT: usize = 512;
const USUAL_RESPONSE: usize = 1024;

/// Default longest response, as a multiple of the mean.
const USUAL_MOST: usize = 4;

/// The parts of a rollout that options state.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RolloutChoices {
    prompts: Option<usize>,
    samples: Option<usize>,
    prompt: Option<usize>,
    response: Option<usize>,
    response_p95: Option<usize>,
    response_max: Option<usize>,
    concurrency: Option<usize>,
    off_policy: Option<usize>,
    tensor: Option<usize>,
    placement: Option<RolloutPlacement>,
    memory_share: Option<f64>,
    sleep: Option<bool>,
    offload: Option<RolloutOffload>,
    reference: Option<bool>,
    reward: Option<Reward>,
    packing: Option<bool>,
    framework: Option<String>,
}

const NAMES: [&str; 17] = [
    "prompts",
    "samples",
    "prompt",
    "response",
    "response-p95",
    "response-max",
    "concurrency",
    "off-policy",
    "tensor",
    "placement",
    "memory-share",
    "sleep",
    "offload",
    "reference",
    "reward",
    "packing",
    "framework",
];

impl FromStr for RolloutChoices {
    type Err = Mistake;

    fn from_str(text: &str) -> Result<Self, Mistake> {
        let mut choices = Self::default();
        let mut seen = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let hint = "write for example prompts=64,samples=8,response=1024";
            let (name, value) = part.split_once('=').ok_or_else(|| Mistake::new(format!("`{part}` has no `=`"), hint))?;
            let name = name.trim().replace('_', "-");
            if seen.contains(&name) {
                return Err(Mistake::new(format!("`{name}` is given twice"), hint));
            }
            choices.set(&name, value.trim())?;
            seen.push(name);
        }
        Ok(choices)
    }
}

impl RolloutChoices {
    fn set(&mut self, name: &str, value: &str) -> Result<(), Mistake> {
        let wrong = |what: &str, hint: &str| Mistake::new(format!("`{name}`: `{value}` is no {what}"), hint);
        let size = || value.parse::<usize>().map(Some).map_err(|_| wrong("whole number", "write for example 64"));
        let switch = || match value {
            "on" | "yes" | "true" => Ok(Some(true)),
            "off" | "no" | "false" => Ok(Some(false)),
            _ => Err(wrong("switch", "write on or off")),
        };
        match name {
            "prompts" => self.prompts = size()?,
            "samples" => self.samples = size()?,
            "prompt" => self.prompt = size()?,
            "response" => self.response = size()?,
            "response-p95" => self.response_p95 = size()?,
            "response-max" => self.response_max = size()?,
            "concurrency" => self.concurrency = size()?,
            "off-policy" => self.off_policy = size()?,
            "tensor" => self.tensor = size()?,
            "placement" => {
                let own = value.strip_prefix("split:").and_then(|devices| devices.parse().ok());
                self.placement = Some(match own {
                    Some(devices) => RolloutPlacement::Split(devices),
                    None if value == "colocated" => RolloutPlacement::Colocated,
                    None => return Err(wrong("placement", "write colocated, or split:8 for engines on 8 devices of their own")),
                });
            }
            "memory-share" => {
                let share = value.parse::<f64>().ok().filter(|share| *share > 0.0 && *share < 1.0);
                self.memory_share = Some(share.ok_or_else(|| wrong("share", "write for example 0.6"))?);
            }
            "sleep" => self.sleep = switch()?,
            "offload" => {
                let found = RolloutOffload::ALL.into_iter().find(|offload| offload.name() == value);
                self.offload = Some(found.ok_or_else(|| wrong("offload", "write none, optimizer or all"))?);
            }
            "reference" => self.reference = switch()?,
            "reward" => {
                self.reward = Some(match value {
                    "verifier" => Reward::Verifier,
                    "model" => Reward::Model,
                    _ => return Err(wrong("reward", "write verifier or model")),
                });
            }
            "packing" => self.packing = switch()?,
            "framework" => {
                Framework::named(value)?;
                self.framework = Some(value.into());
            }
            _ => return Err(Mistake::new(format!("a rollout has no `{name}`"), suggest(name, NAMES))),
        }
        Ok(())
    }

    /// The framework, by name.
    pub fn framework(&self) -> &str {
        self.framework.as_deref().unwrap_or(USUAL_FRAMEWORK)
    }

    /// The rollout of a job, with the defaults of the framework. Adds the defaults that were used
    /// to `taken`, as they would be typed.
    pub fn rollout(&self, method: PolicyMethod, taken: &mut Vec<String>) -> Result<Rollout, Mistake> {
        let framework = Framework::named(self.framework())?;
        let mut defaults = Vec::new();
        let mut or = |name: &str, stated: Option<usize>, usual: usize| {
            stated.unwrap_or_else(|| {
                defaults.push(format!("{name}={usual}"));
                usual
            })
        };
        let prompts = or("prompts", self.prompts, USUAL_PROMPTS);
        let samples = or("samples", self.samples, method.usual_samples());
        let prompt = or("prompt", self.prompt, USUAL_PROMPT);
        let response = or("response", self.response, USUAL_RESPONSE);
        let response_max = or("response-max", self.response_max, USUAL_MOST.saturating_mul(response));
        if self.framework.is_none() {
            defaults.push(format!("framework={USUAL_FRAMEWORK}"));
        }
        if !defaults.is_empty() {
            taken.push(format!("--rollout {}", defaults.join(",")));
        }
        let mut rollout = Rollout::new([prompts, samples], [prompt, response, response_max]);
        rollout.packing = framework.packing;
        rollout.memory_share = framework.memory_share;
        rollout.offload = framework.offloads.first().copied().unwrap_or_default();
        rollout.framework = Some(self.framework().into());
        self.apply(&mut rollout);
        if rollout.own_devices() > 0 && self.offload.is_none() {
            rollout.offload = RolloutOffload::None;
        }
        Ok(rollout)
    }

    /// Overwrites the fields of a rollout that the options state.
    pub fn apply(&self, rollout: &mut Rollout) {
        let choices = self.clone();
        let set = |field: &mut usize, stated: Option<usize>| *field = stated.unwrap_or(*field);
        set(&mut rollout.prompts, choices.prompts);
        set(&mut rollout.samples, choices.samples);
        set(&mut rollout.prompt, choices.prompt);
        set(&mut rollout.response, choices.response);
        set(&mut rollout.response_max, choices.response_max);
        set(&mut rollout.concurrency, choices.concurrency);
        set(&mut rollout.off_policy, choices.off_policy);
        set(&mut rollout.tensor, choices.tensor);
        rollout.response_p95 = choices.response_p95.or(rollout.response_p95);
        rollout.placement = choices.placement.unwrap_or(rollout.placement);
        rollout.memory_share = choices.memory_share.unwrap_or(rollout.memory_share);
        rollout.sleep = choices.sleep.unwrap_or(rollout.sleep);
        rollout.offload = choices.offload.unwrap_or(rollout.offload);
        rollout.reference = choices.reference.unwrap_or(rollout.reference);
        rollout.reward = choices.reward.unwrap_or(rollout.reward);
        rollout.packing = choices.packing.unwrap_or(rollout.packing);
        rollout.framework = choices.framework.or(rollout.framework.take());
    }

    /// The fields that the search must not change.
    pub fn fixed(&self) -> FixedRollout {
        let Self { tensor, placement, memory_share, offload, .. } = *self;
        FixedRollout { tensor, placement, memory_share, offload }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rollouts_are_read_or_refused() {
        let text = "prompts=32,samples=16,prompt=256,response=512,response_max=2048,placement=split:8,off-policy=1,reward=model";
        let choices: RolloutChoices = text.parse().expect("it is well formed");
        let mut taken = Vec::new();
        let rollout = choices.rollout(PolicyMethod::Grpo, &mut taken).expect("it is known");
        assert_eq!((rollout.responses(), rollout.longest(), rollout.own_devices()), (512, 2304, 8));
        assert_eq!((rollout.off_policy, rollout.reward), (1, Reward::Model));
        assert_eq!(taken, ["--rollout framework=verl"]);
        for wrong in [
            "prompts",
            "prompts=x",
            "promts=3",
            "prompts=3,prompts=4",
            "placement=split",
            "sleep=maybe",
            "memory-share=2",
            "framework=x",
        ] {
            assert!(wrong.parse::<RolloutChoices>().is_err(), "{wrong}");
        }
        let mistake = "promts=3".parse::<RolloutChoices>().expect_err("it is misspelt");
        assert!(mistake.hint.contains("prompts"), "{}", mistake.hint);
    }
}
