//! The text models of Gemma 3n and Gemma 4: an embedding for each layer, and layers that share
//! keys. Gemma 4 has other heads where a layer sees all positions, and Gemma 3n several residual
//! streams.

use super::decoders::{gemma_parts, period};
use super::fields::{ConfigError, Fields, inexpressible};
use crate::families::{Decoder, FullAttention, LayerInputs, ResidualStreams, SharedKeys};
use crate::model::Model;
use serde_json::{Map, Value, json};

/// Reads the bases of the frequencies, which differ between layers with a window and layers that
/// see all positions. Keeps that of layers that see all positions.
fn positions(fields: &mut Fields) -> Result<(), ConfigError> {
    const FIELD: &str = "rope_parameters";
    let Some(kinds) = fields.object(FIELD)? else {
        fields.set(FIELD, json!({"rope_theta": 1_000_000.0}));
        return Ok(());
    };
    let of = |kind: &str| kinds.get(kind).and_then(Value::as_object).cloned().unwrap_or_default();
    let [full, local] = ["full_attention", "sliding_attention"].map(of);
    let is_plain =
        |rope: &Map<String, Value>, usual: &str| rope.get("rope_type").is_none_or(|kind| kind == usual || kind == "default");
    if !is_plain(&full, "proportional") || !is_plain(&local, "default") {
        return Err(inexpressible(FIELD, &json!(kinds), "frequencies are not scaled"));
    }
    // The frequencies of the features that are not rotated are 0 in Transformers, so all features
    // are read.
    let theta = full.get("rope_theta").cloned().unwrap_or(json!(1_000_000.0));
    fields.set(FIELD, json!({"rope_theta": theta}));
    fields.note("all layers rotate with the frequencies of those that see every position");
    Ok(())
}

/// Reads the sizes that differ in layers that see all positions.
fn full_attention(fields: &mut Fields) -> Result<FullAttention, ConfigError> {
    let keys_as_values = fields.flag_or("attention_k_eq_v", false)?;
    let usual = fields.size_or("global_head_dim", 512)?;
    let kv_heads = fields.optional("num_global_key_value_heads")?.filter(|_| keys_as_values);
    let written = FullAttention { head_dimension: Some(usual), kv_heads, keys_as_values };
    // Newer files list these layers in place of the two fields.
    let Some(layers) = fields.object("per_layer_config")? else { return Ok(written) };
    let mut own = layers.values();
    let Some(Value::Object(first)) = own.next() else { return Ok(FullAttention { head_dimension: None, ..written }) };
    let is_known = |name: &String| matches!(name.as_str(), "head_dim" | "num_key_value_heads");
    if own.any(|other| other.as_object() != Some(first)) || !first.keys().all(is_known) {
        return Err(inexpressible("per_layer_config", &json!(layers), "all layers that see every position have the same heads"));
    }
    let size = |name: &str| first.get(name).and_then(Value::as_u64).and_then(|size| usize::try_from(size).ok());
    Ok(FullAttention { head_dimension: size("head_dim"), kv_heads: size("num_key_value_heads"), keys_as_values })
}

/// Reads a value that Gemma 3n's files list by layer. All layers must have the same.
fn of_each_layer(fields: &mut Fields, field: &str) -> Result<(), ConfigError> {
    let Some(Value::Array(values)) = fields.peek(field).cloned() else { return Ok(()) };
    match values.first() {
        Some(first) if values.iter().all(|value| value == first) => {
            fields.set(field, first.clone());
            Ok(())
        }
        _ => Err(inexpressible(field, &json!(values), "all layers have the same size")),
    }
}

/// Reads in how many layers from the first on activations are cut off.
fn sparse_layers(fields: &mut Fields, layers: usize) -> Result<usize, ConfigError> {
    const FIELD: &str = "activation_sparsity_pattern";
    const HINT: &str = "the first layers cut off the same share, and the others nothing";
    let shares = match fields.take(FIELD) {
        // Transformers' default: 95 % in the first ten layers.
        None if fields.has(FIELD) => return Ok(0),
        None => return Ok(layers.min(10)),
        Some(Value::Array(shares)) => shares,
        Some(share) => vec![share; layers],
    };
    let cuts = |share: &Value| share.as_f64().is_some_and(|share| share > 0.0);
    let count = shares.iter().take_while(|share| cuts(share)).count();
    let are_equal = shares.iter().take(count).all(|share| Some(share) == shares.first());
    match shares.len() == layers && are_equal && !shares.iter().skip(count).any(cuts) {
        true => Ok(count),
        false => Err(inexpressible(FIELD, &json!(shares), HINT)),
    }
}

