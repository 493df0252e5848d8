//! The fitted values, their priors, and the factors that related values share.
//!
//! The prior is hierarchical. All stacks of a family deviate from their priors by a common factor,
//! and so do a stack and its variants within the family, and all devices of a generation. Such a
//! factor is a parameter of its own. A value's offset is the sum of its own and those of its
//! factors.

use super::cases::{Case, Quantity};
use crate::run::Run;
use foretell_models::Model;
use foretell_simulator::gpu::{AttentionKind, Fp8Scaling, Profiles};
use std::collections::{BTreeMap, BTreeSet};

/// The profile, or the set of profiles, that a parameter belongs to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    Device(String),
    Network,
    Stack(String),
    /// All stacks of a family; the parameter is their shared factor.
    Family(String),
    /// A stack and its variants; the parameter is their shared factor.
    Branch(String),
    /// All devices of a generation; the parameter is their shared factor.
    Generation(String),
}

/// Share of a stack value's variance that is its family's.
const FAMILY_SHARE: f64 = 0.7;
/// Share of the remaining variance that is its branch's, if the stack has one.
const BRANCH_SHARE: f64 = 0.8;
/// Share of a device value's variance that is its generation's.
const GENERATION_SHARE: f64 = 0.8;

/// Returns the share of a value's variance that a shared factor has.
fn variance_share(owner: &Owner) -> f64 {
    match owner {
        Owner::Generation(_) => GENERATION_SHARE,
        Owner::Branch(_) => (1.0 - FAMILY_SHARE) * BRANCH_SHARE,
        _ => FAMILY_SHARE,
    }
}

/// A fitted value, or a factor that several share.
#[derive(Clone, Debug)]
pub struct Parameter {
    pub owner: Owner,
    /// Name of the value in the owner's profile.
    pub name: String,
    /// Value in the profiles.
    pub prior: f64,
    /// Smallest and largest admissible value.
    pub bounds: [f64; 2],
    /// Standard deviation of the logarithm of the value over the prior.
    pub spread: f64,
    /// Index of the nearest shared factor, which may itself have one.
    pub factor: Option<usize>,
}

impl Parameter {
    fn new(owner: Owner, name: String, spread: f64) -> Self {
        Self { owner, name, prior: 1.0, bounds: [0.0, f64::INFINITY], spread, factor: None }
    }

    /// Returns whether the prediction of a run may depend on the parameter.
    pub fn affects(&self, run: &Run) -> bool {
        let owns = match &self.owner {
            Owner::Device(name) => run.clusters().any(|cluster| cluster.device == *name),
            Owner::Network => run.devices() > run.cluster.devices_per_node,
            Owner::Stack(name) => run.stack_name == *name,
            Owner::Family(name) => run.stack.family == *name,
            Owner::Branch(name) => run.stack_name == *name || run.stack.variant_of.as_ref() == Some(name),
            Owner::Generation(name) => run.clusters().any(|cluster| cluster.gpu.generation == *name),
        };
        let is_fused = matches!(run.stack.attention, AttentionKind::Fused { .. });
        let is_moe = matches!(run.model, Model::Moe(_));
        owns && match (&self.owner, self.name.split_once(':')) {
            (Owner::Stack(_), Some(("product", device))) => run.cluster.device == device,
            (Owner::Family(_) | Owner::Branch(_), Some(("attention", kind))) => {
                !matches!(run.model, Model::Resnet(_)) && is_fused == (kind == "fused")
            }
            (Owner::Generation(_), None) => self.name == "product" || is_fused,
            (_, Some(("format" | "product", format))) => run.format.name() == format,
            (_, Some((_, "routing"))) => is_moe,
            (_, Some((_, "norm"))) => matches!(run.model, Model::Resnet(_)),
            (_, Some(_)) => true,
            (Owner::Device(_), None) => is_fused,
            (_, None) => match self.name.as_str() {
                "expert_product" | "exchange" => is_moe,
                "cast_bytes" => run.format.is_cast(),
                "scaled_by_row" => run.workload.fp8_scaling == Fp8Scaling::Row,
                "communication" | "compute_slowdown" | "gradient_bytes" => run.devices() > 1,
                "attention" => !matches!(run.model, Model::Resnet(_)),
                _ => true,
            },
        }
    }

    /// Returns the effect of the parameter. Parameters of the same effect have the same slope.
    pub fn effect(&self) -> &str {
        match self.name.as_str() {
            name if name == "product_scale" || name.starts_with("product:") || name.starts_with("format:") => "product",
            name if name.starts_with("attention") => "attention",
            name => name,
        }
    }

    /// Returns whether the parameter is a shared factor.
    pub fn is_factor(&self) -> bool {
        matches!(self.owner, Owner::Family(_) | Owner::Branch(_) | Owner::Generation(_))
    }

