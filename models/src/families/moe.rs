//! Mixtral (Jiang et al. 2024) with Hugging Face's names: a Llama with mixtures of experts.

use super::decoder::{CapacityFactor, Decoder, Mixtures};
use super::{Check, Family};
use crate::builder::GraphOptions;
use crate::defaults::{is_zero, one};
use crate::error::ModelError;
use crate::graph::Graph;
use crate::optimizer::Optimizer;
use crate::sample::SampleShape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A Mixtral in any size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Moe {
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
    /// Features of the low-rank projection that queries are made from, as in DeepSeek's latent
    /// attention. `None`: they are made from `hidden` features.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub query_rank: Option<usize>,
    /// As `query_rank`, for keys and values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_value_rank: Option<usize>,
    /// Inner width of an expert.
    pub ffn: usize,
    /// Inner width of a dense layer. `None`: `ffn`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dense_ffn: Option<usize>,
    /// Inner width of all shared experts together, to which every token goes. `None`: there are
    /// none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_ffn: Option<usize>,
    /// Dense layers before the first mixture.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub dense_layers: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Positions of a sample.
    pub sequence: usize,
    /// Experts of a mixture.
    pub experts: usize,
    /// Experts that a token is sent to.
    pub top_k: usize,
    /// Period of mixtures among layers. The last layer of a period is one.
    #[serde(default = "one")]
    pub moe_every: usize,
    /// Ratio of the experts' slots to those that balanced routing needs. A choice that finds no
    /// slot is dropped. With `experts / top_k` none is.
    #[serde(default)]
    pub capacity_factor: CapacityFactor,
    /// Base of the rotary embedding's frequencies.
    #[serde(default = "rope_theta")]
    pub rope_theta: usize,
    /// Whether the head shares the embedding's weights.
    #[serde(default)]
    pub tied_embeddings: bool,
}

fn rope_theta() -> usize {
    1_000_000
}

impl Moe {
    /// The mixtures of the model.
    fn mixtures(&self) -> Mixtures {
        Mixtures {
            experts: self.experts,
            top_k: self.top_k,
            ffn: self.ffn,
            shared_ffn: self.shared_ffn,
            shared_gate: false,
            every: self.moe_every,
            first: self.dense_layers,
            capacity_factor: self.capacity_factor,
            router_bias: false,
            expert_bias: false,
            unnormalised_gates: false,
        }
    }

    /// The Mixtral that a decoder is, if it has no other parts. `None` if it has no mixtures.
    pub(crate) fn of_decoder(decoder: &Decoder) -> Option<Self> {
        let mixtures = decoder.mixtures?;
        Some(Self {
            layers: decoder.layers,
            hidden: decoder.hidden,
            heads: decoder.heads,
            kv_heads: decoder.kv_heads,
            head_dimension: decoder.head_dimension,
            query_rank: decoder.query_rank,
            key_value_rank: decoder.key_value_rank,
            ffn: mixtures.ffn,
            dense_ffn: Some(decoder.ffn).filter(|&ffn| ffn != mixtures.ffn),
            shared_ffn: mixtures.shared_ffn,
            dense_layers: mixtures.first,
            vocab: decoder.vocab,
            sequence: decoder.sequence,
            experts: mixtures.experts,
            top_k: mixtures.top_k,
            moe_every: mixtures.every,
            capacity_factor: mixtures.capacity_factor,
            rope_theta: decoder.rope_theta,
            tied_embeddings: decoder.tied_embeddings,
        })
    }

    /// The model as a decoder.
    pub(crate) fn decoder(&self) -> Decoder {
        let Self { layers, hidden, heads, ffn, vocab, sequence, .. } = *self;
        Decoder {
            kv_heads: self.kv_heads,
            head_dimension: self.head_dimension,
            query_rank: self.query_rank,
            key_value_rank: self.key_value_rank,
            tied_embeddings: self.tied_embeddings,
            rope_theta: self.rope_theta,
            mixtures: Some(self.mixtures()),
            ..Decoder::llama([layers, hidden, heads, self.dense_ffn.unwrap_or(ffn), vocab, sequence])
        }
    }
}

impl Family for Moe {
    const NAME: &'static str = "moe";
    const OPTIMIZER: Optimizer = Optimizer::AdamW;

    fn zoo() -> Vec<(&'static str, Self)> {
        let mixtral = |layers, hidden, heads, ffn| Self {
            layers,
            hidden,
            heads,
            kv_heads: Some(8),
            head_dimension: None,
            query_rank: None,
            key_value_rank: None,
            ffn,
            dense_ffn: None,
            shared_ffn: None,
            dense_layers: 0,
            vocab: 32000,
            sequence: 4096,
            experts: 8,
            top_k: 2,
            moe_every: 1,
            capacity_factor: CapacityFactor::BALANCED,
            rope_theta: 1_000_000,
            tied_embeddings: false,
        };
        vec![("mixtral-8x7b", mixtral(32, 4096, 32, 14336)), ("mixtral-8x22b", mixtral(56, 6144, 48, 16384))]
    }

    fn examples() -> Vec<(&'static str, Self)> {
        let small = Self {
            layers: 1,
            hidden: 256,
            heads: 4,
            kv_heads: None,
            head_dimension: None,
            query_rank: None,
            key_value_rank: None,
            ffn: 256,
            dense_ffn: None,
            shared_ffn: None,
            dense_layers: 0,
            vocab: 1024,
            sequence: 128,
            experts: 4,
            top_k: 2,
            moe_every: 1,
            capacity_factor: CapacityFactor::default(),
            rope_theta: 10_000,
            tied_embeddings: false,
        };
        vec![("small-moe", small)]
    }

    fn validate(&self, check: &Check<'_>) -> Result<(), ModelError> {
        check.sizes(&[("dense_ffn", self.dense_ffn.unwrap_or(1))])?;
        self.decoder().validate(check)
    }

    fn sample(&self) -> SampleShape {
        SampleShape::Tokens { sequence: self.sequence, vocabulary: self.vocab }
    }

    fn is_transformer(&self) -> bool {
        true
    }

    fn repeated_layers(&self) -> Option<usize> {
        (self.moe_every == 1 && self.dense_layers == 0).then_some(self.layers)
    }

    fn layers_mut(&mut self) -> Option<&mut usize> {
        Some(&mut self.layers)
    }

    fn graph(&self, name: &str, options: &GraphOptions) -> Graph {
        self.decoder().graph(name, options)
    }
}
