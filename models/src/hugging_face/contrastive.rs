//! CLIP and SigLIP: an encoder of images and one of text, each with a configuration of its own.

use super::Unknown;
use super::fields::{ConfigError, Fields, inexpressible};
use crate::families::{Clip, ClipForm, ImageEncoder, TextEncoder};
use crate::model::Model;
use serde_json::{Map, Value, json};

/// Reads the configuration of one encoder. Older files write it twice, and the second one has
/// precedence, as in Transformers.
fn part(fields: &mut Fields, name: &str, kind: &str) -> Result<Fields, ConfigError> {
    let mut object = fields.object(name)?.unwrap_or_default();
    object.extend(fields.object(&format!("{name}_dict"))?.unwrap_or_default());
    if let Some(other) = object.insert("model_type".into(), kind.into()).filter(|other| *other != kind) {
        return Err(inexpressible(&format!("{name}.model_type"), &other, &format!("the encoder of this type is `{kind}`")));
    }
    object.retain(|_, value| !value.is_null());
    Fields::new(object, None)
}

/// Names the encoder whose field an error is about.
fn within(name: &str, error: ConfigError) -> ConfigError {
    let inside = |field: String| format!("{name}.{field}");
    match error {
        ConfigError::Value { field, reason, expected } => ConfigError::Value { field: inside(field), reason, expected },
        ConfigError::Inexpressible { field, value, hint } => ConfigError::Inexpressible { field: inside(field), value, hint },
        ConfigError::Unknown { names, model_type } => {
            ConfigError::Unknown { names: names.into_iter().map(inside).collect(), model_type }
        }
        other => other,
    }
}

/// Reads what both kinds of encoders have: layers, features, heads, and inner width.
fn sizes(fields: &mut Fields, [hidden, heads, ffn]: [usize; 3], epsilon: f64) -> Result<[usize; 4], ConfigError> {
    // Each activation is one pass over the same numbers.
    let activations = [json!("quick_gelu"), json!("gelu"), json!("gelu_pytorch_tanh"), json!("gelu_new")];
    fields.must_be("hidden_act", &activations, "the activation is a GELU or an approximation of it")?;
    fields.must_be("attention_dropout", &[json!(0.0), json!(0)], "nothing is dropped")?;
    fields.must_be("dropout", &[json!(0.0), json!(0)], "nothing is dropped")?;
    fields.fixed_epsilon("layer_norm_eps", epsilon, epsilon)?;
    Ok([
        fields.size_or("num_hidden_layers", 12)?,
        fields.size_or("hidden_size", hidden)?,
        fields.size_or("num_attention_heads", heads)?,
        fields.size_or("intermediate_size", ffn)?,
    ])
}

/// Reads the encoder of images.
fn images(fields: &mut Fields, patch: usize, epsilon: f64) -> Result<ImageEncoder, ConfigError> {
    // The projection is the outer model's.
    fields.neutral(&["projection_dim", "vocab_size"]);
    fields.must_be("vision_use_head", &[json!(true)], "a head pools the patches")?;
    let [layers, hidden, heads, ffn] = sizes(fields, [768, 12, 3072], epsilon)?;
    Ok(ImageEncoder {
        layers,
        hidden,
        heads,
        ffn,
        patch: fields.size_or("patch_size", patch)?,
        image: fields.size_or("image_size", 224)?,
        channels: fields.size_or("num_channels", 3)?,
    })
}

/// Reads the encoder of text. `usual` are the defaults of its sizes, `vocab` and `positions` those
/// of its vocabulary and number of positions.
fn text(
    fields: &mut Fields,
    usual: [usize; 3],
    [vocab, positions]: [usize; 2],
    epsilon: f64,
    asked: Option<usize>,
) -> Result<TextEncoder, ConfigError> {
    fields.neutral(&["projection_dim"]);
    let [layers, hidden, heads, ffn] = sizes(fields, usual, epsilon)?;
    let rows = fields.size_or("max_position_embeddings", positions)?;
    let sequence = asked.unwrap_or(rows);
    Ok(TextEncoder {
        layers,
        hidden,
        heads,
        ffn,
        vocab: fields.size_or("vocab_size", vocab)?,
        sequence,
        position_rows: Some(rows).filter(|&rows| rows != sequence),
    })
}

/// Reads both encoders by their readers, and gives their notes to the model.
fn both(
    outer: &mut Fields,
    kinds: [&str; 2],
    read_images: impl Fn(&mut Fields) -> Result<ImageEncoder, ConfigError>,
    read_text: impl Fn(&mut Fields) -> Result<TextEncoder, ConfigError>,
) -> Result<(ImageEncoder, TextEncoder), ConfigError> {
    const NAMES: [&str; 2] = ["vision_config", "text_config"];
    let mut of_images = part(outer, NAMES[0], kinds[0])?;
    let mut of_text = part(outer, NAMES[1], kinds[1])?;
    let images = read_images(&mut of_images).map_err(|error| within(NAMES[0], error))?;
    let text = read_text(&mut of_text).map_err(|error| within(NAMES[1], error))?;
    for (name, fields) in [(NAMES[0], of_images), (NAMES[1], of_text)] {
        let notes = fields.finish(Unknown::Refused).map_err(|error| within(name, error))?;
        notes.into_iter().for_each(|note| outer.note(format!("`{name}`: {note}")));
    }
    outer.note(format!(
        "a sample is an image of {0}x{0} pixels and a text of {1} tokens; each image of a micro-batch is compared with each text of it, \
         on all ranks of `data`",
        images.image, text.sequence
    ));
    Ok((images, text))
}

pub(super) fn clip(fields: &mut Fields) -> Result<Model, ConfigError> {
    fields.neutral(&["logit_scale_init_value"]);
    let asked = fields.asked_sequence();
    let (images, text) = both(
        fields,
        ["clip_vision_model", "clip_text_model"],
        |part| images(part, 32, 1e-5),
        |part| text(part, [512, 8, 2048], [49_408, 77], 1e-5, asked),
    )?;
    let projection = fields.size_or("projection_dim", 512)?;
    Ok(Model::Clip(Clip { form: ClipForm::Clip, images, text, projection }))
}

pub(super) fn siglip(fields: &mut Fields) -> Result<Model, ConfigError> {
    let asked = fields.asked_sequence();
    let stated = |fields: &Fields| -> Option<Map<String, Value>> { fields.peek("text_config")?.as_object().cloned() };
    let projected = stated(fields).and_then(|text| text.get("projection_size").cloned()).filter(|size| !size.is_null());
    let (images, text) = both(
        fields,
        ["siglip_vision_model", "siglip_text_model"],
        |part| images(part, 16, 1e-6),
        |part| {
            part.neutral(&["projection_size"]);
            text(part, [768, 12, 3072], [32_000, 64], 1e-6, asked)
        },
    )?;
    let projection = match projected {
        None => text.hidden,
        Some(size) if size.as_u64() == Some(images.hidden as u64) => images.hidden,
        Some(other) => {
            let hint = format!("an image has {} features, and a text is compared in as many", images.hidden);
            return Err(inexpressible("text_config.projection_size", &other, &hint));
        }
    };
    fields.note(
        "the sigmoid of each pair is planned as a softmax of each image over the texts: the same product, and as many logits",
    );
    Ok(Model::Clip(Clip { form: ClipForm::Siglip, images, text, projection }))
}
