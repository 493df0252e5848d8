//! Decoder-only transformers in general: the layers that Llama, Mixtral and their relatives are
//! made of, each part of which a model file may choose. Names of weights are those of Hugging
//! Face's Llama and Mixtral.
//!
//! Shared experts, dense layers before the first mixture, and low-rank queries and keys are as in
//! DeepSeek's models (DeepSeek-AI 2024). There is no auxiliary loss that balances the experts. It
//! must not know how a graph is sharded or computed.

mod layer_inputs;
mod layers;
mod linear;
mod mixers;
mod parts;
mod streams;
mod validity;
mod vision;

pub use layer_inputs::{FullAttention, LayerInputs, SharedKeys};
pub use linear::{LayerKind, LinearAttention, LinearNorm};
pub use parts::{CapacityFactor, FeedForward, Mixtures, NormEpsilon, NormKind, ParallelBlock, PositionKind};
pub use streams::ResidualStreams;
pub use vision::{JoinedPatches, Projector, VisionTower};

use super::{Check, Family};
use crate::builder::GraphOptions;
use crate::defaults::{is_false, is_zero};
use crate::dropout::DropoutRate;
use crate::error::ModelError;
use crate::graph::Graph;
use crate::optimizer::Optimizer;
use crate::sample::SampleShape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A decoder-only transformer in any size. What a file leaves out is as in Llama.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Decoder {
    /// Transformer layers.
    pub layers: usize,
    /// Features of a position.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Heads of keys and values. `None`: `heads`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_heads: Option<usize>,
    /// Features of a head. `None`: `hidden / heads`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dimension: Option<usize>,
    /// Features of the low-rank projection that queries are made from. `None`: they are made from
    /// `hidden` features.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub query_rank: Option<usize>,
    /// As `query_rank`, for keys and values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_value_rank: Option<usize>,
    /// Whether the products with a rank have biases, as `attention_bias` says in DeepSeek's files.
    #[serde(default, skip_serializing_if = "is_false")]
    pub rank_bias: bool,
    /// Features of a head's rotary part, before its `head_dimension` other features. All heads have
    /// the same rotary keys, as in DeepSeek's latent attention. With `positions: none` it is not
    /// rotated, as in Kimi Linear. `None`: heads have no separate rotary part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rotary_part: Option<usize>,
    /// Features of a head of values. `None`: `head_dimension`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_dimension: Option<usize>,
    /// Inner width of a dense layer's feed-forward network.
    pub ffn: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Positions of a sample.
    pub sequence: usize,
    /// Whether the head shares the embedding's weights.
    #[serde(default)]
    pub tied_embeddings: bool,
    /// Kind of the norms.
    #[serde(default)]
    pub norm: NormKind,
    /// Number that norms add to the variance.
    #[serde(default)]
    pub norm_epsilon: NormEpsilon,
    /// How a position is known.
    #[serde(default)]
    pub positions: PositionKind,
    /// Base of the rotary embedding's frequencies.
    #[serde(default = "rope_theta")]
    pub rope_theta: usize,
    /// Features of a head that are rotated. `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rotary_dimension: Option<usize>,
    /// Whether the frequencies are scaled for long sequences, as in Llama 3.1. Planned as if they
    /// were not: it costs nothing.
    #[serde(default, skip_serializing_if = "is_false")]
    pub rope_scaling: bool,
    /// Rows of the table of learned positions. `None`: `sequence`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position_rows: Option<usize>,
    /// Row of the first position in the table: 2 in OPT.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub first_position: usize,
    /// The feed-forward network.
    #[serde(default)]
    pub feed_forward: FeedForward,
    /// Whether queries, keys and values have biases.
    #[serde(default, skip_serializing_if = "is_false")]
    pub qkv_bias: bool,
    /// Whether attention's output has a bias.
    #[serde(default, skip_serializing_if = "is_false")]
    pub attention_output_bias: bool,
    /// Whether the feed-forward network has biases.
    #[serde(default, skip_serializing_if = "is_false")]
    pub ffn_bias: bool,
    /// Whether the head has a bias.
    #[serde(default, skip_serializing_if = "is_false")]
    pub head_bias: bool,
    /// Whether attention and the feed-forward network of a layer read the same input.
    #[serde(default, skip_serializing_if = "ParallelBlock::is_none")]
    pub parallel_block: ParallelBlock,
    /// Whether queries and keys are normed head by head, as in Qwen3.
    #[serde(default, skip_serializing_if = "is_false")]
    pub query_key_norm: bool,
    /// Whether that norm is over all heads together, as in OLMo 2.
    #[serde(default, skip_serializing_if = "is_false")]
    pub query_key_norm_of_all_heads: bool,
    /// Whether each part's output is normed too before it is added, as in Gemma 2.
    #[serde(default, skip_serializing_if = "is_false")]
    pub output_norms: bool,
    /// Whether each head has a scale of its own in that norm, as in Command R+.
    #[serde(default, skip_serializing_if = "is_false")]
    pub query_key_scales_of_heads: bool,
    /// Whether the parts' inputs are not normed, as in OLMo 2.
    #[serde(default, skip_serializing_if = "is_false")]
    pub no_input_norms: bool,
    /// Whether the residual stream is normed with the parts' inputs, as in MiniMax-01.
    #[serde(default, skip_serializing_if = "is_false")]
    pub residual_after_norm: bool,
    /// Whether the embedding is normed, as in BLOOM.
    #[serde(default, skip_serializing_if = "is_false")]
    pub embedding_norm: bool,
    /// Whether the embedding is multiplied by the root of `hidden`, as in Gemma.
    #[serde(default, skip_serializing_if = "is_false")]
    pub embedding_scale: bool,
    /// Positions that a query sees: itself and those just before it. `None`: all before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
    /// Period of layers that see all positions although there is a `window`. The last layer of a
    /// period does. `None`: no layer does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub full_attention_every: Option<usize>,
    /// Attention in layers that see all positions, if it differs from that of the other layers, as
    /// in Gemma 4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub full_attention: Option<FullAttention>,
    /// Layers that use the keys and values of another, as in Gemma 4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_keys: Option<SharedKeys>,
    /// Whether values are normed head by head, without a scale, as in Gemma 4.
    #[serde(default, skip_serializing_if = "is_false")]
    pub value_norm: bool,
    /// An embedding with features for each layer, as in Gemma 4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_inputs: Option<LayerInputs>,
    /// Whether a layer's output is multiplied by a number, as in Gemma 4.
    #[serde(default, skip_serializing_if = "is_false")]
    pub layer_scales: bool,
    /// Period of layers that do not rotate queries and keys, as in Command R7B. The last layer of a
    /// period does not. `None`: all layers do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unrotated_every: Option<usize>,
    /// Whether attention's scores are capped softly, as in Gemma 2.
    #[serde(default, skip_serializing_if = "is_false")]
    pub score_cap: bool,
    /// Whether logits are capped softly, as in Gemma 2.
    #[serde(default, skip_serializing_if = "is_false")]
    pub logit_cap: bool,
    /// Whether logits are multiplied by a number, as in Command R. Planned as a pass over them.
    #[serde(default, skip_serializing_if = "is_false")]
    pub logit_scale: bool,
    /// Whether each head has a learned number among its scores that stands for no position
    /// (attention sinks), as in gpt-oss.
    #[serde(default, skip_serializing_if = "is_false")]
    pub sinks: bool,
    /// Whether a gate made from the layer's input weighs attention's output, as in Qwen3-Next.
    #[serde(default, skip_serializing_if = "is_false")]
    pub attention_gate: bool,
    /// The kinds of layers, repeated from the first layer on. Empty: all layers have attention and
    /// a feed-forward network.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layer_kinds: Vec<LayerKind>,
    /// Linear attention, in the layers whose kind has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linear: Option<LinearAttention>,
    /// The part that sees images. Its tokens are among the `sequence` positions of a sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vision: Option<VisionTower>,
    /// Several residual streams, as in Gemma 3n. `None`: one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residual_streams: Option<ResidualStreams>,
    /// Layers from the first on whose activations are cut off at a share of each position's
    /// distribution, as in Gemma 3n. Planned as one more pass over the gate.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub sparse_activation_layers: usize,
    /// Mixtures of experts. `None`: all layers are dense.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mixtures: Option<Mixtures>,
    /// Modules behind the last layer that predict one more token each (multi-token prediction,
    /// DeepSeek-AI 2024). A module is a layer, two norms before it and one after it, and a product
    /// of both inputs. They share the model's embedding and head.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub prediction_modules: usize,
    /// Dropout rate of the embedding and of what each layer adds to the residual stream.
    #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
    pub dropout: DropoutRate,
    /// Dropout rate of attention's probabilities.
    #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
    pub attention_dropout: DropoutRate,
}

