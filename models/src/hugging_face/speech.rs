//! Whisper.

use super::fields::{ConfigError, Fields, inexpressible};
use crate::families::Whisper;
use crate::model::Model;
use serde_json::json;

pub(super) fn whisper(fields: &mut Fields) -> Result<Model, ConfigError> {
    // Of classifiers, of generation, and of noise on the spectrogram, which the input has already.
    fields.neutral(&["classifier_proj_size", "median_filter_width", "use_weighted_layer_sum", "num_hidden_layers", "init_std"]);
    fields.neutral(&["apply_spec_augment", "mask_time_prob", "mask_time_length", "mask_time_min_masks"]);
    fields.neutral(&["mask_feature_prob", "mask_feature_length", "mask_feature_min_masks", "alignment_heads"]);
    fields.must_be("activation_function", &[json!("gelu")], "the activation is a GELU")?;
    fields.must_be_off("scale_embedding", "embeddings are not scaled")?;
    fields.must_be("tie_word_embeddings", &[json!(true)], "the head shares the embedding's weights")?;
    fields.must_be("activation_dropout", &[json!(0.0), json!(0)], "nothing is dropped within the feed-forward network")?;
    for field in ["encoder_layerdrop", "decoder_layerdrop"] {
        fields.must_be(field, &[json!(0.0), json!(0)], "every layer takes part in every step")?;
    }
    let (layers, decoder_layers) = (fields.size_or("encoder_layers", 4)?, fields.size_or("decoder_layers", 4)?);
    let [heads, ffn] = [("attention_heads", 6), ("ffn_dim", 1536)].map(|(field, usual)| {
        let of_encoder = fields.size_or(&format!("encoder_{field}"), usual)?;
        let name = format!("decoder_{field}");
        match fields.size_or(&name, usual)? {
            same if same == of_encoder => Ok(same),
            other => Err(inexpressible(&name, &json!(other), "layers of encoder and decoder have the same sizes")),
        }
    });
    let rows = fields.size_or("max_target_positions", 448)?;
    let target_sequence = fields.asked_sequence().unwrap_or(rows);
    let source_positions = fields.size_or("max_source_positions", 1500)?;
    let mel_bins = fields.size_or("num_mel_bins", 80)?;
    fields.note(format!(
        "a sample is {} frames of {mel_bins} bins and {target_sequence} tokens; every sample is as long",
        2 * source_positions
    ));
    fields.note(
        "the encoder's table of positions is trained here, and Transformers does not train it: `training: {frozen: \
         [model.encoder.embed_positions.weight]}` in the plan says so",
    );
    Ok(Model::Whisper(Whisper {
        layers,
        decoder_layers: Some(decoder_layers).filter(|&count| count != layers),
        hidden: fields.size_or("d_model", 384)?,
        heads: heads?,
        ffn: ffn?,
        vocab: fields.size_or("vocab_size", 51_865)?,
        mel_bins,
        source_positions,
        target_sequence,
        target_rows: Some(rows).filter(|&rows| rows != target_sequence),
        dropout: fields.dropout(&[("dropout", 0.0)])?,
        attention_dropout: fields.dropout(&[("attention_dropout", 0.0)])?,
    }))
}