    /// Sets the value in a run. A shared factor has no effect of its own: the values that share it
    /// include it.
    pub fn set(&self, run: &mut Run, value: f64) {
        match &self.owner {
            Owner::Stack(_) => {
                run.stack.set_value(&self.name, value);
            }
            Owner::Network => run.clusters_mut().for_each(|cluster| {
                cluster.set_value(&self.name, value);
            }),
            Owner::Device(name) => run.clusters_mut().filter(|cluster| cluster.device == *name).for_each(|cluster| {
                cluster.gpu.set_value(&self.name, value);
            }),
            Owner::Family(_) | Owner::Branch(_) | Owner::Generation(_) => {}
        }
    }

    fn value(&self, run: &Run) -> Option<f64> {
        match &self.owner {
            Owner::Stack(_) => run.stack.value(&self.name),
            Owner::Network => run.cluster.value(&self.name),
            Owner::Device(name) => run.clusters().find(|cluster| cluster.device == *name)?.gpu.value(&self.name),
            Owner::Family(_) | Owner::Branch(_) | Owner::Generation(_) => Some(1.0),
        }
    }
}

/// Returns the parameters that the measured cases may determine, followed by their shared factors.
pub fn parameters(cases: &[Case], quantity: Quantity, profiles: &Profiles) -> Vec<Parameter> {
    let mut spreads: BTreeMap<(Owner, String), f64> = BTreeMap::new();
    let mut by_stack: BTreeMap<&str, Vec<&Case>> = BTreeMap::new();
    for case in cases.iter().filter(|case| case.measured(quantity).is_some()) {
        by_stack.entry(&case.run.stack_name).or_default().push(case);
    }
    for (stack, cases) in &by_stack {
        let mut add = |name: &str, spread: f64| {
            spreads.insert((Owner::Stack((*stack).into()), name.into()), spread);
        };
        match quantity {
            Quantity::Memory => memory_values(cases, &mut add),
            Quantity::Step => time_values(cases, &mut add),
        }
    }
    if quantity == Quantity::Step {
        device_and_network_values(cases, &mut spreads);
    }
    let with_prior = |((owner, name), spread): ((Owner, String), f64)| {
        let mut parameter = Parameter::new(owner, name, spread);
        let mut affected = cases.iter().filter(|case| parameter.affects(&case.run));
        parameter.prior = affected.find_map(|case| parameter.value(&case.run))?;
        parameter.bounds = bounds(&parameter);
        // A logarithm cannot move a value away from zero.
        (parameter.prior > 0.0).then_some(parameter)
    };
    let own: Vec<Parameter> = spreads.into_iter().filter_map(with_prior).collect();
    if quantity == Quantity::Step { with_factors(own, profiles) } else { own }
}

/// Returns the bounds that physics sets on a value: a device reaches a share of its data sheet.
fn bounds(parameter: &Parameter) -> [f64; 2] {
    match parameter.owner {
        Owner::Device(_) => [0.05, 1.0],
        _ => [0.0, f64::INFINITY],
    }
}

/// Adds the values of a stack that memory depends on, with their spreads.
fn memory_values(cases: &[&Case], add: &mut dyn FnMut(&str, f64)) {
    add("memory_activations", 0.15);
    add("memory_gradient", 0.3);
    add("memory_logit", 0.4);
    add("memory_buffers", 0.7);
    if cases.iter().any(|case| matches!(case.run.stack.attention, AttentionKind::Unfused { .. })) {
        add("memory_score", 0.3);
    }
    if cases.iter().any(|case| case.row.mem_kind.contains("nvidia-smi")) {
        add("memory_context", 0.5);
    }
}

/// Adds the values of a stack that step time depends on, with their spreads.
fn time_values(cases: &[&Case], add: &mut dyn FnMut(&str, f64)) {
    let any = |condition: &dyn Fn(&Run) -> bool| cases.iter().any(|case| condition(&case.run));
    add("product_scale", 0.10);
    add("elementwise", 0.30);
    add("host_launch", 0.50);
    add("step_overhead", 0.70);
    add("backward_launch", 0.30);
    if any(&|run| !matches!(run.model, Model::Resnet(_))) {
        let is_unfused = any(&|run| matches!(run.stack.attention, AttentionKind::Unfused { .. }));
        add("attention", if is_unfused { 0.4 } else { 0.25 });
    }
    if any(&|run| matches!(run.model, Model::Resnet(_))) {
        add("traffic:norm", 0.3);
    }
    if any(&|run| run.devices() > 1) {
        add("communication", 0.25);
    }
    if any(&|run| run.plan.layout.tensor * run.plan.layout.pipeline > 1) {
        add("launches:exchange", 0.3);
        add("partitioned_message", 0.7);
        add("tensor_wait", 0.7);
    }
    add("micro_batch_overhead", 0.7);
    if any(&|run| run.format.is_cast()) {
        add("cast_bytes", 0.35);
    }
    if any(&|run| run.workload.fp8_scaling == Fp8Scaling::Row) {
        add("scaled_by_row", 0.35);
    }
    if any(&|run| matches!(run.model, Model::Moe(_))) {
        add("expert_product", 0.2);
        add("exchange", 0.4);
        add("traffic:routing", 0.5);
        add("launches:routing", 0.5);
    }
    let devices: BTreeSet<&str> = cases.iter().map(|case| case.run.cluster.device.as_str()).collect();
    if devices.len() > 1 {
        devices.iter().for_each(|device| add(&format!("product:{device}"), 0.06));
    }
    let formats: BTreeSet<&str> = cases.iter().map(|case| case.run.format.name()).collect();
    if formats.len() > 1 {
        formats.iter().for_each(|format| add(&format!("format:{format}"), 0.06));
    }
}

