//! The model of a row's run: the sizes that the row states, and the architecture that the model's
//! name tells where the table has no column for it.

use crate::names::has_word;
use crate::refusal::Refusal;
use crate::row::Row;
use foretell_models::{Bert, Gpt, GraphOptions, Llama, Model, Moe};
use foretell_program::Layout;
use foretell_simulator::gpu::{StackProfile, without_padding};
use foretell_units::diagnostic::{Mistake, one_line};

/// Sizes of an architecture that the table has no columns for. `None` means the family's default.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Architecture {
    /// Features of an attention head.
    head_dimension: Option<usize>,
    /// Rank of the query projection of latent attention.
    query_rank: Option<usize>,
    /// Rank of the key and value projection of latent attention.
    key_value_rank: Option<usize>,
    /// Inner width of the experts that every token passes.
    shared_ffn: Option<usize>,
    /// Number of first layers without experts.
    dense_layers: usize,
}

/// Architectures by a word of the model's name, from the published configurations. The first match
/// is used. DeepSeek's heads have 192 features for queries and keys and 128 for values. The mean,
/// 160, has the same FLOPs.
const ARCHITECTURES: [(&str, Architecture); 13] = {
    const PLAIN: Architecture =
        Architecture { head_dimension: None, query_rank: None, key_value_rank: None, shared_ffn: None, dense_layers: 0 };
    const LATENT: Architecture =
        Architecture { head_dimension: Some(160), query_rank: Some(1536), key_value_rank: Some(512), dense_layers: 1, ..PLAIN };
    const HEADS_OF_256: Architecture = Architecture { head_dimension: Some(256), ..PLAIN };
    const HEADS_OF_128: Architecture = Architecture { head_dimension: Some(128), ..PLAIN };
    [
        ("deepseek-v3", Architecture { shared_ffn: Some(2048), dense_layers: 3, ..LATENT }),
        ("deepseek-r1", Architecture { shared_ffn: Some(2048), dense_layers: 3, ..LATENT }),
        ("deepseek-v2-lite", Architecture { shared_ffn: Some(2816), query_rank: None, ..LATENT }),
        ("deepseek-v2", Architecture { shared_ffn: Some(3072), ..LATENT }),
        ("kimi", Architecture { shared_ffn: Some(2048), ..LATENT }),
        ("llama-4", Architecture { shared_ffn: Some(8192), ..PLAIN }),
        ("llama4", Architecture { shared_ffn: Some(8192), ..PLAIN }),
        ("qwen3", HEADS_OF_128),
        ("mistral-nemo", HEADS_OF_128),
        ("gpt-oss", Architecture { head_dimension: Some(64), ..PLAIN }),
        ("gemma-2-27b", HEADS_OF_128),
        ("gemma3-27b", HEADS_OF_128),
        ("gemma", HEADS_OF_256),
    ]
};

/// Image models of the library, by a word of a row's model. The first match is used.
const IMAGE_MODELS: [(&str, &str); 11] = [
    ("resnet-18", "resnet18"),
    ("resnet-34", "resnet34"),
    ("resnet-50", "resnet50"),
    ("resnet50", "resnet50"),
    ("resnet-101", "resnet101"),
    ("resnet-152", "resnet152"),
    ("vgg-16 (batch norm)", "vgg16_bn"),
    ("vgg-16", "vgg16"),
    ("vit-b/16", "vit_b_16"),
    ("vit-b/32", "vit_b_32"),
    ("vit-l/16", "vit_l_16"),
];

/// Words in the names of models that none of our families covers.
const UNSUPPORTED: [&str; 9] =
    ["transformer-xl", "gnmt", "t5", "transformer-big", "dlrm", "nemotron-h", "mamba", "stable", "unet"];

/// Sizes of a transformer, as stated or assumed.
struct Sizes {
    layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dimension: Option<usize>,
    ffn: usize,
    /// Size of the vocabulary, padded as the stack pads it.
    vocab: usize,
    sequence: usize,
    architecture: Architecture,
}

