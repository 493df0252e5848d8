//! OpenRLHF's jobs (`openrlhf.cli.train_sft`, `train_dpo`, `train_rm`) as arguments of a Trainer
//! with a configuration of DeepSpeed. OpenRLHF has its own defaults and its own names, dotted in
//! newer releases and plain in older ones.

use super::super::stated::Stated;
use super::super::{FrameworkError, Surroundings};
use foretell_program::Preference;
use serde_json::{Value, json};

/// A command of OpenRLHF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Job {
    Sft,
    Dpo,
    Reward,
}

impl Job {
    /// The preference that a job trains on.
    pub(super) const fn preference(self) -> Option<Preference> {
        match self {
            Self::Sft => None,
            Self::Dpo => Some(Preference::Dpo),
            Self::Reward => Some(Preference::Reward),
        }
    }
}

/// The command that a module or a script runs; `None` for other programs.
///
/// # Errors
/// For commands that train by rewards, which are not read.
pub(super) fn job(script: &str) -> Result<Option<Job>, FrameworkError> {
    let dotted = script.replace('/', ".");
    let Some((_, command)) = dotted.split_once("openrlhf.cli.") else { return Ok(None) };
    match command.trim_end_matches(".py") {
        "train_sft" => Ok(Some(Job::Sft)),
        "train_dpo" => Ok(Some(Job::Dpo)),
        "train_rm" => Ok(Some(Job::Reward)),
        other => Err(FrameworkError::Form {
            reason: format!("`openrlhf.cli.{other}`: training by rewards has other models and passes"),
            hint: "plan it with `foretell plan --method ppo` or `grpo`; of OpenRLHF's commands, train_sft, train_dpo and train_rm are read"
                .into(),
        }),
    }
}

/// Names in newer and older releases, with the Trainer's name.
const RENAMED: [(&str, &str); 46] = [
    ("train.micro_batch_size", "per_device_train_batch_size"),
    ("micro_train_batch_size", "per_device_train_batch_size"),
    ("train.batch_size", "train_batch_size"),
    ("model.model_name_or_path", "model_name_or_path"),
    ("pretrain", "model_name_or_path"),
    ("data.max_len", "max_length"),
    ("max_len", "max_length"),
    ("model.gradient_checkpointing_enable", "activation_checkpointing"),
    ("gradient_checkpointing", "activation_checkpointing"),
    ("ds.attn_implementation", "attn_implementation"),
    ("ds.use_liger_kernel", "use_liger_kernel"),
    ("ds.packing_samples", "packing"),
    ("packing_samples", "packing"),
    ("ds.ring_attn_size", "ring_attn_size"),
    ("ds.ring_attn_head_stride", "ring_head_stride"),
    ("ds.zero_stage", "zero_stage"),
    ("ds.adam_offload", "adam_offload"),
    ("ds.zpg", "zpg"),
    ("ds.param_dtype", "param_dtype"),
    ("ds.grad_accum_dtype", "grad_accum_dtype"),
    ("ds.tensor_parallel_size", "ds_tensor_parallel_size"),
    ("ds.overlap_comm", "overlap_comm"),
    ("ds.deepcompile", "deepcompile"),
    ("ds.load_in_4bit", "load_in_4bit"),
    ("ds.lora.rank", "lora_r"),
    ("lora_rank", "lora_r"),
    ("ds.lora.alpha", "lora_alpha"),
    ("ds.lora.target_modules", "lora_target_modules"),
    ("target_modules", "lora_target_modules"),
    ("ds.lora.dropout", "lora_dropout"),
    ("adam.lr", "learning_rate"),
    ("adam.betas", "adam_betas"),
    ("adam.eps", "adam_epsilon"),
    ("adam.weight_decay", "weight_decay"),
    ("l2", "weight_decay"),
    ("max_norm", "max_grad_norm"),
    ("model.beta", "beta"),
    ("model.ipo_enable", "ipo"),
    ("ref.offload", "ref_offload"),
    ("ref.model_name_or_path", "ref_pretrain"),
    ("model.nll_loss_coef", "nll_loss_coef"),
    ("model.aux_loss_coef", "aux_loss_coef"),
    ("model.loss_type", "loss"),
    ("model.compute_fp32_loss_enable", "compute_fp32_loss"),
    ("optim", "optimizer_name"),
    ("ds.experts_implementation", "experts_implementation"),
];

