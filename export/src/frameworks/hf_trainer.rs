//! The `TrainingArguments` of Hugging Face's Trainer, as JSON.

use super::accelerate::STACK;
use super::json_object::JsonObject;
use super::{FrameworkError, ImportedPlan};
use foretell_program::{Layout, Optimizer, Plan, Recompute, Stack, Training};
use foretell_units::DataType;
use serde_json::{Map, Value};

/// Arguments that change neither the time of a step nor its memory.
const NEUTRAL: [&str; 35] = [
    "output_dir",
    "overwrite_output_dir",
    "do_train",
    "do_eval",
    "do_predict",
    "eval_strategy",
    "evaluation_strategy",
    "max_steps",
    "num_train_epochs",
    "lr_scheduler_type",
    "warmup_ratio",
    "warmup_steps",
    "logging_dir",
    "logging_steps",
    "logging_strategy",
    "save_steps",
    "save_strategy",
    "save_total_limit",
    "seed",
    "data_seed",
    "report_to",
    "run_name",
    "push_to_hub",
    "hub_model_id",
    "per_device_eval_batch_size",
    "eval_steps",
    "load_best_model_at_end",
    "remove_unused_columns",
    "dataloader_num_workers",
    "ddp_timeout",
    "logging_first_step",
    "disable_tqdm",
    "resume_from_checkpoint",
    "gradient_checkpointing_kwargs",
    "activation_checkpointing_kwargs",
];

/// Entries of `fsdp_config` that are read, or change neither the time of a step nor its memory.
const FSDP: [&str; 9] = [
    "reshard_after_forward",
    "activation_checkpointing",
    "version",
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "state_dict_type",
    "cpu_ram_efficient_loading",
    "xla",
    "min_num_params",
];

/// Reads what is sharded. Returns what was not understood.
fn read_fsdp(document: &mut JsonObject, layout: &mut Layout) -> Vec<String> {
    let mut unread = Vec::new();
    let config = match document.take("fsdp_config") {
        Some(Value::Object(config)) => config,
        Some(other) => {
            unread.push(format!("fsdp_config: {other}"));
            Map::new()
        }
        None => Map::new(),
    };
    match document.take("fsdp") {
        // Releases before 5.20 list words.
        Some(Value::String(words)) => {
            layout.zero = if words.contains("full_shard") {
                3
            } else if words.contains("shard_grad_op") {
                2
            } else {
                0
            };
            let known = ["full_shard", "shard_grad_op", "auto_wrap", "no_shard"];
            unread.extend(words.split_whitespace().filter(|word| !known.contains(word)).map(|word| format!("fsdp: {word}")));
        }
        Some(Value::Bool(true)) => {
            layout.zero = if config.get("reshard_after_forward") == Some(&Value::Bool(false)) { 2 } else { 3 }
        }
        Some(Value::Array(words)) if words.is_empty() => {}
        Some(Value::Bool(false)) | None => {}
        Some(other) => unread.push(format!("fsdp: {other}")),
    }
    if layout.zero > 0 {
        if config.get("activation_checkpointing") == Some(&Value::Bool(true)) {
            layout.recompute = Recompute::Full;
        }
        let others = config.iter().filter(|(name, value)| !FSDP.contains(&name.as_str()) && **value != Value::Bool(false));
        unread.extend(others.map(|(name, value)| format!("fsdp_config.{name}: {value}")));
    }
    unread
}

pub(super) fn import(text: &str, ranks: usize) -> Result<ImportedPlan, FrameworkError> {
    let mut document = JsonObject::parse(text, "TrainingArguments as JSON (`training_args.to_json_string()`)")?;
    document.neutral(&NEUTRAL);
    let micro_batch = document.size("per_device_train_batch_size")?.unwrap_or(8);
    let accumulation = document.size("gradient_accumulation_steps")?.unwrap_or(1);
    let mut layout = Layout { data: ranks, micro_batch, ..Layout::default() };
    // The second name is that of releases before 5.20.
    if document.flag("activation_checkpointing") | document.flag("gradient_checkpointing") {
        layout.recompute = Recompute::Full;
    }
    let mut unread = read_fsdp(&mut document, &mut layout);
    let global = micro_batch.saturating_mul(accumulation).saturating_mul(ranks);
    let mut plan = Plan::new(layout, global);
    plan.stack = Stack::new(STACK);
    let [is_bf16, is_fp16] = ["bf16", "fp16"].map(|name| document.flag(name));
    plan.precision = match (is_bf16, is_fp16) {
        (true, _) => DataType::Bf16,
        (_, true) => DataType::Fp16,
        _ => DataType::Fp32,
    };
    let usual = Training::default();
    // A Trainer's own defaults.
    let weight_decay = document.number("weight_decay").unwrap_or(0.0);
    let clip = document.number("max_grad_norm").unwrap_or(1.0);
    plan.training = Training {
        learning_rate: Some(document.number("learning_rate").unwrap_or(5e-5)),
        weight_decay,
        beta1: document.number("adam_beta1").unwrap_or(usual.beta1),
        beta2: document.number("adam_beta2").unwrap_or(usual.beta2),
        epsilon: document.number("adam_epsilon").unwrap_or(usual.epsilon),
        clip_norm: Some(clip).filter(|&norm| norm > 0.0),
        ..usual
    };
    let optimizer = document.take("optim");
    plan.optimizer = match optimizer.as_ref().and_then(Value::as_str) {
        Some("sgd") => Optimizer::Sgd,
        Some(name) if !name.starts_with("adamw_torch") => {
            unread.push(format!("optim: {name}"));
            Optimizer::AdamW
        }
        _ if weight_decay == 0.0 => Optimizer::Adam,
        _ => Optimizer::AdamW,
    };
    if plan.optimizer == Optimizer::Sgd {
        plan.training =
            Training { momentum: 0.0, beta1: usual.beta1, beta2: usual.beta2, epsilon: usual.epsilon, ..plan.training };
    }
    unread.extend(document.unread());
    Ok(ImportedPlan { plan, model: None, unread })
}
