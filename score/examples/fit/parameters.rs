//! Which values are fitted, and how far each may be from what is assumed of it.

use crate::cases::{Case, Quantity};
use foretell_models::Model;
use foretell_score::Run;
use foretell_simulator::gpu::{AttentionKind, Profiles};
use std::collections::{BTreeMap, BTreeSet};

/// Whose value it is. What several have in common comes after them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    Device(String),
    Network,
    Stack(String),
    /// What all stacks of a family differ by from what is assumed of them: a factor.
    Family(String),
    /// What a stack and its variants differ by from what their family has in common: a factor.
    Branch(String),
    /// What all devices of a generation differ by from what is assumed of them: a factor.
    Generation(String),
}

/// The share of a value's variance that a stack has in common with its family.
const OF_FAMILY: f64 = 0.7;
/// The share of what is left then that it has in common with its branch, if it is of one.
const OF_BRANCH: f64 = 0.8;
/// The share that a device has in common with its generation.
const OF_GENERATION: f64 = 0.8;

/// The share of a value's variance that is its kin's.
fn share(kin: &Owner) -> f64 {
    match kin {
        Owner::Generation(_) => OF_GENERATION,
        Owner::Branch(_) => (1.0 - OF_FAMILY) * OF_BRANCH,
        _ => OF_FAMILY,
    }
}

/// A value that is fitted.
#[derive(Clone, Debug)]
pub struct Parameter {
    pub owner: Owner,
    pub name: String,
    /// What the profiles assume.
    pub prior: f64,
    /// What it may be at most.
    pub most: f64,
    /// The standard deviation of the logarithm of what it may be over what is assumed.
    pub spread: f64,
    /// The place of the factor that it has in common with its nearest kin; that has the next.
    pub kin: Option<usize>,
}

impl Parameter {
    /// Whether a case's prediction may depend on it.
    pub fn concerns(&self, run: &Run) -> bool {
        let of_owner = match &self.owner {
            Owner::Device(name) => run.cluster.device == *name || run.others.iter().any(|(_, other)| other.device == *name),
            Owner::Network => run.devices() > run.cluster.devices_per_node,
            Owner::Stack(name) => run.stack_name == *name,
            Owner::Family(name) => run.stack.family == *name,
            Owner::Branch(name) => run.stack_name == *name || run.stack.variant_of.as_ref() == Some(name),
            Owner::Generation(name) => run.clusters().iter().any(|cluster| cluster.gpu.generation == *name),
        };
        let is_fused = matches!(run.stack.attention, AttentionKind::Fused { .. });
        let is_moe = matches!(run.model, Model::Moe { .. });
        of_owner
            && match (&self.owner, self.name.split_once(':')) {
                (Owner::Stack(_), Some(("product", device))) => run.cluster.device == device,
                (Owner::Family(_) | Owner::Branch(_), Some(("attention", kind))) => {
                    !matches!(run.model, Model::Resnet { .. }) && is_fused == (kind == "fused")
                }
                (Owner::Generation(_), None) => self.name == "product" || is_fused,
                (_, Some(("format" | "product", format))) => run.format.name() == format,
                (_, Some((_, "routing"))) => is_moe,
                (_, Some((_, "norm"))) => matches!(run.model, Model::Resnet { .. }),
                (_, Some(_)) => true,
                (Owner::Device(_), None) => is_fused,
                (_, None) => match self.name.as_str() {
                    "expert_product" | "exchange" => is_moe,
                    "cast_bytes" => run.format.is_cast(),
                    "scaled_by_row" => run.stack.scales_by_row,
                    "communication" | "compute_slowdown" | "gradient_bytes" => run.devices() > 1,
                    "attention" => !matches!(run.model, Model::Resnet { .. }),
                    _ => true,
                },
            }
    }

    /// What it changes: values of the same effect move a prediction alike.
    pub fn effect(&self) -> &str {
        match self.name.as_str() {
            name if name == "product_scale" || name.starts_with("product:") || name.starts_with("format:") => "product",
            name if name.starts_with("attention") => "attention",
            name => name,
        }
    }

    /// Gives it a value.
    pub fn set(&self, run: &mut Run, value: f64) {
        let clusters = std::iter::once(&mut run.cluster).chain(run.others.iter_mut().map(|(_, other)| other));
        match &self.owner {
            Owner::Stack(_) => {
                run.stack.set_value(&self.name, value);
            }
            Owner::Network => clusters.for_each(|cluster| {
                cluster.set_value(&self.name, value);
            }),
            Owner::Device(name) => clusters.filter(|cluster| cluster.device == *name).for_each(|cluster| {
                cluster.gpu.set_value(&self.name, value);
            }),
            // It is in the values of those that have it in common.
            Owner::Family(_) | Owner::Branch(_) | Owner::Generation(_) => {}
        }
    }

