//! Cohere's Command R, R+ and R7B: attention and the feed-forward network side by side, norms
//! without a shift, scaled logits.

use super::decoders::{Defaults, LLAMA, common, period, silu, windowed};
use super::fields::{ConfigError, Fields};
use crate::families::{Decoder, NormKind, ParallelBlock};
use crate::model::Model;
use serde_json::json;

/// Reads the fields that all of these types have.
fn cohere_parts(fields: &mut Fields) -> Result<Decoder, ConfigError> {
    silu(fields)?;
    // Published files state these fields although the type implies them.
    fields.must_be("use_parallel_block", &[json!(true)], "attention and the feed-forward network read one norm")?;
    fields.must_be("use_gated_activation", &[json!(true)], "the feed-forward network has a gate")?;
    fields.must_be("use_embedding_sharing", &[json!(true)], "the head shares the embedding's weights")?;
    fields.must_be("rotary_pct", &[json!(1.0), json!(1)], "all features of a head are rotated")?;
    fields.must_be("position_embedding_type", &[json!("rope_gptj"), json!("rope")], "positions are rotated")?;
    fields.neutral(&["use_parallel_embedding", "cache_implementation", "logit_scale"]);
    let epsilon = fields.number_or("layer_norm_eps", 1e-5)?;
    fields.set("rms_norm_eps", json!(epsilon));
    let has_bias = fields.flag_or("attention_bias", false)?;
    let decoder = common(fields, &Defaults { sequence: 8192, tied: true, ..LLAMA })?;
    Ok(Decoder {
        norm: NormKind::LayerWithoutShift,
        parallel_block: ParallelBlock::OneNorm,
        qkv_bias: has_bias,
        attention_output_bias: has_bias,
        logit_scale: true,
        ..decoder
    })
}

pub(super) fn cohere(fields: &mut Fields) -> Result<Model, ConfigError> {
    let query_key_norm = fields.flag_or("use_qk_norm", false)?;
    let decoder = cohere_parts(fields)?;
    Ok(Model::Decoder(Decoder { query_key_norm, query_key_scales_of_heads: query_key_norm, ..decoder }))
}

/// Command R7B: windows in three of four layers, and no rotation in the fourth.
pub(super) fn cohere2(fields: &mut Fields) -> Result<Model, ConfigError> {
    fields.must_be_off("use_qk_norm", "queries and keys of this type are not normed")?;
    let first = "layers with a window come first in each period";
    fields.must_be("order_of_interleaved_layers", &[json!("local_attn_first")], first)?;
    let every = fields.size_or("sliding_window_pattern", 4)?;
    // Another name of the period, which Transformers does not read.
    fields.neutral(&["layer_switch"]);
    let usual = (!fields.has("sliding_window")).then_some(4096);
    let window = fields.optional("sliding_window")?.or(usual);
    let every = match fields.list("layer_types")? {
        Some(kinds) => period(&kinds)?,
        None => Some(every),
    };
    let decoder = windowed(cohere_parts(fields)?, window);
    // Layers differ in rotation even if the window hides nothing. Without a window no layer
    // rotates.
    let every = if window.is_some() { every } else { Some(1) };
    let full_attention_every = every.filter(|_| decoder.window.is_some());
    Ok(Model::Decoder(Decoder { full_attention_every, unrotated_every: every, ..decoder }))
}
