//! Image classifiers: ViT and ResNet.

use super::fields::{ConfigError, Fields, inexpressible};
use crate::families::{Resnet, Stem, Vit};
use crate::model::Model;
use serde_json::{Value, json};

/// The number of classes: two if the file names none, as in Transformers.
fn classes(fields: &mut Fields) -> Result<usize, ConfigError> {
    let names = fields.object("id2label")?;
    let stated = fields.optional("num_labels")?;
    Ok(names.map(|names| names.len()).or(stated).unwrap_or(2).max(1))
}

pub(super) fn vit(fields: &mut Fields) -> Result<Model, ConfigError> {
    // A classifier has no pooler, and only masked image modelling has an encoder's stride.
    fields.neutral(&["encoder_stride", "pooler_act", "pooler_output_size"]);
    fields.must_be("qkv_bias", &[json!(true)], "queries, keys and values have biases")?;
    fields.must_be("hidden_act", &[json!("gelu")], "the activation is a GELU")?;
    fields.fixed_epsilon("layer_norm_eps", 1e-12, 1e-6)?;
    let hidden = fields.size_or("hidden_size", 768)?;
    let dropout = fields.dropout(&[("hidden_dropout_prob", 0.0)])?;
    Ok(Model::Vit(Vit {
        layers: fields.size_or("num_hidden_layers", 12)?,
        hidden,
        heads: fields.size_or("num_attention_heads", 12)?,
        ffn: Some(fields.size_or("intermediate_size", 3072)?).filter(|&ffn| ffn != 4 * hidden),
        patch: fields.size_or("patch_size", 16)?,
        image: fields.size_or("image_size", 224)?,
        channels: fields.size_or("num_channels", 3)?,
        classes: classes(fields)?,
        dropout,
        attention_dropout: fields.dropout(&[("attention_probs_dropout_prob", 0.0)])?,
    }))
}

pub(super) fn resnet(fields: &mut Fields) -> Result<Model, ConfigError> {
    fields.neutral(&["out_features", "out_indices", "stage_names", "_out_features", "_out_indices"]);
    fields.must_be("hidden_act", &[json!("relu")], "the activation is `max(0, x)`")?;
    fields.must_be_off("downsample_in_first_stage", "the first stage keeps the size")?;
    fields.must_be_off("downsample_in_bottleneck", "the 3x3 convolution of a bottleneck has the stride")?;
    let kind = fields.text_or("layer_type", "bottleneck")?;
    let depths = fields.list("depths")?.unwrap_or_else(|| vec![json!(3), json!(4), json!(6), json!(3)]);
    let widths = fields.list("hidden_sizes")?.unwrap_or_else(|| vec![json!(256), json!(512), json!(1024), json!(2048)]);
    let numbers = |list: &[Value]| list.iter().filter_map(Value::as_u64).collect::<Vec<_>>();
    let depth = match (kind.as_str(), &numbers(&depths)[..]) {
        ("basic", [2, 2, 2, 2]) => 18,
        ("basic", [3, 4, 6, 3]) => 34,
        ("bottleneck", [3, 4, 6, 3]) => 50,
        ("bottleneck", [3, 4, 23, 3]) => 101,
        ("bottleneck", [3, 8, 36, 3]) => 152,
        _ => return Err(inexpressible("depths", &json!(depths), "depths are those of ResNet-18, 34, 50, 101 and 152")),
    };
    let width = fields.size_or("embedding_size", 64)?;
    let expansion = if kind == "basic" { 1 } else { 4 };
    let expected: Vec<u64> = (0..4).map(|stage| (width * expansion) as u64 * (1 << stage)).collect();
    if numbers(&widths) != expected {
        return Err(inexpressible("hidden_sizes", &json!(widths), "each stage is twice as wide as the one before it"));
    }
    Ok(Model::Resnet(Resnet {
        depth,
        stem: Stem::Imagenet,
        // The configuration states no size of images.
        image: 224,
        channels: fields.size_or("num_channels", 3)?,
        classes: classes(fields)?,
        width,
    }))
}
