//! What a framework is asked to measure or to train, as `python/foretell/trace/real.py` reads it.

use crate::failure::{Failure, code};
use crate::inputs;
use crate::plan_file::LoadedPlan;
use foretell_models::operator_tables::TableSizes;
use foretell_program::traced::{adapts_whole_groups, wanted_key};
use foretell_program::{DecayExemptions, LearningRateSchedule, Lora, MomentFormat, Optimizer, Plan, Preference};
use foretell_topologies::Architecture;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A request to a framework to measure or train a step.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Request {
    /// The entries of the operator table's key.
    key: BTreeMap<String, String>,
    /// The sizes of the model and its batch, by symbol. A batch counts sequences.
    sizes: BTreeMap<String, f64>,
    /// Layers of every stack.
    layers: usize,
    /// Number of processes.
    pub(super) ranks: usize,
    /// Threads of each process.
    pub(super) threads: usize,
    /// Micro-batches of a step.
    micro_batches: usize,
    /// The optimizer: `adamw` or `sgd`.
    optimizer: String,
    /// The method of training on preferences, whose trainer TRL has.
    preference: Option<&'static str>,
    /// Whether the log-probabilities of the preferences' reference are computed before the
    /// training.
    precomputed: bool,
    /// The recipe in the words of `TrainingArguments`, the adapters' `alpha` and SGD's `momentum`.
    /// The framework's defaults hold for the others.
    recipe: BTreeMap<&'static str, f64>,
    /// Steps that are trained.
    pub(super) steps: usize,
    /// Seed of everything random.
    pub(super) seed: u64,
    /// The folder for the trained parameters, if they are saved.
    pub(super) checkpoint: Option<PathBuf>,
}

impl Request {
    /// The request for a plan whose stack has operator tables.
    pub(super) fn of(loaded: &LoadedPlan) -> Result<Self, Failure> {
        let (plan, model) = (&loaded.plan, &loaded.model.model);
        let stack = plan.stack.name();
        let Some(tables) = &inputs::stack(stack)?.tables else {
            let message = format!("`stack: {stack}` is not run here: the operators of its framework were not traced");
            return Err(Failure::input(code::PLAN_CONTRADICTION, message)
                .hint("use `stack: hf-trainer`, or `stack: foretell` for our own executor")
                .in_file(&loaded.path));
        };
        if loaded.topology.devices().any(|device| loaded.topology.device_kind(device).architecture != Architecture::Cpu) {
            let message = format!("`stack: {stack}` is run on processors only");
            return Err(Failure::input(code::PLAN_CONTRADICTION, message).hint("use `topology: local`").in_file(&loaded.path));
        }
        let refused = |reason: String| {
            Failure::input(code::PLAN_CONTRADICTION, format!("`stack: {stack}` does not run {reason}")).in_file(&loaded.path)
        };
        let key = wanted_key(plan, model, tables).map_err(|untraced| refused(untraced.reason))?;
        if let Some(field) = unread(plan) {
            return Err(refused(format!("`{field}` on processors")).hint("leave it out"));
        }
        if !adapts_whole_groups(plan, model).map_err(|untraced| refused(untraced.reason))? {
            let hint = "adapt all linear layers, or all of attention: the operators of these steps were traced";
            return Err(refused("adapters on other layers than all or attention's (`training.lora.targets`)".into()).hint(hint));
        }
        let ranks = plan.layout.data;
        if ranks > 1 && plan.layout.zero > 0 {
            return Err(refused("sharded parameters on processors: Accelerate has DDP alone there".into()).hint("use `zero: 0`"));
        }
        let preference = plan.workload.preference;
        let sequences = preference.map_or(1, Preference::sequences);
        let sizes = TableSizes::of_model(model, plan.layout.micro_batch.saturating_mul(sequences))
            .ok_or_else(|| refused(format!("models of the family `{}`", model.family())))?;
        let sizes = sizes.with("r", plan.training.lora.as_ref().map_or(0, |lora| lora.rank));
        Ok(Self {
            key,
            layers: sizes.layers,
            sizes: sizes.symbols,
            ranks,
            threads: (foretell_executor::machine::core_count() / ranks).max(1),
            micro_batches: plan.micro_batches()?,
            optimizer: plan.optimizer.name().to_owned(),
            preference: preference.map(Preference::name),
            precomputed: plan.workload.precomputed_reference,
            recipe: recipe(plan),
            steps: 0,
            seed: 0,
            checkpoint: None,
        })
    }
}

