//! The `TrainingArguments` of Hugging Face's Trainer, as JSON or YAML, and the files of tools that
//! begin with them: TRL, LLaMA-Factory, Axolotl.

use super::accelerate::STACK;
use super::deepspeed::{Trainer, read_config as read_deepspeed};
use super::fsdp;
use super::stated::Stated;
use super::{FrameworkError, ImportedPlan, Surroundings};
use foretell_program::{Layout, Optimizer, Plan, Recompute, Stack, Training};
use foretell_units::{Bytes, DataType};
use serde_json::{Value, json};

/// Arguments that change neither the time of a step nor its memory.
const NEUTRAL: [&str; 95] = [
    "output_dir",
    "overwrite_output_dir",
    "do_*",
    "eval_*",
    "evaluation_strategy",
    "val_*",
    "max_steps",
    "num_train_epochs",
    "num_epochs",
    "lr_scheduler*",
    "cosine_*",
    "warmup_*",
    "logging_*",
    "log_*",
    "save_*",
    "saves_per_epoch",
    "evals_per_epoch",
    "seed",
    "data_seed",
    "report_to",
    "run_name",
    "push_to_hub*",
    "hub_*",
    "per_device_eval_batch_size",
    "load_best_model_at_end",
    "remove_unused_columns",
    "dataloader_*",
    "ddp_timeout*",
    "ddp_backend",
    "ddp_find_unused_parameters",
    "ddp_broadcast_buffers",
    "ddp_static_graph",
    "disable_tqdm",
    "resume_from_checkpoint",
    "gradient_checkpointing_kwargs.*",
    "activation_checkpointing_kwargs.*",
    "include_inputs_for_metrics",
    "include_num_input_tokens_seen",
    "include_tokens_per_second",
    "include_for_metrics",
    "metric_for_best_model",
    "greater_is_better",
    "ignore_data_skip",
    "full_determinism",
    "label_names",
    "length_column_name",
    "train_sampling_strategy",
    "group_by_length",
    "skip_memory_metrics",
    "debug",
    "past_index",
    "local_rank",
    "_n_gpu",
    "no_cuda",
    "use_cpu",
    "use_ipex",
    "use_mps_device",
    "fp16_backend",
    "half_precision_backend",
    "fp16_opt_level",
    "fp16_full_eval",
    "bf16_full_eval",
    "batch_eval_metrics",
    "accelerator_config.*",
    "average_tokens_across_devices",
    "auto_find_batch_size",
    "tpu_num_cores",
    "torchdynamo",
    "mp_parameters",
    "project",
    "trackio_*",
    "wandb_*",
    "mlflow_*",
    "special_tokens.*",
    "dataset*",
    "datasets",
    "template",
    "chat_template*",
    "stage",
    "preprocessing_num_workers",
    "overwrite_cache",
    "plot_loss",
    "max_samples",
    "trust_remote_code",
    "strict",
    "tokenizer*",
    "hf_use_auth_token",
    "eos_token",
    "pad_token",
    "truncation_mode",
    "shuffle_dataset",
    "train_on_inputs",
    "optim_args",
    "plugins",
    "label_smoothing_factor",
];

/// Names of the same settings in files of Axolotl, LLaMA-Factory and TRL, and older names.
const RENAMED: [(&str, &str); 12] = [
    ("per_gpu_train_batch_size", "per_device_train_batch_size"),
    ("micro_batch_size", "per_device_train_batch_size"),
    ("optimizer", "optim"),
    ("base_model", "model_name_or_path"),
    ("model_name", "model_name_or_path"),
    ("sequence_len", "max_length"),
    ("max_seq_length", "max_length"),
    ("cutoff_len", "max_length"),
    ("bfloat16", "bf16"),
    ("float16", "fp16"),
    // The second name is that of releases before 5.20.
    ("gradient_checkpointing", "activation_checkpointing"),
    ("flash_attention", "flash_attn"),
];

/// Settings that no plan expresses.
const REFUSED: [&str; 8] = [
    "sharded_ddp",
    "adafactor",
    "parallelism_config",
    "adapter",
    "use_peft",
    "load_in_4bit",
    "load_in_8bit",
    "activation_offloading",
];

