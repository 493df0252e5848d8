//! Decoders of Llama's kind: RMS norms, rotary positions, a gated feed-forward network.

use super::fields::{ConfigError, Fields, inexpressible};
use super::rotary::rotary;
use crate::families::{CapacityFactor, Decoder, FeedForward, Mixtures};
use crate::model::Model;
use serde_json::{Value, json};

/// Transformers' defaults of one model type, for fields whose defaults differ between types.
pub(super) struct Defaults {
    pub(super) sequence: usize,
    /// Epsilon of the norms.
    pub(super) epsilon: f64,
    /// Heads of keys and values, if a file without the field has fewer than `num_attention_heads`.
    pub(super) kv_heads: Option<usize>,
    /// Features of a head, if the type states them apart from `hidden_size`.
    pub(super) head_dimension: Option<usize>,
    pub(super) rope_theta: f64,
    pub(super) tied: bool,
}

pub(super) const LLAMA: Defaults =
    Defaults { sequence: 2048, epsilon: 1e-6, kv_heads: None, head_dimension: None, rope_theta: 10_000.0, tied: false };

/// Reads the fields that all of these types have.
pub(super) fn common(fields: &mut Fields, defaults: &Defaults) -> Result<Decoder, ConfigError> {
    let [layers, hidden, heads] =
        [fields.size("num_hidden_layers")?, fields.size("hidden_size")?, fields.size("num_attention_heads")?];
    let (ffn, vocab) = (fields.size("intermediate_size")?, fields.size("vocab_size")?);
    let sequence = fields.sequence("max_position_embeddings", defaults.sequence)?;
    let usual = defaults.kv_heads.filter(|_| !fields.has("num_key_value_heads"));
    let kv_heads = fields.optional("num_key_value_heads")?.or(usual).filter(|&kv_heads| kv_heads != heads);
    let head_dimension = fields.optional("head_dim")?.or(defaults.head_dimension).filter(|features| features * heads != hidden);
    let rope = rotary(fields, defaults.rope_theta, 1.0)?;
    let decoder = Decoder {
        kv_heads,
        head_dimension,
        tied_embeddings: fields.flag_or("tie_word_embeddings", defaults.tied)?,
        norm_epsilon: fields.epsilon("rms_norm_eps", defaults.epsilon)?,
        rope_theta: rope.theta,
        rope_scaling: rope.is_scaled,
        attention_dropout: fields.dropout(&[("attention_dropout", 0.0)])?,
        ..Decoder::llama([layers, hidden, heads, ffn, vocab, sequence])
    };
    Ok(Decoder { rotary_dimension: rope.rotated(&decoder)?, ..decoder })
}

pub(super) fn silu(fields: &mut Fields) -> Result<(), ConfigError> {
    fields.must_be("hidden_act", &[json!("silu"), json!("swish")], "the feed-forward network of this type is a gated SiLU")
}

pub(super) fn llama(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    fields.sliced_products(true)?;
    let has_bias = fields.flag_or("attention_bias", false)?;
    let ffn_bias = fields.flag_or("mlp_bias", false)?;
    let decoder = common(fields, &LLAMA)?;
    Ok(Model::of_decoder(Decoder { qkv_bias: has_bias, attention_output_bias: has_bias, ffn_bias, ..decoder }))
}

pub(super) fn mistral(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    // A file without the field has Mistral 7B's window, and null says that there is none.
    let default = if fields.has("sliding_window") { None } else { Some(4096) };
    let window = fields.optional("sliding_window")?.or(default);
    let decoder = common(fields, &Defaults { sequence: 131_072, kv_heads: Some(8), ..LLAMA })?;
    Ok(Model::of_decoder(windowed(decoder, window)))
}

/// Sets a window if it hides any position.
pub(super) fn windowed(decoder: Decoder, window: Option<usize>) -> Decoder {
    let window = window.filter(|&window| window < decoder.sequence);
    Decoder { window, ..decoder }
}

