//! ms-swift's jobs on Megatron-Core (`megatron sft`, `megatron pt`): Megatron's settings, a model
//! that is named and not described, and ms-swift's defaults.

use super::super::FrameworkError;
use super::super::stated::Stated;
use serde_json::{Value, json};

/// ms-swift's names, and Megatron-LM's.
const RENAMED: [(&str, &str); 5] = [
    ("max-length", "seq-length"),
    ("optimizer-cpu-offload-fraction", "optimizer-offload-fraction"),
    ("train-type", "tuner-type"),
    ("model-id-or-path", "model"),
    ("mcore-model", "load"),
];

/// Settings that change neither the time of a step nor its memory.
const NEUTRAL: [&str; 51] = [
    "system",
    "template*",
    "agent-template",
    "loss-scale",
    "dataset*",
    "val-dataset*",
    "cached-dataset*",
    "split-dataset-ratio",
    "columns*",
    "custom-*",
    "external-plugins*",
    "lazy-tokenize",
    "load-from-cache-file",
    "streaming",
    "truncation-strategy",
    "num-train-epochs",
    "max-epochs",
    "output-dir",
    "save-*",
    "no-save-*",
    "no-load-*",
    "add-version",
    "report-to",
    "logging-*",
    "eval-*",
    "swanlab-*",
    "use-hf",
    "hub-token",
    "model-type",
    "model-revision",
    "model-author",
    "model-name",
    "attn-impl",
    "dataloader-*",
    "ddp-timeout",
    "ddp-backend",
    "finetune",
    "use-chat-template",
    "masked-softmax-fusion",
    "bias-*-fusion",
    "apply-rope-fusion",
    "gradient-accumulation-fusion",
    "cross-entropy-fusion-impl",
    "strict",
    "merge-lora",
    "check-model",
    "bridge-backend",
    "moe-enable-deepep",
    "moe-deepep-*",
    "moe-shared-expert-overlap",
    "moe-router-padding-*",
];

/// The command of ms-swift that starts Megatron-Core: `sft`, `pt` or another; `None` for Megatron's
/// own scripts.
pub(super) fn job(script: &str) -> Option<&str> {
    let of_package = || script.split("swift/cli/_megatron/").nth(1)?.strip_suffix(".py");
    script.strip_prefix("megatron-").or_else(of_package)
}

/// Renames ms-swift's settings, adds its defaults, and returns the model's name.
pub(super) fn translate(stated: &mut Stated, job: &str) -> Result<Option<String>, FrameworkError> {
    if !["sft", "pt"].contains(&job) {
        return Err(FrameworkError::Form {
            reason: format!("`megatron {job}`: training on preferences or by rewards has other models and passes"),
            hint: "plan it with `foretell plan --method dpo` or `grpo` and `--stack megatron-core`; `megatron sft` and `megatron pt` are \
                   read"
                .into(),
        });
    }
    for (own, general) in RENAMED {
        stated.rename(own, general)?;
    }
    stated.neutral(&NEUTRAL);
    match stated.text("tuner-type")?.as_deref() {
        None | Some("full") => stated.neutral(&["lora-*", "target-modules"]),
        Some(_) => {
            return Err(FrameworkError::Form {
                reason: format!("{}: adapters under Megatron-Core are not read", stated.written("tuner-type")),
                hint: "write `--tuner_type full`, or plan adapters with `foretell plan --method lora`".into(),
            });
        }
    }
    for name in ["packing", "padding-free"] {
        if stated.is_on(name)? {
            stated.assume_packed(name);
        }
    }
    stated.neutral(&["packing-*"]);
    let has_experts = has_experts(stated);
    for (name, value, what) in [
        ("global-batch-size", json!(16), "16 samples of a step"),
        ("recompute-granularity", json!("selective"), "`recompute` selective"),
        ("use-distributed-optimizer", json!(true), "`zero` 1, the distributed optimizer"),
        ("expert-tensor-parallel-size", json!(1), "experts that no ranks of `tensor` shard"),
        ("weight-decay", json!(0.1), "a weight decay of 0.1"),
        ("adam-beta2", json!(0.95), "`beta2` 0.95"),
        ("lr", json!(1e-5), "a learning rate of 1e-5"),
    ] {
        if name == "expert-tensor-parallel-size" && !has_experts {
            continue;
        }
        if !stated.has(name) {
            stated.provide(name, value);
            stated.assume(format!("{what}: ms-swift's default"));
        }
    }
    read_format(stated)?;
    let freezes = |stated: &mut Stated, name: &str| stated.is_on(name);
    if freezes(stated, "freeze-llm")? {
        return Err(stated.frozen_text("freeze-llm"));
    }
    stated.neutral(&["freeze-vit", "freeze-aligner"]);
    stated.name("model")
}

/// Parts of the names of models with experts.
const OF_EXPERTS: [&str; 10] =
    ["moe", "mixtral", "deepseek-v2", "deepseek-v3", "deepseek-r1", "gpt-oss", "glm-4.5", "kimi-k2", "dbrx", "llama-4"];

/// Returns `true` if the model has experts, judged by a setting of experts or by its name
/// (`Qwen3-30B-A3B`, `8x7B`).
fn has_experts(stated: &Stated) -> bool {
    let sizes = ["num-experts", "expert-model-parallel-size"];
    let is_one = |name: &str| stated.peek(name).is_some_and(|size| size == "1" || size == 1);
    if sizes.iter().any(|name| stated.has(name) && !is_one(name)) || !stated.stated_of(&["moe-*"]).is_empty() {
        return true;
    }
    let name = ["model", "load"].iter().find_map(|name| stated.peek(name)?.as_str()).unwrap_or_default().to_ascii_lowercase();
    let is_number = |text: &str| !text.is_empty() && text.chars().all(|letter| letter.is_ascii_digit() || letter == '.');
    let is_active = |word: &str| word.strip_prefix('a').and_then(|rest| rest.strip_suffix('b')).is_some_and(is_number);
    let is_product = |word: &str| {
        word.strip_suffix('b')
            .and_then(|word| word.split_once('x'))
            .is_some_and(|(count, size)| is_number(count) && is_number(size))
    };
    OF_EXPERTS.iter().any(|part| name.contains(part))
        || name.split(['-', '_', '/']).any(|word| is_active(word) || is_product(word))
}

/// Reads the format of the checkpoint, which decides the precision.
fn read_format(stated: &mut Stated) -> Result<(), FrameworkError> {
    let format = stated.text("torch-dtype")?;
    if ["bf16", "fp16"].iter().any(|name| stated.has(name)) {
        return Ok(());
    }
    match format.as_deref().map(|name| name.trim_start_matches("torch.")) {
        Some("float16" | "fp16") => stated.provide("fp16", Value::Bool(true)),
        Some("bfloat16" | "bf16") => stated.provide("bf16", Value::Bool(true)),
        Some(_) => return Err(stated.unknown("torch-dtype", "formats: bfloat16, float16")),
        None => {
            stated.assume("`precision` bf16: ms-swift takes the checkpoint's format, and most are in bf16 (`--torch_dtype`)");
            stated.provide("bf16", Value::Bool(true));
        }
    }
    Ok(())
}