pub(super) fn import(text: &str, surroundings: &Surroundings<'_>) -> Result<ImportedPlan, FrameworkError> {
    let mut stated = Stated::parse(text, "TrainingArguments as JSON (`training_args.to_json_string()`) or YAML")?;
    for (older, newer) in RENAMED {
        stated.rename(older, newer)?;
    }
    let is_known =
        ["per_device_train_batch_size", "num_train_epochs", "output_dir", "bf16", "fp16", "learning_rate", "optim", "fsdp"];
    if !is_known.iter().any(|name| stated.has(name)) {
        return Err(FrameworkError::Form {
            reason: "no argument of a Trainer is in it".into(),
            hint: "give TrainingArguments as JSON (`training_args.to_json_string()`) or YAML".into(),
        });
    }
    stated.refuse(&REFUSED, "no plan expresses it, and it decides layout, optimizer or memory")?;
    if stated.text("finetuning_type")?.is_some_and(|kind| kind != "full") {
        return Err(stated.unknown("finetuning_type", "types: full"));
    }
    stated.neutral(&NEUTRAL);
    stated.neutral(&["flash_attn", "attn_implementation", "packing*", "sample_packing", "pad_to_sequence_len", "padding_free"]);
    let sequence = stated.size("max_length")?;
    let unknown_model = stated.text("model_name_or_path")?;
    if stated.is_on("torch_compile")? {
        stated.neutral(&["torch_compile_*"]);
        stated.assume("`torch_compile`: kernels are those that the stack is fitted to");
    }
    let mut plan = read_plan(&mut stated, surroundings)?;
    if stated.has("deepspeed") || stated.has_section("deepspeed") {
        follow_deepspeed(&mut stated, surroundings, &mut plan)?;
    }
    Ok(ImportedPlan { sequence, unknown_model, ..ImportedPlan::new(plan, stated.finish()?) })
}

/// Reads all but DeepSpeed's part.
fn read_plan(stated: &mut Stated, surroundings: &Surroundings<'_>) -> Result<Plan, FrameworkError> {
    let ranks = surroundings.ranks;
    let micro_batch = match stated.size("per_device_train_batch_size")?.or(surroundings.micro_batch) {
        Some(size) => size,
        None => {
            stated.assume("`micro_batch` 8: the Trainer's default of `per_device_train_batch_size`");
            8
        }
    };
    let accumulation = stated.size("gradient_accumulation_steps")?.unwrap_or(1);
    let mut layout = Layout { data: ranks, micro_batch, ..Layout::default() };
    if stated.is_on("activation_checkpointing")? {
        layout.recompute = Recompute::Full;
    }
    if let Some(megabytes) = stated.size("ddp_bucket_cap_mb")? {
        layout.bucket = Bytes::new((megabytes as u64).saturating_mul(1 << 20));
    }
    let words = fsdp::read_words(stated)?;
    let section = stated.section("fsdp_config");
    if let Some(Value::String(_)) = stated.take("fsdp_config") {
        return Err(stated.wrong("fsdp_config", "an object: give the contents of that file in its place"));
    }
    let account = fsdp::read_config(section, words, &mut layout, surroundings.devices_per_node)?;
    stated.absorb(account);
    stated.usual("fsdp_min_num_params", &json!(0));
    stated.neutral(&["fsdp_transformer_layer_cls_to_wrap"]);
    let global = micro_batch.saturating_mul(accumulation).saturating_mul(ranks);
    let mut plan = Plan::new(layout, global);
    plan.stack = Stack::new(STACK);
    plan.precision = read_precision(stated, surroundings)?;
    read_optimizer(stated, &mut plan)?;
    Ok(plan)
}

fn read_precision(stated: &mut Stated, surroundings: &Surroundings<'_>) -> Result<DataType, FrameworkError> {
    // Axolotl's `auto` takes what the devices have.
    if stated.is_auto("bf16") {
        stated.assume(format!("`precision` {}: the file says `bf16: auto`", surroundings.precision));
        return Ok(surroundings.precision);
    }
    let (is_bf16, is_fp16) = (stated.is_on("bf16")?, stated.is_on("fp16")?);
    let has_tf32 = stated.is_on("tf32")?;
    Ok(match (is_bf16, is_fp16) {
        (true, true) => {
            let reason = "`bf16` and `fp16` are both on".into();
            return Err(FrameworkError::Form { reason, hint: "keep one of them, as the Trainer demands".into() });
        }
        (true, _) => DataType::Bf16,
        (_, true) => DataType::Fp16,
        _ if has_tf32 => DataType::Tf32,
        _ => {
            stated.assume("`precision` fp32: neither `bf16` nor `fp16` is on, and that is the Trainer's default");
            DataType::Fp32
        }
    })
}