/// The text model of Gemma 3n.
pub(super) fn gemma3n(fields: &mut Fields) -> Result<Model, ConfigError> {
    // Clipping of a coefficient, and which stream is active, affect no cost.
    fields.neutral(&["altup_coef_clip", "altup_active_idx", "rope_local_base_freq"]);
    fields.must_be("altup_correct_scale", &[json!(true)], "the corrected stream has a scale")?;
    for (field, usual) in [("num_hidden_layers", 35), ("hidden_size", 2048), ("num_attention_heads", 8), ("vocab_size", 262_400)]
    {
        if !fields.has(field) {
            fields.set(field, json!(usual));
        }
    }
    of_each_layer(fields, "intermediate_size")?;
    if !fields.has("intermediate_size") {
        fields.set("intermediate_size", json!(16_384));
    }
    // Older files state the base next to the object that newer files have instead.
    if fields.has("rope_parameters") {
        positions(fields)?;
    }
    if !fields.has("rope_theta") && !fields.has("rope_parameters") {
        fields.set("rope_theta", json!(1_000_000.0));
    }
    let window = fields.size_or("sliding_window", 512)?;
    let every = match fields.list("layer_types")? {
        Some(kinds) => period(&kinds)?,
        None => Some(5),
    };
    let features = fields.size_or("hidden_size_per_layer_input", 256)?;
    let rows = fields.size_or("vocab_size_per_layer_input", 262_144)?;
    let shared = fields.count_or("num_kv_shared_layers", 15)?;
    let cap = fields.number_or("final_logit_softcapping", 30.0)?;
    let residual_streams =
        ResidualStreams { streams: fields.size_or("altup_num_inputs", 4)?, rank: fields.size_or("laurel_rank", 64)? };
    let decoder = gemma_parts(fields, 32_768, Some(2))?;
    let sparse_activation_layers = sparse_layers(fields, decoder.layers)?;
    let layer_inputs = LayerInputs { features, vocab: Some(rows).filter(|&rows| rows != decoder.vocab) };
    Ok(Model::Decoder(Decoder {
        output_norms: true,
        query_key_norm: true,
        value_norm: true,
        window: Some(window),
        full_attention_every: every,
        shared_keys: Some(SharedKeys { layers: shared, ffn: None }).filter(|shared| shared.layers > 0),
        layer_inputs: Some(layer_inputs),
        residual_streams: Some(residual_streams),
        sparse_activation_layers,
        logit_cap: cap != 0.0,
        ..decoder
    }))
}

pub(super) fn gemma4(fields: &mut Fields) -> Result<Model, ConfigError> {
    let experts =
        "experts beside a dense network, with norms of their own, are not planned; without them it comes near `gemma3_text`";
    fields.must_be_off("enable_moe_block", experts)?;
    fields.neutral(&["num_experts", "top_k_experts", "moe_intermediate_size"]);
    // Text sees what is before it; images would see all of themselves.
    if fields.take("use_bidirectional_attention").is_some_and(|seen| seen == "vision") {
        fields.set("use_bidirectional_attention", json!(false));
    }
    positions(fields)?;
    let full = full_attention(fields)?;
    let window = fields.size_or("sliding_window", 512)?;
    let every = match fields.list("layer_types")? {
        Some(kinds) => period(&kinds)?,
        None => Some(6),
    };
    let features = fields.count_or("hidden_size_per_layer_input", 256)?;
    let rows = fields.size_or("vocab_size_per_layer_input", 262_144)?;
    let shared = fields.count_or("num_kv_shared_layers", 0)?;
    let is_wide = fields.flag_or("use_double_wide_mlp", false)?;
    let cap = fields.number_or("final_logit_softcapping", 0.0)?;
    let decoder = gemma_parts(fields, 131_072, Some(4))?;
    let shared_keys = SharedKeys { layers: shared, ffn: is_wide.then_some(2 * decoder.ffn) };
    let layer_inputs = LayerInputs { features, vocab: Some(rows).filter(|&rows| rows != decoder.vocab) };
    let features_of_a_head = decoder.head_features();
    let full = FullAttention {
        head_dimension: full.head_dimension.filter(|&features| features != features_of_a_head),
        kv_heads: full.kv_heads.filter(|&heads| heads != decoder.kv_heads.unwrap_or(decoder.heads)),
        ..full
    };
    let is_other = full.head_dimension.is_some() || full.kv_heads.is_some() || full.keys_as_values;
    Ok(Model::Decoder(Decoder {
        output_norms: true,
        query_key_norm: true,
        value_norm: true,
        // Layers differ in their heads even if the window hides nothing.
        window: Some(window),
        full_attention_every: every,
        full_attention: Some(full).filter(|_| is_other),
        shared_keys: Some(shared_keys).filter(|shared| shared.layers > 0),
        layer_inputs: Some(layer_inputs).filter(|inputs| inputs.features > 0),
        layer_scales: true,
        logit_cap: cap != 0.0,
        ..decoder
    }))
}
