//! ms-swift's jobs (`swift sft`, `swift pt`, `swift rlhf`) as arguments of a Trainer: their names,
//! their defaults, and the configurations of DeepSpeed and FSDP that ms-swift includes.

use super::super::stated::Stated;
use super::super::{FrameworkError, Surroundings};
use super::published;
use serde_json::{Value, json};

/// Names of the same settings in this and older releases, with the Trainer's name.
const RENAMED: [(&str, &str); 13] = [
    ("train_type", "tuner_type"),
    ("sft_type", "tuner_type"),
    ("model_id_or_path", "model"),
    ("batch_size", "per_device_train_batch_size"),
    ("eval_batch_size", "per_device_eval_batch_size"),
    ("attn_impl", "attn_implementation"),
    ("use_flash_attn", "flash_attn"),
    ("target_modules", "lora_target_modules"),
    ("lora_rank", "lora_r"),
    ("gradient_checkpointing", "activation_checkpointing"),
    ("zero_hpz_partition_size", "deepspeed.zero_optimization.zero_hpz_partition_size"),
    ("deepspeed_autotp_size", "deepspeed.tensor_parallel.autotp_size"),
    ("use_loss_scale", "loss_scale"),
];

/// Settings that change neither the time of a step nor its memory.
const NEUTRAL: [&str; 40] = [
    "rlhf_type",
    "system",
    "template*",
    "agent_template",
    "loss_scale",
    "is_binary_loss_scale",
    "split_dataset_ratio",
    "model_author",
    "use_hf",
    "custom_*",
    "external_plugins*",
    "val_dataset*",
    "columns*",
    "truncation_strategy",
    "lazy_tokenize",
    "load_from_cache_file",
    "use_chat_template",
    "padding_side",
    "response_prefix",
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "check_model",
    "check_dataset_strategy",
    "acc_strategy",
    "create_checkpoint_symlink",
    "add_version",
    "swanlab_*",
    "load_args",
    "resume_only_model",
    "norm_bbox",
    "max_epochs",
    "init_weights",
    "interleave_prob",
    "stopping_strategy",
    "shuffle_buffer_size",
    "download_mode",
    "self_cognition_sample",
    "max_shard_size",
];

/// DeepSpeed's configurations that ms-swift includes, by the names that `--deepspeed` takes: the
/// stage, and whether the optimizer's state and the parameters are in host memory.
const ZERO: [(&str, u8, bool); 7] = [
    ("zero0", 0, false),
    ("zero1", 1, false),
    ("zero2", 2, false),
    ("zero3", 3, false),
    ("zero2_offload", 2, true),
    ("zero3_offload", 3, true),
    // Names of releases before 3.
    ("default-zero2", 2, false),
];

/// The command of ms-swift that a script runs: `sft`, `pt` or `rlhf`.
pub(super) fn job(script: &str) -> Option<&str> {
    let of_package = || script.split("swift/cli/").nth(1)?.strip_suffix(".py");
    script.strip_prefix("swift-").or_else(of_package).filter(|job| ["sft", "pt", "rlhf"].contains(job))
}

/// Renames ms-swift's settings, and adds its defaults.
pub(super) fn translate(stated: &mut Stated, job: &str, surroundings: &Surroundings<'_>) -> Result<(), FrameworkError> {
    for (own, general) in RENAMED {
        stated.rename(own, general)?;
    }
    if !stated.has("model") {
        stated.rename("model_type", "model")?;
    }
    stated.neutral(&NEUTRAL[1..]);
    if job != "rlhf" {
        stated.neutral(&NEUTRAL[..1]);
    }
    stated.refuse(
        &["use_galore", "lisa_activated_layers", "freeze_parameters_ratio", "train_dataloader_kwargs"],
        "no plan expresses it, and it decides what is trained",
    )?;
    let is_lora = read_tuner(stated)?;
    let mut usual = |name: &str, value: Value, what: &str| {
        if !stated.has(name) {
            stated.provide(name, value);
            stated.assume(format!("{what}, as ms-swift does where `{name}` is not stated"));
        }
    };
    usual("per_device_train_batch_size", json!(1), "`micro_batch` 1");
    let (rate, decay) = if is_lora { (1e-4, "a learning rate of 1e-4") } else { (1e-5, "a learning rate of 1e-5") };
    usual("learning_rate", json!(rate), decay);
    usual("weight_decay", json!(0.1), "a weight decay of 0.1");
    usual("adam_beta2", json!(0.95), "`beta2` 0.95");
    read_format(stated)?;
    let micro_batch = stated.size("per_device_train_batch_size")?.unwrap_or(1);
    if !stated.has("gradient_accumulation_steps") {
        let steps = 16usize.div_ceil(micro_batch.saturating_mul(surroundings.ranks).max(1)).max(1);
        stated.provide("gradient_accumulation_steps", json!(steps));
        stated.assume(format!("{steps} micro-batches of a step, so that it has 16 samples at least: ms-swift's default"));
    }
    read_bits(stated)?;
    read_shards(stated);
    Ok(())
}

