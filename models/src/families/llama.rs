//! Llama (Touvron et al. 2023) with Hugging Face's names.

use super::decoder::Decoder;
use super::{Check, Family};
use crate::builder::GraphOptions;
use crate::error::ModelError;
use crate::graph::Graph;
use crate::optimizer::Optimizer;
use crate::sample::SampleShape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A Llama in any size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Llama {
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
    /// Inner width of the feed-forward network.
    pub ffn: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Positions of a sample.
    pub sequence: usize,
    /// Whether the head shares the embedding's weights.
    #[serde(default)]
    pub tied_embeddings: bool,
    /// Base of the rotary embedding's frequencies.
    #[serde(default = "rope_theta")]
    pub rope_theta: usize,
}

fn rope_theta() -> usize {
    10_000
}

impl Llama {
    /// The Llama that a decoder is, if it has no other parts.
    pub(crate) fn of_decoder(decoder: &Decoder) -> Self {
        Self {
            layers: decoder.layers,
            hidden: decoder.hidden,
            heads: decoder.heads,
            kv_heads: decoder.kv_heads,
            head_dimension: decoder.head_dimension,
            ffn: decoder.ffn,
            vocab: decoder.vocab,
            sequence: decoder.sequence,
            tied_embeddings: decoder.tied_embeddings,
            rope_theta: decoder.rope_theta,
        }
    }

    /// The model as a decoder.
    pub(crate) fn decoder(&self) -> Decoder {
        let Self { layers, hidden, heads, ffn, vocab, sequence, .. } = *self;
        Decoder {
            kv_heads: self.kv_heads,
            head_dimension: self.head_dimension,
            tied_embeddings: self.tied_embeddings,
            rope_theta: self.rope_theta,
            ..Decoder::llama([layers, hidden, heads, ffn, vocab, sequence])
        }
    }
}

impl Family for Llama {
    const NAME: &'static str = "llama";
    const OPTIMIZER: Optimizer = Optimizer::AdamW;

    fn zoo() -> Vec<(&'static str, Self)> {
        let llama2 = |layers, hidden, heads, kv_heads, ffn| Self {
            layers,
            hidden,
            heads,
            kv_heads: Some(kv_heads),
            head_dimension: None,
            ffn,
            vocab: 32000,
            sequence: 4096,
            tied_embeddings: false,
            rope_theta: 10_000,
        };
        let llama3 = |layers, hidden, heads, ffn| Self {
            vocab: 128_256,
            sequence: 8192,
            rope_theta: 500_000,
            ..llama2(layers, hidden, heads, 8, ffn)
        };
        vec![
            ("llama2-7b", llama2(32, 4096, 32, 32, 11_008)),
            ("llama2-13b", llama2(40, 5120, 40, 40, 13_824)),
            ("llama2-70b", llama2(80, 8192, 64, 8, 28_672)),
            ("llama3-8b", llama3(32, 4096, 32, 14_336)),
            ("llama3-70b", llama3(80, 8192, 64, 28_672)),
            ("llama3-405b", llama3(126, 16_384, 128, 53_248)),
        ]
    }

    fn examples() -> Vec<(&'static str, Self)> {
        let small = Self {
            layers: 1,
            hidden: 256,
            heads: 4,
            kv_heads: Some(2),
            head_dimension: None,
            ffn: 768,
            vocab: 1024,
            sequence: 128,
            tied_embeddings: false,
            rope_theta: 10_000,
        };
        vec![("small-llama", small)]
    }

    fn validate(&self, check: &Check<'_>) -> Result<(), ModelError> {
        self.decoder().validate(check)
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
        self.decoder().graph(name, options)
    }
}
