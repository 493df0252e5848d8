//! GPT-2's architecture (Radford et al. 2019) with Hugging Face's names. Dropout is applied to the
//! embedding, to what each layer adds to the residual stream, and to attention's probabilities.

use super::{Check, Family};
use crate::builder::{AttentionKind, GraphBuilder, GraphOptions, dimension};
use crate::dropout::DropoutRate;
use crate::error::ModelError;
use crate::graph::{BATCH, Dimension, Graph, Initialisation, InputKind, TensorId};
use crate::kernel::{Epsilon, WeightLayout};
use crate::optimizer::Optimizer;
use crate::sample::SampleShape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A GPT-2 in any size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Gpt {
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
    /// Whether the head shares the embedding's weights.
    #[serde(default = "tied_embeddings")]
    pub tied_embeddings: bool,
    /// Dropout rate of the embedding and of what each layer adds to the residual stream.
    #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
    pub dropout: DropoutRate,
    /// Dropout rate of attention's probabilities.
    #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
    pub attention_dropout: DropoutRate,
}

fn tied_embeddings() -> bool {
    true
}

/// Epsilon of the norms.
const EPSILON: Epsilon = Epsilon::new(5);

/// Initial values of weights.
const WEIGHTS: Initialisation = Initialisation::Normal(0.02);

impl Family for Gpt {
    const NAME: &'static str = "gpt";
    const OPTIMIZER: Optimizer = Optimizer::AdamW;

    fn zoo() -> Vec<(&'static str, Self)> {
        let gpt2 = |layers, hidden, heads| Self {
            layers,
            hidden,
            heads,
            ffn: None,
            vocab: 50257,
            sequence: 1024,
            tied_embeddings: true,
            dropout: DropoutRate::NONE,
            attention_dropout: DropoutRate::NONE,
        };
        vec![
            ("gpt2", gpt2(12, 768, 12)),
            ("gpt2-medium", gpt2(24, 1024, 16)),
            ("gpt2-large", gpt2(36, 1280, 20)),
            ("gpt2-xl", gpt2(48, 1600, 25)),
        ]
    }

    fn examples() -> Vec<(&'static str, Self)> {
        // Attention is timed with dropout and without.
        let small = |attention_dropout| Self {
            layers: 1,
            hidden: 256,
            heads: 4,
            ffn: None,
            vocab: 1024,
            sequence: 128,
            tied_embeddings: true,
            dropout: DropoutRate::TENTH,
            attention_dropout,
        };
        vec![("small-gpt", small(DropoutRate::NONE)), ("small-dropping-gpt", small(DropoutRate::TENTH))]
    }

    fn validate(&self, check: &Check<'_>) -> Result<(), ModelError> {
        let Self { layers, hidden, heads, ffn, vocab, sequence, .. } = *self;
        check.sizes(&[("vocab", vocab), ("sequence", sequence)])?;
        check.transformer([layers, hidden, heads, ffn.unwrap_or(1)])
    }

    fn sample(&self) -> SampleShape {
        SampleShape::Tokens { sequence: self.sequence, vocabulary: self.vocab }
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
        let mut layers = Layers { builder: GraphBuilder::new(name, options), sizes: self };
        let positions = vec![dimension(BATCH, options.batch), dimension("sequence", self.sequence)];
        layers.builder.block("embedding", false);
        let tokens = layers.builder.input(InputKind::Tokens, positions.clone());
        let table = layers.table("transformer.wte.weight");
        let words = layers.builder.embedding("transformer.wte", tokens, table);
        let position_table = layers.builder.parameter(
            "transformer.wpe.weight".into(),
            vec![dimension("sequence", self.sequence), dimension("hidden", self.hidden)],
            vec![self.sequence, self.hidden],
            WEIGHTS,
        );
        let x = layers.builder.bias_add("transformer.wpe", words, position_table);
        let mut x = layers.builder.dropout("transformer.drop", x, self.dropout);
        for layer in 0..self.layers {
            layers.builder.block(format!("layer {layer}"), true);
            x = layers.layer(&format!("transformer.h.{layer}"), x);
        }
        layers.builder.block("head", false);
        let normed = layers.builder.layer_norm("transformer.ln_f", x, EPSILON);
        let head = if self.tied_embeddings { table } else { layers.table("lm_head.weight") };
        let logits = layers.builder.matmul("lm_head", normed, head, 1, WeightLayout::OutIn);
        let labels = layers.builder.input(InputKind::Labels, positions);
        layers.builder.cross_entropy("loss", logits, labels);
        layers.builder.finish(self.sequence, Some(self.sequence))
    }
}

