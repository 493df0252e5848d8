//! Which settings may decide what is planned, judged by their names. It must not know frameworks.

/// Parts of names of settings that decide model, layout, precision, optimizer or memory. If an
/// unknown setting's name contains one of them, the file is refused: the plan could be that of
/// another job.
const DECIDING: [&str; 60] = [
    "accum",
    "activation",
    "adam",
    "adapter",
    "apollo",
    "attention",
    "autocast",
    "batch",
    "bf16",
    "bits",
    "checkpointing",
    "dist-config",
    "distill",
    "dtype",
    "experimental",
    "expert",
    "float8",
    "fp16",
    "fp4",
    "fp8",
    "freeze",
    "frozen",
    "fsdp",
    "galore",
    "heads",
    "hidden-size",
    "hybrid",
    "latent",
    "layers",
    "load-in",
    "lomo",
    "lora",
    "mamba",
    "microbatch",
    "mixture-of-depths",
    "model-class",
    "moe",
    "mtp",
    "muon",
    "num-layers",
    "offload",
    "optim",
    "parallel",
    "peft",
    "pipeline",
    "precision",
    "prun",
    "quant",
    "query-groups",
    "recompute",
    "seq",
    "shard",
    "sparse",
    "teacher",
    "ulysses",
    "vision",
    "vllm",
    "vocab",
    "window",
    "zero",
];

/// Words that have the same meaning, but only as a whole word between dashes.
const DECIDING_WORDS: [&str; 10] = ["context", "cp", "dp", "ep", "pp", "qat", "ring", "sp", "tensor", "tp"];

/// Whether a setting with this name may decide what is planned.
pub(super) fn may_decide(name: &str) -> bool {
    let name = name.to_ascii_lowercase().replace('_', "-");
    let has_word = || name.split(|letter: char| !letter.is_ascii_alphanumeric()).any(|word| DECIDING_WORDS.contains(&word));
    DECIDING.iter().any(|part| name.contains(part)) || has_word()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_within_longer_ones_decide_nothing() {
        for name in ["cp_size", "dist_config.tp", "use_galore", "ring_attn", "dp-shard-size", "qat.group_size", "tensor_size"] {
            assert!(may_decide(name), "{name}");
        }
        for name in ["tensorboard_dir", "ddp_timeout", "save_steps", "keep_best", "tcp-port", "neftune_noise_alpha", "string"] {
            assert!(!may_decide(name), "{name}");
        }
    }
}
