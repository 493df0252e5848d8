//! A number of a `config.json` that decides the model is read or refused: with another one the
//! model is another, or the file is refused.
#![allow(clippy::panic, reason = "a test that fails may panic")]

use foretell_models::from_hugging_face;
use serde_json::{Map, Value, json};

/// Parts of names of fields that decide no size, operator or number of a model: tokens, how weights
/// begin, losses beside the main one, generation, scales, and how a router weighs.
const NEUTRAL: [&str; 26] = [
    "token_id",
    "token_index",
    "init",
    "coef",
    "max_length",
    "scaling_factor",
    "multiplier",
    "mask_",
    "median",
    "classifier",
    "n_group",
    "topk_group",
    "limit",
    "alpha",
    "time_step",
    "window_size",
    "temporal",
    "seq_length",
    "tokens_per_second",
    "cap",
    "expand",
    "query_pre_attn_scalar",
    "original_max_position_embeddings",
    "pooler_output_size",
    "encoder_stride",
    "floor_scale",
];

/// Numbers that Transformers does not read either, since another field says the same, or that are
/// without effect in the case's other settings: the beginning of a case's name, and fields.
const SUPERSEDED: [(&str, &[&str]); 15] = [
    // Latent attention has heads of other sizes, and its own number of keys.
    ("deepseek", &["head_dim", "num_key_value_heads", "qk_head_dim"]),
    ("kimi", &["head_dim", "num_key_value_heads", "qk_head_dim"]),
    // The list of layers counts.
    ("exaone4", &["sliding_window_pattern"]),
    ("gemma3", &["_sliding_window_pattern", "sliding_window"]),
    ("llama4", &["no_rope_layer_interval", "attention_chunk_size"]),
    ("smollm3", &["no_rope_layer_interval"]),
    ("qwen2", &["max_window_layers"]),
    ("qwen3", &["max_window_layers"]),
    // Older layers have one key head, or as many as queries.
    ("falcon", &["num_kv_heads"]),
    // Its layers have no inputs of their own.
    ("gemma4-plain", &["vocab_size_per_layer_input"]),
    // The whole model's projection counts.
    ("clip", &["projection_dim"]),
    ("llava", &["projection_dim"]),
    // Its resolution is free, and a head is a share of its width.
    ("mistral3", &["image_size", "head_dim"]),
    // The text model's width counts.
    ("qwen", &["hidden_size", "out_hidden_size"]),
    ("mpt", &["alibi_bias_max"]),
];

/// Whether a number is superseded. Llama 4's part that sees is left out, which a note says.
fn is_superseded(case: &str, path: &[String]) -> bool {
    let in_vision = path.first().is_some_and(|part| part == "vision_config");
    let name = path.last().map(String::as_str).unwrap_or_default();
    let is_listed = |(start, names): &(&str, &[&str])| case.starts_with(start) && names.contains(&name);
    let width_of_text = case.starts_with("qwen") && !in_vision;
    (case.starts_with("llama4") && in_vision)
        || (SUPERSEDED.iter().any(is_listed) && !(width_of_text && name.ends_with("hidden_size")))
}

/// Whether a field decides something, by its name.
fn decides(name: &str) -> bool {
    !NEUTRAL.iter().any(|part| name.contains(part))
}

/// The numbers of a configuration: their paths.
fn numbers(object: &Map<String, Value>, path: &[String], found: &mut Vec<Vec<String>>) {
    for (name, value) in object {
        let inner = [path, std::slice::from_ref(name)].concat();
        match value {
            Value::Number(number) if number.as_u64().is_some_and(|number| number > 1) => found.push(inner),
            Value::Object(object) => numbers(object, &inner, found),
            _ => {}
        }
    }
}

fn at<'a>(config: &'a mut Value, path: &[String]) -> &'a mut Value {
    path.iter().fold(config, |value, name| &mut value[name.as_str()])
}

#[test]
fn a_number_that_decides_the_model_is_read_or_refused() {
    let document: Value = serde_json::from_str(include_str!("hugging_face.json")).expect("it is JSON");
    let cases = document["cases"].as_array().expect("a list").iter();
    let mut kept = std::collections::BTreeSet::new();
    for case in cases.filter(|case| case["parameters"].as_u64() < Some(3_000_000)) {
        let config = &case["whole"];
        let read =
            |config: &Value| from_hugging_face(&config.to_string(), None).map(|imported| (imported.model, imported.notes)).ok();
        let original = read(config);
        assert!(original.is_some(), "{}", case["name"]);
        let mut paths = Vec::new();
        numbers(config.as_object().expect("an object"), &[], &mut paths);
        for path in paths.iter().filter(|path| path.last().is_some_and(|name| decides(name))) {
            let mut changed = config.clone();
            let value = at(&mut changed, path);
            *value = json!(value.as_u64().expect("it is whole") * 2);
            let case = case["name"].as_str().unwrap_or_default();
            if read(&changed) == original && !is_superseded(case, path) {
                kept.insert(format!("{case}: {}", path.join(".")));
            }
        }
    }
    assert!(kept.is_empty(), "{kept:#?}");
}