pub(super) fn mixtral(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    let experts = fields.size_or("num_local_experts", 8)?;
    let top_k = fields.size_or("num_experts_per_tok", 2)?;
    fields.must_be("router_jitter_noise", &[json!(0.0), json!(0)], "the router adds no noise")?;
    router(fields)?;
    let window = fields.optional("sliding_window")?;
    let decoder = common(fields, &Defaults { sequence: 131_072, epsilon: 1e-5, kv_heads: Some(8), rope_theta: 1e6, ..LLAMA })?;
    let mixtures = mixtures([experts, top_k, decoder.ffn]);
    let decoder = windowed(Decoder { mixtures: Some(mixtures), ..decoder }, window);
    Ok(Model::of_decoder(decoder))
}

/// Reads the fields of routers that affect no cost.
pub(super) fn router(fields: &mut Fields) -> Result<(), ConfigError> {
    fields.neutral(&["router_aux_loss_coef"]);
    fields.must_be_off("output_router_logits", "no auxiliary loss balances the experts")?;
    fields.note(
        "an expert has slots for balanced routing (`capacity_factor: 1`): Transformers drops no token, and our own executor those \
         beyond it",
    );
    Ok(())
}

/// Mixtures in every layer.
pub(super) fn mixtures([experts, top_k, ffn]: [usize; 3]) -> Mixtures {
    Mixtures {
        experts,
        top_k,
        ffn,
        shared_ffn: None,
        shared_gate: false,
        every: 1,
        first: 0,
        capacity_factor: CapacityFactor::BALANCED,
        router_bias: false,
        expert_bias: false,
        unnormalised_gates: false,
    }
}

/// Reads Qwen's windows: layers from `max_window_layers` on have one, if any has.
pub(super) fn qwen_window(fields: &mut Fields) -> Result<Option<usize>, ConfigError> {
    let uses_window = fields.flag_or("use_sliding_window", false)?;
    let window = fields.count_or("sliding_window", 4096)?;
    let full_layers = fields.count_or("max_window_layers", 28)?;
    let kinds = fields.list("layer_types")?;
    if !uses_window {
        return Ok(None);
    }
    let some_are_full = match kinds {
        Some(kinds) => kinds.iter().any(|kind| kind != "sliding_attention"),
        None => full_layers > 0,
    };
    if some_are_full {
        fields.note("every layer is planned with the window, and Transformers has it in the layers from `max_window_layers` on");
    }
    Ok(Some(window).filter(|&window| window > 0))
}

pub(super) fn qwen2(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    let window = qwen_window(fields)?;
    let decoder = common(fields, &Defaults { sequence: 32_768, ..LLAMA })?;
    Ok(Model::Decoder(windowed(Decoder { qkv_bias: true, ..decoder }, window)))
}

/// The text model of Qwen2-VL and Qwen2.5-VL: Qwen2 with other defaults.
pub(super) fn qwen2_vl(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    let window = qwen_window(fields)?;
    let defaults = Defaults { sequence: 32_768, epsilon: 1e-5, kv_heads: Some(8), rope_theta: 1e6, ..LLAMA };
    let decoder = common(fields, &defaults)?;
    Ok(Model::Decoder(windowed(Decoder { qkv_bias: true, ..decoder }, window)))
}

pub(super) fn qwen3(fields: &mut Fields) -> Result<Model, ConfigError> {
    Ok(Model::Decoder(qwen3_parts(fields, &Defaults { head_dimension: Some(128), ..QWEN3 })?))
}

/// The text model of Qwen3-VL. Its lower layers also read features that the part that sees images
/// passes on.
pub(super) fn qwen3_vl(fields: &mut Fields) -> Result<Model, ConfigError> {
    let defaults = Defaults { sequence: 128_000, head_dimension: Some(128), kv_heads: Some(32), rope_theta: 500_000.0, ..QWEN3 };
    Ok(Model::Decoder(qwen3_parts(fields, &defaults)?))
}

