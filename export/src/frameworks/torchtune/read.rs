//! Plans from torchtune's recipes.

use super::super::stated::Stated;
use super::super::{FrameworkError, ImportedPlan, Surroundings};
use super::{ATTENTION, FEED_FORWARD, HEAD, MODELS, STACK};
use foretell_models::Model;
use foretell_program::{
    Layout, Lora, LossKernel, MomentFormat, Offload, Optimizer, Plan, PlanError, Preference, Recompute, Stack, Training,
};
use foretell_units::DataType;
use serde_json::{Value, json};

/// Settings that change neither the time of a step nor its memory.
const NEUTRAL: [&str; 33] = [
    "dataloader.*",
    "output_dir",
    "model_dir",
    "tokenizer.*",
    "checkpointer.*",
    "resume_from_checkpoint",
    "save_adapter_weights_only",
    "save_last_epoch_only",
    "enable_async_checkpointing",
    "dataset.*",
    "dataset_val.*",
    "run_val_every_n_steps",
    "batch_size_val",
    "seed",
    "shuffle",
    "epochs",
    "max_steps_per_epoch",
    "device",
    "metric_logger.*",
    "log_every_n_steps",
    "log_peak_memory_stats",
    "log_level",
    "profiler.*",
    "lr_scheduler.*",
    "cudnn_deterministic_mode",
    "keep_last_n_checkpoints",
    "tensor_parallel_plan.*",
    "optimizer.fused",
    "loss.num_output_chunks",
    "loss.ignore_index",
    "custom_sharded_layers",
    "memory_efficient_fsdp_wrap",
    "checkpoint_dir",
];

pub(in super::super) fn import(text: &str, surroundings: &Surroundings<'_>) -> Result<ImportedPlan, FrameworkError> {
    let mut stated = super::launch::read(text, surroundings)?;
    let Some(component) = stated.text("model._component_")? else {
        return Err(FrameworkError::Form {
            reason: "it has no `model._component_`".into(),
            hint: "give a recipe's YAML file, as `tune cp` copies it".into(),
        });
    };
    let builder = component.rsplit('.').next().unwrap_or_default().to_string();
    let (method, builder) = match (builder.strip_prefix("qlora_"), builder.strip_prefix("lora_")) {
        (Some(rest), _) => (Some(true), rest.to_string()),
        (None, Some(rest)) => (Some(false), rest.to_string()),
        (None, None) => (None, builder),
    };
    if matches!(stated.peek("model.decoder_trainable"), Some(Value::Bool(false))) {
        return Err(stated.frozen_text("model.decoder_trainable"));
    }
    stated.refuse(&["model.use_dora"], "of adapters, plain LoRA and QLoRA are planned")?;
    stated.refuse(&["fsdp_sharding_strategy"], "no plan expresses it, and it decides memory")?;
    for teacher in ["teacher_model", "reward_and_value_model", "ref_policy_model", "base_model_path", "quantizer"] {
        stated.refuse(
            &[teacher, &format!("{teacher}.*")],
            "training with other models, and from quantised weights, is not planned",
        )?;
    }
    let sequence = stated.size("tokenizer.max_seq_len")?;
    stated.neutral(&NEUTRAL);
    let layout = read_layout(&mut stated, surroundings)?;
    let accumulation = stated.size("gradient_accumulation_steps")?.unwrap_or(1);
    let global = layout.micro_batch.saturating_mul(accumulation).saturating_mul(layout.data);
    let mut plan = Plan::new(layout, global);
    read_optimizer(&mut stated, &mut plan)?;
    plan.workload.updates_in_backward = stated.is_on("optimizer_in_bwd")?;
    if stated.peek("dataset.packed") == Some(&Value::Bool(true)) {
        stated.assume_packed("dataset.packed");
    }
    plan.precision = match stated.word("dtype")?.as_deref() {
        Some("bf16") => DataType::Bf16,
        None | Some("fp32") => DataType::Fp32,
        Some(_) => return Err(stated.unknown("dtype", "formats: bf16, fp32")),
    };
    // Parameters, gradients and moments all have this format.
    plan.workload.no_master_copy = plan.precision == DataType::Bf16;
    read_adapters(&mut stated, method, &mut plan)?;
    plan.workload.loss = match stated.text("loss._component_")?.as_deref() {
        Some(name) if name.ends_with(".DPOLoss") || name.ends_with(".RSOLoss") => {
            read_preference(&mut stated, &mut plan);
            LossKernel::Plain
        }
        Some(name) if name.contains("Chunked") || name.contains("LinearCrossEntropy") => LossKernel::Chunked,
        None => LossKernel::Plain,
        Some(name) if name.ends_with("CrossEntropyLoss") => LossKernel::Plain,
        Some(_) => {
            return Err(stated.unknown("loss._component_", "losses: CEWithChunkedOutputLoss, CrossEntropyLoss, DPOLoss"));
        }
    };
    if stated.is_on("compile")? {
        stated.assume("`compile`: kernels are those that the stack `torchtune` is fitted to");
    }
    plan.stack = Stack::new(STACK);
    stated.assume("`stack` torchtune: its own recipes on PyTorch's FSDP2");
    let known = MODELS
        .iter()
        .find(|(_, _, own, _)| *own == builder || own.replace("3_1_", "3_") == builder || own.replace("3_1_", "3_3_") == builder);
    let known = known.map(|(name, ..)| *name).or_else(|| Model::named_on_hub(&hub_name(&builder)));
    let (model, unknown_model) = match known {
        Some(name) => {
            let model = Model::named(name).map_err(PlanError::from)?;
            let length = sequence.or(surroundings.sequence);
            if length.is_none() {
                stated.assume("samples have the model's own length: `tokenizer.max_seq_len` is not stated (`--sequence`)");
            }
            let model = length.and_then(|length| model.with_sequence(length)).unwrap_or(model);
            (Some(model), None)
        }
        None => (None, Some(component.clone())),
    };
    Ok(ImportedPlan { model, unknown_model, sequence, ..ImportedPlan::new(plan, stated.finish()?) })
}

