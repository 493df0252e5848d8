//! Models of images and text: their `config.json` becomes that of the text model inside.
//!
//! The part that sees images is read elsewhere, or left out with a note. Every other field beside
//! `text_config` is treated as a field of the text model, so one that is not understood is named in
//! an error.

use super::fields::{ConfigError, inexpressible, is_neutral};
use super::is_readable;
use serde_json::{Map, Value};

/// A model type with a text model inside, and Transformers' defaults, which published files leave
/// out.
struct Outer {
    name: &'static str,
    text: &'static str,
    /// `vocab_size`, `hidden_size`, `intermediate_size`, `num_hidden_layers` and
    /// `num_attention_heads`.
    sizes: [usize; 5],
    /// Where the file says whether embedding and head share their weights.
    tied: Tied,
    /// Whether older files have the text model's fields beside `vision_config`.
    may_be_flat: bool,
}

/// Where `tie_word_embeddings` has effect.
#[derive(PartialEq)]
enum Tied {
    Inside,
    /// Outside, with this default.
    Outside(bool),
}

const TYPES: [Outer; 6] = [
    Outer { name: "llama4", text: "llama4_text", sizes: [202_048, 5120, 8192, 48, 40], tied: Tied::Inside, may_be_flat: false },
    Outer {
        name: "gemma3",
        text: "gemma3_text",
        sizes: [262_208, 2304, 9216, 26, 8],
        tied: Tied::Outside(true),
        may_be_flat: false,
    },
    Outer {
        name: "qwen2_vl",
        text: "qwen2_vl_text",
        sizes: [152_064, 8192, 29_568, 80, 64],
        tied: Tied::Outside(false),
        may_be_flat: true,
    },
    Outer {
        name: "qwen2_5_vl",
        text: "qwen2_5_vl_text",
        sizes: [152_064, 8192, 29_568, 80, 64],
        tied: Tied::Outside(false),
        may_be_flat: true,
    },
    Outer {
        name: "qwen3_vl_moe",
        text: "qwen3_vl_moe_text",
        sizes: [151_936, 2048, 5632, 24, 16],
        tied: Tied::Outside(false),
        may_be_flat: false,
    },
    Outer {
        name: "qwen3_vl",
        text: "qwen3_vl_text",
        sizes: [151_936, 4096, 22_016, 32, 32],
        tied: Tied::Outside(false),
        may_be_flat: false,
    },
];

const SIZES: [&str; 5] = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"];

/// Fields of the part that sees images, and of the tokens that represent its output.
const OF_IMAGES: [&str; 10] = [
    "boi_token_index",
    "eoi_token_index",
    "image_token_id",
    "image_token_index",
    "mm_tokens_per_image",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
    "vision_token_id",
];

/// The names of the types.
pub(super) fn types() -> impl Iterator<Item = &'static str> {
    TYPES.iter().map(|outer| outer.name)
}

/// Replaces the configuration by that of its text model. Returns a note on what is left out; `None`
/// if the model has text only.
pub(super) fn keep_text(object: &mut Map<String, Value>) -> Result<Option<String>, ConfigError> {
    let name = object.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let Some(outer) = TYPES.iter().find(|outer| outer.name == name) else { return Ok(descend(object)) };
    let expected = "an object, the text model's configuration";
    let wrong = |reason: String| ConfigError::Value { field: "text_config".into(), reason, expected };
    let is_flat = outer.may_be_flat || object.contains_key("num_hidden_layers");
    let mut text = match object.remove("text_config").filter(|text| !text.is_null()) {
        Some(Value::Object(text)) => text,
        None if is_flat => Map::new(),
        None => return Err(wrong("is missing".into())),
        Some(other) => return Err(wrong(format!("is {other}"))),
    };
    let kind = text.insert("model_type".into(), outer.text.into());
    if let Some(kind) = kind.filter(|kind| kind != outer.text && kind != outer.name) {
        return Err(inexpressible("text_config.model_type", &kind, &format!("the text model of this type is `{}`", outer.text)));
    }
    let sees = object.get("vision_config").is_some();
    object.retain(|field, _| !matches!(field.as_str(), "model_type" | "architectures"));
    let tied = object.remove("tie_word_embeddings").filter(|tied| !tied.is_null());
    if let Tied::Outside(default) = outer.tied {
        let inside = text.remove("tie_word_embeddings").filter(|tied| !tied.is_null());
        text.insert("tie_word_embeddings".into(), tied.or(inside).unwrap_or(default.into()));
    }
    for (field, value) in std::mem::take(object) {
        match text.get(&field) {
            None => _ = text.insert(field, value),
            Some(inside) if *inside == value || inside.is_null() || value.is_null() || is_neutral(&field) => {}
            Some(inside) => {
                let hint = format!("`text_config` has {inside} there, and both describe the text model");
                return Err(inexpressible(&field, &value, &hint));
            }
        }
    }
    text.retain(|field, _| !OF_IMAGES.contains(&field.as_str()));
    for (field, size) in SIZES.into_iter().zip(outer.sizes) {
        text.entry(field).or_insert(size.into());
    }
    drop_image_positions(&mut text);
    *object = text;
    let part = if sees { "the part that sees images (`vision_config`)" } else { "the part that sees images" };
    Ok(Some(format!("the text model is planned alone; {part} is left out, with its parameters, time and memory")))
}

