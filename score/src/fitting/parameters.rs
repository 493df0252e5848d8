//! The fitted values, their priors, and the factors that related values share.
//!
//! A value is its prior times a factor: its own, one that all stacks of its family share, or one
//! that all stacks share. [`sharing`] decides which, by the name of the value. A shared factor is a
//! parameter, and the values that share it are tied to it. So there are few free parameters, each
//! with many rows.
//!
//! The rates of a device come from its data sheet and from measured kernels. No factor of a device
//! is fitted here.

use super::cases::{Case, Quantity};
use crate::run::Run;
use foretell_models::Model;
use foretell_simulator::gpu::{AttentionKind, Profiles};
use std::collections::BTreeMap;

/// The profile, or the set of profiles, that a parameter belongs to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    Network,
    Stack(String),
    /// All stacks of a family; the parameter is their shared factor.
    Family(String),
    /// All stacks; the parameter is their shared factor.
    AllStacks,
}

/// Who shares the factor of a stack's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sharing {
    /// No other stack: each has a factor of its own.
    Stack,
    /// The stacks of a family.
    Family,
    /// All stacks.
    AllStacks,
}

/// Returns which stacks share the factor of a value. Chosen by the errors of left-out sources, see
/// `docs/reference/published-measurements.md`.
fn sharing(name: &str) -> Sharing {
    match name {
        // Each framework tunes its products, its memory-bound kernels and its routing, and decides
        // what it allocates for any model. A stack has no other constants of its own.
        "product_scale" | "elementwise" | "traffic:routing" | "memory_buffers" => Sharing::Stack,
        // All stacks use the same driver and the same interpreter.
        "host_launch" | "step_overhead" | "tensor_wait" | "attention:unfused" => Sharing::AllStacks,
        // The code of the stacks tells the memory for each parameter and activation.
        name if name.starts_with("memory_") => Sharing::AllStacks,
        _ => Sharing::Family,
    }
}

