//! Which model a row's run trains: the sizes that the row states, and what is known of an architecture by its name where the schema has no
//! column for it.

use crate::row::Row;
use crate::run::Refusal;
use foretell_models::Model;
use foretell_program::Layout;
use foretell_simulator::gpu::StackKind;

/// What is known of an architecture by its name.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Architecture {
    /// Features of a head.
    head_dimension: Option<usize>,
    query_rank: Option<usize>,
    key_value_rank: Option<usize>,
    /// Inner width of the experts that every token goes to.
    shared_ffn: Option<usize>,
    /// Layers at the beginning that are no mixtures.
    dense_layers: usize,
}

/// Architectures that the schema's columns do not tell, by a word of the model's name, the first that fits. From the published
/// configurations; DeepSeek's heads have 192 features of queries and keys and 128 of values: the mean does their work.
const ARCHITECTURES: [(&str, Architecture); 13] = {
    const PLAIN: Architecture =
        Architecture { head_dimension: None, query_rank: None, key_value_rank: None, shared_ffn: None, dense_layers: 0 };
    const LATENT: Architecture =
        Architecture { head_dimension: Some(160), query_rank: Some(1536), key_value_rank: Some(512), dense_layers: 1, ..PLAIN };
    const WIDE: Architecture = Architecture { head_dimension: Some(256), ..PLAIN };
    const OF_128: Architecture = Architecture { head_dimension: Some(128), ..PLAIN };
    [
        ("deepseek-v3", Architecture { shared_ffn: Some(2048), dense_layers: 3, ..LATENT }),
        ("deepseek-r1", Architecture { shared_ffn: Some(2048), dense_layers: 3, ..LATENT }),
        ("deepseek-v2-lite", Architecture { shared_ffn: Some(2816), query_rank: None, ..LATENT }),
        ("deepseek-v2", Architecture { shared_ffn: Some(3072), ..LATENT }),
        ("kimi", Architecture { shared_ffn: Some(2048), ..LATENT }),
        ("llama-4", Architecture { shared_ffn: Some(8192), ..PLAIN }),
        ("llama4", Architecture { shared_ffn: Some(8192), ..PLAIN }),
        ("qwen3", OF_128),
        ("mistral-nemo", OF_128),
        ("gpt-oss", Architecture { head_dimension: Some(64), ..PLAIN }),
        ("gemma-2-27b", OF_128),
        ("gemma3-27b", OF_128),
        ("gemma", WIDE),
    ]
};

/// The model of a row's run.
///
/// # Errors
/// [`Refusal`] where the row does not state a size, or the model is not one of ours.
pub(crate) fn model(row: &Row, stack: &StackKind, layout: &Layout, stand_ins: &mut Vec<String>) -> Result<Model, Refusal> {
    let name = row.model.to_lowercase();
    if name.contains("resnet-50") || name.contains("resnet50") {
        return Ok(Model::Resnet {
            depth: 50,
            stem: foretell_models::Stem::Imagenet,
            image: 224,
            channels: 3,
            classes: 1000,
            width: 64,
        });
    }
    for other in ["transformer-xl", "gnmt", "t5", "transformer-big", "dlrm", "nemotron-h", "mamba", "stable", "unet"] {
        if name.contains(other) {
            return Err(Refusal(format!("the model `{}` is not one of ours", row.model)));
        }
    }
    let needed = |column: &'static str| row.count(column).ok_or_else(|| Refusal(format!("`{column}` is not stated")));
    let (layers, hidden) = (needed("layers")?, needed("hidden")?);
    let heads = row.count("heads").unwrap_or_else(|| {
        stand_ins.push("the heads are not stated: of 128 features each".into());
        (hidden / 128).max(1).next_multiple_of(layout.tensor)
    });
    let mut sequence = needed("seq")?;
    let vocabulary = row.count("vocab").unwrap_or_else(|| {
        stand_ins.push("the vocabulary is not stated".into());
        51200
    });
    let vocab = vocabulary.next_multiple_of(stack.vocabulary_multiple * layout.tensor);
    let found = ARCHITECTURES.iter().find(|(word, _)| name.contains(word)).map(|(_, found)| *found).unwrap_or_default();
    let head_dimension = match row.count("head_dim").or(found.head_dimension) {
        Some(features) => Some(features),
        None if hidden.is_multiple_of(heads) => None,
        None => {
            stand_ins.push("the width of a head is not stated".into());
            Some((hidden / heads).max(1).next_multiple_of(8))
        }
    };
    let mut ffn = row.count("ffn").unwrap_or(4 * hidden);
    // Ranks that are more than heads of keys have copies.
    let kv_heads = row.count("kv_heads").unwrap_or(heads).max(layout.tensor).min(heads);
    if name.contains("bert") {
        if sequence >= 512 {
            // Frameworks pad to a multiple of eight, which tensor cores want.
            sequence = 8 * (sequence as f64 * stack.sequence_share / 8.0).round() as usize;
        }
        return Ok(Model::Bert {
            layers,
            hidden,
            heads,
            ffn: Some(ffn),
            vocab,
            sequence,
            dropout: Default::default(),
            attention_dropout: Default::default(),
        });
    }
    let mut routing = row.count("experts").zip(row.count("topk"));
    if routing.is_none()
        && let Some(experts) = name.split_once("switch-xl-").and_then(|(_, rest)| rest.split(' ').next()?.parse().ok())
    {
        // Hugging Face's loop over experts, eager.
        stand_ins.push("every expert is taken to compute every token".into());
        routing = Some((experts, experts));
        ffn = (2 * ffn / 3).next_multiple_of(64 * layout.tensor);
    }
    if let Some((experts, top_k)) = routing {
        if found.key_value_rank.is_some() {
            stand_ins.push("latent attention is simulated with heads of equal widths".into());
        }
        let every = if name.contains("maverick") { 2 } else { 1 };
        return Ok(Model::Moe {
            layers,
            hidden,
            heads,
            kv_heads: Some(kv_heads),
            head_dimension,
            query_rank: found.query_rank,
            key_value_rank: found.key_value_rank,
            dense_ffn: row.count("ffn"),
            shared_ffn: row.count("shared_expert_ffn").or(found.shared_ffn),
            dense_layers: found.dense_layers.min(layers - 1),
            ffn: row.count("moe_ffn").unwrap_or(ffn),
            vocab,
            sequence,
            experts,
            top_k,
            moe_every: every,
            capacity_factor: 1.0f64.try_into().map_err(Refusal)?,
            rope_theta: 10_000,
            tied_embeddings: false,
        });
    }
    let is_gated = row.number("gated_ffn").map_or(name.contains("llama"), |value| value != 0.0);
    let model = if is_gated || kv_heads != heads {
        // Without a gate: two matrices of the same weight in all as the three of a gated one two thirds as wide.
        let ffn = if is_gated { ffn } else { (2 * ffn / 3).next_multiple_of(64 * layout.tensor) };
        Model::Llama {
            layers,
            hidden,
            heads,
            kv_heads: Some(kv_heads),
            head_dimension,
            ffn,
            vocab,
            sequence,
            tied_embeddings: false,
            rope_theta: 10_000,
        }
    } else {
        Model::Gpt {
            layers,
            hidden,
            heads,
            ffn: Some(ffn),
            vocab,
            sequence,
            tied_embeddings: true,
            dropout: Default::default(),
            attention_dropout: Default::default(),
        }
    };
    Ok(tied_as_counted(model, row.number("params_b").map(|billions| billions * 1e9)))
}

