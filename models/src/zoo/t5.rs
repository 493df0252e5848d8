//! T5 (Raffel et al. 2020) with Hugging Face's names, in its first form (ReLU) and in that of T5 v1.1 and FLAN-T5 (gated GELU).
//! Dropout is of the embeddings and of what goes into the residual streams, and of attention's probabilities; not within the feed-forward
//! network, nor after the last norms.

use crate::DropoutRate;
use crate::attention::RelativePositions;
use crate::builder::{AttentionKind, GraphBuilder, dimension};
use crate::graph::{BATCH, Graph, Initialisation, InputKind, TensorId};
use crate::kernel::{Epsilon, WeightLayout};
use crate::specification::GraphOptions;

/// A T5's sizes.
pub(crate) struct T5Shape {
    /// Of the encoder, and of the decoder.
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) head_dimension: usize,
    pub(crate) ffn: usize,
    pub(crate) vocabulary: usize,
    /// Positions read and written.
    pub(crate) sequences: [usize; 2],
    pub(crate) buckets: usize,
    pub(crate) max_distance: usize,
    /// Whether the feed-forward network is a gated GELU instead of a ReLU.
    pub(crate) gated: bool,
    pub(crate) tied_embeddings: bool,
    pub(crate) dropout: DropoutRate,
    pub(crate) attention_dropout: DropoutRate,
}

/// T5's epsilon of its norms.
const EPSILON: Epsilon = Epsilon::new(6);

pub(crate) fn t5(name: &str, shape: &T5Shape, options: &GraphOptions) -> Graph {
    let mut t5 = T5 { builder: GraphBuilder::new(name, options), shape };
    let positions = shape.sequences.map(|sequence| vec![dimension(BATCH, options.batch), dimension("sequence", sequence)]);
    t5.builder.block("encoder embedding", false);
    let source = t5.builder.input(InputKind::SourceTokens, positions[0].clone());
    let table = t5.table("shared.weight");
    let x = t5.builder.embedding("encoder.embed_tokens", source, table);
    let mut x = t5.builder.dropout("encoder.dropout", x, shape.dropout);
    let relative = t5.relative("encoder", true);
    for layer in 0..shape.layers {
        t5.builder.block(format!("encoder layer {layer}"), true);
        let module = format!("encoder.block.{layer}.layer");
        let kind = AttentionKind { causal: false, scaled: false, relative: Some(relative), dropout: shape.attention_dropout };
        x = t5.attention(&format!("{module}.0"), "SelfAttention", x, None, kind);
        x = t5.feed_forward(&format!("{module}.1"), x);
    }
    t5.builder.block("decoder embedding", false);
    let memory = t5.builder.rms_norm("encoder.final_layer_norm", x, EPSILON);
    let tokens = t5.builder.input(InputKind::Tokens, positions[1].clone());
    let x = t5.builder.embedding("decoder.embed_tokens", tokens, table);
    let mut x = t5.builder.dropout("decoder.dropout", x, shape.dropout);
    let relative = t5.relative("decoder", false);
    for layer in 0..shape.layers {
        t5.builder.block(format!("decoder layer {layer}"), true);
        let module = format!("decoder.block.{layer}.layer");
        let kind = AttentionKind { causal: true, scaled: false, relative: Some(relative), dropout: shape.attention_dropout };
        x = t5.attention(&format!("{module}.0"), "SelfAttention", x, None, kind);
        let kind = AttentionKind { causal: false, relative: None, ..kind };
        x = t5.attention(&format!("{module}.1"), "EncDecAttention", x, Some(memory), kind);
        x = t5.feed_forward(&format!("{module}.2"), x);
    }
    t5.builder.block("head", false);
    let normed = t5.builder.rms_norm("decoder.final_layer_norm", x, EPSILON);
    // The tied table starts with a deviation of 1, an output's weight would with 1/√hidden.
    let (normed, head) = match shape.tied_embeddings {
        true => (t5.builder.scale("lm_head.scale", normed, shape.hidden), table),
        false => (normed, t5.table("lm_head.weight")),
    };
    let logits = t5.builder.matmul("lm_head", normed, head, 1, WeightLayout::OutIn);
    let labels = t5.builder.input(InputKind::Labels, positions[1].clone());
    t5.builder.cross_entropy("loss", logits, labels);
    t5.builder.finish(shape.sequences[1], Some(shape.sequences.iter().sum()))
}

struct T5<'a> {
    builder: GraphBuilder,
    shape: &'a T5Shape,
}

/// Normal with a deviation of one over the root of `inputs`.
fn normal(inputs: usize) -> Initialisation {
    Initialisation::Normal(1.0 / (inputs as f64).sqrt())
}

impl T5<'_> {
    fn table(&mut self, name: &str) -> TensorId {
        let (vocabulary, hidden) = (self.shape.vocabulary, self.shape.hidden);
        let dimensions = vec![dimension("vocabulary", vocabulary), dimension("hidden", hidden)];
        self.builder.parameter(name.into(), dimensions, vec![vocabulary, hidden], Initialisation::Normal(1.0))
    }

    /// The relative positions of a stack, whose table all its layers share.
    fn relative(&mut self, stack: &str, bidirectional: bool) -> (RelativePositions, TensorId) {
        let T5Shape { heads, hidden, buckets, max_distance, .. } = *self.shape;
        let name = format!("{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight");
        let dimensions = vec![dimension("buckets", buckets), dimension("heads", heads)];
        let table = self.builder.parameter(name, dimensions, vec![buckets, heads], normal(hidden));
        (RelativePositions { buckets, max_distance, bidirectional }, table)
    }

    /// Attention of normed x over itself, or over `memory`, and its residual.
    fn attention(&mut self, module: &str, part: &str, x: TensorId, memory: Option<TensorId>, kind: AttentionKind) -> TensorId {
        let T5Shape { hidden, heads, head_dimension, .. } = *self.shape;
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
        let y = self.builder.dropout(&format!("{module}.dropout"), y, self.shape.dropout);
        self.builder.add(&format!("{module}.residual"), x, y)
    }

    fn feed_forward(&mut self, module: &str, x: TensorId) -> TensorId {
        let T5Shape { hidden, ffn, gated, .. } = *self.shape;
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
        let y = self.builder.dropout(&format!("{module}.dropout"), y, self.shape.dropout);
        self.builder.add(&format!("{module}.residual"), x, y)
    }
}
