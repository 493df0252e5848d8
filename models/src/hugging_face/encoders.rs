//! BERT, RoBERTa, DistilBERT, ModernBERT and T5.

use super::fields::{ConfigError, Fields, inexpressible};
use crate::families::{Bert, ModernBert, NormKind, T5};
use crate::model::Model;
use serde_json::{Value, json};

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
        keeps_attention_output: false,
    })
}

/// DistilBERT: BERT without token types, whose attention's output is not dropped.
pub(super) fn distilbert(fields: &mut Fields) -> Result<Model, ConfigError> {
    fields.neutral(&["qa_dropout", "seq_classif_dropout"]);
    fields.must_be("activation", &[json!("gelu")], "the activation is a GELU")?;
    fields.must_be_off("sinusoidal_pos_embds", "the table of positions is trained")?;
    fields.must_be("tie_word_embeddings", &[json!(true)], "the head shares the embedding's weights")?;
    fields.must_be("tie_weights_", &[json!(true)], "the head shares the embedding's weights")?;
    let rows = fields.size_or("max_position_embeddings", 512)?;
    let sequence = fields.asked_sequence().unwrap_or(rows);
    let hidden = fields.size_or("dim", 768)?;
    Ok(Model::Bert(Bert {
        layers: fields.size_or("n_layers", 6)?,
        hidden,
        heads: fields.size_or("n_heads", 12)?,
        ffn: Some(fields.size_or("hidden_dim", 3072)?).filter(|&ffn| ffn != 4 * hidden),
        vocab: fields.size_or("vocab_size", 30_522)?,
        sequence,
        position_rows: Some(rows).filter(|&rows| rows != sequence),
        first_position: 0,
        token_types: 0,
        dropout: fields.dropout(&[("dropout", 0.1)])?,
        attention_dropout: fields.dropout(&[("attention_dropout", 0.1)])?,
        keeps_attention_output: true,
    }))
}

/// Reads the bases of the frequencies: of layers that see all positions, and of the others.
fn modernbert_bases(fields: &mut Fields) -> Result<[usize; 2], ConfigError> {
    let [mut full, mut local] =
        [fields.number_or("global_rope_theta", 160_000.0)?, fields.number_or("local_rope_theta", 10_000.0)?];
    if let Some(kinds) = fields.object("rope_parameters")? {
        for (kind, rope) in &kinds {
            let field = format!("rope_parameters.{kind}");
            let base = match (kind.as_str(), rope) {
                ("full_attention", Value::Object(rope)) => (&mut full, rope),
                ("sliding_attention", Value::Object(rope)) => (&mut local, rope),
                (_, Value::Null) => continue,
                _ => return Err(fields.unknown(field)),
            };
            for (name, value) in base.1 {
                match (name.as_str(), value) {
                    ("rope_theta", value) => {
                        *base.0 = value.as_f64().ok_or_else(|| fields.unknown(format!("{field}.{name}")))?;
                    }
                    ("rope_type", value) if *value == "default" => {}
                    _ => return Err(inexpressible(&format!("{field}.{name}"), value, "frequencies are not scaled")),
                }
            }
        }
    }
    fields.must_be("rope_scaling", &[], "frequencies are not scaled")?;
    let whole = |name: &str, base: f64| match base.fract() == 0.0 && (1.0..=16_777_216.0).contains(&base) {
        true => Ok(base as usize),
        false => Err(inexpressible(name, &json!(base), "the base of the frequencies is a whole number from 1 to 16,777,216")),
    };
    Ok([whole("global_rope_theta", full)?, whole("local_rope_theta", local)?])
}

/// Reads which layers see all positions: the first of each period.
fn modernbert_period(fields: &mut Fields) -> Result<usize, ConfigError> {
    let every = fields.size_or("global_attn_every_n_layers", 3)?;
    let Some(kinds) = fields.list("layer_types")? else { return Ok(every) };
    let is_full = |kind: &Value| kind == "full_attention";
    let every = kinds.iter().skip(1).position(is_full).map_or(kinds.len().max(1), |later| later + 1);
    let is_periodic = kinds.iter().enumerate().all(|(layer, kind)| is_full(kind) == layer.is_multiple_of(every));
    let are_known = kinds.iter().all(|kind| is_full(kind) || kind == "sliding_attention");
    if is_periodic && are_known {
        return Ok(every);
    }
    Err(inexpressible("layer_types", &json!(kinds), "the first of every n layers sees all positions, and the others a window"))
}

pub(super) fn modernbert(fields: &mut Fields) -> Result<Model, ConfigError> {
    // Of classifiers, of generation, and of how batches are packed.
    fields.neutral(&["classifier_pooling", "classifier_dropout", "sparse_pred_ignore_index", "initializer_cutoff_factor"]);
    fields.neutral(&["reference_compile", "repad_logits_with_grad", "layer_norm_eps", "position_embedding_type"]);
    // Decoders' names, which Transformers does not read for this type.
    let foreign = ["head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta"];
    for field in foreign {
        if fields.has(field) {
            fields.note(format!("`{field}` is no field of this type, and Transformers does not read it"));
        }
    }
    fields.neutral(&foreign);
    fields.must_be("hidden_activation", &[json!("gelu")], "the feed-forward network of this type is a gated GELU")?;
    fields.must_be("classifier_activation", &[json!("gelu")], "the activation is a GELU")?;
    fields.must_be_off("sparse_prediction", "logits are made of all positions")?;
    fields.must_be_off("deterministic_flash_attn", "attention is not made deterministic, which is slower")?;
    for field in ["embedding_dropout", "attention_dropout", "mlp_dropout"] {
        fields.must_be(field, &[json!(0.0), json!(0)], "nothing is dropped")?;
    }
    fields.must_be("tie_word_embeddings", &[json!(true)], "the head shares the embedding's weights")?;
    let sequence = fields.sequence("max_position_embeddings", 8192)?;
    // Half of it lies on each side.
    let window = fields.size_or("local_attention", 128)? / 2 + 1;
    let [rope_theta, local_rope_theta] = modernbert_bases(fields)?;
    let has_shift = fields.flag_or("norm_bias", false)?;
    Ok(Model::ModernBert(ModernBert {
        layers: fields.size_or("num_hidden_layers", 22)?,
        hidden: fields.size_or("hidden_size", 768)?,
        heads: fields.size_or("num_attention_heads", 12)?,
        ffn: fields.size_or("intermediate_size", 1152)?,
        vocab: fields.size_or("vocab_size", 50_368)?,
        sequence,
        window: Some(window).filter(|&window| window < sequence),
        full_attention_every: modernbert_period(fields)?,
        rope_theta,
        local_rope_theta,
        norm: if has_shift { NormKind::Layer } else { NormKind::LayerWithoutShift },
        norm_epsilon: fields.epsilon("norm_eps", 1e-5)?,
        attention_bias: fields.flag_or("attention_bias", false)?,
        ffn_bias: fields.flag_or("mlp_bias", false)?,
        transform_bias: fields.flag_or("classifier_bias", false)?,
        no_head_bias: !fields.flag_or("decoder_bias", true)?,
    }))
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