fn rope_theta() -> usize {
    10_000
}

impl Decoder {
    /// A decoder of Llama's kind.
    pub fn llama([layers, hidden, heads, ffn, vocab, sequence]: [usize; 6]) -> Self {
        Self {
            layers,
            hidden,
            heads,
            kv_heads: None,
            head_dimension: None,
            query_rank: None,
            key_value_rank: None,
            rank_bias: false,
            rotary_part: None,
            value_dimension: None,
            ffn,
            vocab,
            sequence,
            tied_embeddings: false,
            norm: NormKind::Rms,
            norm_epsilon: NormEpsilon::default(),
            positions: PositionKind::Rotary,
            rope_theta: rope_theta(),
            rotary_dimension: None,
            rope_scaling: false,
            position_rows: None,
            first_position: 0,
            feed_forward: FeedForward::GatedSilu,
            qkv_bias: false,
            attention_output_bias: false,
            ffn_bias: false,
            head_bias: false,
            parallel_block: ParallelBlock::None,
            query_key_norm: false,
            query_key_norm_of_all_heads: false,
            query_key_scales_of_heads: false,
            output_norms: false,
            no_input_norms: false,
            residual_after_norm: false,
            embedding_norm: false,
            embedding_scale: false,
            window: None,
            full_attention_every: None,
            full_attention: None,
            shared_keys: None,
            value_norm: false,
            layer_inputs: None,
            layer_scales: false,
            unrotated_every: None,
            score_cap: false,
            logit_cap: false,
            logit_scale: false,
            sinks: false,
            attention_gate: false,
            layer_kinds: Vec::new(),
            linear: None,
            vision: None,
            residual_streams: None,
            sparse_activation_layers: 0,
            mixtures: None,
            prediction_modules: 0,
            dropout: DropoutRate::NONE,
            attention_dropout: DropoutRate::NONE,
        }
    }