/// Reads the settings that only recipes for DPO have.
fn read_preference(stated: &mut Stated, plan: &mut Plan) {
    plan.workload.preference = Some(Preference::Dpo);
    stated.neutral(&["loss.beta", "loss.label_smoothing", "loss.gamma"]);
    match &plan.training.lora {
        None => stated.neutral(&["ref_checkpointer.*"]),
        Some(_) if plan.training.clip_norm.take().is_some() => {
            let clip = stated.written("clip_grad_norm");
            stated.assume(format!("{clip}: the recipes of DPO with adapters do not clip gradients"));
        }
        Some(_) => {}
    }
}

fn read_layout(stated: &mut Stated, surroundings: &Surroundings<'_>) -> Result<Layout, FrameworkError> {
    let tensor = stated.size("tensor_parallel_dim")?.unwrap_or(1);
    let context = stated.size("context_parallel_dim")?.unwrap_or(1);
    let replicate = stated.size("data_parallel_replicate_dim")?.unwrap_or(1);
    let ranks = surroundings.ranks;
    let wrong = |reason: String| FrameworkError::Form { reason, hint: "say the cluster with `--topology` and `--nodes`".into() };
    let of_model = tensor.saturating_mul(context);
    if !ranks.is_multiple_of(of_model.saturating_mul(replicate)) {
        return Err(wrong(format!(
            "{ranks} ranks are no multiple of the dimensions' product, {}",
            of_model.saturating_mul(replicate)
        )));
    }
    let data = ranks / of_model;
    if let Some(shard) = stated.take("data_parallel_shard_dim").filter(|value| *value != -1)
        && shard != json!(data / replicate)
    {
        return Err(wrong(format!("`data_parallel_shard_dim: {shard}`, and {} ranks are left for it", data / replicate)));
    }
    let micro_batch = match stated.size("batch_size")?.or(surroundings.micro_batch) {
        Some(size) => size,
        None => {
            return Err(FrameworkError::Form {
                reason: "it states no `batch_size`".into(),
                hint: "add it, or say `--micro-batch`".into(),
            });
        }
    };
    let reshards = stated.flag("fsdp_reshard_after_forward")?.unwrap_or(true);
    let zero = match (ranks, reshards) {
        (1, _) => 0,
        (_, true) => 3,
        (_, false) => 2,
    };
    let mut layout = Layout { data, tensor, context, zero, micro_batch, ..Layout::default() };
    layout.shard_group = Some(data / replicate).filter(|_| replicate > 1 && zero > 0);
    if stated.is_on("enable_activation_checkpointing")? {
        layout.recompute = Recompute::Full;
    }
    stated.refuse(&["ac_mode", "ac_option"], "blocks are recomputed all or not at all (`enable_activation_checkpointing`)")?;
    let offloads = stated.is_on("enable_activation_offloading")?;
    let is_state = stated.is_on("fsdp_cpu_offload")?;
    layout.offload = match (offloads, is_state) {
        (true, true) => {
            return Err(FrameworkError::Form {
                reason: "`fsdp_cpu_offload` beside `enable_activation_offloading`: no plan has both".into(),
                hint: "keep one of them".into(),
            });
        }
        (true, false) => Offload::Activations,
        (false, true) if zero == 3 => Offload::State,
        (false, true) => {
            return Err(FrameworkError::Form {
                reason: "`fsdp_cpu_offload` without parameters that are sharded: no plan has it".into(),
                hint: "leave out `fsdp_reshard_after_forward: false`".into(),
            });
        }
        (false, false) => Offload::None,
    };
    Ok(layout)
}

