//! BERT for masked language modelling (Devlin et al. 2019), named as Hugging Face's `BertForMaskedLM`. Without the prediction of the next
//! sentence. Dropout is of the embedding and of what goes into the residual stream, and of attention's probabilities.

use crate::DropoutRate;
use crate::builder::{AttentionKind, GraphBuilder, dimension};
use crate::graph::{BATCH, Graph, Initialisation, InputKind, TensorId};
use crate::kernel::{Epsilon, WeightLayout};
use crate::specification::{GraphOptions, masked_predictions};

/// A BERT's sizes.
pub(crate) struct BertShape {
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) ffn: usize,
    pub(crate) vocabulary: usize,
    pub(crate) sequence: usize,
    pub(crate) dropout: DropoutRate,
    pub(crate) attention_dropout: DropoutRate,
}

const EPSILON: Epsilon = Epsilon::new(12);

const WEIGHTS: Initialisation = Initialisation::Normal(0.02);

const BIASES: Option<Initialisation> = Some(Initialisation::Zeros);

/// Kinds of texts in a sample: a first and a second.
const TOKEN_TYPES: usize = 2;

pub(crate) fn bert(name: &str, shape: &BertShape, options: &GraphOptions) -> Graph {
    let mut builder = GraphBuilder::new(name, options);
    let hidden = dimension("hidden", shape.hidden);
    let vocabulary = dimension("vocabulary", shape.vocabulary);
    let sequence = dimension("sequence", shape.sequence);
    let positions = vec![dimension(BATCH, options.batch), sequence];
    builder.block("embedding", false);
    let table = |name: &str, rows, builder: &mut GraphBuilder| {
        let name = format!("bert.embeddings.{name}.weight");
        builder.parameter(name, vec![rows, hidden], vec![rows.extent, shape.hidden], WEIGHTS)
    };
    let tokens = builder.input(InputKind::Tokens, positions.clone());
    let words_table = table("word_embeddings", vocabulary, &mut builder);
    let words = builder.embedding("bert.embeddings.word_embeddings", tokens, words_table);
    let positions_table = table("position_embeddings", sequence, &mut builder);
    let x = builder.bias_add("bert.embeddings.position_embeddings", words, positions_table);
    let token_types = builder.input(InputKind::TokenTypes, positions.clone());
    let types_table = table("token_type_embeddings", dimension("token_types", TOKEN_TYPES), &mut builder);
    let types = builder.embedding("bert.embeddings.token_type_embeddings", token_types, types_table);
    let x = builder.add("bert.embeddings.sum", x, types);
    let x = builder.layer_norm("bert.embeddings.LayerNorm", x, EPSILON);
    let mut x = builder.dropout("bert.embeddings.dropout", x, shape.dropout);
    for index in 0..shape.layers {
        builder.block(format!("layer {index}"), true);
        x = layer(&mut builder, &format!("bert.encoder.layer.{index}"), shape, x);
    }
    builder.block("head", false);
    let x = builder.linear("cls.predictions.transform.dense", x, 1, &[hidden], WEIGHTS, BIASES);
    let x = builder.gelu_exact("cls.predictions.transform.act", x);
    let x = builder.layer_norm("cls.predictions.transform.LayerNorm", x, EPSILON);
    // The decoder shares the words' embeddings.
    let logits = builder.matmul("cls.predictions.decoder", x, words_table, 1, WeightLayout::OutIn);
    let bias = builder.parameter("cls.predictions.bias".into(), vec![vocabulary], vec![shape.vocabulary], Initialisation::Zeros);
    let logits = builder.bias_add("cls.predictions", logits, bias);
    let labels = builder.input(InputKind::Labels, positions);
    builder.cross_entropy("loss", logits, labels);
    builder.finish(masked_predictions(shape.sequence), Some(shape.sequence))
}

fn layer(builder: &mut GraphBuilder, module: &str, shape: &BertShape, x: TensorId) -> TensorId {
    let name = |part: &str| format!("{module}.{part}");
    let hidden = [dimension("hidden", shape.hidden)];
    let heads = [dimension("heads", shape.heads), dimension("head_dimension", shape.hidden / shape.heads)];
    let projections = ["query", "key", "value"]
        .map(|part| builder.linear(&name(&format!("attention.self.{part}")), x, 1, &heads, WEIGHTS, BIASES));
    let kind = AttentionKind { causal: false, scaled: true, relative: None, dropout: shape.attention_dropout };
    let y = builder.attention(&name("attention.self"), projections, kind);
    let y = builder.linear(&name("attention.output.dense"), y, 2, &hidden, WEIGHTS, BIASES);
    let y = builder.dropout(&name("attention.output.dropout"), y, shape.dropout);
    let x = builder.add(&name("attention.residual"), x, y);
    let x = builder.layer_norm(&name("attention.output.LayerNorm"), x, EPSILON);

    let y = builder.linear(&name("intermediate.dense"), x, 1, &[dimension("ffn", shape.ffn)], WEIGHTS, BIASES);
    let y = builder.gelu_exact(&name("intermediate.act"), y);
    let y = builder.linear(&name("output.dense"), y, 1, &hidden, WEIGHTS, BIASES);
    let y = builder.dropout(&name("output.dropout"), y, shape.dropout);
    let x = builder.add(&name("residual"), x, y);
    builder.layer_norm(&name("output.LayerNorm"), x, EPSILON)
}