const QWEN3: Defaults = Defaults { sequence: 32_768, ..LLAMA };

/// Reads the fields that Qwen3 and its mixtures have. Their heads have another default.
fn qwen3_parts(fields: &mut Fields, defaults: &Defaults) -> Result<Decoder, ConfigError> {
    silu(fields)?;
    let window = qwen_window(fields)?;
    let has_bias = fields.flag_or("attention_bias", false)?;
    let decoder = common(fields, defaults)?;
    let decoder = Decoder { qkv_bias: has_bias, attention_output_bias: has_bias, query_key_norm: true, ..decoder };
    Ok(windowed(decoder, window))
}

/// Reads which layers are dense: the first few, or all but every `decoder_sparse_step`-th. Returns
/// how many come first, and the period of mixtures after them.
pub(super) fn dense_layers(fields: &mut Fields) -> Result<(usize, usize), ConfigError> {
    let every = fields.size_or("decoder_sparse_step", 1)?;
    let dense = fields.list("mlp_only_layers")?.unwrap_or_default();
    let are_first = dense.iter().enumerate().all(|(index, layer)| *layer == index);
    if !dense.is_empty() && (!are_first || every > 1) {
        let hint = "mixtures are every layer after the first dense ones, or every `decoder_sparse_step`-th";
        return Err(inexpressible("mlp_only_layers", &json!(dense), hint));
    }
    Ok((dense.len(), every))
}

/// The text model of Qwen3-VL's mixtures.
pub(super) fn qwen3_vl_moe(fields: &mut Fields) -> Result<Model, ConfigError> {
    let (first, every) = dense_layers(fields)?;
    let old = fields.optional("num_experts")?;
    let experts = fields.optional("num_local_experts")?.or(old).unwrap_or(60);
    let top_k = fields.size_or("num_experts_per_tok", 4)?;
    let ffn = fields.size_or("moe_intermediate_size", 1408)?;
    let is_normalised = fields.flag_or("norm_topk_prob", true)?;
    router(fields)?;
    let defaults = Defaults { sequence: 128_000, kv_heads: Some(16), rope_theta: 500_000.0, ..QWEN3 };
    let decoder = qwen3_parts(fields, &defaults)?;
    let mixtures = Mixtures { first, every, unnormalised_gates: !is_normalised, ..mixtures([experts, top_k, ffn]) };
    Ok(Model::Decoder(Decoder { mixtures: Some(mixtures), ..decoder }))
}

pub(super) fn qwen3_moe(fields: &mut Fields) -> Result<Model, ConfigError> {
    // Published files also have fields of older code, whose values the type implies.
    fields.must_be("shared_expert_intermediate_size", &[json!(0)], "no expert of this type is shared")?;
    fields.must_be("use_qk_norm", &[json!(true)], "queries and keys of this type are normed")?;
    fields.must_be_off("qkv_bias", "queries, keys and values of this type have no biases of their own")?;
    let (first, every) = dense_layers(fields)?;
    let old = fields.optional("num_experts")?;
    let experts = fields.optional("num_local_experts")?.or(old).unwrap_or(128);
    let top_k = fields.size_or("num_experts_per_tok", 8)?;
    let ffn = fields.size_or("moe_intermediate_size", 768)?;
    let is_normalised = fields.flag_or("norm_topk_prob", false)?;
    router(fields)?;
    let decoder = qwen3_parts(fields, &Defaults { kv_heads: Some(4), ..QWEN3 })?;
    let mixtures = Mixtures { first, every, unnormalised_gates: !is_normalised, ..mixtures([experts, top_k, ffn]) };
    Ok(Model::Decoder(Decoder { mixtures: Some(mixtures), ..decoder }))
}