fn device_and_network_values(cases: &[Case], spreads: &mut BTreeMap<(Owner, String), f64>) {
    for case in cases {
        for cluster in case.run.clusters() {
            let mut add = |name: String, spread: f64| {
                spreads.insert((Owner::Device(cluster.device.clone()), name), spread);
            };
            add(format!("product:{}", case.run.format), if cluster.gpu.estimated { 0.25 } else { 0.08 });
            if matches!(case.run.stack.attention, AttentionKind::Fused { .. }) {
                add("attention".into(), 0.12);
            }
        }
    }
    spreads.insert((Owner::Network, "efficiency".into()), 0.1);
    spreads.insert((Owner::Network, "latency_scale".into()), 0.4);
}

/// Returns the shared factors of a value by owner and name, the widest first.
pub fn factors_of(owner: &Owner, name: &str, profiles: &Profiles) -> Vec<(Owner, String)> {
    match owner {
        Owner::Stack(stack_name) => {
            let Ok(stack) = profiles.stack(stack_name) else { return Vec::new() };
            let name = match (name, stack.attention) {
                // A stack's factor for one device is not shared.
                (name, _) if name.starts_with("product:") => return Vec::new(),
                ("attention", AttentionKind::Fused { .. }) => "attention:fused",
                ("attention", AttentionKind::Unfused { .. }) => "attention:unfused",
                (name, _) => name,
            };
            let is_variant =
                |other: &&str| profiles.stack(other).is_ok_and(|other| other.variant_of.as_deref() == Some(stack_name.as_str()));
            let branch = match &stack.variant_of {
                Some(base) => Some(base.clone()),
                None => profiles.stack_names().find(is_variant).map(|_| stack_name.clone()),
            };
            let owners = std::iter::once(Owner::Family(stack.family.clone())).chain(branch.map(Owner::Branch));
            owners.map(|owner| (owner, name.into())).collect()
        }
        Owner::Device(device) => {
            let name = if name == "attention" { name } else { "product" };
            let generation = profiles.gpu(device).ok().map(|gpu| Owner::Generation(gpu.generation.clone()));
            generation.into_iter().map(|owner| (owner, name.into())).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the offset of a parameter together with those of its shared factors.
pub fn total_offset(parameters: &[Parameter], offsets: &[f64], index: usize) -> f64 {
    let chain = std::iter::successors(Some(index), |index| parameters[*index].factor);
    chain.map(|index| offsets[index]).sum()
}

/// Appends the shared factors to `own` and moves their share of the variance to them.
fn with_factors(mut own: Vec<Parameter>, profiles: &Profiles) -> Vec<Parameter> {
    let mut spreads: BTreeMap<(Owner, String), f64> = BTreeMap::new();
    let chains: Vec<Vec<(Owner, String)>> =
        own.iter().map(|parameter| factors_of(&parameter.owner, &parameter.name, profiles)).collect();
    for (parameter, chain) in own.iter().zip(&chains) {
        for factor in chain {
            let spread = spreads.entry(factor.clone()).or_insert(f64::INFINITY);
            *spread = spread.min(parameter.spread * variance_share(&factor.0).sqrt());
        }
    }
    let indices: BTreeMap<(Owner, String), usize> = spreads.keys().cloned().zip(own.len()..).collect();
    let mut factors: Vec<Parameter> =
        spreads.into_iter().map(|((owner, name), spread)| Parameter::new(owner, name, spread)).collect();
    for (parameter, chain) in own.iter_mut().zip(&chains) {
        parameter.spread *= (1.0 - chain.iter().map(|(owner, _)| variance_share(owner)).sum::<f64>()).sqrt();
        parameter.factor = chain.last().map(|nearest| indices[nearest]);
    }
    for pair in chains.iter().flat_map(|chain| chain.windows(2)) {
        let narrow = indices[&pair[1]] - own.len();
        factors[narrow].factor = Some(indices[&pair[0]]);
    }
    own.extend(factors);
    own
}
