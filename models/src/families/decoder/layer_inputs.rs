//! Parts that layers of Gemma 3n and Gemma 4 have in addition to the usual ones: an embedding of
//! their own, keys and values of another layer, and other heads in layers that see all positions.

use super::super::Check;
use super::Decoder;
use super::layers::{Layers, WEIGHTS};
use crate::builder::dimension;
use crate::defaults::{is_false, is_zero};
use crate::error::ModelError;
use crate::graph::TensorId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Attention in layers that see all positions although there is a window, if it differs from that
/// of the other layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FullAttention {
    /// Features of a head. `None`: as in the other layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dimension: Option<usize>,
    /// Heads of keys and values. `None`: as in the other layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_heads: Option<usize>,
    /// Whether one product computes both keys and values.
    #[serde(default, skip_serializing_if = "is_false")]
    pub keys_as_values: bool,
}

/// Layers that reuse the keys and values of an earlier layer: of the last one that computes its own
/// and sees the same positions (all, or the window).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SharedKeys {
    /// Number of such layers: the last ones of the decoder.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub layers: usize,
    /// Inner width of their feed-forward networks. `None`: `ffn`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ffn: Option<usize>,
}

/// A second embedding, with features for each layer. A projection of the first embedding is added
/// to it. After its feed-forward network, each layer adds a projection of its own features, weighed
/// by a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LayerInputs {
    /// Features of a position for one layer.
    pub features: usize,
    /// Rows of the table. `None`: `vocab`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocab: Option<usize>,
}

impl Decoder {
    /// Whether a layer sees all positions although there is a window.
    pub(super) fn is_full(&self, layer: usize) -> bool {
        self.full_attention_every.is_some_and(|every| (layer + 1).is_multiple_of(every))
    }

    /// Attention sizes of a layer that sees all positions, if the decoder gives such layers their
    /// own; else `None`.
    fn full_attention_of(&self, layer: usize) -> Option<FullAttention> {
        self.full_attention.filter(|_| self.is_full(layer))
    }

    /// Features of a head in a layer, without its rotary part.
    pub(super) fn head_features_of(&self, layer: usize) -> usize {
        self.full_attention_of(layer).and_then(|full| full.head_dimension).unwrap_or_else(|| self.head_features())
    }

    /// Heads of keys and values in a layer.
    pub(super) fn kv_heads_of(&self, layer: usize) -> usize {
        let own = self.full_attention_of(layer).and_then(|full| full.kv_heads);
        own.or(self.kv_heads).unwrap_or(self.heads)
    }

    /// Whether one product computes both keys and values of a layer.
    pub(super) fn has_keys_as_values(&self, layer: usize) -> bool {
        self.full_attention_of(layer).is_some_and(|full| full.keys_as_values)
    }

    /// The sharing of keys, if the layer has none of its own; else `None`.
    fn shared_keys_of(&self, layer: usize) -> Option<SharedKeys> {
        self.shared_keys.filter(|shared| layer < self.layers && layer + shared.layers >= self.layers)
    }

    /// Inner width of a layer's dense feed-forward network.
    pub(super) fn ffn_of(&self, layer: usize) -> usize {
        self.shared_keys_of(layer).and_then(|shared| shared.ffn).unwrap_or(self.ffn)
    }