/// Llama 4 without its images. Each mixture has one shared expert, and gates are not normalised.
pub(super) fn llama4(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    fields.neutral(&["floor_scale", "attn_scale", "for_llm_compressor"]);
    let is_tuned = fields.flag_or("attn_temperature_tuning", true)?;
    let has_norms = fields.flag_or("use_qk_norm", true)?;
    fields.must_be("router_jitter_noise", &[json!(0.0), json!(0)], "the router adds no noise")?;
    router(fields)?;
    let has_bias = fields.flag_or("attention_bias", false)?;
    let experts = fields.size_or("num_local_experts", 16)?;
    let top_k = fields.size_or("num_experts_per_tok", 1)?;
    let every = fields.size_or("interleave_moe_layer_step", 1)?;
    let dense_ffn = fields.size_or("intermediate_size_mlp", 16_384)?;
    let full_every = fields.size_or("no_rope_layer_interval", 4)?;
    let unrotated = fields.list("no_rope_layers")?.filter(|layers| !layers.is_empty());
    let full_attention_every = match fields.list("layer_types")? {
        Some(kinds) => period(&kinds)?,
        None => Some(full_every),
    };
    let chunk = fields.optional("attention_chunk_size")?;
    let moe_layers = fields.list("moe_layers")?;
    let defaults = Defaults {
        sequence: 131_072,
        epsilon: 1e-5,
        kv_heads: Some(8),
        head_dimension: Some(128),
        rope_theta: 500_000.0,
        ..LLAMA
    };
    let decoder = common(fields, &defaults)?;
    let usual: Vec<Value> = (0..decoder.layers).filter(|layer| (layer + 1).is_multiple_of(every)).map(Value::from).collect();
    if let Some(layers) = moe_layers.filter(|layers| *layers != usual) {
        return Err(inexpressible("moe_layers", &json!(layers), "every `interleave_moe_layer_step`-th layer is a mixture"));
    }
    if has_norms {
        fields.note("queries and keys of Llama 4 are normed without weights; these norms are left out");
    }
    let count = unrotated.map_or(decoder.layers / full_every, |layers| layers.iter().filter(|layer| **layer == 0).count());
    if count > 0 {
        let scale = if is_tuned { ", and scale their queries by position" } else { "" };
        fields.note(format!("all layers rotate queries and keys here; {count} layers of Llama 4 do not{scale}"));
    }
    let mixtures =
        Mixtures { every, shared_ffn: Some(decoder.ffn), unnormalised_gates: true, ..mixtures([experts, top_k, decoder.ffn]) };
    let decoder = windowed(decoder, chunk.filter(|_| full_attention_every != Some(1)));
    if decoder.window.is_some() {
        fields.note("attention within chunks of the sequence is planned as a window of their length");
    }
    Ok(Model::Decoder(Decoder {
        ffn: dense_ffn,
        mixtures: Some(mixtures),
        qkv_bias: has_bias,
        attention_output_bias: has_bias,
        full_attention_every: full_attention_every.filter(|_| decoder.window.is_some()),
        ..decoder
    }))
}

/// Reads the fields that all Gemmas have. Their norms multiply by one more than the weight, which
/// is the same norm with another initial weight.
pub(super) fn gemma_parts(fields: &mut Fields, sequence: usize, kv_heads: Option<usize>) -> Result<Decoder, ConfigError> {
    let activations = [json!("gelu_pytorch_tanh"), json!("gelu"), json!("gelu_new")];
    for name in ["hidden_act", "hidden_activation"] {
        fields.must_be(name, &activations, "the feed-forward network of this type is a gated GELU by its tanh approximation")?;
    }
    fields.must_be_off("use_bidirectional_attention", "a position sees itself and those before it")?;
    let has_bias = fields.flag_or("attention_bias", false)?;
    let defaults = Defaults { sequence, kv_heads, head_dimension: Some(256), tied: true, ..LLAMA };
    let decoder = common(fields, &defaults)?;
    Ok(Decoder {
        feed_forward: FeedForward::GatedGeluTanh,
        embedding_scale: true,
        qkv_bias: has_bias,
        attention_output_bias: has_bias,
        ..decoder
    })
}