    /// Features of a head, without its rotary part. The sizes are sound.
    pub(crate) fn head_features(&self) -> usize {
        self.head_dimension.unwrap_or(self.hidden / self.heads.max(1))
    }

    /// The kind of a layer.
    pub(crate) fn kind_of(&self, layer: usize) -> LayerKind {
        let period = self.layer_kinds.len().max(1);
        self.layer_kinds.get(layer % period).copied().unwrap_or(LayerKind::Attention)
    }

    /// Whether all layers are made of the same parts.
    fn has_equal_kinds(&self) -> bool {
        self.layer_kinds.windows(2).all(|pair| pair[0] == pair[1])
    }

    /// The window of a layer, if it hides any position.
    fn window_of(&self, layer: usize) -> Option<usize> {
        self.window.filter(|&window| !self.is_full(layer) && window < self.sequence)
    }

    /// Whether a layer rotates queries and keys.
    pub(crate) fn rotates(&self, layer: usize) -> bool {
        let is_exempt = self.unrotated_every.is_some_and(|every| (layer + 1).is_multiple_of(every));
        self.positions == PositionKind::Rotary && !is_exempt
    }
}

impl Family for Decoder {
    const NAME: &'static str = "decoder";
    const OPTIMIZER: Optimizer = Optimizer::AdamW;

    fn zoo() -> Vec<(&'static str, Self)> {
        let qwen3 = |layers, hidden, heads, ffn, tied_embeddings| Self {
            kv_heads: Some(8),
            head_dimension: Some(128),
            tied_embeddings,
            norm_epsilon: NormEpsilon::MILLIONTH,
            rope_theta: 1_000_000,
            query_key_norm: true,
            ..Self::llama([layers, hidden, heads, ffn, 151_936, 4096])
        };
        let qwen2 = |layers, hidden, heads, kv_heads, ffn, vocab| Self {
            kv_heads: Some(kv_heads),
            norm_epsilon: NormEpsilon::MILLIONTH,
            rope_theta: 1_000_000,
            qkv_bias: true,
            ..Self::llama([layers, hidden, heads, ffn, vocab, 4096])
        };
        let mistral = Self { kv_heads: Some(8), ..Self::llama([32, 4096, 32, 14_336, 32_000, 4096]) };
        let neox = Self {
            norm: NormKind::Layer,
            rotary_dimension: Some(24),
            feed_forward: FeedForward::Gelu,
            qkv_bias: true,
            attention_output_bias: true,
            ffn_bias: true,
            parallel_block: ParallelBlock::OwnNorms,
            ..Self::llama([44, 6144, 64, 24_576, 50_432, 2048])
        };
        vec![
            ("mistral-7b", mistral),
            ("qwen2.5-7b", qwen2(28, 3584, 28, 4, 18_944, 152_064)),
            ("qwen3-0.6b", qwen3(28, 1024, 16, 3072, true)),
            ("qwen3-8b", qwen3(36, 4096, 32, 12_288, false)),
            ("qwen3-32b", qwen3(64, 5120, 64, 25_600, false)),
            ("gpt-neox-20b", neox),
        ]
    }

