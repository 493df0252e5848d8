//! `--method` and related options for an existing plan: they replace its method.

use crate::failure::{Failure, code};
use crate::method::{Method, MethodChoices};
use crate::plan_file::LoadedPlan;
use foretell_program::{Plan, Preference};

/// Replaces the parts of a plan's method that options state. A method among them replaces the
/// plan's method and its adapters; without one, options change only what they name.
///
/// # Errors
/// Fails if the options contradict each other or the plan's rollout.
pub fn replace(loaded: &mut LoadedPlan, choices: &MethodChoices) -> Result<(), Failure> {
    if *choices == (MethodChoices { rollout: choices.rollout.clone(), ..MethodChoices::default() }) {
        return Ok(());
    }
    let before = &loaded.plan;
    let replaces = choices.method.filter(|method| method.policy().is_none());
    if let (Some(method), Some(policy)) = (replaces, &loaded.policy) {
        let message = format!("`--method {}`: the plan has `method: {}`", method.name(), policy.method.name());
        return Err(Failure::input(code::OPTION_VALUE, message).hint("leave out the plan's `method` and `rollout`"));
    }
    let mut plan = before.clone();
    plan.training.lora = plan.training.lora.filter(|_| replaces.is_none());
    let keeps_adapters = plan.training.lora.is_some() && choices.adapter.is_none();
    let stated = MethodChoices {
        method: choices.method.or(loaded.policy.as_ref().map(|policy| policy.method.into())).or_else(|| Some(method_of(before))),
        base_bits: choices.base_bits.filter(|_| !keeps_adapters),
        ..choices.clone()
    };
    let mut taken = Vec::new();
    stated.apply(&mut plan, &loaded.model.model, &mut taken)?;
    let (new, old) = (&mut plan.workload, &before.workload);
    if keeps_adapters {
        plan.training.lora.clone_from(&before.training.lora);
        (new.adapter_dropout, new.base_bits) = (old.adapter_dropout, choices.base_bits.or(old.base_bits));
        taken.clear();
    } else if replaces.is_none() && choices.base_bits.is_none() {
        new.base_bits = old.base_bits;
    }
    let keeps_reference = choices.reference.is_none() && new.preference.is_some_and(Preference::has_reference);
    new.precomputed_reference = if keeps_reference { old.precomputed_reference } else { new.precomputed_reference };
    new.loss = if choices.loss.is_none() { old.loss } else { new.loss };
    new.attention = if choices.attention.is_none() { old.attention } else { new.attention };
    loaded.remarks.extend(taken.iter().map(|taken| format!("taken by default: {taken}")));
    loaded.replace_training(plan.training, plan.workload)
}

/// The method that a plan's fields describe.
fn method_of(plan: &Plan) -> Method {
    match (plan.workload.preference, &plan.training.lora, plan.workload.base_bits) {
        (Some(preference), ..) => preference.into(),
        (None, Some(_), Some(4)) => Method::Qlora,
        (None, Some(_), _) => Method::Lora,
        (None, None, _) => Method::Pretrain,
    }
}