/// How far a stated count of parameters may be from what is counted so that it tells whether a head of its own is in it.
const SAME_COUNT: f64 = 0.02;

/// The model with its head tied to the embedding or not, as its stated parameters tell: with the other choice the count is right, and with the usual
/// one off by more than rounding. A count that has tables neither way or both tells nothing.
fn tied_as_counted(model: Model, stated: Option<f64>) -> Model {
    let Some(stated) = stated else { return model };
    let mut other = model.clone();
    let (Model::Gpt { tied_embeddings, vocab, hidden, .. } | Model::Llama { tied_embeddings, vocab, hidden, .. }) = &mut other
    else {
        return model;
    };
    let table = *vocab as f64 * *hidden as f64;
    let is_tied = *tied_embeddings;
    *tied_embeddings = !is_tied;
    let Ok(graph) = model.graph("counted", &foretell_models::GraphOptions::ONE) else { return model };
    let usual = graph.parameter_count() as f64;
    let counted = if is_tied { usual + table } else { usual - table };
    let is_off = |count: f64| (stated / count - 1.0).abs() > SAME_COUNT;
    if is_off(usual) && !is_off(counted) { other } else { model }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Llama's 1.34 B with its head tied to a vocabulary of 131,072, 1.61 B without.
    fn llama() -> Model {
        Model::Llama {
            layers: 16,
            hidden: 2048,
            heads: 32,
            kv_heads: Some(32),
            head_dimension: None,
            ffn: 8192,
            vocab: 131_072,
            sequence: 64,
            tied_embeddings: false,
            rope_theta: 10_000,
        }
    }

    #[test]
    fn the_stated_parameters_tell_whether_the_head_is_tied() {
        let is_tied = |stated| matches!(tied_as_counted(llama(), stated), Model::Llama { tied_embeddings: true, .. });
        assert!(is_tied(Some(1.34e9)));
        assert!(!is_tied(Some(1.61e9)) && !is_tied(None));
        // A count that is right neither way is of a model that is counted otherwise.
        assert!(!is_tied(Some(1.2e9)) && !is_tied(Some(1.45e9)));
    }

    #[test]
    fn a_table_that_counts_for_nothing_tells_nothing() {
        let large = Model::Gpt {
            layers: 96,
            hidden: 12288,
            heads: 96,
            ffn: None,
            vocab: 51200,
            sequence: 2048,
            tied_embeddings: true,
            dropout: Default::default(),
            attention_dropout: Default::default(),
        };
        assert_eq!(tied_as_counted(large.clone(), Some(175e9)), large);
    }
}
