//! The kinds of a decoder's layers, and the sizes of layers with linear attention.

use super::super::Check;
use crate::defaults::{is_false, is_zero};
use crate::error::ModelError;
use crate::kernel::ScanRule;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The parts of a layer. Kinds whose name does not end in `Alone` also have a feed-forward network,
/// dense or a mixture, after the named parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LayerKind {
    /// Attention.
    Attention,
    /// Linear attention.
    Linear,
    /// Both in parallel, after one norm, as in Falcon-H1.
    AttentionAndLinear,
    /// Attention, without a feed-forward network, as in Nemotron-H.
    AttentionAlone,
    /// Linear attention, without a feed-forward network.
    LinearAlone,
    /// A dense feed-forward network alone.
    DenseAlone,
    /// A mixture of experts alone.
    MixtureAlone,
}

impl LayerKind {
    /// Whether it has attention.
    pub(crate) fn has_attention(self) -> bool {
        matches!(self, Self::Attention | Self::AttentionAndLinear | Self::AttentionAlone)
    }

    /// Whether it has linear attention.
    pub(crate) fn has_linear(self) -> bool {
        matches!(self, Self::Linear | Self::AttentionAndLinear | Self::LinearAlone)
    }

    /// Whether the layer consists of a single part.
    pub(crate) fn is_alone(self) -> bool {
        matches!(self, Self::AttentionAlone | Self::LinearAlone | Self::DenseAlone | Self::MixtureAlone)
    }
}

/// Norm of what linear attention gives, before its last product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LinearNorm {
    /// There is none.
    None,
    /// Over all heads together.
    #[default]
    Whole,
    /// Over the heads of each head of keys, with a scale for each feature, as in Nemotron-H.
    Groups,
    /// Head by head, with one scale, as in Qwen3-Next.
    Heads,
}

/// Sizes of the layers with linear attention: Mamba-2 (Dao and Gu 2024), the gated delta rule
/// (Yang et al. 2024) or lightning attention (Qin et al. 2024). A causal convolution of each
/// feature comes before it, and a gate after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LinearAttention {
    /// How a position updates the state.
    pub rule: ScanRule,
    /// Heads of values.
    pub heads: usize,
    /// Features of a value.
    pub head_dimension: usize,
    /// Heads of keys and queries: the groups of Mamba-2.
    pub key_heads: usize,
    /// Features of a key: the state size of Mamba-2.
    pub key_dimension: usize,
    /// Positions of the causal convolution's window. 0: there is none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub convolution: usize,
    /// Whether the convolution has a bias.
    #[serde(default, skip_serializing_if = "is_false")]
    pub convolution_bias: bool,
    /// Whether the products have biases.
    #[serde(default, skip_serializing_if = "is_false")]
    pub bias: bool,
    /// Features between the two products that make the gate, and between those that make the decays
    /// of `kimi_delta`. `None`: one product makes each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// Norm before the last product.
    #[serde(default)]
    pub norm: LinearNorm,
    /// Positions of a chunk, within which every query meets every key.
    pub chunk: usize,
}

impl LinearAttention {
    /// Refuses sizes that no graph can be built from.
    pub(super) fn validate(&self, check: &Check<'_>) -> Result<(), ModelError> {
        let Self { heads, head_dimension, key_heads, key_dimension, convolution, chunk, .. } = *self;
        check.sizes(&[
            ("linear.heads", heads),
            ("linear.head_dimension", head_dimension),
            ("linear.key_heads", key_heads),
            ("linear.key_dimension", key_dimension),
            ("linear.convolution", convolution.max(1)),
            ("linear.rank", self.rank.unwrap_or(1)),
            ("linear.chunk", chunk),
        ])?;
        if !heads.is_multiple_of(key_heads) {
            let reason = format!("`linear` has {heads} heads of values for {key_heads} heads of keys");
            return check.refuse(reason, "choose `key_heads` that divide `heads`");
        }
        Ok(())
    }
}