    fn examples() -> Vec<(&'static str, Self)> {
        let small = Self {
            norm: NormKind::Layer,
            rotary_dimension: Some(16),
            feed_forward: FeedForward::Gelu,
            qkv_bias: true,
            attention_output_bias: true,
            ffn_bias: true,
            parallel_block: ParallelBlock::OwnNorms,
            ..Self::llama([1, 256, 4, 768, 1024, 128])
        };
        let normed = Self {
            kv_heads: Some(2),
            query_key_norm: true,
            output_norms: true,
            feed_forward: FeedForward::GatedGeluTanh,
            tied_embeddings: true,
            ..Self::llama([1, 256, 4, 768, 1024, 128])
        };
        vec![("small-neox", small), ("small-normed-decoder", normed)]
    }

    fn validate(&self, check: &Check<'_>) -> Result<(), ModelError> {
        self.validate_sizes(check)?;
        self.validate_positions(check)?;
        self.validate_kinds(check)?;
        self.validate_layer_inputs(check)?;
        self.validate_streams(check)?;
        if let Some(tower) = &self.vision {
            tower.validate(self, check)?;
        }
        match &self.mixtures {
            Some(mixtures) => mixtures.validate(check),
            None => Ok(()),
        }
    }

    fn sample(&self) -> SampleShape {
        SampleShape::Tokens { sequence: self.sequence, vocabulary: self.vocab }
    }

    fn is_transformer(&self) -> bool {
        true
    }

    fn repeated_layers(&self) -> Option<usize> {
        let has_equal_layers = self.mixtures.as_ref().is_none_or(|mixtures| mixtures.every == 1 && mixtures.first == 0);
        let has_equal_windows = self.full_attention_every.is_none() || (self.window.is_none() && self.full_attention.is_none());
        // With `layer_inputs` the size of the embedding depends on the number of layers.
        let has_equal_attention = self.unrotated_every.is_none() && self.shared_keys.is_none() && self.layer_inputs.is_none();
        let has_equal_activations = self.sparse_activation_layers == 0 || self.sparse_activation_layers >= self.layers;
        (self.vision.is_none()
            && has_equal_layers
            && has_equal_windows
            && has_equal_attention
            && has_equal_activations
            && self.has_equal_kinds()
            && self.prediction_modules == 0)
            .then_some(self.layers)
    }

    fn layers_mut(&mut self) -> Option<&mut usize> {
        Some(&mut self.layers)
    }

    fn planned_only(&self) -> Vec<&'static str> {
        let has = |part: fn(&Mixtures) -> bool| self.mixtures.as_ref().is_some_and(part);
        [
            (self.rotary_part.is_some(), "`rotary_part`"),
            (self.value_dimension.is_some_and(|features| features != self.head_features()), "`value_dimension`"),
            (self.prediction_modules > 0, "`prediction_modules`"),
            ((0..self.layers).any(|layer| self.window_of(layer).is_some()), "`window`"),
            (self.positions == PositionKind::Alibi, "`positions: alibi`"),
            (self.rope_scaling, "`rope_scaling`"),
            (self.embedding_scale, "`embedding_scale`"),
            (self.vision.is_some(), "`vision`"),
            (self.residual_streams.is_some(), "`residual_streams`"),
            (self.sparse_activation_layers > 0, "`sparse_activation_layers`"),
            (self.sinks, "`sinks`"),
            (self.attention_gate, "`attention_gate`"),
            (self.layer_kinds.iter().any(|kind| kind.has_linear()), "`linear`"),
            (self.feed_forward == FeedForward::SquaredRelu, "`feed_forward: squared_relu`"),
            (has(|mixtures| mixtures.expert_bias), "`expert_bias`"),
            (self.score_cap, "`score_cap`"),
            (self.logit_cap, "`logit_cap`"),
            (self.logit_scale, "`logit_scale`"),
            (self.value_norm, "`value_norm`"),
            (self.shared_keys.is_some(), "`shared_keys`"),
            (self.layer_inputs.is_some(), "`layer_inputs`"),
            (self.layer_scales, "`layer_scales`"),
            (self.norm == NormKind::LayerWithoutShift, "`norm: layer_without_shift`"),
            (self.query_key_norm && self.query_key_scales_of_heads, "`query_key_scales_of_heads`"),
            (has(|mixtures| mixtures.unnormalised_gates), "`unnormalised_gates`"),
            (has(|mixtures| mixtures.shared_gate && mixtures.shared_ffn.is_some()), "`shared_gate`"),
        ]
        .into_iter()
        .filter_map(|(has, name)| has.then_some(name))
        .collect()
    }

    fn graph(&self, name: &str, options: &GraphOptions) -> Graph {
        layers::graph(self, name, options)
    }
}