fn read_optimizer(stated: &mut Stated, plan: &mut Plan) -> Result<(), FrameworkError> {
    let usual = Training::default();
    // A Trainer's own defaults.
    let weight_decay = stated.number("weight_decay")?.unwrap_or(0.0);
    let clip = stated.number("max_grad_norm")?.unwrap_or(1.0);
    plan.training = Training {
        learning_rate: Some(stated.number("learning_rate")?.unwrap_or(5e-5)),
        weight_decay,
        beta1: stated.number("adam_beta1")?.unwrap_or(usual.beta1),
        beta2: stated.number("adam_beta2")?.unwrap_or(usual.beta2),
        epsilon: stated.number("adam_epsilon")?.unwrap_or(usual.epsilon),
        clip_norm: Some(clip).filter(|&norm| norm > 0.0),
        ..usual.clone()
    };
    let optimizer = stated.text("optim")?;
    plan.optimizer = match optimizer.as_deref() {
        Some("sgd") => Optimizer::Sgd,
        Some(name)
            if (!name.starts_with("adamw_torch") || name.contains("bit")) && !matches!(name, "adamw_hf" | "adamw_apex_fused") =>
        {
            return Err(stated.unknown("optim", "optimizers: adamw_torch, adamw_torch_fused, sgd"));
        }
        _ if weight_decay == 0.0 => Optimizer::Adam,
        _ => Optimizer::AdamW,
    };
    if plan.optimizer == Optimizer::Sgd {
        plan.training =
            Training { momentum: 0.0, beta1: usual.beta1, beta2: usual.beta2, epsilon: usual.epsilon, ..plan.training.clone() };
    }
    Ok(())
}

/// Reads DeepSpeed's configuration, written in place or in a file that the arguments name.
fn follow_deepspeed(stated: &mut Stated, surroundings: &Surroundings<'_>, plan: &mut Plan) -> Result<(), FrameworkError> {
    let mut section = match stated.text("deepspeed").ok().flatten() {
        None => stated.section("deepspeed"),
        Some(path) => match (surroundings.file)(&path) {
            Some(text) => Stated::parse(&text, "DeepSpeed's JSON configuration")?,
            None => {
                stated.assume(format!(
                    "`deepspeed: {path}` is not followed, as there is no such file beside this one: the plan lacks its ZeRO stage and \
                     offload, and is another job if that file has them; put it there and import again"
                ));
                return Ok(());
            }
        },
    };
    if plan.layout.zero > 0 {
        return Err(FrameworkError::Form {
            reason: "`deepspeed` beside `fsdp`".into(),
            hint: "keep one of them, as the Trainer demands".into(),
        });
    }
    let layout = &plan.layout;
    let steps = plan.global_batch / layout.micro_batch.saturating_mul(surroundings.ranks).max(1);
    let trainer = Trainer {
        micro_batch: (layout.micro_batch, "the Trainer's"),
        accumulation: steps,
        precision: (plan.precision, "the Trainer's"),
        optimizer: plan.optimizer,
        training: plan.training.clone(),
        is_stated: true,
    };
    // A configuration without its own batch or precision gets the Trainer's.
    let has_precision = ["bf16.enabled", "fp16.enabled", "bfloat16.enabled"].iter().any(|name| section.has(name));
    let recompute = layout.recompute.clone();
    let mut followed = read_deepspeed(&mut section, surroundings, &trainer)?;
    if !has_precision {
        followed.precision = plan.precision;
    }
    if followed.global_batch != plan.global_batch || followed.layout.micro_batch != plan.layout.micro_batch {
        return Err(FrameworkError::Form {
            reason: format!(
                "the arguments say {} samples of a micro-batch and {} of a step, and DeepSpeed's configuration {} and {}",
                plan.layout.micro_batch, plan.global_batch, followed.layout.micro_batch, followed.global_batch
            ),
            hint: "write \"auto\" in DeepSpeed's configuration, as the Trainer demands equal values".into(),
        });
    }
    followed.layout.recompute = recompute;
    *plan = followed;
    stated.absorb(section.finish()?);
    Ok(())
}