/// Settings that change neither the time of a step nor its memory.
const NEUTRAL: [&str; 50] = [
    "ckpt.*",
    "logger.*",
    "eval.*",
    "data.*",
    "train.seed",
    "train.max_epochs",
    "train.full_determinism_enable",
    "max_epochs",
    "lr_scheduler",
    "lr_warmup_ratio",
    "min_lr_ratio",
    "model.pretrain_mode_enable",
    "pretrain_mode",
    "model.gradient_checkpointing_reentrant",
    "gradient_checkpointing_use_reentrant",
    "model.margin_loss_enable",
    "margin_loss",
    "ds.use_universal_ckpt",
    "use_ds_universal_ckpt",
    "ds.value_head_prefix",
    "value_head_prefix",
    "muon.*",
    "ring_head_stride",
    "save_path",
    "save_steps",
    "save_hf_ckpt",
    "disable_ds_ckpt",
    "ckpt_path",
    "max_ckpt_num",
    "max_ckpt_mem",
    "load_checkpoint",
    "input_key",
    "output_key",
    "input_template",
    "prompt_key",
    "chosen_key",
    "rejected_key",
    "apply_chat_template",
    "tokenizer_chat_template",
    "multiturn",
    "use_wandb",
    "use_tensorboard",
    "eval_steps",
    "disable_fast_tokenizer",
    "dataset_probs",
    "train_split",
    "use_ms",
    "nll_loss_coef",
    "ipo",
    "ref_pretrain",
];

/// Renames OpenRLHF's settings, adds its defaults, and moves DeepSpeed's settings into a section.
pub(super) fn translate(stated: &mut Stated, job: Job, surroundings: &Surroundings<'_>) -> Result<(), FrameworkError> {
    for (own, general) in RENAMED {
        stated.rename(own, general)?;
    }
    stated.neutral(&NEUTRAL);
    stated.noted(&["compute_fp32_loss", "deepcompile", "aux_loss_coef", "loss"]);
    stated.refuse(&["ref_offload"], "the reference model's parameters lie in device memory in a plan")?;
    stated.usual("optimizer_name", &json!("adam"));
    stated.refuse(&["optimizer_name"], "of OpenRLHF's optimizers, adam is planned")?;
    let mut usual = |name: &str, value: Value, what: String| {
        if !stated.has(name) {
            stated.provide(name, value);
            stated.assume(format!("{what}: OpenRLHF's default"));
        }
    };
    let (micro_batch, positions, rate) = match job {
        Job::Sft => (8, 2048, 5e-6),
        Job::Dpo => (8, 512, 1e-5),
        Job::Reward => (1, 512, 9e-6),
    };
    usual("per_device_train_batch_size", json!(micro_batch), format!("`micro_batch` {micro_batch}"));
    usual("train_batch_size", json!(128), "128 samples of a step".into());
    usual("max_length", json!(positions), format!("{positions} positions of a sample"));
    usual("learning_rate", json!(rate), format!("a learning rate of {rate}"));
    usual("zero_stage", json!(2), "`zero` 2".into());
    read_precision(stated)?;
    let betas = stated.list("adam_betas")?;
    let beta = |index: usize, usual: f64| betas.get(index).cloned().unwrap_or(json!(usual));
    let [first, second] = [beta(0, 0.9), beta(1, 0.95)];
    stated.provide("adam_beta1", first);
    stated.provide("adam_beta2", second);
    read_adapters(stated)?;
    let ring = stated.size("ring_attn_size")?.unwrap_or(1);
    let tensor = stated.size("ds_tensor_parallel_size")?.unwrap_or(1);
    if ring > 1 {
        stated.provide("sequence_parallel_size", json!(ring));
        stated.provide("sequence_parallel_mode", json!("ring"));
    }
    if tensor > 1 {
        return Err(FrameworkError::Form {
            reason: format!(
                "{}: DeepSpeed's sharding of operators is not read beside a Trainer's batch",
                stated.written("ds_tensor_parallel_size")
            ),
            hint: "leave it out, and choose `tensor` in the plan".into(),
        });
    }
    read_accumulation(stated, surroundings.ranks / ring.max(1))?;
    write_deepspeed(stated)
}