/// Returns the model of a row's run. Adds a sentence to `assumptions` for each size that is
/// assumed.
///
/// # Errors
/// [`Refusal`] if the row does not state a required size, or no family covers the model.
pub(crate) fn model(row: &Row, stack: &StackProfile, layout: &Layout, assumptions: &mut Vec<String>) -> Result<Model, Refusal> {
    let name = row.model.to_lowercase();
    if let Some((_, library)) = IMAGE_MODELS.into_iter().find(|(word, _)| has_word(&name, word)) {
        return Model::named(library).map_err(|error| Refusal(error.to_string()));
    }
    if UNSUPPORTED.iter().any(|word| has_word(&name, word)) {
        return Err(Refusal(format!("no model family covers `{}`", row.model)));
    }
    let sizes = Sizes::of(row, &name, stack, layout, assumptions)?;
    if has_word(&name, "bert") {
        let model = bert(&sizes);
        return Ok(without_padding(&model, stack.defaults.sequence_share).unwrap_or(model));
    }
    if let Some(routing) = row.count("experts").zip(row.count("topk")) {
        return mixture(row, &name, &sizes, routing, assumptions);
    }
    if let Some(experts) = name.split_once("switch-xl-").and_then(|(_, rest)| rest.split(' ').next()?.parse().ok()) {
        // Hugging Face's eager implementation loops over the experts.
        assumptions.push("every expert is assumed to compute every token".into());
        let ffn = gated_width(sizes.ffn, layout);
        return mixture(row, &name, &Sizes { ffn, ..sizes }, (experts, experts), assumptions);
    }
    let is_gated = row.number("gated_ffn").map_or(has_word(&name, "llama"), |value| value != 0.0);
    let model = if is_gated || sizes.kv_heads != sizes.heads { llama(&sizes, is_gated, layout) } else { gpt(&sizes) };
    Ok(tied_as_counted(model, row.number("params_b").map(|billions| billions * 1e9)))
}

impl Sizes {
    fn of(row: &Row, name: &str, stack: &StackProfile, layout: &Layout, assumptions: &mut Vec<String>) -> Result<Self, Refusal> {
        let required = |column: &'static str| row.count(column).ok_or_else(|| Refusal(format!("`{column}` is not stated")));
        let (layers, hidden) = (required("layers")?, required("hidden")?);
        let heads = row.count("heads").unwrap_or_else(|| {
            assumptions.push("the number of heads is not stated; assumed heads of 128 features".into());
            (hidden / 128).max(1).next_multiple_of(layout.tensor)
        });
        let sequence = required("seq")?;
        let vocabulary = row.count("vocab").unwrap_or_else(|| {
            assumptions.push("the vocabulary is not stated; assumed 51200".into());
            51200
        });
        let padding = row.count("vocabulary_multiple").unwrap_or(stack.defaults.vocabulary_multiple);
        let found = ARCHITECTURES.iter().find(|(word, _)| has_word(name, word));
        let architecture = found.map(|(_, architecture)| *architecture).unwrap_or_default();
        let head_dimension = match row.count("head_dim").or(architecture.head_dimension) {
            Some(features) => Some(features),
            None if hidden.is_multiple_of(heads) => None,
            None => {
                assumptions.push("the width of a head is not stated; assumed hidden over heads, rounded up".into());
                Some((hidden / heads).max(1).next_multiple_of(8))
            }
        };
        Ok(Self {
            layers,
            hidden,
            heads,
            // If there are more tensor-parallel ranks than key heads, the ranks have copies of
            // them.
            kv_heads: row.count("kv_heads").unwrap_or(heads).max(layout.tensor).min(heads),
            head_dimension,
            ffn: row.count("ffn").unwrap_or(4 * hidden),
            vocab: vocabulary.next_multiple_of(padding * layout.tensor),
            sequence,
            architecture,
        })
    }
}

fn bert(sizes: &Sizes) -> Model {
    Model::Bert(Bert {
        layers: sizes.layers,
        hidden: sizes.hidden,
        heads: sizes.heads,
        ffn: Some(sizes.ffn),
        vocab: sizes.vocab,
        sequence: sizes.sequence,
        position_rows: None,
        first_position: 0,
        token_types: 2,
        dropout: Default::default(),
        attention_dropout: Default::default(),
        keeps_attention_output: false,
    })
}