/// Reads what is trained. Returns whether that is adapters.
fn read_tuner(stated: &mut Stated) -> Result<bool, FrameworkError> {
    if !stated.has("tuner_type") {
        stated.assume("`training.lora`: ms-swift's default of `tuner_type` is lora");
        stated.provide("tuner_type", json!("lora"));
    }
    match stated.text("tuner_type")?.as_deref() {
        Some("full") => {
            stated.neutral(&["lora_*"]);
            return Ok(false);
        }
        Some("lora" | "qlora") => stated.provide("use_peft", json!(true)),
        _ => return Err(stated.unknown("tuner_type", "types: full, lora")),
    }
    stated.refuse(&["target_regex", "target_parameters"], "adapters at names of modules are planned, and not by expressions")?;
    for (name, value, what) in [
        ("lora_r", json!(8), "`training.lora.rank` 8"),
        ("lora_alpha", json!(32), "`training.lora.alpha` 32"),
        ("lora_dropout", json!(0.05), "adapters with dropout"),
        ("lora_target_modules", json!("all-linear"), "`training.lora.targets`: all linear layers"),
    ] {
        if !stated.has(name) {
            stated.provide(name, value);
            stated.assume(format!("{what}, ms-swift's default"));
        }
    }
    // The word of older releases.
    if stated.peek("lora_target_modules").and_then(Value::as_str) == Some("ALL") {
        stated.set("lora_target_modules", json!("all-linear"));
    }
    Ok(true)
}

/// Reads the format of the checkpoint, which decides the precision.
fn read_format(stated: &mut Stated) -> Result<(), FrameworkError> {
    stated.rename("dtype", "torch_dtype")?;
    if ["bf16", "fp16"].iter().any(|name| stated.has(name)) {
        return Ok(());
    }
    match stated.peek("torch_dtype").and_then(Value::as_str).map(|name| name.trim_start_matches("torch.")) {
        Some("float16" | "fp16" | "float32" | "fp32") => stated.provide("fp16", json!(true)),
        Some(_) => stated.provide("bf16", json!(true)),
        None => {
            stated.assume("`precision` bf16: ms-swift takes the checkpoint's format, and most are in bf16 (`--torch_dtype`)");
            stated.provide("bf16", json!(true));
        }
    }
    Ok(())
}

/// Reads the bits of frozen weights.
fn read_bits(stated: &mut Stated) -> Result<(), FrameworkError> {
    let method = stated.text("quant_method")?;
    match (method.as_deref(), stated.count("quant_bits")?) {
        (None, None) | (Some("bnb"), None) => {}
        (None | Some("bnb"), Some(4)) => stated.provide("load_in_4bit", json!(true)),
        (None | Some("bnb"), Some(8)) => stated.provide("load_in_8bit", json!(true)),
        (None | Some("bnb"), Some(_)) => return Err(stated.unknown("quant_bits", "bits: 4, 8")),
        (Some(_), _) => return Err(stated.unknown("quant_method", "methods: bnb")),
    }
    Ok(())
}

/// Writes out the configurations that ms-swift includes.
fn read_shards(stated: &mut Stated) {
    let named = stated.peek("deepspeed").and_then(Value::as_str).map(str::to_owned);
    if let Some(name) = named
        && let Some((_, stage, offloads)) = ZERO.iter().find(|(own, ..)| *own == name || format!("default-{own}") == name)
    {
        stated.replace_by_section("deepspeed", zero(*stage, *offloads));
    }
    if stated.peek("fsdp").is_some_and(|name| name == "fsdp2") {
        stated.set("fsdp", json!("full_shard auto_wrap"));
        let config = json!({"version": 2, "reshard_after_forward": true, "activation_checkpointing": true});
        stated.replace_by_section("fsdp_config", config);
    }
}

/// A configuration of DeepSpeed as in ms-swift, as far as it decides a plan.
fn zero(stage: u8, offloads: bool) -> Value {
    let device = if offloads { "cpu" } else { "none" };
    let mut zero = json!({"stage": stage, "overlap_comm": false, "offload_optimizer": {"device": device}});
    if stage < 3 {
        zero["reduce_bucket_size"] = json!(200_000_000);
    } else {
        zero["reduce_bucket_size"] = json!("auto");
        zero["offload_param"] = json!({"device": device});
    }
    published::configuration(zero)
}
