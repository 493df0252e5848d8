//! The nearest alternatives to a configuration whose type has no reader, found from fields that
//! most transformers have: a model file, and a type that can be read instead. Used for messages
//! only.

use serde_json::{Map, Value};

/// Beginnings of the names of fields that describe layers of other kinds than attention, or layers
/// that differ from each other in size.
const OTHER_LAYERS: [&str; 13] = [
    "hybrid_",
    "layers_block_type",
    "block_configs",
    "full_attention_interval",
    "linear_",
    "mamba_",
    "ssm_",
    "conv_L_cache",
    "attn_layer_period",
    // Gemma 3n and 4: embeddings of each layer, layers that share keys, two sizes of heads.
    "hidden_size_per_layer_input",
    "num_kv_shared_layers",
    "num_global_key_value_heads",
    "global_head_dim",
];

/// Types in use that have no reader, by the beginnings of their names: which part of them cannot be
/// planned, and the nearest alternative.
const KNOWN: [(&str, &str); 6] = [
    ("clip", ONE_TOWER),
    ("siglip2", "images of any number of patches are not planned; `siglip` comes nearest, whose images have one size"),
    ("siglip", ONE_TOWER),
    ("chinese_clip", OTHER_TOWERS),
    ("metaclip", OTHER_TOWERS),
    ("moonshine", "convolutions over the samples of a sound are not planned; `whisper` comes nearest, which reads a spectrogram"),
];

const ONE_TOWER: &str = "an encoder alone has no loss that it is trained by; the configuration of the whole model (`clip`, `siglip`) is \
                         read, and the families `vit` and `bert` are an encoder each";

const OTHER_TOWERS: &str =
    "its encoders differ from CLIP's; the family `clip` comes nearest, an encoder of images beside one of text";

/// For a known type without a reader: which part of it cannot be planned, and the nearest
/// alternative.
pub(super) fn known(name: &str) -> Option<&'static str> {
    KNOWN.iter().find(|(beginning, _)| name.starts_with(beginning)).map(|(_, missing)| *missing)
}

/// Kinds of layers that decoders here have.
const KINDS: [&str; 3] = ["full_attention", "sliding_attention", "chunked_attention"];

/// The fields that show layers of kinds that a decoder does not have.
pub(super) fn other_layers(config: &Map<String, Value>) -> Vec<String> {
    let is_there = |value: &Value| !value.is_null() && *value != Value::Bool(false);
    let is_other = |(name, value): &(&String, &Value)| {
        let begins = OTHER_LAYERS.iter().any(|start| name.starts_with(start));
        let is_kind = |kind: &Value| kind.as_str().is_none_or(|kind| KINDS.contains(&kind));
        let has_other_kinds = *name == "layer_types" && !value.as_array().is_none_or(|kinds| kinds.iter().all(is_kind));
        is_there(value) && (begins || has_other_kinds)
    };
    config.iter().filter(is_other).map(|(name, _)| name.clone()).collect()
}

/// Common fields of transformers, each with our name. The last two may be missing; then a decoder's
/// defaults apply.
const COMMON: [(&str, &str); 8] = [
    ("num_hidden_layers", "layers"),
    ("hidden_size", "hidden"),
    ("num_attention_heads", "heads"),
    ("intermediate_size", "ffn"),
    ("vocab_size", "vocab"),
    ("max_position_embeddings", "sequence"),
    ("num_key_value_heads", "kv_heads"),
    ("head_dim", "head_dimension"),
];

/// Names of the number of experts, with the type whose files have that name.
const EXPERTS: [(&str, &str); 3] =
    [("num_local_experts", "mixtral"), ("num_experts", "qwen3_moe"), ("n_routed_experts", "glm4_moe")];

fn size(config: &Map<String, Value>, field: &str) -> Option<u64> {
    config.get(field).and_then(Value::as_u64)
}

/// The number of experts of a mixture, and the type whose files use that field name.
fn experts(config: &Map<String, Value>) -> Option<(u64, &'static str)> {
    EXPERTS.iter().find_map(|(field, like)| Some((size(config, field).filter(|&count| count > 1)?, *like)))
}

/// Parts of names of types that have the sizes of a decoder but are none.
const NO_DECODERS: [&str; 3] = ["clip", "whisper", "audio"];

/// The type to read a configuration as, and a model file in one line. The error is the reason why
/// there is none: the sizes of a transformer are missing, or it is unlike all that can be planned.
pub(super) fn nearest(config: &Map<String, Value>) -> Result<(&'static str, String), String> {
    let name = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    if NO_DECODERS.iter().any(|part| name.contains(part)) {
        return Err("it is neither a decoder nor an encoder of text alone".into());
    }
    let is_encoder = config.get("model_type").and_then(Value::as_str).is_some_and(|name| name.contains("bert"));
    let mut entries = Vec::new();
    for (field, own) in COMMON {
        match size(config, field) {
            _ if is_encoder && matches!(own, "kv_heads" | "head_dimension") => {}
            Some(size) => entries.push(format!("{own}: {size}")),
            None if matches!(own, "kv_heads" | "head_dimension") => {}
            None => return Err(format!("it states no `{field}`, as decoders do")),
        }
    }
    if is_encoder {
        return Ok(("bert", format!("{{family: bert, {}}}", entries.join(", "))));
    }
    let is_latent = size(config, "kv_lora_rank").is_some() && config.get("q_lora_rank").is_some();
    let like = match experts(config) {
        None => "llama",
        Some((count, like)) => {
            let top = ["num_experts_per_tok", "experts_per_token", "moe_topk"].iter().find_map(|field| size(config, field));
            let ffn = ["moe_intermediate_size", "intermediate_size"].iter().find_map(|field| size(config, field));
            entries.push(format!("mixtures: {{experts: {count}, top_k: {}, ffn: {}}}", top.unwrap_or(1), ffn.unwrap_or(1)));
            if is_latent && like == "glm4_moe" { "deepseek_v3" } else { like }
        }
    };
    Ok((like, format!("{{family: decoder, {}}}", entries.join(", "))))
}