fn mixture(
    row: &Row,
    name: &str,
    sizes: &Sizes,
    (experts, top_k): (usize, usize),
    assumptions: &mut Vec<String>,
) -> Result<Model, Refusal> {
    let Architecture { query_rank, key_value_rank, shared_ffn, dense_layers, .. } = sizes.architecture;
    if key_value_rank.is_some() {
        assumptions.push("latent attention is simulated with heads of equal widths".into());
    }
    Ok(Model::Moe(Moe {
        layers: sizes.layers,
        hidden: sizes.hidden,
        heads: sizes.heads,
        kv_heads: Some(sizes.kv_heads),
        head_dimension: sizes.head_dimension,
        query_rank,
        key_value_rank,
        dense_ffn: row.count("ffn"),
        shared_ffn: row.count("shared_expert_ffn").or(shared_ffn),
        dense_layers: dense_layers.min(sizes.layers - 1),
        ffn: row.count("moe_ffn").unwrap_or(sizes.ffn),
        vocab: sizes.vocab,
        sequence: sizes.sequence,
        experts,
        top_k,
        // Llama 4 Maverick has experts in every other layer.
        moe_every: if has_word(name, "maverick") { 2 } else { 1 },
        capacity_factor: 1.0f64.try_into().map_err(|mistake: Mistake| Refusal(one_line(&mistake)))?,
        rope_theta: 10_000,
        tied_embeddings: false,
    }))
}

fn llama(sizes: &Sizes, is_gated: bool, layout: &Layout) -> Model {
    Model::Llama(Llama {
        layers: sizes.layers,
        hidden: sizes.hidden,
        heads: sizes.heads,
        kv_heads: Some(sizes.kv_heads),
        head_dimension: sizes.head_dimension,
        ffn: if is_gated { sizes.ffn } else { gated_width(sizes.ffn, layout) },
        vocab: sizes.vocab,
        sequence: sizes.sequence,
        tied_embeddings: false,
        rope_theta: 10_000,
    })
}

fn gpt(sizes: &Sizes) -> Model {
    Model::Gpt(Gpt {
        layers: sizes.layers,
        hidden: sizes.hidden,
        heads: sizes.heads,
        ffn: Some(sizes.ffn),
        vocab: sizes.vocab,
        sequence: sizes.sequence,
        tied_embeddings: true,
        dropout: Default::default(),
        attention_dropout: Default::default(),
    })
}

/// Returns the width at which a gated feed-forward network (three matrices) has as many weights as
/// an ungated one (two matrices) of width `ffn`.
fn gated_width(ffn: usize, layout: &Layout) -> usize {
    (2 * ffn / 3).next_multiple_of(64 * layout.tensor)
}

/// Largest relative difference at which a stated parameter count still agrees with a counted one.
const COUNT_TOLERANCE: f64 = 0.02;

/// Returns the model with the head tied to the embedding or untied, as the stated parameter count
/// implies. The usual choice stays unless its count is wrong and the other choice's count is right.
fn tied_as_counted(model: Model, stated: Option<f64>) -> Model {
    let Some(stated) = stated else { return model };
    let mut other = model.clone();
    let (Model::Gpt(Gpt { tied_embeddings, vocab, hidden, .. }) | Model::Llama(Llama { tied_embeddings, vocab, hidden, .. })) =
        &mut other
    else {
        return model;
    };
    let table = *vocab as f64 * *hidden as f64;
    let is_tied = *tied_embeddings;
    *tied_embeddings = !is_tied;
    let Ok(graph) = model.graph("counted", &GraphOptions::ONE) else { return model };
    let usual = graph.parameter_count() as f64;
    let counted = if is_tied { usual + table } else { usual - table };
    let is_off = |count: f64| (stated / count - 1.0).abs() > COUNT_TOLERANCE;
    if is_off(usual) && !is_off(counted) { other } else { model }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1.34 billion parameters with the head tied to a vocabulary of 131,072, 1.61 billion without.
    fn llama_1b() -> Model {
        Model::Llama(Llama {
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
        })
    }

    #[test]
    fn the_stated_parameter_count_decides_whether_the_head_is_tied() {
        let is_tied = |stated| matches!(tied_as_counted(llama_1b(), stated), Model::Llama(Llama { tied_embeddings: true, .. }));
        assert!(is_tied(Some(1.34e9)));
        assert!(!is_tied(Some(1.61e9)) && !is_tied(None));
        // A count that matches neither choice says nothing.
        assert!(!is_tied(Some(1.2e9)) && !is_tied(Some(1.45e9)));
    }

    #[test]
    fn a_head_smaller_than_the_tolerance_leaves_the_usual_choice() {
        let large = Model::Gpt(Gpt {
            layers: 96,
            hidden: 12288,
            heads: 96,
            ffn: None,
            vocab: 51200,
            sequence: 2048,
            tied_embeddings: true,
            dropout: Default::default(),
            attention_dropout: Default::default(),
        });
        assert_eq!(tied_as_counted(large.clone(), Some(175e9)), large);
    }
}