    fn value(&self, run: &Run) -> Option<f64> {
        match &self.owner {
            Owner::Stack(_) => run.stack.value(&self.name),
            Owner::Network => run.cluster.value(&self.name),
            Owner::Device(name) => {
                let mut clusters = std::iter::once(&run.cluster).chain(run.others.iter().map(|(_, other)| other));
                clusters.find(|cluster| cluster.device == *name)?.gpu.value(&self.name)
            }
            Owner::Family(_) | Owner::Branch(_) | Owner::Generation(_) => Some(1.0),
        }
    }
}

/// The values that the cases may determine.
pub fn parameters(cases: &[Case], quantity: Quantity, profiles: &Profiles) -> Vec<Parameter> {
    let mut names: BTreeMap<(Owner, String), f64> = BTreeMap::new();
    let mut add = |owner: Owner, name: String, spread: f64| {
        names.insert((owner, name), spread);
    };
    let mut by_stack: BTreeMap<&str, Vec<&Case>> = BTreeMap::new();
    for case in cases.iter().filter(|case| case.measured(quantity).is_some()) {
        by_stack.entry(&case.run.stack_name).or_default().push(case);
    }
    for (stack, cases) in &by_stack {
        let mut of_stack = |name: String, spread: f64| add(Owner::Stack((*stack).into()), name, spread);
        let any = |of: &dyn Fn(&Run) -> bool| cases.iter().any(|case| of(&case.run));
        if quantity == Quantity::Memory {
            of_stack("memory_activations".into(), 0.15);
            of_stack("memory_gradient".into(), 0.3);
            of_stack("memory_logit".into(), 0.4);
            of_stack("memory_buffers".into(), 0.7);
            if any(&|run| matches!(run.stack.attention, AttentionKind::Unfused { .. })) {
                of_stack("memory_score".into(), 0.3);
            }
            if cases.iter().any(|case| case.row.mem_kind.contains("nvidia-smi")) {
                of_stack("memory_context".into(), 0.5);
            }
            continue;
        }
        of_stack("product_scale".into(), 0.10);
        of_stack("elementwise".into(), 0.30);
        of_stack("host_launch".into(), 0.50);
        of_stack("step_overhead".into(), 0.70);
        of_stack("backward_launch".into(), 0.30);
        if any(&|run| !matches!(run.model, Model::Resnet { .. })) {
            let unfused = any(&|run| matches!(run.stack.attention, AttentionKind::Unfused { .. }));
            of_stack("attention".into(), if unfused { 0.4 } else { 0.25 });
        }
        if any(&|run| matches!(run.model, Model::Resnet { .. })) {
            of_stack("traffic:norm".into(), 0.3);
        }
        if any(&|run| run.devices() > 1) {
            of_stack("communication".into(), 0.25);
        }
        if any(&|run| run.plan.layout.tensor * run.plan.layout.pipeline > 1) {
            of_stack("launches:exchange".into(), 0.3);
            of_stack("partitioned_message".into(), 0.7);
            of_stack("tensor_wait".into(), 0.7);
        }
        of_stack("micro_batch_overhead".into(), 0.7);
        if any(&|run| run.format.is_cast()) {
            of_stack("cast_bytes".into(), 0.35);
        }
        if any(&|run| run.stack.scales_by_row) {
            of_stack("scaled_by_row".into(), 0.35);
        }
        if any(&|run| matches!(run.model, Model::Moe { .. })) {
            of_stack("expert_product".into(), 0.2);
            of_stack("exchange".into(), 0.4);
            of_stack("traffic:routing".into(), 0.5);
            of_stack("launches:routing".into(), 0.5);
        }
        let devices: BTreeSet<&str> = cases.iter().map(|case| case.run.cluster.device.as_str()).collect();
        if devices.len() > 1 {
            devices.iter().for_each(|device| of_stack(format!("product:{device}"), 0.06));
        }
        let formats: BTreeSet<&str> = cases.iter().map(|case| case.run.format.name()).collect();
        if formats.len() > 1 {
            formats.iter().for_each(|format| of_stack(format!("format:{format}"), 0.06));
        }
    }
    if quantity == Quantity::Step {
        for case in cases {
            for cluster in std::iter::once(&case.run.cluster).chain(case.run.others.iter().map(|(_, other)| other)) {
                let spread = if cluster.gpu.estimated { 0.25 } else { 0.08 };
                let mut of_device = |name: String, spread: f64| add(Owner::Device(cluster.device.clone()), name, spread);
                of_device(format!("product:{}", case.run.format), spread);
                if matches!(case.run.stack.attention, AttentionKind::Fused { .. }) {
                    of_device("attention".into(), 0.12);
                }
            }
        }
        add(Owner::Network, "efficiency".into(), 0.1);
        add(Owner::Network, "latency_scale".into(), 0.4);
    }
    let found = |((owner, name), spread): ((Owner, String), f64)| {
        // Nothing exceeds a data sheet.
        let is_share = matches!(owner, Owner::Device(_));
        let most = if is_share { 1.0 } else { f64::INFINITY };
        let parameter = Parameter { owner, name, prior: 1.0, most, spread, kin: None };
        let prior = cases.iter().filter(|case| parameter.concerns(&case.run)).find_map(|case| parameter.value(&case.run))?;
        // What is assumed to be nothing stays so.
        (prior > 0.0).then_some(Parameter { prior, ..parameter })
    };
    let own: Vec<Parameter> = names.into_iter().filter_map(found).collect();
    if quantity == Quantity::Step { with_kin(own, profiles) } else { own }
}

