//! BERT, RoBERTa and T5.

use super::fields::{ConfigError, Fields, inexpressible};
use crate::families::{Bert, T5};
use crate::model::Model;
use serde_json::json;

pub(super) fn bert(fields: &mut Fields) -> Result<Model, ConfigError> {
    Ok(Model::Bert(bert_parts(fields, 512, 2)?))
}

pub(super) fn roberta(fields: &mut Fields) -> Result<Model, ConfigError> {
    // Positions are counted from the row after that of padding.
    let padding = fields.count_or("pad_token_id", 1)?;
    let bert = bert_parts(fields, 512, 2)?;
    let rows = bert.position_rows.unwrap_or(bert.sequence);
    let sequence = fields.asked_sequence().unwrap_or(rows.saturating_sub(padding + 1));
    Ok(Model::Bert(Bert { sequence, position_rows: Some(rows), first_position: padding + 1, ..bert }))
}

/// Reads a BERT whose table of positions has as many rows as `max_position_embeddings` says.
fn bert_parts(fields: &mut Fields, positions: usize, token_types: usize) -> Result<Bert, ConfigError> {
    fields.neutral(&["directionality"]);
    fields.neutral(&[
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
    ]);
    fields.must_be_off("is_decoder", "a position sees all others")?;
    fields.must_be_off("add_cross_attention", "it is an encoder alone")?;
    fields.must_be("hidden_act", &[json!("gelu")], "the activation is a GELU")?;
    fields.must_be("position_embedding_type", &[json!("absolute")], "positions have a table")?;
    fields.must_be("tie_word_embeddings", &[json!(true)], "the head shares the embedding's weights")?;
    fields.fixed_epsilon("layer_norm_eps", 1e-12, 1e-12)?;
    let rows = fields.size_or("max_position_embeddings", positions)?;
    let sequence = fields.asked_sequence().unwrap_or(rows);
    let hidden = fields.size_or("hidden_size", 768)?;
    Ok(Bert {
        layers: fields.size_or("num_hidden_layers", 12)?,
        hidden,
        heads: fields.size_or("num_attention_heads", 12)?,
        ffn: Some(fields.size_or("intermediate_size", 3072)?).filter(|&ffn| ffn != 4 * hidden),
        vocab: fields.size_or("vocab_size", 30_522)?,
        sequence,
        position_rows: Some(rows).filter(|&rows| rows != sequence),
        first_position: 0,
        token_types: fields.size_or("type_vocab_size", token_types)?,
        dropout: fields.dropout(&[("hidden_dropout_prob", 0.1)])?,
        attention_dropout: fields.dropout(&[("attention_probs_dropout_prob", 0.1)])?,
    })
}

/// Positions of T5's source and target in pre-training (Raffel et al. 2020, section 3.1), rounded
/// as in our zoo. Its positions are distances, so a configuration states no length.
const T5_SOURCE: usize = 512;
const T5_TARGET: usize = 128;

pub(super) fn t5(fields: &mut Fields) -> Result<Model, ConfigError> {
    fields.neutral(&["is_gated_act", "dense_act_fn", "n_positions"]);
    // Version 5 scales the decoder's outputs if and only if the head shares the embedding's
    // weights, as ours does.
    fields.neutral(&["scale_decoder_outputs"]);
    fields.must_be_off("is_decoder", "it is an encoder with a decoder")?;
    fields.fixed_epsilon("layer_norm_epsilon", 1e-6, 1e-6)?;
    let form = fields.text_or("feed_forward_proj", "relu")?;
    let gated = match form.as_str() {
        "relu" => false,
        "gated-gelu" => true,
        _ => return Err(inexpressible("feed_forward_proj", &json!(form), "forms: relu, gated-gelu")),
    };
    let layers = fields.size_or("num_layers", 6)?;
    let decoder_layers = fields.size_or("num_decoder_layers", layers)?;
    if decoder_layers != layers {
        return Err(inexpressible(
            "num_decoder_layers",
            &json!(decoder_layers),
            "encoder and decoder have the same number of layers",
        ));
    }
    let [hidden, heads, features] =
        [fields.size_or("d_model", 512)?, fields.size_or("num_heads", 8)?, fields.size_or("d_kv", 64)?];
    let dropout = fields.dropout(&[("dropout_rate", 0.1)])?;
    if !dropout.is_none() {
        fields.note("nothing is dropped within the feed-forward network or after the last norms");
    }
    let source_sequence = fields.asked_sequence().unwrap_or(T5_SOURCE);
    let target_sequence = T5_TARGET.min(source_sequence);
    fields.note(format!("a sample has {source_sequence} source and {target_sequence} target tokens"));
    Ok(Model::T5(T5 {
        layers,
        hidden,
        heads,
        head_dimension: Some(features).filter(|features| features * heads != hidden),
        ffn: fields.size_or("d_ff", 2048)?,
        vocab: fields.size_or("vocab_size", 32_128)?,
        source_sequence,
        target_sequence,
        relative_buckets: fields.size_or("relative_attention_num_buckets", 32)?,
        relative_max_distance: fields.size_or("relative_attention_max_distance", 128)?,
        gated,
        tied_embeddings: fields.flag_or("tie_word_embeddings", true)?,
        dropout,
        attention_dropout: dropout,
    }))
}