/// A GPT under construction.
struct Layers<'a> {
    builder: GraphBuilder,
    sizes: &'a Gpt,
}

impl Layers<'_> {
    fn table(&mut self, name: &str) -> TensorId {
        let (vocabulary, hidden) = (self.sizes.vocab, self.sizes.hidden);
        let dimensions = vec![dimension("vocabulary", vocabulary), dimension("hidden", hidden)];
        self.builder.parameter(name.into(), dimensions, vec![vocabulary, hidden], WEIGHTS)
    }

    fn layer(&mut self, module: &str, x: TensorId) -> TensorId {
        let Gpt { layers, hidden, heads, .. } = *self.sizes;
        let ffn = self.sizes.ffn.unwrap_or(4 * hidden);
        let name = |part: &str| format!("{module}.{part}");
        let head_dimension = hidden / heads;
        let hidden_dimension = dimension("hidden", hidden);
        let head_dimensions = [dimension("heads", heads), dimension("head_dimension", head_dimension)];
        let projections = [dimension("projections", 3), head_dimensions[0], head_dimensions[1]];
        // GPT-2 scales projections into the residual stream by its depth.
        let residual = Initialisation::Normal(0.02 / (2.0 * layers as f64).sqrt());

        let y = self.builder.layer_norm(&name("ln_1"), x, EPSILON);
        let weight_dimensions = [&[hidden_dimension][..], &projections].concat();
        let y = self.linear(&name("attn.c_attn"), y, weight_dimensions, 1, [hidden, 3 * hidden], WEIGHTS);
        let qkv = self.builder.split(&name("attn.split"), y);
        let kind =
            AttentionKind { causal: true, scaled: true, window: None, relative: None, dropout: self.sizes.attention_dropout };
        let y = self.builder.attention(&name("attn"), qkv, kind);
        let weight_dimensions = vec![head_dimensions[0], head_dimensions[1], hidden_dimension];
        let y = self.linear(&name("attn.c_proj"), y, weight_dimensions, 2, [hidden, hidden], residual);
        let y = self.builder.dropout(&name("attn.resid_dropout"), y, self.sizes.dropout);
        let x = self.builder.add(&name("attn.residual"), x, y);

        let y = self.builder.layer_norm(&name("ln_2"), x, EPSILON);
        let inner = dimension("ffn", ffn);
        let y = self.linear(&name("mlp.c_fc"), y, vec![hidden_dimension, inner], 1, [hidden, ffn], WEIGHTS);
        let y = self.builder.gelu(&name("mlp.act"), y);
        let y = self.linear(&name("mlp.c_proj"), y, vec![inner, hidden_dimension], 1, [ffn, hidden], residual);
        let y = self.builder.dropout(&name("mlp.dropout"), y, self.sizes.dropout);
        self.builder.add(&name("mlp.residual"), x, y)
    }

    /// Adds Hugging Face's `Conv1D`: a product with a weight `[inputs.., outputs..]`, and a bias.
    fn linear(
        &mut self,
        name: &str,
        x: TensorId,
        weight_dimensions: Vec<Dimension>,
        contracted: usize,
        shape: [usize; 2],
        initialisation: Initialisation,
    ) -> TensorId {
        let bias_dimensions = weight_dimensions[contracted..].to_vec();
        let weight = self.builder.parameter(format!("{name}.weight"), weight_dimensions, shape.to_vec(), initialisation);
        let bias = self.builder.parameter(format!("{name}.bias"), bias_dimensions, vec![shape[1]], Initialisation::Zeros);
        let y = self.builder.matmul(name, x, weight, contracted, WeightLayout::InOut);
        self.builder.bias_add(&format!("{name}.bias"), y, bias)
    }
}
