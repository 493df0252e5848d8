//! `method` of a plan file: what is trained of the model, with the names of `--method`. It is
//! translated to the fields that describe the same (`training.lora`, `workload`), and must not
//! contradict them.

use crate::failure::{Failure, code};
use crate::method::{Adapter, Method};
use foretell_models::Model;
use foretell_program::{PlannedWorkload, Training};

/// Writes the meaning of a method into `training` and `workload`, and what it leaves open into
/// `remarks`. Methods that generate are described by the file's `rollout` instead.
///
/// # Errors
/// Fails if the file states something else.
pub fn apply(
    method: Method,
    training: &mut Training,
    workload: &mut PlannedWorkload,
    model: &Model,
    remarks: &mut Vec<String>,
) -> Result<(), Failure> {
    let name = method.name();
    let contradiction = |other: &str, hint: &str| {
        Err(Failure::input(code::PLAN_CONTRADICTION, format!("`method: {name}` beside {other}")).hint(hint.to_owned()))
    };
    let has_adapters = matches!(method, Method::Lora | Method::Qlora);
    let trains_everything = matches!(method, Method::Pretrain | Method::Full);
    if trains_everything && training.lora.is_some() {
        return contradiction("`training.lora`", "leave out one of them; `method: lora` trains adapters");
    }
    if let Some(stated) = workload.preference.filter(|stated| Some(*stated) != method.preference()) {
        let other = format!("`workload.preference: {}`", stated.name());
        return contradiction(&other, "leave out one of them");
    }
    workload.preference = method.preference();
    if has_adapters && training.lora.is_none() {
        let adapter = Adapter::default();
        training.lora = Some(adapter.lora(model)?);
        remarks.push(format!("`method: {name}`: adapters of {adapter}; `training.lora` says others"));
    }
    match (method, workload.base_bits) {
        (Method::Qlora, Some(bits)) if bits != 4 => {
            let other = format!("`workload.base_bits: {bits}`");
            contradiction(&other, "write `method: lora` for other bits of the frozen weights")
        }
        (Method::Qlora, _) => {
            workload.base_bits = Some(4);
            Ok(())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::method::MethodChoices;
    use foretell_program::{Layout, Lora, Plan, Preference};

    fn applied(method: Method, mut plan: Plan, model: &Model) -> Result<Plan, Failure> {
        apply(method, &mut plan.training, &mut plan.workload, model, &mut Vec::new())?;
        Ok(plan)
    }

    #[test]
    fn a_method_is_the_same_job_as_its_option() {
        let model = Model::named("gpt2").expect("it is in the zoo");
        let plan = Plan::new(Layout::default(), 8);
        for method in [Method::Pretrain, Method::Full, Method::Lora, Method::Qlora, Method::Dpo, Method::Orpo, Method::Kto] {
            let stated = applied(method, plan.clone(), &model).expect("it is sound");
            let mut chosen = plan.clone();
            let choices = MethodChoices { method: Some(method), ..MethodChoices::default() };
            choices.apply(&mut chosen, &model, &mut Vec::new()).expect("it is sound");
            assert_eq!(stated, chosen, "{}", method.name());
        }
    }

    #[test]
    fn a_method_beside_another_one_is_refused() {
        let model = Model::named("gpt2").expect("it is in the zoo");
        let mut adapters = Plan::new(Layout::default(), 8);
        adapters.training.lora = Some(Lora::default());
        assert!(applied(Method::Full, adapters.clone(), &model).is_err());
        assert_eq!(applied(Method::Lora, adapters.clone(), &model).expect("it is one").training.lora, Some(Lora::default()));
        let mut eight = adapters.clone();
        eight.workload.base_bits = Some(8);
        assert!(applied(Method::Qlora, eight.clone(), &model).is_err());
        assert_eq!(applied(Method::Lora, eight, &model).expect("it is one").workload.base_bits, Some(8));
        let mut preferences = Plan::new(Layout::default(), 8);
        preferences.workload.preference = Some(Preference::Orpo);
        assert!(applied(Method::Dpo, preferences.clone(), &model).is_err());
        assert!(applied(Method::Lora, preferences.clone(), &model).is_err());
        assert!(applied(Method::Orpo, preferences, &model).is_ok());
    }
}
