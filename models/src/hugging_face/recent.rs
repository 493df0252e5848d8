//! Decoders of 2025 with parts of their own: gpt-oss, OLMo 2 and 3, MiniMax-M2, Seed-OSS,
//! ERNIE 4.5, EXAONE 4, Hunyuan, Arcee.

use super::decoders::{Defaults, LLAMA, common, mixtures, period, router, silu, windowed};
use super::fields::{ConfigError, Fields, inexpressible};
use crate::families::{Decoder, FeedForward, Mixtures};
use crate::model::Model;
use serde_json::{Value, json};

/// Reads which layers have a window: `layer_types`, or every layer but the last of each `usual`.
fn windows(fields: &mut Fields, window: Option<usize>, usual: usize) -> Result<(Option<usize>, Option<usize>), ConfigError> {
    let default = window.filter(|_| !fields.has("sliding_window"));
    let window = fields.optional("sliding_window")?.or(default);
    let every = match fields.list("layer_types")? {
        Some(kinds) => period(&kinds)?,
        None => Some(usual),
    };
    Ok((window, every))
}

/// Sets windows in the layers that have one.
fn with_windows(decoder: Decoder, (window, every): (Option<usize>, Option<usize>)) -> Decoder {
    let decoder = windowed(decoder, window.filter(|_| every != Some(1)));
    Decoder { full_attention_every: every.filter(|_| decoder.window.is_some()), ..decoder }
}

/// gpt-oss: sinks, windows in every other layer, biases everywhere. MXFP4 is how its weights are
/// stored, and not how it is trained.
pub(super) fn gpt_oss(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    // The activation is a gated SiLU with scaled and clipped arguments, which is part of its
    // kernel.
    fields.neutral(&["swiglu_alpha", "swiglu_limit", "initial_context_length"]);
    let windows = windows(fields, Some(128), 2)?;
    let has_bias = fields.flag_or("attention_bias", true)?;
    let experts = fields.size_or("num_local_experts", 128)?;
    let old = fields.optional("experts_per_token")?;
    let top_k = fields.optional("num_experts_per_tok")?.or(old).unwrap_or(4);
    router(fields)?;
    let defaults = Defaults {
        sequence: 131_072,
        epsilon: 1e-5,
        kv_heads: Some(8),
        head_dimension: Some(64),
        rope_theta: 150_000.0,
        ..LLAMA
    };
    let decoder = common(fields, &defaults)?;
    let mixtures = Mixtures { router_bias: true, expert_bias: true, ..mixtures([experts, top_k, decoder.ffn]) };
    let decoder =
        Decoder { qkv_bias: has_bias, attention_output_bias: has_bias, sinks: true, mixtures: Some(mixtures), ..decoder };
    Ok(Model::Decoder(with_windows(decoder, windows)))
}

/// Reads the fields that OLMo 2 and 3 have: norms only after the parts, and one norm over all query
/// or key heads together.
fn olmo_parts(fields: &mut Fields, rope_theta: f64) -> Result<Decoder, ConfigError> {
    silu(fields)?;
    fields.must_be("clip_qkv", &[], "queries, keys and values are not clipped")?;
    let has_bias = fields.flag_or("attention_bias", false)?;
    let decoder = common(fields, &Defaults { epsilon: 1e-5, rope_theta, ..LLAMA })?;
    Ok(Decoder { qkv_bias: has_bias, attention_output_bias: has_bias, query_key_norm_of_all_heads: true, ..decoder })
}

pub(super) fn olmo2(fields: &mut Fields) -> Result<Model, ConfigError> {
    let decoder = olmo_parts(fields, 10_000.0)?;
    Ok(Model::Decoder(Decoder { output_norms: true, no_input_norms: true, ..decoder }))
}

pub(super) fn olmo3(fields: &mut Fields) -> Result<Model, ConfigError> {
    let windows = windows(fields, Some(4096), 4)?;
    let decoder = olmo_parts(fields, 500_000.0)?;
    Ok(Model::Decoder(with_windows(Decoder { output_norms: true, no_input_norms: true, ..decoder }, windows)))
}

pub(super) fn olmoe(fields: &mut Fields) -> Result<Model, ConfigError> {
    let experts = fields.size_or("num_experts", 64)?;
    let top_k = fields.size_or("num_experts_per_tok", 8)?;
    let is_normalised = fields.flag_or("norm_topk_prob", false)?;
    router(fields)?;
    let decoder = olmo_parts(fields, 10_000.0)?;
    let sequence = fields.sequence("max_position_embeddings", 4096)?;
    let mixtures = Mixtures { unnormalised_gates: !is_normalised, ..mixtures([experts, top_k, decoder.ffn]) };
    Ok(Model::Decoder(Decoder { sequence, mixtures: Some(mixtures), ..decoder }))
}

