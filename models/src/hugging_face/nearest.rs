//! The model file that comes nearest to a configuration whose type has no reader, from the fields
//! that most decoders have. Only for messages.

use serde_json::{Map, Value};

/// Fields of most decoders, with ours.
const COMMON: [(&str, &str); 8] = [
    ("num_hidden_layers", "layers"),
    ("hidden_size", "hidden"),
    ("num_attention_heads", "heads"),
    ("num_key_value_heads", "kv_heads"),
    ("head_dim", "head_dimension"),
    ("intermediate_size", "ffn"),
    ("vocab_size", "vocab"),
    ("max_position_embeddings", "sequence"),
];

/// A model file in one line. `None` if the configuration lacks a decoder's sizes.
pub(super) fn model_file(config: &Map<String, Value>) -> Option<String> {
    let mut entries = Vec::new();
    for (field, own) in COMMON {
        match config.get(field).and_then(Value::as_u64) {
            Some(size) => entries.push(format!("{own}: {size}")),
            None if matches!(own, "kv_heads" | "head_dimension") => {}
            None => return None,
        }
    }
    Some(format!("{{family: decoder, {}}}", entries.join(", ")))
}
