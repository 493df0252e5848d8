//! Decoders of Llama's kind with parts of their own: SmolLM3, Granite, GLM.

use super::decoders::{Defaults, LLAMA, common, mixtures, qwen_window, router, silu, windowed};
use super::fields::{ConfigError, Fields};
use crate::families::{Decoder, Mixtures};
use crate::model::Model;
use serde_json::json;

pub(super) fn smollm3(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    fields.sliced_products(true)?;
    let has_bias = fields.flag_or("attention_bias", false)?;
    let ffn_bias = fields.flag_or("mlp_bias", false)?;
    let window = fields.optional("sliding_window")?;
    let uses_window = fields.flag_or("use_sliding_window", false)?;
    fields.list("layer_types")?;
    if uses_window && window.is_some() {
        fields.note("every layer is planned with the window, and SmolLM3 has it in the layers that rotate");
    }
    let every = fields.size_or("no_rope_layer_interval", 4)?;
    let unrotated = fields.list("no_rope_layers")?;
    let defaults = Defaults { sequence: 32_768, kv_heads: Some(4), rope_theta: 2e6, tied: true, ..LLAMA };
    let decoder = common(fields, &defaults)?;
    let count = unrotated.map_or(decoder.layers / every, |layers| layers.iter().filter(|layer| **layer == 0).count());
    if count > 0 {
        fields.note(format!("all layers rotate queries and keys here; {count} layers of SmolLM3 do not"));
    }
    let decoder = Decoder { qkv_bias: has_bias, attention_output_bias: has_bias, ffn_bias, ..decoder };
    Ok(Model::of_decoder(windowed(decoder, window.filter(|_| uses_window))))
}

/// MiMo: Qwen2 with modules of multi-token prediction.
pub(super) fn mimo(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    fields.must_be_off("use_mrope", "positions are those of text")?;
    let window = qwen_window(fields)?;
    let has_bias = fields.flag_or("attention_bias", true)?;
    let prediction_modules = fields.count_or("num_nextn_predict_layers", 0)?;
    if prediction_modules > 0 {
        fields.note(format!("multi-token prediction is planned with {prediction_modules} of `prediction_modules`"));
    }
    let decoder = common(fields, &Defaults { sequence: 32_768, ..LLAMA })?;
    Ok(Model::Decoder(windowed(Decoder { qkv_bias: has_bias, prediction_modules, ..decoder }, window)))
}

/// Granite: Llama with numbers that scale the embedding, the scores, what layers add, and the
/// logits.
pub(super) fn granite(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    // A product with one number is part of the kernel before it.
    fields.neutral(&["embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"]);
    let has_bias = fields.flag_or("attention_bias", false)?;
    let ffn_bias = fields.flag_or("mlp_bias", false)?;
    fields.note("Granite's scales of embedding, scores, layers and logits are left out: they cost nothing, and results differ");
    let decoder = common(fields, &LLAMA)?;
    Ok(Model::of_decoder(Decoder { qkv_bias: has_bias, attention_output_bias: has_bias, ffn_bias, ..decoder }))
}

const GLM: Defaults = Defaults { sequence: 131_072, epsilon: 1.5625e-7, kv_heads: Some(2), head_dimension: Some(128), ..LLAMA };

/// Reads the fields that GLM's dense models have. Gate and up are one product there: the same
/// parameters.
fn glm_parts(fields: &mut Fields) -> Result<Decoder, ConfigError> {
    silu(fields)?;
    // These types have biases unless the file says otherwise.
    let has_bias = fields.flag_or("attention_bias", true)?;
    // Half of a head's features are rotated unless the file says otherwise.
    fields.default_rotary_share(0.5);
    // The type's own number is no power of ten.
    let number = fields.number_or("rms_norm_eps", GLM.epsilon)?;
    fields.set("rms_norm_eps", json!(power_of_ten(number)));
    if power_of_ten(number) != number {
        fields.note(format!("norms add {:e} to the variance, and `rms_norm_eps` says {number:e}", power_of_ten(number)));
    }
    let decoder = common(fields, &GLM)?;
    Ok(Decoder { qkv_bias: has_bias, ..decoder })
}

/// The nearest power of ten.
fn power_of_ten(number: f64) -> f64 {
    let digits = (-number.max(1e-30).log10()).round().clamp(1.0, 30.0);
    format!("1e-{digits}").parse().unwrap_or(1e-6)
}

pub(super) fn glm(fields: &mut Fields) -> Result<Model, ConfigError> {
    Ok(Model::Decoder(glm_parts(fields)?))
}

pub(super) fn glm4(fields: &mut Fields) -> Result<Model, ConfigError> {
    Ok(Model::Decoder(Decoder { output_norms: true, ..glm_parts(fields)? }))
}

/// GLM-4.5 and later: mixtures with a shared expert.
pub(super) fn glm4_moe(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    let has_bias = fields.flag_or("attention_bias", false)?;
    let query_key_norm = fields.flag_or("use_qk_norm", false)?;
    // Grouping, choosing and weighing experts costs nothing compared with the experts' products.
    fields.neutral(&[
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "scoring_func",
        "topk_method",
        "num_nextn_predict_layers",
    ]);
    router(fields)?;
    fields.note("gates are a softmax over the chosen experts, and in GLM-4.5 they are sigmoids, normed and scaled");
    let is_normalised = fields.flag_or("norm_topk_prob", true)?;
    let experts = fields.size_or("n_routed_experts", 128)?;
    let top_k = fields.size_or("num_experts_per_tok", 8)?;
    let ffn = fields.size_or("moe_intermediate_size", 1408)?;
    let shared = fields.count_or("n_shared_experts", 1)?;
    let first = fields.count_or("first_k_dense_replace", 1)?;
    fields.default_rotary_share(0.5);
    let decoder = common(fields, &Defaults { sequence: 131_072, epsilon: 1e-5, kv_heads: Some(8), ..LLAMA })?;
    let mixtures = Mixtures {
        first,
        shared_ffn: Some(ffn * shared).filter(|&ffn| ffn > 0),
        unnormalised_gates: !is_normalised,
        ..mixtures([experts, top_k, ffn])
    };
    Ok(Model::Decoder(Decoder { qkv_bias: has_bias, query_key_norm, mixtures: Some(mixtures), ..decoder }))
}