pub(super) fn minimax_m2(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    fields.must_be("qk_norm_type", &[json!("per_layer")], "queries and keys are normed over all heads")?;
    fields.must_be("use_qk_norm", &[json!(true)], "queries and keys of this type are normed")?;
    fields.must_be("shared_intermediate_size", &[json!(0)], "no expert of this type is shared")?;
    fields.must_be("router_jitter_noise", &[json!(0.0), json!(0)], "the router adds no noise")?;
    fields.must_be("sliding_window", &[], "every layer sees all positions")?;
    let kinds = fields.list("attn_type_list")?.unwrap_or_default();
    if kinds.iter().any(|kind| *kind != 1) {
        return Err(inexpressible("attn_type_list", &json!(kinds), "every layer of this type has softmax attention"));
    }
    // A bias without a gradient balances the experts. Betas and a dense width are of older code.
    fields.neutral(&["use_routing_bias", "scoring_func", "shared_moe_mode", "mlp_intermediate_size", "mtp_transformer_layers"]);
    fields.neutral(&["layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"]);
    fields.note("gates are a softmax over the chosen experts, and in MiniMax-M2 they are sigmoids, normed");
    let experts = fields.size_or("num_local_experts", 256)?;
    let top_k = fields.size_or("num_experts_per_tok", 8)?;
    router(fields)?;
    let prediction_modules = fields.count_or("num_mtp_modules", 0)?;
    if prediction_modules > 0 {
        fields.note(format!(
            "multi-token prediction is planned with {prediction_modules} of `prediction_modules`, whose parameters Transformers does \
             not count"
        ));
    }
    let rotated = fields.optional("rotary_dim")?;
    let defaults = Defaults { sequence: 196_608, kv_heads: Some(8), head_dimension: Some(128), rope_theta: 5e6, ..LLAMA };
    let decoder = common(fields, &defaults)?;
    let rotary_dimension = rotated.filter(|&rotated| rotated != decoder.head_features()).or(decoder.rotary_dimension);
    Ok(Model::Decoder(Decoder {
        query_key_norm_of_all_heads: true,
        rotary_dimension,
        mixtures: Some(mixtures([experts, top_k, decoder.ffn])),
        prediction_modules,
        ..decoder
    }))
}

pub(super) fn seed_oss(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    fields.sliced_products(true)?;
    let qkv_bias = fields.flag_or("attention_bias", true)?;
    let attention_output_bias = fields.flag_or("attention_out_bias", false)?;
    let ffn_bias = fields.flag_or("mlp_bias", false)?;
    let dropout = fields.dropout(&[("residual_dropout", 0.1)])?;
    let attention_dropout = fields.dropout(&[("attention_dropout", 0.1)])?;
    let defaults = Defaults { sequence: 524_288, head_dimension: Some(128), kv_heads: Some(8), ..LLAMA };
    let decoder = common(fields, &defaults)?;
    Ok(Model::of_decoder(Decoder { qkv_bias, attention_output_bias, ffn_bias, dropout, attention_dropout, ..decoder }))
}

/// Reads the fields that ERNIE 4.5 and its mixtures have.
fn ernie_parts(fields: &mut Fields, kv_heads: usize, head_dimension: Option<usize>) -> Result<Decoder, ConfigError> {
    silu(fields)?;
    let has_bias = fields.flag_or("use_bias", false)?;
    let defaults = Defaults {
        sequence: 131_072,
        epsilon: 1e-5,
        kv_heads: Some(kv_heads),
        head_dimension,
        rope_theta: 500_000.0,
        tied: true,
    };
    let decoder = common(fields, &defaults)?;
    Ok(Decoder { qkv_bias: has_bias, attention_output_bias: has_bias, ffn_bias: has_bias, ..decoder })
}

pub(super) fn ernie4_5(fields: &mut Fields) -> Result<Model, ConfigError> {
    Ok(Model::of_decoder(ernie_parts(fields, 2, Some(128))?))
}

pub(super) fn ernie4_5_moe(fields: &mut Fields) -> Result<Model, ConfigError> {
    let experts = fields.size_or("moe_num_experts", 64)?;
    let top_k = fields.size_or("moe_k", 6)?;
    let ffn = fields.size_or("moe_intermediate_size", 1536)?;
    let shared = fields.count_or("moe_num_shared_experts", 2)?;
    let first = fields.count_or("moe_layer_start_index", 1)?;
    let every = fields.size_or("moe_layer_interval", 1)?;
    let last = fields.take("moe_layer_end_index").unwrap_or(json!(-1));
    fields.neutral(&["moe_norm_min", "moe_use_aux_free", "moe_capacity", "moe_gate", "num_nextn_predict_layers"]);
    router(fields)?;
    let decoder = ernie_parts(fields, 4, None)?;
    if last != -1 && last != decoder.layers - 1 {
        return Err(inexpressible("moe_layer_end_index", &last, "mixtures go on to the last layer"));
    }
    if !first.is_multiple_of(every) {
        return Err(inexpressible("moe_layer_start_index", &json!(first), "the first mixture is the last layer of a period"));
    }
    let mixtures = Mixtures {
        first,
        every,
        shared_ffn: Some(ffn * shared).filter(|&ffn| ffn > 0),
        // Its bias has no gradient: it balances the experts.
        router_bias: true,
        ..mixtures([experts, top_k, ffn])
    };
    Ok(Model::Decoder(Decoder { mixtures: Some(mixtures), ..decoder }))
}

