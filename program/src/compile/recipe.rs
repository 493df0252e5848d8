//! The parts of a recipe that concern single parameters and the loss: a check that they fit the
//! model, the frozen parameters, those exempt from weight decay, and the constants of the loss. It
//! must not know meshes or buckets.

use crate::plan::{NamePatterns, PlanError, Training};
use foretell_models::{Graph, Kernel, Operator, Role, Tensor, TensorId};
use std::collections::BTreeSet;
use std::sync::Arc;

/// How the parameters of a bucket are trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BucketTraining {
    /// With weight decay, if the plan has any.
    Decayed,
    /// Without weight decay.
    Exempt,
    /// Not at all: there are no gradients and no optimizer state.
    Frozen,
}

impl BucketTraining {
    pub(super) fn is_frozen(self) -> bool {
        self == BucketTraining::Frozen
    }
}

/// A tensor that keeps the values that the graph gives it.
#[derive(Clone, Debug)]
pub(super) struct Constant {
    pub(super) name: String,
    pub(super) values: Arc<[f32]>,
}

/// Refuses a recipe that does not fit the model: patterns that match no parameter, nothing to
/// train, or a number of class weights that differs from the number of classes.
pub(super) fn check_recipe(forward: &Graph, training: &Training) -> Result<(), PlanError> {
    let names = forward.parameters().map(|(_, tensor)| tensor.name.as_str());
    let none = NamePatterns::default();
    let also_train = training.lora.as_ref().map_or(&none, |lora| &lora.also_train);
    let patterns = [
        ("training.frozen", &training.frozen),
        ("training.no_decay.names", &training.no_decay.names),
        ("training.lora.also_train", also_train),
    ];
    for (field, patterns) in patterns {
        if let Some(pattern) = patterns.unmatched(names.clone()) {
            let example = names.clone().next().unwrap_or_default();
            return Err(PlanError::Invalid {
                field,
                reason: format!("`{pattern}` matches no parameter of the model"),
                hint: format!("its parameters have names such as `{example}`, and `*` stands for any characters"),
            });
        }
    }
    if names.clone().all(|name| training.is_frozen(name)) {
        return Err(PlanError::Invalid {
            field: "training.frozen",
            reason: "every parameter is frozen".into(),
            hint: "leave at least one to train".into(),
        });
    }
    let weights = training.class_weights.len();
    let losses = forward.operators.iter().filter(|operator| matches!(operator.kind, Kernel::CrossEntropy { .. }));
    let classes = losses.filter_map(|operator| operator.loops.last()).map(|loss| loss.extent).next();
    match classes {
        Some(classes) if training.weighs_classes() && classes != weights => Err(PlanError::Invalid {
            field: "training.class_weights",
            reason: format!("there are {weights}, and the model has {classes} classes"),
            hint: "give one weight for each class".into(),
        }),
        _ => Ok(()),
    }
}

/// The parameters that a stage reads but does not train, each with the first operator that reads
/// it, in the order of these operators.
pub(super) fn frozen_parameters(
    graph: &Graph,
    is_of_stage: impl Fn(&Operator) -> bool,
    is_trained: impl Fn(&str) -> bool,
) -> Vec<(usize, TensorId)> {
    let mut found: Vec<(usize, TensorId)> = Vec::new();
    for (index, operator) in graph.operators.iter().enumerate().filter(|(_, operator)| is_of_stage(operator)) {
        for input in &operator.inputs {
            let tensor = graph.tensor(input.tensor);
            let is_new = matches!(tensor.role, Role::Parameter(_)) && !is_trained(&tensor.name);
            if is_new && found.iter().all(|&(_, known)| known != input.tensor) {
                found.push((index, input.tensor));
            }
        }
    }
    found
}

/// The parameters that weight decay leaves alone.
pub(super) fn exempt_parameters(graph: &Graph, training: &Training) -> BTreeSet<TensorId> {
    let exemptions = &training.no_decay;
    // Without weight decay there is nothing to exempt, and exempt parameters need no buckets of
    // their own.
    if training.weight_decay == 0.0 {
        return BTreeSet::new();
    }
    let is_norm = |operator: &&Operator| {
        matches!(operator.kind, Kernel::BatchNorm { .. } | Kernel::LayerNorm { .. } | Kernel::RmsNorm { .. })
    };
    let norms = graph.operators.iter().filter(is_norm).flat_map(|operator| operator.inputs.iter().map(|input| input.tensor));
    let norms: BTreeSet<TensorId> = norms.collect();
    let is_exempt = |&(id, tensor): &(TensorId, &Tensor)| {
        // Public names of biases end in `bias`, except for those of an LSTM (`bias_ih_l0`).
        let is_bias = tensor.name.rsplit('.').next().is_some_and(|last| last.contains("bias"));
        // The shift of a norm is called a bias, too, but counts as a norm's.
        let is_of_norm = norms.contains(&id);
        (exemptions.norms && is_of_norm)
            || (exemptions.biases && is_bias && !is_of_norm)
            || exemptions.names.match_name(&tensor.name)
    };
    graph.parameters().filter(is_exempt).map(|(id, _)| id).collect()
}

/// The constants that a stage's operators read.
pub(super) fn constants(graph: &Graph, is_of_stage: impl Fn(&Operator) -> bool) -> Vec<Constant> {
    let mut found: Vec<Constant> = Vec::new();
    for operator in graph.operators.iter().filter(|operator| is_of_stage(operator)) {
        for input in &operator.inputs {
            let Tensor { name, role: Role::Constant(values), .. } = graph.tensor(input.tensor) else { continue };
            if found.iter().all(|known| known.name != *name) {
                found.push(Constant { name: name.clone(), values: Arc::clone(values) });
            }
        }
    }
    found
}
