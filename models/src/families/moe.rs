//! Mixtral (Jiang et al. 2024) with Hugging Face's names: a Llama with mixtures of experts.

use super::decoder::{Decoder, Mixtures};
use super::{Check, Family};
use crate::builder::{GraphOptions, MixtureShape};
use crate::error::ModelError;
use crate::graph::Graph;
use crate::optimizer::Optimizer;
use crate::sample::SampleShape;
use serde::{Deserialize, Serialize};

/// A Mixtral in any size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

fn one() -> usize {
    1
}

fn is_zero(value: &usize) -> bool {
    *value == 0
}

fn rope_theta() -> usize {
    1_000_000
}

/// Ratio of the experts' slots to those that balanced routing needs: a positive, finite number.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct CapacityFactor(f64);

// The number is never NaN.
impl Eq for CapacityFactor {}

impl Default for CapacityFactor {
    /// The usual factor of GShard (Lepikhin et al. 2021) and Switch Transformer.
    fn default() -> Self {
        Self(1.25)
    }
}

impl TryFrom<f64> for CapacityFactor {
    type Error = String;

    fn try_from(factor: f64) -> Result<Self, String> {
        if factor > 0.0 && factor <= 1e6 {
            return Ok(Self(factor));
        }
        Err(format!("`capacity_factor` is {factor}; hint: give a number above 0 and at most 1,000,000, such as 1.25"))
    }
}

impl From<CapacityFactor> for f64 {
    fn from(factor: CapacityFactor) -> f64 {
        factor.0
    }
}

/// The most experts of a mixture.
const MOST_EXPERTS: usize = 1 << 14;

/// An expert with at least this many slots has a multiple of [`SLOT_GRANULE`], so that ranks which
/// shard the sequence can shard the slots.
const MANY_SLOTS: usize = 256;

const SLOT_GRANULE: usize = 16;

impl Moe {
    /// Returns the slots of an expert for each sample. They are at most the positions, since an
    /// expert gets each token at most once.
    fn slots_per_sample(&self) -> usize {
        let balanced = self.sequence as f64 * self.top_k as f64 / self.experts as f64;
        let slots = (f64::from(self.capacity_factor) * balanced).ceil() as usize;
        let slots = if slots >= MANY_SLOTS { slots.next_multiple_of(SLOT_GRANULE) } else { slots };
        slots.clamp(1, self.sequence)
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
            capacity_factor: CapacityFactor::default(),
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
        let Self { layers, hidden, heads, experts, top_k, .. } = *self;
        let kv_heads = self.kv_heads.unwrap_or(heads);
        check.sizes(&[
            ("layers", layers),
            ("hidden", hidden),
            ("heads", heads),
            ("kv_heads", kv_heads),
            ("query_rank", self.query_rank.unwrap_or(1)),
            ("key_value_rank", self.key_value_rank.unwrap_or(1)),
            ("ffn", self.ffn),
            ("dense_ffn", self.dense_ffn.unwrap_or(1)),
            ("shared_ffn", self.shared_ffn.unwrap_or(1)),
            ("vocab", self.vocab),
            ("sequence", self.sequence),
            ("experts", experts),
            ("top_k", top_k),
            ("moe_every", self.moe_every),
            ("rope_theta", self.rope_theta),
        ])?;
        check.layers(layers)?;
        check.rotary_head(hidden, heads, self.head_dimension)?;
        check.key_heads(heads, kv_heads)?;
        if top_k > experts || experts > MOST_EXPERTS {
            return check.refuse(
                format!("each token goes to {top_k} of {experts} experts"),
                "`top_k` is at most `experts`, and that at most 16,384",
            );
        }
        Ok(())
    }

    fn sample(&self) -> SampleShape {
        SampleShape::Tokens { sequence: self.sequence, vocabulary: self.vocab }
    }

    fn repeated_layers(&self) -> Option<usize> {
        (self.moe_every == 1 && self.dense_layers == 0).then_some(self.layers)
    }

    fn layers_mut(&mut self) -> Option<&mut usize> {
        Some(&mut self.layers)
    }

    fn experts(&self) -> Option<usize> {
        Some(self.experts)
    }

    fn graph(&self, name: &str, options: &GraphOptions) -> Graph {
        let Self { layers, hidden, heads, ffn, sequence, .. } = *self;
        let decoder = Decoder {
            layers,
            hidden,
            heads,
            kv_heads: self.kv_heads.unwrap_or(heads),
            head_dimension: self.head_dimension.unwrap_or(hidden / heads),
            query_rank: self.query_rank,
            key_value_rank: self.key_value_rank,
            ffn: self.dense_ffn.unwrap_or(ffn),
            vocabulary: self.vocab,
            sequence,
            tied_embeddings: self.tied_embeddings,
            rope_theta: self.rope_theta,
            mixtures: Some(Mixtures {
                shape: MixtureShape { experts: self.experts, top: self.top_k, slots_per_sample: self.slots_per_sample() },
                ffn,
                shared_ffn: self.shared_ffn,
                every: self.moe_every,
                first: self.dense_layers,
            }),
        };
        decoder.graph(name, options)
    }
}
