//! Mixtures with linear attention of other rules: Kimi Linear and MiniMax-01 (MiniMax-M1).

use super::decoders::{Defaults, LLAMA, common, mixtures, router, silu, windowed};
use super::fields::{ConfigError, Fields, inexpressible};
use super::hybrids::{DELTA_CHUNK, KINDS, is_of_all_layers, kinds_of, shortest};
use super::mixtures::{DeepseekDefaults, deepseek};
use crate::families::{Decoder, LayerKind, LinearAttention, LinearNorm, PositionKind};
use crate::kernel::ScanRule;
use crate::model::Model;
use serde_json::{Map, Value, json};

/// Copies a field that a file has under another name (`other`) to the field `name` of the type.
fn renamed(fields: &mut Fields, other: &str, name: &str) {
    if let Some(value) = fields.take(other) {
        fields.set(name, value);
    }
}

/// Kimi Linear: the delta rule with a decay for each feature in most layers, latent attention
/// without positions in the others.
pub(super) fn kimi_linear(fields: &mut Fields) -> Result<Model, ConfigError> {
    for (other, name) in [
        ("model_max_length", "max_position_embeddings"),
        ("moe_renormalize", "norm_topk_prob"),
        ("num_expert_group", "n_group"),
        ("num_experts", "n_routed_experts"),
        ("num_local_experts", "n_routed_experts"),
        ("num_experts_per_token", "num_experts_per_tok"),
        ("num_shared_experts", "n_shared_experts"),
    ] {
        renamed(fields, other, name);
    }
    fields.must_be("mla_use_nope", &[json!(true)], "latent attention has no positions")?;
    fields.must_be("moe_router_activation_func", &[json!("sigmoid")], "gates are sigmoids of the router's logits")?;
    // Grouping, choosing and weighing experts costs nothing compared with the experts' products.
    fields.neutral(&["n_group", "topk_group", "use_grouped_topk"]);
    fields.note("gates are a softmax over the chosen experts, and in Kimi Linear they are sigmoids, normed and scaled");
    let prediction_modules = fields.count_or("num_nextn_predict_layers", 0)?;
    if prediction_modules > 0 {
        let hint = "modules of multi-token prediction of this type are not known";
        return Err(inexpressible("num_nextn_predict_layers", &json!(prediction_modules), hint));
    }
    if !fields.has("q_lora_rank") {
        fields.set("q_lora_rank", Value::Null);
    }
    // A file that lists the layers of each kind also states the sizes there.
    let inner = fields.object("linear_attn_config")?.unwrap_or_default();
    for (other, name) in
        [("head_dim", "linear_head_dim"), ("num_heads", "linear_num_heads"), ("short_conv_kernel_size", "linear_conv_kernel_dim")]
    {
        if let Some(value) = inner.get(other) {
            fields.set(name, value.clone());
        }
    }
    let heads = fields.size_or("linear_num_heads", 32)?;
    let features = fields.size_or("linear_head_dim", 128)?;
    let linear = LinearAttention {
        rule: ScanRule::KimiDelta,
        heads,
        head_dimension: features,
        key_heads: heads,
        key_dimension: features,
        convolution: fields.size_or("linear_conv_kernel_dim", 4)?,
        convolution_bias: false,
        bias: false,
        rank: Some(features),
        norm: LinearNorm::Heads,
        chunk: DELTA_CHUNK,
    };
    let listed = fields.list("layer_types")?;
    let networks = fields.list("mlp_layer_types")?;
    if let Some(networks) = &networks {
        let dense = networks.iter().take_while(|kind| **kind == "dense").count();
        if networks.iter().skip(dense).any(|kind| kind != "sparse") {
            let hint = "the first layers are dense, and the others mixtures";
            return Err(inexpressible("mlp_layer_types", &json!(networks), hint));
        }
        fields.set("first_k_dense_replace", json!(dense));
    }
    let defaults = DeepseekDefaults {
        sequence: 1_048_576,
        experts: 256,
        top_k: Some(8),
        expert_ffn: 1024,
        shared_experts: 1,
        dense_layers: 1,
        normalises_gates: true,
    };
    let decoder = deepseek(fields, &defaults)?;
    is_of_all_layers(listed.as_ref().map(Vec::len), decoder.layers)?;
    let kinds = match (listed_layers(&inner), listed) {
        (Some(full), _) => layers_with(decoder.layers, |layer| full.contains(&(layer + 1))),
        (None, Some(kinds)) => kinds_of(&kinds, "layer_types", &KINDS)?,
        (None, None) => layers_with(decoder.layers, |layer| layer > 0 && layer.is_multiple_of(4)),
    };
    Ok(Model::Decoder(Decoder {
        positions: PositionKind::None,
        rope_theta: Decoder::llama([1; 6]).rope_theta,
        rope_scaling: false,
        layer_kinds: shortest(kinds),
        linear: Some(linear),
        ..decoder
    }))
}

