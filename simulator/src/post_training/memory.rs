//! Memory of a device in each phase: what the roles hold, and what holds the most.
//!
//! Log-probabilities are computed without gradients, with the same state, and need less than
//! training. So training stands for both.

use super::engine::Engine;
use foretell_program::{Footprint, Rollout, RolloutOffload, RolloutPlacement};
use foretell_units::Bytes;
use schemars::JsonSchema;
use serde::Serialize;

/// What a role holds of a device.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct RoleMemory {
    /// Who holds it, and what it is, such as `actor: optimizer state`.
    pub holder: String,
    /// Its size.
    pub bytes: u64,
}

/// Memory of a device of a group in a phase.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct PhaseMemory {
    /// Index of the group of devices.
    pub group: usize,
    /// The phase: `generation` or `training`.
    pub phase: String,
    /// What the roles hold, the largest first.
    pub holders: Vec<RoleMemory>,
    /// All of it.
    pub bytes: u64,
}

impl PhaseMemory {
    fn new(group: usize, phase: &str, holders: impl IntoIterator<Item = (String, Bytes)>) -> Self {
        let holders = holders.into_iter().filter(|(_, bytes)| *bytes > Bytes::ZERO);
        let mut holders: Vec<RoleMemory> = holders.map(|(holder, bytes)| RoleMemory { holder, bytes: bytes.count() }).collect();
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        Self { group, phase: phase.into(), bytes: holders.iter().map(|holder| holder.bytes).sum(), holders }
    }

    /// What holds the most, in words.
    pub fn peak_in_words(&self) -> String {
        let largest: Vec<String> =
            self.holders.iter().take(3).map(|holder| format!("{} {}", holder.holder, Bytes::new(holder.bytes))).collect();
        format!("{}: {}", self.phase, largest.join(", "))
    }
}

/// What roles other than the engine hold of a device of the actor, between phases.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Residents {
    /// The fullest rank of the actor, while it trains.
    pub actor: Footprint,
    /// A frozen model of the actor's size: its shard on a rank, in two bytes a parameter.
    pub frozen: Bytes,
    /// How many such models there are: reference and reward model.
    pub frozen_models: Vec<&'static str>,
    /// Whether a critic is trained, which has the state of another actor.
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

    /// Bytes that a device sends to its host before engines generate, and gets back after it.
    pub fn offloaded(&self, offload: RolloutOffload) -> Bytes {
        let all = |offload| self.kept(offload).into_iter().map(|(_, bytes)| bytes).sum::<Bytes>();
        let trained = if self.has_critic { 2 } else { 1 };
        Bytes::new((all(RolloutOffload::None).count() - all(offload).count()) * trained)
    }

    /// What stays beside colocated engines while they generate.
    fn beside_engines(&self, offload: RolloutOffload) -> Vec<(String, Bytes)> {
        let mut held = Vec::new();
        for role in ["actor", "critic"].into_iter().take(if self.has_critic { 2 } else { 1 }) {
            held.extend(self.kept(offload).map(|(what, bytes)| (format!("{role}: {what}"), bytes)));
        }
        held.extend(self.frozen_in(offload));
        held.push(("context".into(), self.actor.context));
        held
    }

    /// Frozen models: they leave with the parameters.
    fn frozen_in(&self, offload: RolloutOffload) -> Vec<(String, Bytes)> {
        let bytes = if offload == RolloutOffload::All { Bytes::ZERO } else { self.frozen };
        self.frozen_models.iter().map(|role| ((*role).to_owned(), bytes)).collect()
    }

    /// The bytes that colocated engines leave to others.
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
