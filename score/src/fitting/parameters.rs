//! The fitted values: factors on priors, each at one level of a hierarchy.
//!
//! A stack's value is its prior, times a factor of all stacks, times one of its family, times its
//! own; a device's efficiency is its prior, times the factor of its generation ([`Factors`]). [`STACK_KINDS`] says which values have a factor at which level, and how far it may
//! lie from 1. Most have none of their own: a value that left-out sources do not need is not fitted.

use super::cases::{Case, Quantity};
use crate::run::Run;
use foretell_models::Model;
use foretell_simulator::gpu::{AttentionKind, Factors};
use std::collections::BTreeMap;

/// The profile, or the set of profiles, that a factor multiplies a value of.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    EveryStack,
    Family(String),
    Stack(String),
    Generation(String),
    Network,
}

/// A fitted factor on a value.
#[derive(Clone, Debug)]
pub struct Parameter {
    pub owner: Owner,
    /// Name of the value in the owner's profiles.
    pub name: String,
    /// Standard deviation of the factor's logarithm before any row is seen.
    pub spread: f64,
}

/// A value of stacks that is fitted, with the spread of its factors.
struct StackKind {
    name: &'static str,
    quantity: Quantity,
    /// Spread of the factor of all stacks. 0 without one.
    every_stack: f64,
    /// Spread of the factor of a family. 0 without one.
    family: f64,
    /// Spread of the factor of a stack. 0 without one.
    stack: f64,
    /// Whether a prediction may depend on the value.
    matters: fn(&Run) -> bool,
}

const fn always(_: &Run) -> bool {
    true
}

fn is_convolutional(run: &Run) -> bool {
    matches!(run.model, Model::Resnet(_))
}

fn is_mixture(run: &Run) -> bool {
    matches!(run.model, Model::Moe(_))
}

fn attends(run: &Run) -> bool {
    !is_convolutional(run)
}

fn fuses_attention(run: &Run) -> bool {
    matches!(run.stack.attention, AttentionKind::Fused { .. })
}

/// The fitted values of stacks. Which levels they have was chosen by the error of left-out sources
/// (`benches/hyperparameters.py`); `docs/reference/published-measurements.md` lists what was tried.
const STACK_KINDS: &[StackKind] = {
    use Quantity::{Memory, Step};
    const fn kind(
        name: &'static str,
        quantity: Quantity,
        [every_stack, family, stack]: [f64; 3],
        matters: fn(&Run) -> bool,
    ) -> StackKind {
        StackKind { name, quantity, every_stack, family, stack, matters }
    }
    &[
        kind("product_scale", Step, [0.0, 0.0, 0.05], always),
        kind("elementwise", Step, [0.0, 0.125, 0.4], always),
        kind("fused_attention", Step, [0.1, 0.2, 0.0], |run| attends(run) && fuses_attention(run)),
        kind("unfused_attention", Step, [0.5, 0.0, 0.0], |run| attends(run) && !fuses_attention(run)),
        kind("host_launch", Step, [0.4, 0.4, 0.0], always),
        kind("step_overhead", Step, [0.0, 1.0, 0.0], always),
        kind("communication", Step, [0.1, 0.1, 0.0], |run| run.devices() > 1),
        kind("exchange", Step, [0.4, 0.0, 0.0], is_mixture),
        kind("expert_product", Step, [0.0, 0.075, 0.0], is_mixture),
        kind("routing_traffic", Step, [0.0, 0.7, 0.0], is_mixture),
        kind("cast_bytes", Step, [0.5, 0.0, 0.0], |run| run.format.is_cast()),
        kind("memory_activations", Memory, [0.0, 0.0, 0.15], always),
        kind("memory_buffers", Memory, [0.0, 0.0, 0.7], always),
        kind("memory_logit", Memory, [0.3, 0.0, 0.0], always),
    ]
};

/// Spread of a generation's factors on the efficiency of products and of fused attention. Devices
/// have none of their own: with them, left-out sources are no less off.
const GENERATION: [f64; 2] = [0.08, 0.12];
/// Spread of the factors on the network's efficiency and latency.
const NETWORK: [f64; 2] = [0.1, 0.4];

impl Parameter {
    /// Returns whether the prediction of a run may depend on the parameter.
    pub fn affects(&self, run: &Run, quantity: Quantity) -> bool {
        let owns = match &self.owner {
            Owner::EveryStack => true,
            Owner::Family(name) => run.stack.family == *name,
            Owner::Stack(name) => run.stack_name == *name,
            Owner::Generation(name) => run.clusters().any(|cluster| cluster.gpu.generation == *name),
            Owner::Network => run.devices() > run.cluster.devices_per_node,
        };
        let stack_kind = STACK_KINDS.iter().find(|kind| kind.name == self.name && kind.quantity == quantity);
        owns && match self.owner {
            Owner::EveryStack | Owner::Family(_) | Owner::Stack(_) => {
                stack_kind.is_some_and(|kind| (kind.matters)(run)) && run.stack.has_value(&self.name)
            }
            Owner::Generation(_) => self.name != "attention" || attends(run) && fuses_attention(run),
            Owner::Network => true,
        }
    }