/// Returns the smallest and the largest value that physics, or the way programs work, allows, in
/// the value's unit: seconds, bytes, or a factor on the profiles' value.
pub fn physical_bounds(name: &str) -> [f64; 2] {
    match name {
        // No collective beats its links.
        "efficiency" => [0.2, 1.0],
        // A grouped product may need fewer launches than plain ones, but hardly less time on the
        // device.
        "expert_product" => [0.2, 1.1],
        // A factor on the share of peak that lasting products reach on a device, which is at most
        // 0.8.
        "product_scale" => [0.4, 1.25],
        // Fused kernels move fewer bytes than the Program's operators; chains of operators in
        // single precision move up to twelve times as many.
        "elementwise" | "traffic:routing" | "traffic:norm" => [0.25, 12.0],
        // A call of the driver takes a microsecond or more; a call from a busy interpreter takes up
        // to 60.
        "host_launch" => [1e-6, 60e-6],
        "tensor_wait" => [1e-6, 1e-3],
        "micro_batch_overhead" => [10e-6, 10e-3],
        "step_overhead" => [50e-6, 30e-3],
        "partitioned_message" => [0.1e-3, 0.1],
        // Kernels of an exchange or of routing: one if all are captured or fused, otherwise some
        // tens.
        "launches:exchange" | "launches:routing" => [1.0, 60.0],
        // Bytes for each parameter: two if gradients are in half precision, 16 for two copies in
        // single precision and their buckets.
        "memory_gradient" => [2.0, 16.0],
        // Bytes for each logit: none if the loss is fused; 16 for logits, their gradient and two
        // temporary results in single precision.
        "memory_logit" => [0.0, 16.0],
        "memory_activations" => [0.5, 2.5],
        "memory_buffers" | "memory_context" => [0.1e9, 16e9],
        _ => [0.0, f64::INFINITY],
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
    /// Index of the shared factor that the value is tied to.
    pub factor: Option<usize>,
}

impl Parameter {
    fn new(owner: Owner, name: String, spread: f64) -> Self {
        let is_factor = matches!(owner, Owner::Family(_) | Owner::AllStacks);
        // A factor is no physical quantity. The values that are tied to it have bounds.
        let bounds = if is_factor { [0.0, f64::INFINITY] } else { physical_bounds(&name) };
        Self { owner, name, prior: 1.0, bounds, spread, factor: None }
    }

    /// Returns whether the prediction of a run may depend on the parameter.
    pub fn affects(&self, run: &Run) -> bool {
        let owns = match &self.owner {
            Owner::Network => run.devices() > run.cluster.devices_per_node,
            Owner::Stack(name) => run.stack_name == *name,
            Owner::Family(name) => run.stack.family == *name,
            Owner::AllStacks => true,
        };
        let is_fused = matches!(run.stack.attention, AttentionKind::Fused { .. });
        let is_moe = matches!(run.model, Model::Moe(_));
        owns && match self.name.as_str() {
            "expert_product" | "traffic:routing" | "launches:routing" => is_moe,
            "traffic:norm" => matches!(run.model, Model::Resnet(_)),
            "cast_bytes" => run.format.is_cast(),
            "attention" => !matches!(run.model, Model::Resnet(_)),
            "attention:fused" => !matches!(run.model, Model::Resnet(_)) && is_fused,
            "attention:unfused" => !matches!(run.model, Model::Resnet(_)) && !is_fused,
            _ => true,
        }
    }

    /// Returns the effect of the parameter. Parameters with the same effect have the same slope.
    pub fn effect(&self) -> &str {
        if self.name.starts_with("attention") { "attention" } else { &self.name }
    }

    /// Returns whether the parameter is a shared factor.
    pub fn is_factor(&self) -> bool {
        matches!(self.owner, Owner::Family(_) | Owner::AllStacks)
    }

    /// Returns whether the parameter follows a shared factor.
    pub fn is_tied(&self) -> bool {
        self.factor.is_some()
    }

    /// Returns the weight of the parameter's squared offset: one over the prior's variance. A tied
    /// parameter has the offset 0 for any weight.
    pub fn precision(&self) -> f64 {
        if self.is_tied() { 1.0 } else { 1.0 / (self.spread * self.spread) }
    }

    /// Sets the value in a run. Setting a shared factor changes nothing: the values that share it
    /// include it.
    pub fn set(&self, run: &mut Run, value: f64) {
        match &self.owner {
            Owner::Stack(_) => {
                run.stack.set_value(&self.name, value);
            }
            Owner::Network => run.clusters_mut().for_each(|cluster| {
                cluster.set_value(&self.name, value);
            }),
            Owner::Family(_) | Owner::AllStacks => {}
        }
    }

    fn value(&self, run: &Run) -> Option<f64> {
        match &self.owner {
            Owner::Stack(_) => run.stack.value(&self.name),
            Owner::Network => run.cluster.value(&self.name),
            Owner::Family(_) | Owner::AllStacks => Some(1.0),
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
        spreads.insert((Owner::Network, "efficiency".into()), 0.1);
        spreads.insert((Owner::Network, "latency_scale".into()), 0.4);
    }
    let with_prior = |((owner, name), spread): ((Owner, String), f64)| {
        let mut parameter = Parameter::new(owner, name, spread);
        let mut affected = cases.iter().filter(|case| parameter.affects(&case.run));
        parameter.prior = affected.find_map(|case| parameter.value(&case.run))?;
        // A value of zero has no logarithm.
        (parameter.prior > 0.0).then_some(parameter)
    };
    let own: Vec<Parameter> = spreads.into_iter().filter_map(with_prior).collect();
    with_factors(own, profiles)
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
    add("product_scale", 0.07);
    add("elementwise", 0.42);
    add("host_launch", 0.5);
    add("step_overhead", 0.25);
    if any(&|run| !matches!(run.model, Model::Resnet(_))) {
        let is_unfused = any(&|run| matches!(run.stack.attention, AttentionKind::Unfused { .. }));
        add("attention", if is_unfused { 0.4 } else { 0.7 });
    }
    if any(&|run| matches!(run.model, Model::Resnet(_))) {
        add("traffic:norm", 0.3);
    }
    if any(&|run| run.plan.layout.tensor * run.plan.layout.pipeline > 1) {
        add("launches:exchange", 0.3);
        add("partitioned_message", 0.7);
        add("tensor_wait", 0.7);
    }
    add("micro_batch_overhead", 0.7);
    if any(&|run| run.format.is_cast()) {
        add("cast_bytes", 0.7);
    }
    if any(&|run| matches!(run.model, Model::Moe(_))) {
        add("expert_product", 0.2);
        add("traffic:routing", 0.7);
        add("launches:routing", 0.5);
    }
}

/// Returns the shared factor of a value by owner and name, if it has one.
pub fn factor_of(owner: &Owner, name: &str, profiles: &Profiles) -> Option<(Owner, String)> {
    let Owner::Stack(stack) = owner else { return None };
    let stack = profiles.stack(stack).ok()?;
    let name = match (name, stack.attention) {
        ("attention", AttentionKind::Fused { .. }) => "attention:fused",
        ("attention", AttentionKind::Unfused { .. }) => "attention:unfused",
        (name, _) => name,
    };
    match sharing(name) {
        Sharing::Stack => None,
        Sharing::Family => Some((Owner::Family(stack.family.clone()), name.into())),
        Sharing::AllStacks => Some((Owner::AllStacks, name.into())),
    }
}

/// Returns the offset of a parameter, or of the factor that it is tied to.
pub fn total_offset(parameters: &[Parameter], offsets: &[f64], index: usize) -> f64 {
    offsets[parameters[index].factor.unwrap_or(index)]
}

/// Appends the shared factors to `own`, and ties the values that share them.
fn with_factors(mut own: Vec<Parameter>, profiles: &Profiles) -> Vec<Parameter> {
    let factors: Vec<Option<(Owner, String)>> =
        own.iter().map(|parameter| factor_of(&parameter.owner, &parameter.name, profiles)).collect();
    let mut spreads: BTreeMap<&(Owner, String), f64> = BTreeMap::new();
    for (parameter, factor) in own.iter_mut().zip(&factors) {
        let Some(factor) = factor else { continue };
        let spread = spreads.entry(factor).or_insert(f64::INFINITY);
        *spread = spread.min(parameter.spread);
        parameter.spread = 0.0;
    }
    let first = own.len();
    let place = |factor: &(Owner, String)| first + spreads.keys().take_while(|known| **known != factor).count();
    for (parameter, factor) in own.iter_mut().zip(&factors) {
        parameter.factor = factor.as_ref().map(place);
    }
    own.extend(spreads.iter().map(|((owner, name), spread)| Parameter::new(owner.clone(), name.clone(), *spread)));
    own
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fitted_values_are_physical() {
        let names = ["product_scale", "expert_product", "elementwise", "host_launch", "step_overhead", "memory_gradient"];
        let profiles = Profiles::library().expect("the library");
        for stack in profiles.stack_names() {
            let values = profiles.stack(stack).expect("a stack of the library");
            for name in names {
                let (value, [least, most]) = (values.value(name).expect("a value"), physical_bounds(name));
                let is_used = value > 0.0;
                assert!(!is_used || (least..=most).contains(&value), "{stack}, {name}: {value} is not in {least} to {most}");
            }
        }
        assert!(profiles.network_value("efficiency").is_some_and(|share| share <= 1.0));
        // Both run Transformer Engine's attention.
        let attention = |stack| profiles.stack(stack).expect("known").value("attention");
        assert_eq!(attention("megatron-core"), attention("nemo"));
        // A factor that values share may take any size; the values that follow it are bounded.
        let factor = Parameter::new(Owner::AllStacks, "host_launch".into(), 0.5);
        assert_eq!(factor.bounds, [0.0, f64::INFINITY]);
    }

    #[test]
    fn a_stack_has_at_most_four_constants_of_its_own() {
        let row = "row_id,table,model,layers,hidden,heads,vocab,seq,experts,topk,moe_ffn,gpu,n_gpus,dp,tp,mbs,gbs,zero,precision,\
                   framework,step_s,mem_gib\n\
                   a,t,Mixtral,8,1024,16,50257,1024,8,2,2048,H100-SXM-80GB,8,4,2,1,8,1,fp8,NeMo (dgxc 25),1,40\n";
        let rows = crate::row::read_rows(row).expect("rows");
        let profiles = Profiles::priors().expect("the library");
        let run = Run::of(&rows[0], &profiles).expect("a run");
        let compiled = std::sync::Arc::new(crate::prediction::CompiledRun::new(&run).expect("compiles"));
        let case = Case { row: rows[0].clone(), run, compiled, group: "g".into(), kind: "k".into() };
        let found =
            [Quantity::Step, Quantity::Memory].map(|quantity| parameters(std::slice::from_ref(&case), quantity, &profiles));
        let own: Vec<&str> = found
            .iter()
            .flatten()
            .filter(|parameter| matches!(parameter.owner, Owner::Stack(_)) && !parameter.is_tied())
            .map(|parameter| parameter.name.as_str())
            .collect();
        assert_eq!(own, ["elementwise", "product_scale", "traffic:routing", "memory_buffers"]);
    }
}