fn read_optimizer(stated: &mut Stated, plan: &mut Plan) -> Result<(), FrameworkError> {
    let usual = Training::default();
    let component = stated.text("optimizer._component_")?.unwrap_or_else(|| "torch.optim.AdamW".into());
    let kind = component.rsplit('.').next().unwrap_or_default();
    // PyTorch's defaults.
    let usual_decay = if kind.starts_with("AdamW") || kind.starts_with("PagedAdamW") { 0.01 } else { 0.0 };
    let weight_decay = stated.number("optimizer.weight_decay")?.unwrap_or(usual_decay);
    let betas = stated.list("optimizer.betas")?;
    let beta = |index: usize, usual: f32| betas.get(index).and_then(Value::as_f64).map_or(usual, |beta| beta as f32);
    let clip = stated.number("clip_grad_norm")?.unwrap_or(0.0);
    plan.training = Training {
        learning_rate: Some(stated.number("optimizer.lr")?.unwrap_or(1e-3)),
        weight_decay,
        beta1: beta(0, usual.beta1),
        beta2: beta(1, 0.999),
        epsilon: stated.number("optimizer.eps")?.unwrap_or(1e-8),
        clip_norm: Some(clip).filter(|&norm| norm > 0.0),
        ..usual.clone()
    };
    let adam = if weight_decay == 0.0 { Optimizer::Adam } else { Optimizer::AdamW };
    plan.optimizer = match kind {
        "AdamW" | "Adam" => adam,
        "AdamW8bit" | "PagedAdamW8bit" | "Adam8bit" => {
            plan.workload.moments = MomentFormat::EightBit;
            plan.workload.paged_moments = kind.starts_with("Paged");
            adam
        }
        "PagedAdamW" | "PagedAdam" => {
            stated.assume("`optimizer._component_`: the plan keeps the state in device memory, in the format of the parameters; bitsandbytes' is of 32 bits, and pages move to the host where memory runs out");
            adam
        }
        "SGD" => {
            let momentum = stated.number("optimizer.momentum")?.unwrap_or(0.0);
            let nesterov = stated.is_on("optimizer.nesterov")?;
            let training = &mut plan.training;
            *training = Training {
                momentum,
                nesterov,
                beta1: usual.beta1,
                beta2: usual.beta2,
                epsilon: usual.epsilon,
                ..training.clone()
            };
            Optimizer::Sgd
        }
        _ => return Err(stated.unknown("optimizer._component_", "optimizers: AdamW, Adam, PagedAdamW8bit, AdamW8bit, SGD")),
    };
    Ok(())
}

/// Reads adapters. `method` tells whether the frozen weights have four bits; `None` without
/// adapters.
fn read_adapters(stated: &mut Stated, method: Option<bool>, plan: &mut Plan) -> Result<(), FrameworkError> {
    let Some(is_quantised) = method else { return Ok(()) };
    let attention = stated.list("model.lora_attn_modules")?;
    let mut targets = Vec::new();
    for name in &attention {
        match ATTENTION.iter().find(|(_, own)| name == own) {
            Some((name, _)) => targets.push(*name),
            None => return Err(stated.unknown("model.lora_attn_modules", "modules: q_proj, k_proj, v_proj, output_proj")),
        }
    }
    let feed_forward = stated.is_on("model.apply_lora_to_mlp")?;
    let head = stated.is_on("model.apply_lora_to_output")?;
    let is_all = targets.len() == ATTENTION.len() && feed_forward && !head;
    if feed_forward {
        targets.extend(FEED_FORWARD);
    }
    targets.extend(head.then_some(HEAD));
    let rank = stated.size("model.lora_rank")?.unwrap_or(8);
    let alpha = stated.size("model.lora_alpha")?.unwrap_or(16);
    let targets = if is_all { Lora::targets_named(["all"]) } else { Lora::targets_named(targets.iter().copied()) };
    plan.training.lora = Some(Lora { rank, alpha, targets, ..Lora::default() });
    plan.workload.adapter_dropout = stated.number("model.lora_dropout")?.is_some_and(|rate| rate > 0.0);
    plan.workload.base_bits = (is_quantised || stated.is_on("model.quantize_base")?).then_some(4);
    Ok(())
}

/// A builder's name as the Hugging Face Hub writes it: `qwen2.5-7b` for `qwen2_5_7b`.
fn hub_name(builder: &str) -> String {
    let mut name = String::new();
    for part in builder.split('_') {
        let is_release = part.len() == 1 && part.starts_with(|digit: char| digit.is_ascii_digit());
        let separator = if is_release && name.ends_with(|digit: char| digit.is_ascii_digit()) { "." } else { "-" };
        name = if name.is_empty() { part.into() } else { format!("{name}{separator}{part}") };
    }
    name
}