/// Reads the precision, which is a switch in older releases.
fn read_precision(stated: &mut Stated) -> Result<(), FrameworkError> {
    let format = stated.text("param_dtype")?;
    match format.as_deref() {
        Some("fp16") => stated.provide("fp16", json!(true)),
        Some("bf16") => stated.provide("bf16", json!(true)),
        Some(_) => return Err(stated.unknown("param_dtype", "formats: bf16, fp16")),
        // Older releases compute in fp16 unless their switch `--bf16` is given; newer ones have no
        // such switch.
        None if stated.has("bf16") || stated.has("fp16") => {}
        None => {
            stated.assume(
                "`precision` bf16: OpenRLHF's default of `--ds.param_dtype`; releases before it compute in fp16 without `--bf16`",
            );
            stated.provide("bf16", json!(true));
        }
    }
    if !stated.has("attn_implementation") && !stated.has("flash_attn") {
        stated.assume("`workload.attention` flash: OpenRLHF's default of `--ds.attn_implementation`");
        stated.provide("attn_implementation", json!("flash_attention_2"));
    }
    Ok(())
}

/// Reads the adapters, which a rank above 0 switches on.
fn read_adapters(stated: &mut Stated) -> Result<(), FrameworkError> {
    if stated.count("lora_r")?.is_none_or(|rank| rank == 0) {
        stated.neutral(&["lora_*"]);
        stated.drop("lora_r");
        return Ok(());
    }
    stated.provide("use_peft", json!(true));
    for (name, value, what) in [
        ("lora_alpha", json!(16), "`training.lora.alpha` 16"),
        ("lora_target_modules", json!("all-linear"), "`training.lora.targets`: all linear layers"),
    ] {
        if !stated.has(name) {
            stated.provide(name, value);
            stated.assume(format!("{what}: OpenRLHF's default"));
        }
    }
    Ok(())
}

/// Computes the micro-batches of a step from its samples, over `data` ranks with different samples.
fn read_accumulation(stated: &mut Stated, data: usize) -> Result<(), FrameworkError> {
    let micro_batch = stated.size("per_device_train_batch_size")?.unwrap_or(1);
    let global = stated.size("train_batch_size")?.unwrap_or(128);
    let at_once = micro_batch.saturating_mul(data).max(1);
    if !global.is_multiple_of(at_once) {
        return Err(FrameworkError::Form {
            reason: format!(
                "{}: no multiple of {micro_batch} samples on {data} ranks of data",
                stated.written("train_batch_size")
            ),
            hint: "choose a multiple, as OpenRLHF demands, or other `--topology` and `--nodes`".into(),
        });
    }
    stated.provide("gradient_accumulation_steps", json!(global / at_once));
    Ok(())
}

/// Writes the configuration that OpenRLHF gives DeepSpeed.
fn write_deepspeed(stated: &mut Stated) -> Result<(), FrameworkError> {
    let stage = stated.count("zero_stage")?.unwrap_or(2);
    let offload = if stated.is_on("adam_offload")? { "cpu" } else { "none" };
    let groups = stated.size("zpg")?.unwrap_or(1);
    let overlap = stated.is_on("overlap_comm")?;
    let gradients = stated.text("grad_accum_dtype")?.unwrap_or_else(|| "fp32".into());
    stated.replace_by_section(
        "deepspeed",
        json!({
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto"},
            "zero_optimization": {
                "stage": stage,
                "offload_optimizer": {"device": offload},
                "zero_hpz_partition_size": groups,
                "reduce_bucket_size": "auto",
                "overlap_comm": overlap,
            },
            "data_types": {"grad_accum_dtype": gradients},
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
        }),
    );
    Ok(())
}
