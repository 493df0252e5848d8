//! ModernBERT for masked language modelling (Warner et al. 2024) with the names of Hugging Face's
//! `ModernBertForMaskedLM`: rotary positions, gated feed-forward networks, norms before the parts,
//! and windows in most layers. It must not know how a graph is sharded or computed.

use super::{Check, Family, NormEpsilon, NormKind};
use crate::builder::{AttentionKind, GraphBuilder, GraphOptions, dimension};
use crate::defaults::is_false;
use crate::dropout::DropoutRate;
use crate::error::ModelError;
use crate::graph::{BATCH, Dimension, Graph, Initialisation, InputKind, TensorId};
use crate::kernel::WeightLayout;
use crate::optimizer::Optimizer;
use crate::sample::SampleShape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A ModernBERT, trained to find masked words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModernBert {
    /// Transformer layers.
    pub layers: usize,
    /// Features of a position.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Inner width of the gated feed-forward network.
    pub ffn: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Positions of a sample.
    pub sequence: usize,
    /// Positions that a position sees on each side, itself among them, in layers with local
    /// attention. `None`: all layers see all positions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
    /// Period of layers that see all positions although there is a `window`. The first layer of a
    /// period does.
    #[serde(default = "full_attention_every")]
    pub full_attention_every: usize,
    /// Base of the rotary embedding's frequencies in layers that see all positions.
    #[serde(default = "rope_theta")]
    pub rope_theta: usize,
    /// As `rope_theta`, in layers with local attention.
    #[serde(default = "local_rope_theta")]
    pub local_rope_theta: usize,
    /// Kind of the norms.
    #[serde(default = "without_shift")]
    pub norm: NormKind,
    /// Number that norms add to the variance.
    #[serde(default)]
    pub norm_epsilon: NormEpsilon,
    /// Whether the products of attention have biases.
    #[serde(default, skip_serializing_if = "is_false")]
    pub attention_bias: bool,
    /// Whether the products of the feed-forward network have biases.
    #[serde(default, skip_serializing_if = "is_false")]
    pub ffn_bias: bool,
    /// Whether the product before the logits has a bias.
    #[serde(default, skip_serializing_if = "is_false")]
    pub transform_bias: bool,
    /// Whether the logits have no bias.
    #[serde(default, skip_serializing_if = "is_false")]
    pub no_head_bias: bool,
}

/// ModernBERT's period (Warner et al. 2024, section 2.1).
fn full_attention_every() -> usize {
    3
}

/// ModernBERT's base in layers that see all positions.
fn rope_theta() -> usize {
    160_000
}

/// ModernBERT's base in layers with local attention.
fn local_rope_theta() -> usize {
    10_000
}

fn without_shift() -> NormKind {
    NormKind::LayerWithoutShift
}

const WEIGHTS: Initialisation = Initialisation::Normal(0.02);

/// Masked tokens of a sample: 30 % (Warner et al. 2024, section 2.2), and at least one.
fn masked_predictions(sequence: usize) -> usize {
    ((30 * sequence + 50) / 100).max(1)
}

impl ModernBert {
    /// Whether a layer sees all positions.
    fn is_full(&self, layer: usize) -> bool {
        layer.is_multiple_of(self.full_attention_every)
    }

    /// The window of a layer, if it hides any position.
    fn window_of(&self, layer: usize) -> Option<usize> {
        self.window.filter(|&window| !self.is_full(layer) && window < self.sequence)
    }
}

impl Family for ModernBert {
    const NAME: &'static str = "modernbert";
    const OPTIMIZER: Optimizer = Optimizer::AdamW;

    fn zoo() -> Vec<(&'static str, Self)> {
        Vec::new()
    }

    fn examples() -> Vec<(&'static str, Self)> {
        // Norms and products of a kind that has a kernel each, and no windows.
        let small = Self {
            layers: 2,
            hidden: 256,
            heads: 4,
            ffn: 384,
            vocab: 1024,
            sequence: 128,
            window: None,
            full_attention_every: full_attention_every(),
            rope_theta: rope_theta(),
            local_rope_theta: local_rope_theta(),
            norm: NormKind::Layer,
            norm_epsilon: NormEpsilon::default(),
            attention_bias: false,
            ffn_bias: false,
            transform_bias: false,
            no_head_bias: false,
        };
        vec![("small-modernbert", small)]
    }

    fn validate(&self, check: &Check<'_>) -> Result<(), ModelError> {
        let Self { layers, hidden, heads, ffn, vocab, sequence, .. } = *self;
        check.sizes(&[
            ("vocab", vocab),
            ("sequence", sequence),
            ("window", self.window.unwrap_or(1)),
            ("full_attention_every", self.full_attention_every),
            ("rope_theta", self.rope_theta),
            ("local_rope_theta", self.local_rope_theta),
        ])?;
        check.transformer([layers, hidden, heads, ffn])?;
        check.pairs_of_features(hidden / heads)
    }

    fn sample(&self) -> SampleShape {
        let Self { sequence, vocab, .. } = *self;
        SampleShape::MaskedTokens { sequence, vocabulary: vocab, predictions: masked_predictions(sequence) }
    }

    fn is_transformer(&self) -> bool {
        true
    }

    fn layers_mut(&mut self) -> Option<&mut usize> {
        Some(&mut self.layers)
    }

