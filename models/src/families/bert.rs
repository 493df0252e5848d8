//! BERT for masked language modelling (Devlin et al. 2019) with the names of Hugging Face's
//! `BertForMaskedLM`, without next-sentence prediction. Dropout is applied to the embedding, to
//! what each layer adds to the residual stream, and to attention's probabilities.

use super::{Check, Family};
use crate::builder::{AttentionKind, GraphBuilder, GraphOptions, dimension};
use crate::defaults::{is_false, is_zero};
use crate::dropout::DropoutRate;
use crate::error::ModelError;
use crate::graph::{BATCH, Graph, Initialisation, InputKind, TensorId};
use crate::kernel::{Epsilon, WeightLayout};
use crate::optimizer::Optimizer;
use crate::sample::SampleShape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A BERT, trained to find masked words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Bert {
    /// Transformer layers.
    pub layers: usize,
    /// Features of a position.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Inner width of the feed-forward network. `None`: four times `hidden`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ffn: Option<usize>,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Positions of a sample.
    pub sequence: usize,
    /// Rows of the table of positions. `None`: `sequence`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position_rows: Option<usize>,
    /// Row of the first position in the table: 2 in RoBERTa.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub first_position: usize,
    /// Number of token types: the most texts of a sample. 0: there is no table of them, as in
    /// DistilBERT.
    #[serde(default = "token_types", skip_serializing_if = "is_two")]
    pub token_types: usize,
    /// Dropout rate of the embedding and of what each layer adds to the residual stream.
    #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
    pub dropout: DropoutRate,
    /// Dropout rate of attention's probabilities.
    #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
    pub attention_dropout: DropoutRate,
    /// Whether what attention adds to the residual stream is not dropped, as in DistilBERT.
    #[serde(default, skip_serializing_if = "is_false")]
    pub keeps_attention_output: bool,
}

const EPSILON: Epsilon = Epsilon::new(12);

const WEIGHTS: Initialisation = Initialisation::Normal(0.02);

const BIASES: Option<Initialisation> = Some(Initialisation::Zeros);

/// BERT is trained with pairs of texts.
fn token_types() -> usize {
    2
}

fn is_two(value: &usize) -> bool {
    *value == token_types()
}

/// Masked tokens of a sample: 15 %, rounded, and at least one.
fn masked_predictions(sequence: usize) -> usize {
    ((15 * sequence + 50) / 100).max(1)
}

impl Family for Bert {
    const NAME: &'static str = "bert";
    const OPTIMIZER: Optimizer = Optimizer::AdamW;

    fn zoo() -> Vec<(&'static str, Self)> {
        let bert = |layers, hidden, heads| Self {
            layers,
            hidden,
            heads,
            ffn: None,
            vocab: 30522,
            sequence: 512,
            position_rows: None,
            first_position: 0,
            token_types: 2,
            dropout: DropoutRate::NONE,
            attention_dropout: DropoutRate::NONE,
            keeps_attention_output: false,
        };
        vec![("bert-base-uncased", bert(12, 768, 12)), ("bert-large-uncased", bert(24, 1024, 16))]
    }

    fn examples() -> Vec<(&'static str, Self)> {
        let small = Self {
            layers: 1,
            hidden: 256,
            heads: 4,
            ffn: None,
            vocab: 1024,
            sequence: 128,
            position_rows: None,
            first_position: 0,
            token_types: 2,
            dropout: DropoutRate::NONE,
            attention_dropout: DropoutRate::NONE,
            keeps_attention_output: false,
        };
        vec![("small-bert", small)]
    }

    fn validate(&self, check: &Check<'_>) -> Result<(), ModelError> {
        let Self { layers, hidden, heads, ffn, vocab, sequence, .. } = *self;
        let rows = self.position_rows.unwrap_or(sequence.saturating_add(self.first_position));
        check.sizes(&[
            ("vocab", vocab),
            ("sequence", sequence),
            ("position_rows", rows),
            ("token_types", self.token_types.max(1)),
        ])?;
        if rows < sequence.saturating_add(self.first_position) {
            let reason = format!("a table of {rows} positions, and a sequence of {sequence} from {}", self.first_position);
            return check.refuse(reason, "use a shorter `sequence`, or more `position_rows`");
        }
        check.transformer([layers, hidden, heads, ffn.unwrap_or(1)])
    }

    fn sample(&self) -> SampleShape {
        let Self { sequence, vocab, .. } = *self;
        SampleShape::MaskedTokens { sequence, vocabulary: vocab, predictions: masked_predictions(sequence) }
    }

    fn is_transformer(&self) -> bool {
        true
    }

    fn repeated_layers(&self) -> Option<usize> {
        Some(self.layers)
    }

    fn layers_mut(&mut self) -> Option<&mut usize> {
        Some(&mut self.layers)
    }