/// The layers with attention that `linear_attn_config` lists, counted from 1.
fn listed_layers(inner: &Map<String, Value>) -> Option<Vec<usize>> {
    let full = inner.get("full_attn_layers")?.as_array()?;
    Some(full.iter().filter_map(|layer| usize::try_from(layer.as_u64()?).ok()).collect())
}

/// The kinds of layers: attention if `has_attention`, else linear attention.
fn layers_with(layers: usize, has_attention: impl Fn(usize) -> bool) -> Vec<LayerKind> {
    let kind = |layer| if has_attention(layer) { LayerKind::Attention } else { LayerKind::Linear };
    // Bounded, since sizes have not been checked yet.
    (0..layers.min(10_000)).map(kind).collect()
}

/// Numbers with which MiniMax weighs the residual stream and what is added to it. A product with
/// one number is part of the kernel before it.
const WEIGHTS: [&str; 12] = [
    "full_attn_alpha_factor",
    "full_attn_beta_factor",
    "linear_attn_alpha_factor",
    "linear_attn_beta_factor",
    "mlp_alpha_factor",
    "mlp_beta_factor",
    "layernorm_full_attention_alpha",
    "layernorm_full_attention_beta",
    "layernorm_linear_attention_alpha",
    "layernorm_linear_attention_beta",
    "layernorm_mlp_alpha",
    "layernorm_mlp_beta",
];

/// MiniMax-01: lightning attention in most layers, mixtures in all, and a residual stream that is
/// normed with the parts' inputs.
pub(super) fn minimax(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    fields.neutral(&WEIGHTS);
    fields.note("MiniMax's weights of the residual stream are left out: they cost nothing, and results differ");
    let experts = fields.size_or("num_local_experts", 8)?;
    let top_k = fields.size_or("num_experts_per_tok", 2)?;
    fields.must_be("router_jitter_noise", &[json!(0.0), json!(0)], "the router adds no noise")?;
    router(fields)?;
    let window = fields.optional("sliding_window")?;
    let chunk = fields.size_or("block_size", 256)?;
    let kinds = fields.list("layer_types")?;
    let listed = kinds.as_ref().map(Vec::len);
    let layer_kinds = match kinds {
        Some(kinds) => shortest(kinds_of(&kinds, "layer_types", &KINDS)?),
        None => vec![LayerKind::Attention, LayerKind::Linear],
    };
    let defaults = Defaults { sequence: 131_072, epsilon: 1e-5, kv_heads: Some(8), rope_theta: 1e6, ..LLAMA };
    let decoder = common(fields, &defaults)?;
    is_of_all_layers(listed, decoder.layers)?;
    let features = decoder.head_features();
    let linear = LinearAttention {
        rule: ScanRule::FixedDecay,
        heads: decoder.heads,
        head_dimension: features,
        key_heads: decoder.heads,
        key_dimension: features,
        convolution: 0,
        convolution_bias: false,
        bias: false,
        rank: None,
        norm: LinearNorm::Whole,
        chunk,
    };
    let mixtures = mixtures([experts, top_k, decoder.ffn]);
    let decoder = windowed(decoder, window);
    Ok(Model::Decoder(Decoder {
        residual_after_norm: true,
        layer_kinds,
        linear: Some(linear),
        mixtures: Some(mixtures),
        ..decoder
    }))
}

/// The same model in its authors' files: a list of zeros and ones says which layers have attention.
pub(super) fn minimax_m1(fields: &mut Fields) -> Result<Model, ConfigError> {
    fields.must_be("postnorm", &[json!(true)], "the residual stream is normed with the parts' inputs")?;
    fields.must_be("shared_intermediate_size", &[json!(0)], "no expert is shared")?;
    fields.neutral(&["shared_moe_mode"]);
    if let Some(kinds) = fields.list("attn_type_list")? {
        let names: Vec<&str> = kinds.iter().map(|kind| if *kind == 0 { "linear_attention" } else { "full_attention" }).collect();
        fields.set("layer_types", json!(names));
    }
    if let Some(rotated) = fields.optional("rotary_dim")? {
        let [hidden, heads] = [fields.size("hidden_size")?, fields.size("num_attention_heads")?];
        let features = fields.size_or("head_dim", hidden / heads)?;
        fields.default_rotary_share(rotated as f64 / features.max(1) as f64);
    }
    minimax(fields)
}