    fn planned_only(&self) -> Vec<&'static str> {
        [
            ((0..self.layers).any(|layer| self.window_of(layer).is_some()), "`window`"),
            (self.norm == NormKind::LayerWithoutShift, "`norm: layer_without_shift`"),
        ]
        .into_iter()
        .filter_map(|(has, name)| has.then_some(name))
        .collect()
    }

    fn graph(&self, name: &str, options: &GraphOptions) -> Graph {
        let mut layers = Layers { builder: GraphBuilder::new(name, options), sizes: self };
        let (hidden, vocabulary) = (dimension("hidden", self.hidden), dimension("vocabulary", self.vocab));
        let positions = vec![dimension(BATCH, options.batch), dimension("sequence", self.sequence)];
        layers.builder.block("embedding", false);
        let tokens = layers.builder.input(InputKind::Tokens, positions.clone());
        let module = "model.embeddings.tok_embeddings";
        let shape = vec![self.vocab, self.hidden];
        let table = layers.builder.parameter(format!("{module}.weight"), vec![vocabulary, hidden], shape, WEIGHTS);
        let x = layers.builder.embedding(module, tokens, table);
        let mut x = layers.norm("model.embeddings.norm", x);
        for layer in 0..self.layers {
            layers.builder.block(format!("layer {layer}"), true);
            x = layers.layer(layer, x);
        }
        layers.builder.block("head", false);
        let x = layers.norm("model.final_norm", x);
        let x = layers.linear("head.dense", x, 1, &[hidden], self.transform_bias);
        let x = layers.builder.gelu_exact("head.act", x);
        let x = layers.norm("head.norm", x);
        // The logits share the words' embeddings.
        let mut logits = layers.builder.matmul("decoder", x, table, 1, WeightLayout::OutIn);
        if !self.no_head_bias {
            let zeros = Initialisation::Zeros;
            let bias = layers.builder.parameter("decoder.bias".into(), vec![vocabulary], vec![self.vocab], zeros);
            logits = layers.builder.bias_add("decoder.bias", logits, bias);
        }
        let labels = layers.builder.input(InputKind::Labels, positions);
        layers.builder.cross_entropy("loss", logits, labels);
        layers.builder.finish(masked_predictions(self.sequence), Some(self.sequence))
    }
}

/// A ModernBERT under construction.
struct Layers<'a> {
    builder: GraphBuilder,
    sizes: &'a ModernBert,
}

impl Layers<'_> {
    fn norm(&mut self, name: &str, x: TensorId) -> TensorId {
        let epsilon = self.sizes.norm_epsilon.epsilon();
        match self.sizes.norm {
            NormKind::Rms => self.builder.rms_norm(name, x, epsilon),
            NormKind::Layer => self.builder.layer_norm(name, x, epsilon),
            NormKind::LayerWithoutShift => self.builder.feature_norm(name, x, 1),
        }
    }

    fn linear(&mut self, name: &str, x: TensorId, contracted: usize, outputs: &[Dimension], has_bias: bool) -> TensorId {
        self.builder.linear(name, x, contracted, outputs, WEIGHTS, has_bias.then_some(Initialisation::Zeros))
    }

    /// Adds a layer. Transformers computes queries, keys and values in one product, and gate and
    /// input in another. Here each has its own product, so that `tensor` can shard them.
    fn layer(&mut self, layer: usize, x: TensorId) -> TensorId {
        let ModernBert { hidden, heads, ffn, attention_bias, ffn_bias, .. } = *self.sizes;
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let hidden_dimension = [dimension("hidden", hidden)];
        // The embedding has been normed.
        let normed = if layer == 0 { x } else { self.norm(&name("attn_norm"), x) };
        let by_head = [dimension("heads", heads), dimension("head_dimension", hidden / heads)];
        let [q, k, v] =
            ["q", "k", "v"].map(|part| self.linear(&name(&format!("attn.Wqkv.{part}")), normed, 1, &by_head, attention_bias));
        let theta = if self.sizes.is_full(layer) { self.sizes.rope_theta } else { self.sizes.local_rope_theta };
        let [q, k] = [("rotary_q", q), ("rotary_k", k)].map(|(part, y)| self.builder.rope(&name(part), y, theta, None));
        let window = self.sizes.window_of(layer);
        let kind = AttentionKind { causal: false, scaled: true, window, relative: None, dropout: DropoutRate::NONE };
        let y = self.builder.attention(&name("attn"), [q, k, v], kind);
        let y = self.linear(&name("attn.Wo"), y, 2, &hidden_dimension, attention_bias);
        let x = self.builder.add(&name("attn.residual"), x, y);

        let normed = self.norm(&name("mlp_norm"), x);
        let inner = [dimension("ffn", ffn)];
        let [input, gate] =
            ["input", "gate"].map(|part| self.linear(&name(&format!("mlp.Wi.{part}")), normed, 1, &inner, ffn_bias));
        let y = self.builder.gelu_exact(&name("mlp.act"), input);
        let y = self.builder.multiply(&name("mlp.gate"), y, gate);
        let y = self.linear(&name("mlp.Wo"), y, 1, &hidden_dimension, ffn_bias);
        self.builder.add(&name("mlp.residual"), x, y)
    }
}
