//! The placements that frameworks of RL post-training support, as data.

use foretell_program::{PolicyMethod, Rollout, RolloutOffload, RolloutPlacement};
use foretell_units::diagnostic::Mistake;
use foretell_units::suggest;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::LazyLock;

const FRAMEWORKS: &str = include_str!("frameworks.yaml");

static LIBRARY: LazyLock<BTreeMap<String, Framework>> =
    LazyLock::new(|| serde_saphyr::from_str(FRAMEWORKS).expect("invariant: the frameworks that are compiled in are well formed"));

/// The placements that a framework supports.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Framework {
    /// Supported methods of training.
    pub methods: Vec<PolicyMethod>,
    /// Stacks of the actor, the usual one first.
    pub stacks: Vec<String>,
    /// Whether engines may share the actor's devices.
    pub colocated: bool,
    /// Whether engines may have separate devices.
    pub split: bool,
    /// The most steps by which the weights of engines may lag those of the actor.
    pub off_policy: usize,
    /// The supported choices of the actor's state to offload while colocated engines generate.
    pub offloads: Vec<RolloutOffload>,
    /// Whether training packs responses.
    pub packing: bool,
    /// The usual share of a device's memory for colocated engines.
    pub memory_share: f64,
    /// The source of these facts.
    pub source: String,
}

impl Framework {
    /// The framework called `name`.
    ///
    /// # Errors
    /// [`Mistake`] with similar names.
    pub fn named(name: &str) -> Result<&'static Self, Mistake> {
        LIBRARY.get(name).ok_or_else(|| Mistake::new(format!("no framework is called `{name}`"), suggest(name, Self::names())))
    }

    /// The names of all frameworks.
    pub fn names() -> impl Iterator<Item = &'static str> {
        LIBRARY.keys().map(String::as_str)
    }

    /// Refuses a method, stack or rollout that the framework does not support.
    ///
    /// # Errors
    /// [`Mistake`] with a hint of what it supports.
    pub fn check(&self, method: PolicyMethod, rollout: &Rollout, stack: &str) -> Result<(), Mistake> {
        let refuse = |what: String, hint: String| Err(Mistake::new(format!("the framework does not run {what}"), hint));
        if !self.methods.contains(&method) {
            let names: Vec<&str> = self.methods.iter().map(|method| method.name()).collect();
            return refuse(format!("`method: {}`", method.name()), format!("it runs {}", names.join(", ")));
        }
        if !self.stacks.iter().any(|known| known == stack) {
            return refuse(format!("actors of `stack: {stack}`"), format!("use one of {}", self.stacks.join(", ")));
        }
        let (is_there, what, hint) = match rollout.placement {
            RolloutPlacement::Colocated => (self.colocated, "colocated engines", "use `placement: {split: DEVICES}`"),
            RolloutPlacement::Split(_) => (self.split, "engines on devices of their own", "use `placement: colocated`"),
        };
        if !is_there {
            return refuse(what.into(), hint.into());
        }
        if rollout.off_policy > self.off_policy {
            return refuse(format!("{} step off policy", rollout.off_policy), format!("use `off_policy: {}`", self.off_policy));
        }
        let is_colocated = rollout.placement == RolloutPlacement::Colocated;
        if is_colocated && !self.offloads.contains(&rollout.offload) {
            let names: Vec<&str> = self.offloads.iter().map(|offload| offload.name()).collect();
            return refuse(format!("`offload: {}`", rollout.offload.name()), format!("it offloads {}", names.join(", ")));
        }
        if rollout.packing && !self.packing {
            return refuse("packed responses".into(), "use `packing: false`".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_framework_runs_its_usual_step() {
        for name in Framework::names() {
            let framework = Framework::named(name).expect("listed");
            let mut rollout = Rollout::new([64, 8], [512, 1024, 4096]);
            rollout.packing = framework.packing;
            rollout.offload = framework.offloads[0];
            for (method, stack) in framework.methods.iter().zip(framework.stacks.iter().cycle()) {
                assert_eq!(framework.check(*method, &rollout, stack), Ok(()), "{name}");
            }
            assert!(framework.check(PolicyMethod::Grpo, &rollout, "ddp").is_err());
        }
    }

    #[test]
    fn what_a_framework_cannot_do_is_refused() {
        let trl = Framework::named("trl").expect("listed");
        let mut rollout = Rollout { packing: false, ..Rollout::new([64, 8], [512, 1024, 4096]) };
        assert!(trl.check(PolicyMethod::Ppo, &rollout, "trl").is_err());
        (rollout.placement, rollout.off_policy) = (RolloutPlacement::Split(4), 1);
        assert!(trl.check(PolicyMethod::Grpo, &rollout, "trl").is_err());
        rollout.off_policy = 0;
        assert!(trl.check(PolicyMethod::Grpo, &rollout, "trl").is_ok());
        assert!(Framework::named("trll").is_err_and(|mistake| mistake.hint.contains("trl")));
    }
}