    /// Returns a name that parameters share which move a run's prediction alike.
    pub fn effect(&self, run: &Run) -> String {
        let is_on_devices = matches!(self.owner, Owner::Generation(_));
        match self.name.as_str() {
            // On unequal devices a factor moves only some of them.
            name if is_on_devices && run.clusters().count() > 1 => format!("{name} {:?}", self.owner),
            "product" | "product_scale" => "product".into(),
            "attention" | "fused_attention" => "attention".into(),
            name => name.into(),
        }
    }

    /// Multiplies the value in a run.
    pub fn scale(&self, run: &mut Run, factor: f64) {
        match &self.owner {
            Owner::EveryStack | Owner::Family(_) | Owner::Stack(_) => {
                run.stack.scale(&self.name, factor);
            }
            Owner::Network => run.clusters_mut().for_each(|cluster| {
                cluster.network.scale_value(&self.name, factor);
            }),
            Owner::Generation(generation) => {
                let alike = run.clusters_mut().filter(|cluster| cluster.gpu.generation == *generation);
                alike.for_each(|cluster| {
                    cluster.gpu.scale_value(&self.name, factor);
                });
            }
        }
    }

    /// Returns the logarithm of the factor in a set of factors, 0 if it has none.
    pub fn offset_in(&self, factors: &Factors) -> f64 {
        let found = match &self.owner {
            Owner::EveryStack => Some(&factors.every_stack),
            Owner::Family(name) => factors.families.get(name),
            Owner::Stack(name) => factors.stacks.get(name),
            Owner::Generation(name) => factors.generations.get(name),
            Owner::Network => Some(&factors.network),
        };
        found.and_then(|values| values.get(&self.name)).map_or(0.0, |factor| factor.ln())
    }
}

/// Returns the factors of parameters with these offsets.
pub fn factors(parameters: &[Parameter], offsets: &[f64]) -> Factors {
    let mut factors = Factors::default();
    for (Parameter { owner, name, .. }, offset) in parameters.iter().zip(offsets) {
        let values = match owner.clone() {
            Owner::EveryStack => &mut factors.every_stack,
            Owner::Family(family) => factors.families.entry(family).or_default(),
            Owner::Stack(stack) => factors.stacks.entry(stack).or_default(),
            Owner::Generation(generation) => factors.generations.entry(generation).or_default(),
            Owner::Network => &mut factors.network,
        };
        values.insert(name.clone(), offset.exp());
    }
    factors
}

/// Multiplies all values of a run, which has prior values.
pub fn apply(factors: &Factors, run: &mut Run) {
    // All names are those of the tables above, which the profiles know.
    let _ = factors.apply_to_stack(&run.stack_name, &mut run.stack);
    for cluster in run.clusters_mut() {
        let _ = factors.apply_to_device(&mut cluster.gpu);
        let _ = factors.apply_to_network(&mut cluster.network);
    }
}

/// Returns the parameters that the measured cases may determine.
pub fn parameters(cases: &[Case], quantity: Quantity) -> Vec<Parameter> {
    let measured: Vec<&Case> = cases.iter().filter(|case| case.measured(quantity).is_some()).collect();
    let mut spreads: BTreeMap<(Owner, String), f64> = BTreeMap::new();
    for kind in STACK_KINDS.iter().filter(|kind| kind.quantity == quantity) {
        for run in measured.iter().map(|case| &case.run) {
            if !(kind.matters)(run) || !run.stack.has_value(kind.name) {
                continue;
            }
            let levels = [
                (Owner::EveryStack, kind.every_stack),
                (Owner::Family(run.stack.family.clone()), kind.family),
                (Owner::Stack(run.stack_name.clone()), kind.stack),
            ];
            spreads.extend(
                levels.into_iter().filter(|(_, spread)| *spread > 0.0).map(|(owner, spread)| ((owner, kind.name.into()), spread)),
            );
        }
    }
    if quantity == Quantity::Step {
        device_and_network_values(&measured, &mut spreads);
    }
    spreads.into_iter().map(|((owner, name), spread)| Parameter { owner, name, spread }).collect()
}

fn device_and_network_values(measured: &[&Case], spreads: &mut BTreeMap<(Owner, String), f64>) {
    let [product, attention] = GENERATION;
    for run in measured.iter().map(|case| &case.run) {
        for cluster in run.clusters() {
            let mut add = |name: &str, spread: f64| {
                spreads.insert((Owner::Generation(cluster.gpu.generation.clone()), name.into()), spread);
            };
            add("product", product);
            if attends(run) && fuses_attention(run) {
                add("attention", attention);
            }
        }
    }
    let [efficiency, latency] = NETWORK;
    spreads.insert((Owner::Network, "efficiency".into()), efficiency);
    spreads.insert((Owner::Network, "latency_scale".into()), latency);
}