/// What a plan states of its recipe.
fn recipe(plan: &Plan) -> BTreeMap<&'static str, f64> {
    let training = &plan.training;
    // The decimal number that was stated, and not the one that single precision is closest to.
    let stated = |value: f32| value.to_string().parse().unwrap_or_else(|_| f64::from(value));
    let mut recipe = BTreeMap::from([("weight_decay", stated(training.weight_decay))]);
    let of_adam = [("adam_beta1", training.beta1), ("adam_beta2", training.beta2), ("adam_epsilon", training.epsilon)];
    let of_sgd = [("momentum", training.momentum)];
    let own: &[(&'static str, f32)] = if plan.optimizer == Optimizer::Sgd { &of_sgd } else { &of_adam };
    recipe.extend(own.iter().map(|&(name, value)| (name, stated(value))));
    recipe.extend(training.learning_rate.map(|rate| ("learning_rate", stated(rate))));
    recipe.extend(training.clip_norm.map(|norm| ("max_grad_norm", stated(norm))));
    recipe.extend(training.lora.as_ref().map(|lora: &Lora| ("alpha", lora.alpha as f64)));
    recipe
}

/// The first field of a plan that changes the training and that the framework is not told of.
fn unread(plan: &Plan) -> Option<&'static str> {
    let (training, workload) = (&plan.training, &plan.workload);
    let stated = [
        ("optimizer", !matches!(plan.optimizer, Optimizer::Adam | Optimizer::AdamW | Optimizer::Sgd)),
        ("training.schedule", training.schedule != LearningRateSchedule::default()),
        ("training.warm_up", training.warm_up.is_some()),
        ("training.nesterov", training.nesterov),
        ("training.no_decay", training.no_decay != DecayExemptions::default()),
        ("training.label_smoothing", training.label_smoothing > 0.0),
        ("training.class_weights", !training.class_weights.is_empty()),
        ("workload.moments", workload.moments != MomentFormat::Single),
        ("workload.updates_in_backward", workload.updates_in_backward),
    ];
    stated.into_iter().find(|(_, is_stated)| *is_stated).map(|(field, _)| field)
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_models::Model;
    use foretell_program::Layout;

    #[test]
    fn a_recipe_is_stated_in_the_words_of_training_arguments() {
        let mut plan = Plan { optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 8) };
        plan.training.learning_rate = Some(1e-3);
        plan.training.lora = Some(Lora::default());
        let stated = recipe(&plan);
        assert_eq!((stated["learning_rate"], stated["adam_beta2"], stated["alpha"]), (1e-3, 0.999, 8.0));
        assert!(!stated.contains_key("max_grad_norm") && !stated.contains_key("momentum"));
        plan.optimizer = Optimizer::Sgd;
        assert_eq!(recipe(&plan)["momentum"], 0.9);
    }

    #[test]
    fn what_the_framework_is_not_told_is_refused() {
        let mut plan = Plan { optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 8) };
        assert_eq!(unread(&plan), None);
        plan.training.label_smoothing = 0.1;
        assert_eq!(unread(&plan), Some("training.label_smoothing"));
        plan.optimizer = Optimizer::Lamb;
        assert_eq!(unread(&plan), Some("optimizer"));
    }

    #[test]
    fn adapters_are_on_all_linear_layers_or_on_attentions() {
        let model = Model::named("llama3-8b").expect("it is in the zoo");
        let with_targets = |targets: &[&str]| {
            let mut plan = Plan::new(Layout::default(), 8);
            plan.training.lora = Some(Lora { targets: targets.iter().copied().collect(), ..Lora::default() });
            adapts_whole_groups(&plan, &model).expect("the model has a graph")
        };
        assert!(with_targets(&["*"]) && with_targets(&["*attn*"]));
        assert!(!with_targets(&["*q_proj", "*v_proj"]));
    }
}
