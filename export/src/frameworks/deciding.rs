//! Which settings may decide what is planned, by their names. It must not know a framework.

/// Parts of names of settings that decide model, layout, precision, optimizer or memory. A setting
/// that no reader knows is refused if its name has one of them, since the plan would be of another
/// job.
const DECIDING: [&str; 44] = [
    "accum",
    "activation",
    "adapter",
    "attention",
    "autocast",
    "batch",
    "bf16",
    "bits",
    "checkpointing",
    "dtype",
    "expert",
    "experimental",
    "float8",
    "fp16",
    "fp4",
    "fp8",
    "freeze",
    "fsdp",
    "heads",
    "hidden-size",
    "hybrid",
    "latent",
    "layers",
    "load-in",
    "lora",
    "mamba",
    "microbatch",
    "moe",
    "mtp",
    "num-layers",
    "offload",
    "optim",
    "parallel",
    "peft",
    "pipeline",
    "precision",
    "quant",
    "query-groups",
    "recompute",
    "seq",
    "shard",
    "vocab",
    "window",
    "zero",
];

/// Whether a setting of this name may decide what is planned.
pub(super) fn may_decide(name: &str) -> bool {
    let name = name.to_ascii_lowercase().replace('_', "-");
    DECIDING.iter().any(|part| name.contains(part))
}