/// Fields in which models of several parts keep the configuration of their text model.
const INNER: [&str; 5] = ["text_config", "language_config", "llm_config", "thinker_config", "language_model_config"];

/// Text models whose sizes at Transformers' defaults published files leave out, such as those of
/// LLaVA 1.5, in the order of [`SIZES`].
const INNER_SIZES: [(&str, [usize; 5]); 3] = [
    ("llama", [32_000, 4096, 11_008, 32, 32]),
    ("mistral", [32_000, 4096, 14_336, 32, 32]),
    ("qwen2", [151_936, 4096, 22_016, 32, 32]),
];

/// The deepest nesting of parts.
const DEEPEST: usize = 4;

/// Types whose projectors are known. For these every field beside the parts must be known.
const PROJECTED: [&str; 4] = ["llava", "vipllava", "paligemma", "mistral3"];

/// Their fields beside the parts.
const OF_PROJECTORS: [&str; 11] = [
    "hidden_size",
    "ignore_index",
    "image_seq_length",
    "multimodal_projector_bias",
    "projection_dim",
    "projector_hidden_act",
    "spatial_merge_size",
    "tie_word_embeddings",
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "vocab_size",
];

/// Gives fields that are not understood to the text model, whose reader reports them.
fn keep_unknown(outer: &str, object: &Map<String, Value>, inner: &mut Map<String, Value>) {
    if !PROJECTED.contains(&outer) {
        return;
    }
    let is_known = |field: &str| {
        let beside = INNER.contains(&field) || OF_IMAGES.contains(&field) || OF_PROJECTORS.contains(&field);
        beside || is_neutral(field) || field == "architectures" || field == "output_attentions" || field == "output_hidden_states"
    };
    for (field, value) in object.iter().filter(|(field, _)| !is_known(field)) {
        inner.entry(field.clone()).or_insert_with(|| value.clone());
    }
}

/// For a model of several parts whose type is unknown, replaces the configuration by that of its
/// text model, however deep it is nested. Returns a note on the rest.
fn descend(object: &mut Map<String, Value>) -> Option<String> {
    let type_of = |object: &Map<String, Value>| object.get("model_type").and_then(Value::as_str).unwrap_or_default().to_string();
    let outer = type_of(object);
    if is_readable(&outer) {
        return None;
    }
    let mut inner = object.clone();
    let mut tied = None;
    for _ in 0..DEEPEST {
        let found = INNER.iter().find_map(|field| inner.get(*field)).and_then(Value::as_object)?.clone();
        tied = tied.or(inner.get("tie_word_embeddings").filter(|tied| !tied.is_null()).cloned());
        inner = found;
        if is_readable(&type_of(&inner)) {
            // If the type is known, the outer model's setting has precedence. Mistral 3's default
            // is true.
            let tied = tied.or_else(|| (outer == "mistral3").then_some(Value::Bool(true)));
            match tied {
                Some(tied) if PROJECTED.contains(&outer.as_str()) => _ = inner.insert("tie_word_embeddings".into(), tied),
                Some(tied) => _ = inner.entry("tie_word_embeddings").or_insert(tied),
                None => {}
            }
            inner.remove("architectures");
            let kind = type_of(&inner);
            if let Some((_, sizes)) = INNER_SIZES.iter().find(|(name, _)| *name == kind) {
                SIZES.iter().zip(sizes).for_each(|(field, size)| _ = inner.entry(*field).or_insert((*size).into()));
                if kind == "mistral" {
                    inner.entry("num_key_value_heads").or_insert(8.into());
                }
            }
            keep_unknown(&outer, object, &mut inner);
            let text = type_of(&inner);
            *object = inner;
            return Some(format!(
                "of a model of type `{outer}` the text model is planned alone, of type `{text}`; its other parts are left out, with their \
                 parameters, time and memory"
            ));
        }
    }
    None
}

/// Replaces the configuration of a model of several parts by that of its text model, whatever the
/// types are. Returns whether there was one.
pub(super) fn enter_text(object: &mut Map<String, Value>) -> bool {
    let mut has_entered = false;
    for _ in 0..DEEPEST {
        if object.contains_key("num_hidden_layers") {
            break;
        }
        let inner = INNER.iter().find_map(|field| object.get(*field)).and_then(Value::as_object).cloned();
        let Some(inner) = inner else { break };
        let tied = object.get("tie_word_embeddings").filter(|tied| !tied.is_null()).cloned();
        *object = inner;
        if let Some(tied) = tied {
            object.entry("tie_word_embeddings").or_insert(tied);
        }
        has_entered = true;
    }
    has_entered
}

/// Removes the settings that distinguish positions of images from those of text. Positions of text
/// are the usual ones.
fn drop_image_positions(text: &mut Map<String, Value>) {
    for name in ["rope_scaling", "rope_parameters"] {
        let Some(Value::Object(rope)) = text.get_mut(name) else { continue };
        if rope.remove("mrope_section").is_none() {
            continue;
        }
        rope.remove("mrope_interleaved");
        for kind in ["type", "rope_type"] {
            if rope.get(kind).is_some_and(|kind| kind == "mrope") {
                rope.insert(kind.into(), "default".into());
            }
        }
    }
}