    /// Refuses sizes that no graph can be built from.
    pub(super) fn validate_layer_inputs(&self, check: &Check<'_>) -> Result<(), ModelError> {
        if let Some(full) = self.full_attention {
            check.sizes(&[
                ("full_attention.head_dimension", full.head_dimension.unwrap_or(1)),
                ("full_attention.kv_heads", full.kv_heads.unwrap_or(1)),
            ])?;
            let layers = 0..self.layers.min(self.full_attention_every.unwrap_or(0));
            for layer in layers.filter(|&layer| self.is_full(layer)) {
                check.key_heads(self.heads, self.kv_heads_of(layer))?;
                check.pairs_of_features(self.head_features_of(layer))?;
            }
        }
        if let Some(inputs) = self.layer_inputs {
            let all = inputs.features.saturating_mul(self.layers);
            let vocab = inputs.vocab.unwrap_or(1);
            check.sizes(&[
                ("layer_inputs.features", inputs.features),
                ("layer_inputs.vocab", vocab),
                ("layer_inputs.features of all layers", all),
            ])?;
        }
        let is_latent = self.rotary_part.is_some() || self.key_value_rank.is_some() || !self.layer_kinds.is_empty();
        if is_latent && (self.full_attention.is_some() || self.shared_keys.is_some()) {
            let reason = "`full_attention` or `shared_keys` beside other kinds of attention";
            return check.refuse(reason.into(), "leave out one of them");
        }
        let Some(shared) = self.shared_keys else { return Ok(()) };
        check.sizes(&[("shared_keys.ffn", shared.ffn.unwrap_or(1))])?;
        let own = self.layers.saturating_sub(shared.layers);
        let has_own = |is_full: bool| (0..own).any(|layer| self.is_full(layer) == is_full);
        let needs = |is_full: bool| (own..self.layers).any(|layer| self.is_full(layer) == is_full);
        if [true, false].into_iter().any(|is_full| needs(is_full) && !has_own(is_full)) {
            let reason =
                format!("{} of {} layers share keys, and no layer before them has such keys", shared.layers, self.layers);
            return check.refuse(reason, "let fewer layers share them");
        }
        Ok(())
    }
}

impl Layers<'_> {
    /// The keys and values of an earlier layer that a layer uses; `None` if it has its own.
    pub(super) fn shared_keys(&self, layer: usize) -> Option<[TensorId; 2]> {
        self.sizes.shared_keys_of(layer)?;
        self.keys[usize::from(self.sizes.is_full(layer))]
    }

    /// Keeps keys and values for layers that use them.
    pub(super) fn keep_keys(&mut self, layer: usize, keys: [TensorId; 2]) {
        self.keys[usize::from(self.sizes.is_full(layer))] = Some(keys);
    }

    /// Adds the embedding that has features for each layer: `[batch, sequence, layers, features]`.
    pub(super) fn layer_inputs(&mut self, tokens: TensorId, x: TensorId, inputs: LayerInputs) -> TensorId {
        let LayerInputs { features, vocab } = inputs;
        let rows = vocab.unwrap_or(self.sizes.vocab);
        let all = dimension("layer_inputs", features * self.sizes.layers);
        let by_layer = [dimension("layers", self.sizes.layers), dimension("layer_input", features)];
        let name = "model.embed_tokens_per_layer";
        let vocabulary = dimension("vocabulary", rows);
        let shape = vec![rows, all.extent];
        let table = self.builder.parameter(format!("{name}.weight"), vec![vocabulary, all], shape, WEIGHTS);
        let own = self.builder.embedding(name, tokens, table);
        let own = self.builder.scale(&format!("{name}.scale"), own, features);
        let own = self.builder.regrouped(&format!("{name}.by_layer"), own, &by_layer);
        let name = "model.per_layer_model_projection";
        let made = self.linear(name, x, 1, &by_layer, false);
        let made = self.builder.scale(&format!("{name}.scale"), made, self.sizes.hidden);
        let made = self.norm("model.per_layer_projection_norm", made);
        let sum = self.builder.add("model.per_layer_inputs", made, own);
        self.builder.scale("model.per_layer_inputs.scale", sum, 2)
    }

    /// Adds the product of a layer's own features to the residual stream.
    pub(super) fn add_layer_input(&mut self, layer: usize, x: TensorId, all: TensorId) -> TensorId {
        let y = self.layer_input(layer, x, all);
        self.builder.add(&format!("model.layers.{layer}.per_layer_input.residual"), x, y)
    }

    /// Computes what [`Self::add_layer_input`] adds: the layer's own features times a gate computed
    /// from `x`, projected to `hidden` and normalised.
    pub(super) fn layer_input(&mut self, layer: usize, x: TensorId, all: TensorId) -> TensorId {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let own = self.builder.without_layers(&name("per_layer_input"), all);
        let features = *self.builder.dimensions(own).last().expect("invariant: a tensor has dimensions");
        let gate = self.linear(&name("per_layer_input_gate"), x, 1, &[features], false);
        let gate = self.builder.gelu(&name("per_layer_input_gate.act"), gate);
        let y = self.builder.multiply(&name("per_layer_input_gate.product"), gate, own);
        let y = self.linear(&name("per_layer_projection"), y, 1, &[dimension("hidden", self.sizes.hidden)], false);
        self.norm(&name("post_per_layer_input_norm"), y)
    }
}