pub(super) fn gemma(fields: &mut Fields) -> Result<Model, ConfigError> {
    Ok(Model::Decoder(gemma_parts(fields, 8192, None)?))
}

pub(super) fn gemma2(fields: &mut Fields) -> Result<Model, ConfigError> {
    // Older files write the window under two names.
    let window = fields.optional("sliding_window")?;
    if fields.optional("sliding_window_size")?.is_some_and(|other| window.is_some_and(|window| window != other)) {
        return Err(inexpressible("sliding_window_size", &json!(window), "it is another name of `sliding_window`"));
    }
    let every = fields.size_or("sliding_window_pattern", 2)?;
    gemma_with_windows(fields, 8192, every, false)
}

pub(super) fn gemma3(fields: &mut Fields) -> Result<Model, ConfigError> {
    fields.neutral(&["_sliding_window_pattern", "rope_local_base_freq"]);
    let every = fields.size_or("sliding_window_pattern", 6)?;
    gemma_with_windows(fields, 131_072, every, true)
}

fn gemma_with_windows(fields: &mut Fields, sequence: usize, every: usize, query_key_norm: bool) -> Result<Model, ConfigError> {
    let window = fields.optional("sliding_window")?.or(Some(4096));
    let every = match fields.list("layer_types")? {
        Some(kinds) => period(&kinds)?,
        None => Some(every),
    };
    let [score_cap, logit_cap] = ["attn_logit_softcapping", "final_logit_softcapping"].map(|name| (name, fields.has(name)));
    let mut cap = |(name, is_there): (&str, bool), default: f64| -> Result<bool, ConfigError> {
        let cap = fields.number_or(name, if is_there { 0.0 } else { default })?;
        Ok(cap != 0.0)
    };
    let defaults = if query_key_norm { [0.0, 0.0] } else { [50.0, 30.0] };
    let (score_cap, logit_cap) = (cap(score_cap, defaults[0])?, cap(logit_cap, defaults[1])?);
    let scalar = fields.number_or("query_pre_attn_scalar", 256.0)?;
    let decoder = gemma_parts(fields, sequence, Some(4))?;
    if decoder.head_features() as f64 != scalar {
        fields.note("scores are scaled by a head's features, and not by `query_pre_attn_scalar`");
    }
    let decoder = windowed(decoder, window);
    let full_attention_every = every.filter(|_| decoder.window.is_some());
    Ok(Model::Decoder(Decoder { output_norms: true, query_key_norm, score_cap, logit_cap, full_attention_every, ..decoder }))
}

/// The period of layers that see every position. `None`: no layer does.
pub(super) fn period(kinds: &[Value]) -> Result<Option<usize>, ConfigError> {
    let is_full = |kind: &Value| kind == "full_attention";
    let Some(first) = kinds.iter().position(is_full) else { return Ok(None) };
    let every = first + 1;
    let is_periodic = kinds.iter().enumerate().all(|(layer, kind)| is_full(kind) == (layer + 1).is_multiple_of(every));
    if is_periodic {
        return Ok(Some(every));
    }
    Err(inexpressible("layer_types", &json!(kinds), "every n-th layer sees all positions, and the others a window"))
}

pub(super) fn phi3(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    fields.neutral(&["original_max_position_embeddings"]);
    // Queries, keys and values are one product in Transformers, and so are gate and up: the same
    // parameters and arithmetic.
    let dropout = fields.dropout(&[("resid_pdrop", 0.0), ("embd_pdrop", 0.0)])?;
    let window = fields.optional("sliding_window")?;
    let decoder = common(fields, &Defaults { sequence: 4096, epsilon: 1e-5, ..LLAMA })?;
    Ok(Model::of_decoder(windowed(Decoder { dropout, ..decoder }, window)))
}