    fn graph(&self, name: &str, options: &GraphOptions) -> Graph {
        let mut builder = GraphBuilder::new(name, options);
        let hidden = dimension("hidden", self.hidden);
        let vocabulary = dimension("vocabulary", self.vocab);
        let sequence = dimension("sequence", self.sequence);
        let positions = vec![dimension(BATCH, options.batch), sequence];
        builder.block("embedding", false);
        let table = |name: &str, rows, builder: &mut GraphBuilder| {
            let name = format!("bert.embeddings.{name}.weight");
            builder.parameter(name, vec![rows, hidden], vec![rows.extent, self.hidden], WEIGHTS)
        };
        let tokens = builder.input(InputKind::Tokens, positions.clone());
        let words_table = table("word_embeddings", vocabulary, &mut builder);
        let words = builder.embedding("bert.embeddings.word_embeddings", tokens, words_table);
        let rows = self.position_rows.unwrap_or(self.sequence + self.first_position);
        let module = "bert.embeddings.position_embeddings";
        let x = if rows == self.sequence {
            let positions_table = table("position_embeddings", sequence, &mut builder);
            builder.bias_add(module, words, positions_table)
        } else {
            // The table has rows for no position of the sample, so positions look up their rows.
            let positions_table = table("position_embeddings", dimension("positions", rows), &mut builder);
            let places = builder.input(InputKind::Positions { first: self.first_position }, positions.clone());
            let places = builder.embedding(module, places, positions_table);
            builder.add(&format!("{module}.sum"), words, places)
        };
        let x = if self.token_types > 0 {
            let token_types = builder.input(InputKind::TokenTypes, positions.clone());
            let types_table = table("token_type_embeddings", dimension("token_types", self.token_types), &mut builder);
            let types = builder.embedding("bert.embeddings.token_type_embeddings", token_types, types_table);
            builder.add("bert.embeddings.sum", x, types)
        } else {
            x
        };
        let x = builder.layer_norm("bert.embeddings.LayerNorm", x, EPSILON);
        let mut x = builder.dropout("bert.embeddings.dropout", x, self.dropout);
        for index in 0..self.layers {
            builder.block(format!("layer {index}"), true);
            x = layer(&mut builder, &format!("bert.encoder.layer.{index}"), self, x);
        }
        builder.block("head", false);
        let x = builder.linear("cls.predictions.transform.dense", x, 1, &[hidden], WEIGHTS, BIASES);
        let x = builder.gelu_exact("cls.predictions.transform.act", x);
        let x = builder.layer_norm("cls.predictions.transform.LayerNorm", x, EPSILON);
        // The decoder shares the words' embeddings.
        let logits = builder.matmul("cls.predictions.decoder", x, words_table, 1, WeightLayout::OutIn);
        let bias = builder.parameter("cls.predictions.bias".into(), vec![vocabulary], vec![self.vocab], Initialisation::Zeros);
        let logits = builder.bias_add("cls.predictions", logits, bias);
        let labels = builder.input(InputKind::Labels, positions);
        builder.cross_entropy("loss", logits, labels);
        builder.finish(masked_predictions(self.sequence), Some(self.sequence))
    }
}

fn layer(builder: &mut GraphBuilder, module: &str, sizes: &Bert, x: TensorId) -> TensorId {
    let name = |part: &str| format!("{module}.{part}");
    let hidden = [dimension("hidden", sizes.hidden)];
    let heads = [dimension("heads", sizes.heads), dimension("head_dimension", sizes.hidden / sizes.heads)];
    let projections = ["query", "key", "value"]
        .map(|part| builder.linear(&name(&format!("attention.self.{part}")), x, 1, &heads, WEIGHTS, BIASES));
    let kind = AttentionKind { causal: false, scaled: true, window: None, relative: None, dropout: sizes.attention_dropout };
    let y = builder.attention(&name("attention.self"), projections, kind);
    let y = builder.linear(&name("attention.output.dense"), y, 2, &hidden, WEIGHTS, BIASES);
    let dropout = if sizes.keeps_attention_output { DropoutRate::NONE } else { sizes.dropout };
    let y = builder.dropout(&name("attention.output.dropout"), y, dropout);
    let x = builder.add(&name("attention.residual"), x, y);
    let x = builder.layer_norm(&name("attention.output.LayerNorm"), x, EPSILON);

    let y = builder.linear(
        &name("intermediate.dense"),
        x,
        1,
        &[dimension("ffn", sizes.ffn.unwrap_or(4 * sizes.hidden))],
        WEIGHTS,
        BIASES,
    );
    let y = builder.gelu_exact(&name("intermediate.act"), y);
    let y = builder.linear(&name("output.dense"), y, 1, &hidden, WEIGHTS, BIASES);
    let y = builder.dropout(&name("output.dropout"), y, sizes.dropout);
    let x = builder.add(&name("residual"), x, y);
    builder.layer_norm(&name("output.LayerNorm"), x, EPSILON)
}
