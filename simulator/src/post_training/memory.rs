//! Memory of a device in each phase: what each role holds, and the phase that needs the most.
//!
//! The computation of log-probabilities has the same state as training but no gradients, and needs
//! less memory. So the training phase stands for both.

use super::engine::Engine;
use foretell_program::{Footprint, Rollout, RolloutOffload, RolloutPlacement};
use foretell_units::Bytes;
use schemars::JsonSchema;
use serde::Serialize;

/// Memory that a role holds on a device.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct RoleMemory {
    /// The role and the contents, such as `actor: optimizer state`.
    pub holder: String,
    /// Its size.
    pub bytes: u64,
}

/// Memory of one device of a group in a phase.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct PhaseMemory {
    /// Index of the group of devices.
    pub group: usize,
    /// The phase: `generation` or `training`.
    pub phase: String,
    /// The contents by role, the largest first.
    pub holders: Vec<RoleMemory>,
    /// The sum over all holders.
    pub bytes: u64,
}

impl PhaseMemory {
    fn new(group: usize, phase: &str, holders: impl IntoIterator<Item = (String, Bytes)>) -> Self {
        let holders = holders.into_iter().filter(|(_, bytes)| *bytes > Bytes::ZERO);
        let mut holders: Vec<RoleMemory> = holders.map(|(holder, bytes)| RoleMemory { holder, bytes: bytes.count() }).collect();
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        Self { group, phase: phase.into(), bytes: holders.iter().map(|holder| holder.bytes).sum(), holders }
    }

    /// Describes the phase and its three largest holders.
    pub fn peak_in_words(&self) -> String {
        let largest: Vec<String> =
            self.holders.iter().take(3).map(|holder| format!("{} {}", holder.holder, Bytes::new(holder.bytes))).collect();
        format!("{}: {}", self.phase, largest.join(", "))
    }
}

/// What roles other than the engine hold on a device of the actor, between phases.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Residents {
    /// The memory of the actor's fullest rank while it trains.
    pub actor: Footprint,
    /// A rank's shard of a frozen model of the actor's size, at two bytes per parameter.
    pub frozen: Bytes,
    /// The names of these models: reference and reward model.
    pub frozen_models: Vec<&'static str>,
    /// Whether a critic is trained. It has as much state as the actor.
    pub has_critic: bool,
}

impl Residents {
    /// The state of the actor or critic that stays on a device while engines generate.
    fn kept(&self, offload: RolloutOffload) -> [(&'static str, Bytes); 3] {
        let Footprint { parameters, gradients, optimizer_state, .. } = self.actor;
        let if_kept = |bytes, most| if offload <= most { bytes } else { Bytes::ZERO };
        [
            ("optimizer state", if_kept(optimizer_state, RolloutOffload::None)),
            ("parameters", if_kept(parameters, RolloutOffload::Optimizer)),
            ("gradients", if_kept(gradients, RolloutOffload::Optimizer)),
        ]
    }

    /// Bytes that a device copies to its host before engines generate, and back afterwards.
    pub fn offloaded(&self, offload: RolloutOffload) -> Bytes {
        let all = |offload| self.kept(offload).into_iter().map(|(_, bytes)| bytes).sum::<Bytes>();
        let trained = if self.has_critic { 2 } else { 1 };
        Bytes::new((all(RolloutOffload::None).count() - all(offload).count()) * trained)
    }

    /// What stays on a device with colocated engines while they generate.
    fn beside_engines(&self, offload: RolloutOffload) -> Vec<(String, Bytes)> {
        let mut held = Vec::new();
        for role in ["actor", "critic"].into_iter().take(if self.has_critic { 2 } else { 1 }) {
            held.extend(self.kept(offload).map(|(what, bytes)| (format!("{role}: {what}"), bytes)));
        }
        held.extend(self.frozen_in(offload));
        held.push(("context".into(), self.actor.context));
        held
    }

    /// The frozen models that stay on a device. They are offloaded together with the parameters.
    fn frozen_in(&self, offload: RolloutOffload) -> Vec<(String, Bytes)> {
        let bytes = if offload == RolloutOffload::All { Bytes::ZERO } else { self.frozen };
        self.frozen_models.iter().map(|role| ((*role).to_owned(), bytes)).collect()
    }

    /// Bytes that other roles hold on a device while colocated engines generate.
    pub fn beside(&self, offload: RolloutOffload) -> Bytes {
        self.beside_engines(offload).into_iter().map(|(_, bytes)| bytes).sum()
    }

    /// What a device of the actor holds while it trains, without engines.
    fn training(&self) -> Vec<(String, Bytes)> {
        let mut held: Vec<(String, Bytes)> =
            self.actor.parts().into_iter().map(|(what, bytes)| (format!("actor: {what}"), bytes)).collect();
        if self.has_critic {
            held.extend(self.kept(RolloutOffload::None).map(|(what, bytes)| (format!("critic: {what}"), bytes)));
        }
        held.extend(self.frozen_in(RolloutOffload::None));
        held
    }
}

/// The memory of a device of each group in each phase.
pub fn phases(rollout: &Rollout, engine: &Engine, residents: &Residents, longest: usize) -> Vec<PhaseMemory> {
    let own = engine.memory().max(engine.least_memory(longest));
    let rest = Bytes::new(own.count() - engine.weights().count().min(own.count()));
    let workspace = engine.workspace().min(rest);
    let cache = Bytes::new(rest.count() - workspace.count());
    let of_engine = || {
        let parts = [("weights", engine.weights()), ("KV cache", cache), ("workspace", workspace)];
        parts.map(|(what, bytes)| (format!("engine: {what}"), bytes))
    };
    match rollout.placement {
        RolloutPlacement::Colocated => {
            let asleep = if rollout.sleep { Vec::new() } else { of_engine().to_vec() };
            let generation = of_engine().into_iter().chain(residents.beside_engines(rollout.offload));
            vec![
                PhaseMemory::new(0, "generation", generation),
                PhaseMemory::new(0, "training", residents.training().into_iter().chain(asleep)),
            ]
        }
        RolloutPlacement::Split(_) => {
            let generation = of_engine().into_iter().chain([("context".to_owned(), residents.actor.context)]);
            vec![PhaseMemory::new(0, "training", residents.training()), PhaseMemory::new(1, "generation", generation)]
        }
    }
}
