//! T5 (Raffel et al. 2020) with Hugging Face's names, in its first form (ReLU) and in that of T5
//! v1.1 and FLAN-T5 (gated GELU). Dropout is applied to the embeddings, to what each layer adds to
//! the residual streams, and to attention's probabilities. It is not applied within the
//! feed-forward network or after the last norms.

use super::{Check, Family};
use crate::attention::RelativePositions;
use crate::builder::{AttentionKind, GraphBuilder, GraphOptions, dimension};
use crate::dropout::DropoutRate;
use crate::error::ModelError;
use crate::graph::{BATCH, Graph, Initialisation, InputKind, TensorId};
use crate::kernel::{Epsilon, WeightLayout};
use crate::optimizer::Optimizer;
use crate::sample::SampleShape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A T5 in any size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct T5 {
    /// Layers of the encoder, and of the decoder.
    pub layers: usize,
    /// Features of a position.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Features of a head. `None`: `hidden / heads`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dimension: Option<usize>,
    /// Inner width of the feed-forward network.
    pub ffn: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Positions of the source.
    pub source_sequence: usize,
    /// Positions of the target.
    pub target_sequence: usize,
    /// Buckets of distances between positions.
    #[serde(default = "relative_buckets")]
    pub relative_buckets: usize,
    /// Distances from this on share the last bucket.
    #[serde(default = "relative_max_distance")]
    pub relative_max_distance: usize,
    /// Whether the feed-forward network is a gated GELU instead of a ReLU.
    #[serde(default)]
    pub gated: bool,
    /// Whether the head shares the embedding's weights.
    #[serde(default = "tied_embeddings")]
    pub tied_embeddings: bool,
    /// Dropout rate of the embeddings and of what each layer adds to the residual streams.
    #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
    pub dropout: DropoutRate,
    /// Dropout rate of attention's probabilities.
    #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
    pub attention_dropout: DropoutRate,
}

fn relative_buckets() -> usize {
    32
}

fn relative_max_distance() -> usize {
    128
}

fn tied_embeddings() -> bool {
    true
}

/// Epsilon of the norms.
const EPSILON: Epsilon = Epsilon::new(6);

impl Family for T5 {
    const NAME: &'static str = "t5";
    const OPTIMIZER: Optimizer = Optimizer::AdamW;

    fn zoo() -> Vec<(&'static str, Self)> {
        let t5 = |layers, hidden, heads, ffn| Self {
            layers,
            hidden,
            heads,
            head_dimension: Some(64),
            ffn,
            vocab: 32128,
            source_sequence: 512,
            target_sequence: 128,
            relative_buckets: 32,
            relative_max_distance: 128,
            gated: false,
            tied_embeddings: true,
            dropout: DropoutRate::NONE,
            attention_dropout: DropoutRate::NONE,
        };
        vec![
            ("t5-small", t5(6, 512, 8, 2048)),
            ("t5-base", t5(12, 768, 12, 3072)),
            ("flan-t5-small", Self { gated: true, tied_embeddings: false, ..t5(8, 512, 6, 1024) }),
        ]
    }

    fn examples() -> Vec<(&'static str, Self)> {
        let small = Self {
            layers: 1,
            hidden: 256,
            heads: 4,
            head_dimension: None,
            ffn: 512,
            vocab: 1024,
            source_sequence: 64,
            target_sequence: 64,
            relative_buckets: 32,
            relative_max_distance: 128,
            gated: true,
            tied_embeddings: true,
            dropout: DropoutRate::NONE,
            attention_dropout: DropoutRate::NONE,
        };
        vec![("small-t5", small)]
    }