/// What a value has in common with others, the widest kin first: whose that is and its name.
pub fn kin_of(owner: &Owner, name: &str, profiles: &Profiles) -> Vec<(Owner, String)> {
    match owner {
        Owner::Stack(of) => {
            let Ok(stack) = profiles.stack(of) else { return Vec::new() };
            let name = match (name, stack.attention) {
                // What a stack makes of one device is its own.
                (name, _) if name.starts_with("product:") => return Vec::new(),
                ("attention", AttentionKind::Fused { .. }) => "attention:fused",
                ("attention", AttentionKind::Unfused { .. }) => "attention:unfused",
                (name, _) => name,
            };
            let is_variant =
                |other: &&str| profiles.stack(other).is_ok_and(|other| other.variant_of.as_deref() == Some(of.as_str()));
            let branch = match &stack.variant_of {
                Some(first) => Some(first.clone()),
                None => profiles.stack_names().find(is_variant).map(|_| of.clone()),
            };
            let kin = std::iter::once(Owner::Family(stack.family.clone())).chain(branch.map(Owner::Branch));
            kin.map(|kin| (kin, name.into())).collect()
        }
        Owner::Device(device) => {
            let name = if name == "attention" { name } else { "product" };
            let generation = profiles.gpu(device).ok().map(|gpu| Owner::Generation(gpu.generation.clone()));
            generation.into_iter().map(|kin| (kin, name.into())).collect()
        }
        _ => Vec::new(),
    }
}

/// What a value and its kin are moved by together.
pub fn moved(parameters: &[Parameter], offsets: &[f64], place: usize) -> f64 {
    let kin = std::iter::successors(Some(place), |place| parameters[*place].kin);
    kin.map(|place| offsets[place]).sum()
}

/// With the factors that values have in common with their kin after them.
fn with_kin(mut own: Vec<Parameter>, profiles: &Profiles) -> Vec<Parameter> {
    let mut common: BTreeMap<(Owner, String), f64> = BTreeMap::new();
    let kin: Vec<Vec<(Owner, String)>> =
        own.iter().map(|parameter| kin_of(&parameter.owner, &parameter.name, profiles)).collect();
    for (parameter, kin) in own.iter().zip(&kin) {
        for kin in kin {
            let spread = common.entry(kin.clone()).or_insert(f64::INFINITY);
            *spread = spread.min(parameter.spread * share(&kin.0).sqrt());
        }
    }
    let places: BTreeMap<(Owner, String), usize> = common.keys().cloned().zip(own.len()..).collect();
    let factor = |((owner, name), spread)| Parameter { owner, name, prior: 1.0, most: f64::INFINITY, spread, kin: None };
    let mut factors: Vec<Parameter> = common.into_iter().map(factor).collect();
    for (parameter, kin) in own.iter_mut().zip(&kin) {
        parameter.spread *= (1.0 - kin.iter().map(|(kin, _)| share(kin)).sum::<f64>()).sqrt();
        parameter.kin = kin.last().map(|nearest| places[nearest]);
    }
    for pair in kin.iter().flat_map(|kin| kin.windows(2)) {
        let first = places[&pair[1]] - own.len();
        factors[first].kin = Some(places[&pair[0]]);
    }
    own.extend(factors);
    own
}