pub(super) fn exaone4(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    let pattern = match fields.take("sliding_window_pattern") {
        None => 4,
        Some(Value::String(pattern)) if pattern.ends_with('G') && pattern.matches('G').count() == 1 => pattern.len(),
        Some(value) => match value.as_u64().and_then(|every| usize::try_from(every).ok()).filter(|&every| every > 0) {
            Some(every) => every,
            None => return Err(inexpressible("sliding_window_pattern", &value, "a period, or letters that end in one `G`")),
        },
    };
    let (window, every) = windows(fields, Some(4096), pattern)?;
    if window.is_some() {
        fields.note("all layers rotate queries and keys here; those of EXAONE 4 that see all positions do not");
    }
    let decoder = common(fields, &Defaults { epsilon: 1e-5, ..LLAMA })?;
    let decoder = Decoder { query_key_norm: true, output_norms: true, no_input_norms: true, ..decoder };
    Ok(Model::Decoder(with_windows(decoder, (window, every))))
}

/// Reads the fields that Hunyuan's models have.
fn hunyuan_parts(fields: &mut Fields) -> Result<Decoder, ConfigError> {
    silu(fields)?;
    fields.sliced_products(false)?;
    fields.must_be("use_qk_norm", &[json!(true)], "queries and keys of this type are normed")?;
    fields.must_be_off("use_cla", "no layers share keys")?;
    fields.neutral(&["eod_token_id", "sep_token_id", "cla_share_factor", "attention_head_dim", "im_start_id", "im_end_id"]);
    let has_bias = fields.flag_or("attention_bias", false)?;
    let decoder = common(fields, &Defaults { epsilon: 1e-5, ..LLAMA })?;
    Ok(Decoder { qkv_bias: has_bias, attention_output_bias: has_bias, query_key_norm: true, ..decoder })
}

pub(super) fn hunyuan(fields: &mut Fields) -> Result<Model, ConfigError> {
    Ok(Model::Decoder(hunyuan_parts(fields)?))
}

pub(super) fn hunyuan_moe(fields: &mut Fields) -> Result<Model, ConfigError> {
    let experts = of_every_layer(fields, "num_experts")?;
    let top_k = of_every_layer(fields, "moe_topk")?;
    router(fields)?;
    let decoder = hunyuan_parts(fields)?;
    // The type has one shared expert, as wide as the others.
    let mixtures = Mixtures { shared_ffn: Some(decoder.ffn), ..mixtures([experts, top_k, decoder.ffn]) };
    Ok(Model::Decoder(Decoder { mixtures: Some(mixtures), ..decoder }))
}

/// Reads a number, or a list with the same number for each layer.
fn of_every_layer(fields: &mut Fields, field: &str) -> Result<usize, ConfigError> {
    match fields.take(field) {
        Some(Value::Array(list)) if list.windows(2).all(|pair| pair[0] == pair[1]) && !list.is_empty() => {
            let first = list[0].clone();
            fields.set(field, first);
            fields.size_or(field, 1)
        }
        Some(list @ Value::Array(_)) => Err(inexpressible(field, &list, "all layers have as many")),
        _ => fields.size_or(field, 1),
    }
}

pub(super) fn arcee(fields: &mut Fields) -> Result<Model, ConfigError> {
    fields.must_be("hidden_act", &[json!("relu2")], "the feed-forward network of this type has a squared ReLU")?;
    let has_bias = fields.flag_or("attention_bias", false)?;
    let ffn_bias = fields.flag_or("mlp_bias", false)?;
    let decoder = common(fields, &Defaults { sequence: 4096, epsilon: 1e-5, ..LLAMA })?;
    Ok(Model::Decoder(Decoder {
        feed_forward: FeedForward::SquaredRelu,
        qkv_bias: has_bias,
        attention_output_bias: has_bias,
        ffn_bias,
        ..decoder
    }))
}

/// Granite's mixtures, with the numbers that scale embedding, scores, layers and logits.
pub(super) fn granite_moe(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    fields.neutral(&["embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"]);
    let has_bias = fields.flag_or("attention_bias", false)?;
    let experts = fields.size_or("num_local_experts", 8)?;
    let top_k = fields.size_or("num_experts_per_tok", 2)?;
    router(fields)?;
    fields.note("Granite's scales of embedding, scores, layers and logits are left out: they cost nothing, and results differ");
    let decoder = common(fields, &LLAMA)?;
    let mixtures = mixtures([experts, top_k, decoder.ffn]);
    Ok(Model::Decoder(Decoder { qkv_bias: has_bias, attention_output_bias: has_bias, mixtures: Some(mixtures), ..decoder }))
}