    fn validate(&self, check: &Check<'_>) -> Result<(), ModelError> {
        let Self { layers, hidden, heads, head_dimension, relative_buckets, relative_max_distance, .. } = *self;
        check.sizes(&[
            ("layers", layers),
            ("hidden", hidden),
            ("heads", heads),
            ("head_dimension", head_dimension.unwrap_or(1)),
            ("ffn", self.ffn),
            ("vocab", self.vocab),
            ("source_sequence", self.source_sequence),
            ("target_sequence", self.target_sequence),
            ("relative_max_distance", relative_max_distance),
        ])?;
        check.layers_of_each(layers)?;
        if head_dimension.is_none() && !hidden.is_multiple_of(heads) {
            let reason = format!("hidden {hidden} is not a multiple of heads {heads}");
            return check.refuse(reason, "choose heads that divide hidden, or give `head_dimension`");
        }
        if relative_buckets < 4 || relative_max_distance <= relative_buckets {
            let reason = format!("{relative_buckets} buckets for distances up to {relative_max_distance}");
            return check.refuse(reason, "`relative_buckets` is at least 4, and `relative_max_distance` is larger");
        }
        Ok(())
    }

    fn sample(&self) -> SampleShape {
        let Self { vocab, source_sequence, target_sequence, .. } = *self;
        SampleShape::Pair { source: source_sequence, target: target_sequence, source_vocabulary: vocab, target_vocabulary: vocab }
    }

    fn is_transformer(&self) -> bool {
        true
    }

    fn graph(&self, name: &str, options: &GraphOptions) -> Graph {
        let sequences = [self.source_sequence, self.target_sequence];
        let mut layers = Layers { builder: GraphBuilder::new(name, options), sizes: self };
        let positions = sequences.map(|sequence| vec![dimension(BATCH, options.batch), dimension("sequence", sequence)]);
        layers.builder.block("encoder embedding", false);
        let source = layers.builder.input(InputKind::SourceTokens, positions[0].clone());
        let table = layers.table("shared.weight");
        let x = layers.builder.embedding("encoder.embed_tokens", source, table);
        let mut x = layers.builder.dropout("encoder.dropout", x, self.dropout);
        let relative = layers.relative("encoder", true);
        for layer in 0..self.layers {
            layers.builder.block(format!("encoder layer {layer}"), true);
            let module = format!("encoder.block.{layer}.layer");
            let kind = AttentionKind {
                causal: false,
                scaled: false,
                window: None,
                relative: Some(relative),
                dropout: self.attention_dropout,
            };
            x = layers.attention(&format!("{module}.0"), "SelfAttention", x, None, kind);
            x = layers.feed_forward(&format!("{module}.1"), x);
        }
        layers.builder.block("decoder embedding", false);
        let memory = layers.builder.rms_norm("encoder.final_layer_norm", x, EPSILON);
        let tokens = layers.builder.input(InputKind::Tokens, positions[1].clone());
        let x = layers.builder.embedding("decoder.embed_tokens", tokens, table);
        let mut x = layers.builder.dropout("decoder.dropout", x, self.dropout);
        let relative = layers.relative("decoder", false);
        for layer in 0..self.layers {
            layers.builder.block(format!("decoder layer {layer}"), true);
            let module = format!("decoder.block.{layer}.layer");
            let kind = AttentionKind {
                causal: true,
                scaled: false,
                window: None,
                relative: Some(relative),
                dropout: self.attention_dropout,
            };
            x = layers.attention(&format!("{module}.0"), "SelfAttention", x, None, kind);
            let kind = AttentionKind { causal: false, relative: None, ..kind };
            x = layers.attention(&format!("{module}.1"), "EncDecAttention", x, Some(memory), kind);
            x = layers.feed_forward(&format!("{module}.2"), x);
        }
        layers.builder.block("head", false);
        let normed = layers.builder.rms_norm("decoder.final_layer_norm", x, EPSILON);
        // A tied table has an initial deviation of 1. The weight of a head has 1/√hidden.
        let (normed, head) = match self.tied_embeddings {
            true => (layers.builder.scale("lm_head.scale", normed, self.hidden), table),
            false => (normed, layers.table("lm_head.weight")),
        };
        let logits = layers.builder.matmul("lm_head", normed, head, 1, WeightLayout::OutIn);
        let labels = layers.builder.input(InputKind::Labels, positions[1].clone());
        layers.builder.cross_entropy("loss", logits, labels);
        layers.builder.finish(sequences[1], Some(sequences.iter().sum()))
    }
}

/// A T5 under construction.
struct Layers<'a> {
    builder: GraphBuilder,
    sizes: &'a T5,
}

/// Normal with a standard deviation of `1/√inputs`.
fn normal(inputs: usize) -> Initialisation {
    Initialisation::Normal(1.0 / (inputs as f64).sqrt())
}

impl Layers<'_> {
    fn table(&mut self, name: &str) -> TensorId {
        let (vocabulary, hidden) = (self.sizes.vocab, self.sizes.hidden);
        let dimensions = vec![dimension("vocabulary", vocabulary), dimension("hidden", hidden)];
        self.builder.parameter(name.into(), dimensions, vec![vocabulary, hidden], Initialisation::Normal(1.0))
    }

    /// Adds the table of relative positions that all layers of a stack share.
    fn relative(&mut self, stack: &str, bidirectional: bool) -> (RelativePositions, TensorId) {
        let T5 { heads, hidden, relative_buckets: buckets, relative_max_distance: max_distance, .. } = *self.sizes;
        let name = format!("{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight");
        let dimensions = vec![dimension("buckets", buckets), dimension("heads", heads)];
        let table = self.builder.parameter(name, dimensions, vec![buckets, heads], normal(hidden));
        (RelativePositions { buckets, max_distance, bidirectional }, table)
    }

    /// Adds attention of x over itself or over `memory`, with its norm and its residual.
    fn attention(&mut self, module: &str, part: &str, x: TensorId, memory: Option<TensorId>, kind: AttentionKind) -> TensorId {
        let T5 { hidden, heads, .. } = *self.sizes;
        let head_dimension = self.sizes.head_dimension.unwrap_or(hidden / heads);
        let name = |matrix: &str| format!("{module}.{part}.{matrix}");
        let outputs = [dimension("heads", heads), dimension("head_dimension", head_dimension)];
        let y = self.builder.rms_norm(&format!("{module}.layer_norm"), x, EPSILON);
        let attended = memory.unwrap_or(y);
        let q = self.builder.linear(&name("q"), y, 1, &outputs, normal(hidden * head_dimension), None);
        let k = self.builder.linear(&name("k"), attended, 1, &outputs, normal(hidden), None);
        let v = self.builder.linear(&name("v"), attended, 1, &outputs, normal(hidden), None);
        let y = self.builder.attention(&format!("{module}.{part}"), [q, k, v], kind);
        let features = [dimension("hidden", hidden)];
        let y = self.builder.linear(&name("o"), y, 2, &features, normal(heads * head_dimension), None);
        let y = self.builder.dropout(&format!("{module}.dropout"), y, self.sizes.dropout);
        self.builder.add(&format!("{module}.residual"), x, y)
    }

    fn feed_forward(&mut self, module: &str, x: TensorId) -> TensorId {
        let T5 { hidden, ffn, gated, .. } = *self.sizes;
        let name = |matrix: &str| format!("{module}.DenseReluDense.{matrix}");
        let inner = [dimension("ffn", ffn)];
        let y = self.builder.rms_norm(&format!("{module}.layer_norm"), x, EPSILON);
        let y = if gated {
            let gate = self.builder.linear(&name("wi_0"), y, 1, &inner, normal(hidden), None);
            let up = self.builder.linear(&name("wi_1"), y, 1, &inner, normal(hidden), None);
            let gate = self.builder.gelu(&name("act"), gate);
            self.builder.multiply(&name("gated"), gate, up)
        } else {
            let y = self.builder.linear(&name("wi"), y, 1, &inner, normal(hidden), None);
            self.builder.relu(&name("act"), y)
        };
        let y = self.builder.linear(&name("wo"), y, 1, &[dimension("hidden", hidden)], normal(ffn), None);
        let y = self.builder.dropout(&format!("{module}.dropout"), y, self.sizes.dropout);
        self.builder.add(&format!("{module}.residual"), x, y)
    }
}
