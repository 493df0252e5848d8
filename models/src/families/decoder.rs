//! Decoder-only transformers of Llama's kind (Touvron et al. 2023) with Hugging Face's names. The feed-forward network of a layer is
//! dense, or a mixture of experts as in Mixtral (Jiang et al. 2024).
//!
//! There is no auxiliary loss that balances the experts. Experts that every token goes to, dense layers before the first mixture, and
//! low-rank queries and keys are DeepSeek's (DeepSeek-AI 2024).

use crate::builder::{AttentionKind, GraphBuilder, GraphOptions, MixtureShape, dimension};
use crate::dropout::DropoutRate;
use crate::graph::{BATCH, Graph, Initialisation, InputKind, TensorId};
use crate::kernel::{Epsilon, WeightLayout};

/// A decoder's sizes.
pub(super) struct Decoder {
    pub(super) layers: usize,
    pub(super) hidden: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dimension: usize,
    /// Features that queries are made through, where they are.
    pub(super) query_rank: Option<usize>,
    /// Features that keys and values are made through, where they are.
    pub(super) key_value_rank: Option<usize>,
    /// Of a layer that is no mixture.
    pub(super) ffn: usize,
    pub(super) vocabulary: usize,
    pub(super) sequence: usize,
    pub(super) tied_embeddings: bool,
    pub(super) rope_theta: usize,
    /// Of a Mixtral.
    pub(super) mixtures: Option<Mixtures>,
}

/// Which layers are mixtures, and of what.
#[derive(Clone, Copy)]
pub(super) struct Mixtures {
    pub(super) shape: MixtureShape,
    /// Inner width of an expert.
    pub(super) ffn: usize,
    /// Inner width of the experts that every token goes to, all together.
    pub(super) shared_ffn: Option<usize>,
    /// Every so many layers one is a mixture, the last of them.
    pub(super) every: usize,
    /// Layers before the first that may be one.
    pub(super) first: usize,
}

impl Mixtures {
    /// Whether a layer is a mixture.
    fn has(&self, layer: usize) -> bool {
        layer >= self.first && (layer - self.first + 1).is_multiple_of(self.every)
    }
}

/// The epsilon of the norms.
const EPSILON: Epsilon = Epsilon::new(5);

/// How new weights are drawn.
const WEIGHTS: Initialisation = Initialisation::Normal(0.02);

impl Decoder {
    /// The forward graph.
    pub(super) fn graph(&self, name: &str, options: &GraphOptions) -> Graph {
        let mut layers = Layers { builder: GraphBuilder::new(name, options), sizes: self };
        let positions = vec![dimension(BATCH, options.batch), dimension("sequence", self.sequence)];
        layers.builder.block("embedding", false);
        let tokens = layers.builder.input(InputKind::Tokens, positions.clone());
        let table = layers.table("model.embed_tokens.weight");
        let mut x = layers.builder.embedding("model.embed_tokens", tokens, table);
        for layer in 0..self.layers {
            layers.builder.block(format!("layer {layer}"), true);
            x = layers.layer(layer, x);
        }
        layers.builder.block("head", false);
        let normed = layers.builder.rms_norm("model.norm", x, EPSILON);
        let head = if self.tied_embeddings { table } else { layers.table("lm_head.weight") };
        let logits = layers.builder.matmul("lm_head", normed, head, 1, WeightLayout::OutIn);
        let labels = layers.builder.input(InputKind::Labels, positions);
        layers.builder.cross_entropy("loss", logits, labels);
        layers.builder.finish(self.sequence, Some(self.sequence))
    }
}

/// A decoder under construction.
struct Layers<'a> {
    builder: GraphBuilder,
    sizes: &'a Decoder,
}

impl Layers<'_> {
    fn table(&mut self, name: &str) -> TensorId {
        let (vocabulary, hidden) = (self.sizes.vocabulary, self.sizes.hidden);
        let dimensions = vec![dimension("vocabulary", vocabulary), dimension("hidden", hidden)];
        self.builder.parameter(name.into(), dimensions, vec![vocabulary, hidden], WEIGHTS)
    }

    fn layer(&mut self, layer: usize, x: TensorId) -> TensorId {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let y = self.builder.rms_norm(&name("input_layernorm"), x, EPSILON);
        let y = self.attention(&name("self_attn"), y);
        let x = self.builder.add(&name("self_attn.residual"), x, y);
        let y = self.builder.rms_norm(&name("post_attention_layernorm"), x, EPSILON);
        let y = match self.sizes.mixtures.filter(|mixtures| mixtures.has(layer)) {
            Some(mixtures) => self.mixture(&name("block_sparse_moe"), y, mixtures),
            None => self.dense(&name("mlp"), y, self.sizes.ffn),
        };
        self.builder.add(&name("mlp.residual"), x, y)
    }

    fn attention(&mut self, module: &str, x: TensorId) -> TensorId {
        let Decoder { hidden, heads, kv_heads, head_dimension, query_rank, key_value_rank, rope_theta, .. } = *self.sizes;
        let builder = &mut self.builder;
        let name = |part: &str| format!("{module}.{part}");
        let key_heads = [dimension("heads", kv_heads), dimension("head_dimension", head_dimension)];
        // Query head h belongs to key head h / group: the key head's dimension comes first.
        let query_heads = match heads / kv_heads {
            1 => key_heads.to_vec(),
            group => vec![key_heads[0], dimension("group", group), key_heads[1]],
        };
        // Through fewer features and a norm, where the model has such (DeepSeek-AI 2024, without their separate rotary part).
        let mut through = |rank: Option<usize>, part: &str| match rank {
            Some(rank) => {
                let y = builder.linear(&name(&format!("{part}_a_proj")), x, 1, &[dimension("rank", rank)], WEIGHTS, None);
                builder.rms_norm(&name(&format!("{part}_a_layernorm")), y, EPSILON)
            }
            None => x,
        };
        let (query_input, key_input) = (through(query_rank, "q"), through(key_value_rank, "kv"));
        let q = builder.linear(&name("q_proj"), query_input, 1, &query_heads, WEIGHTS, None);
        let k = builder.linear(&name("k_proj"), key_input, 1, &key_heads, WEIGHTS, None);
        let v = builder.linear(&name("v_proj"), key_input, 1, &key_heads, WEIGHTS, None);
        let q = builder.rope(&name("rotary_q"), q, rope_theta);
        let k = builder.rope(&name("rotary_k"), k, rope_theta);
        let kind = AttentionKind { causal: true, scaled: true, relative: None, dropout: DropoutRate::NONE };
        let y = builder.attention(module, [q, k, v], kind);
        builder.linear(&name("o_proj"), y, query_heads.len(), &[dimension("hidden", hidden)], WEIGHTS, None)
    }

    fn dense(&mut self, module: &str, x: TensorId, ffn: usize) -> TensorId {
        let name = |part: &str| format!("{module}.{part}");
        let [inner, hidden] = [dimension("ffn", ffn), dimension("hidden", self.sizes.hidden)];
        let gate = self.builder.linear(&name("gate_proj"), x, 1, &[inner], WEIGHTS, None);
        let up = self.builder.linear(&name("up_proj"), x, 1, &[inner], WEIGHTS, None);
        let y = self.builder.silu_multiply(&name("act"), gate, up);
        self.builder.linear(&name("down_proj"), y, 1, &[hidden], WEIGHTS, None)
    }

    /// The mixture of experts in place of a layer's feed-forward network.
    fn mixture(&mut self, module: &str, x: TensorId, mixtures: Mixtures) -> TensorId {
        let Decoder { hidden, sequence, .. } = *self.sizes;
        let Mixtures { shape, ffn, shared_ffn, .. } = mixtures;
        let name = |part: &str| format!("{module}.{part}");
        let [experts, inner, hidden] = [dimension("experts", shape.experts), dimension("ffn", ffn), dimension("hidden", hidden)];
        let public = vec![experts.extent, hidden.extent];
        let router = self.builder.parameter(name("gate.weight"), vec![experts, hidden], public, WEIGHTS);
        let (slots, routing) = self.builder.dispatch(module, x, router, &shape);
        let experts_name = name("experts");
        let [w1, w3, w2] = [("w1", [experts, inner, hidden]), ("w3", [experts, inner, hidden]), ("w2", [experts, hidden, inner])]
            .map(|(matrix, dimensions)| self.builder.expert_parameter(&experts_name, matrix, dimensions, WEIGHTS));
        let gate = self.builder.expert_matmul(&name("experts.w1"), slots, w1);
        let up = self.builder.expert_matmul(&name("experts.w3"), slots, w3);
        let y = self.builder.silu_multiply(&name("experts.act"), gate, up);
        let y = self.builder.expert_matmul(&name("experts.w2"), y, w2);
        let y = self.builder.combine(module, y, &routing, sequence, &shape);
        match shared_ffn {
            Some(shared) => {
                let always = self.dense(&name("shared_experts"), x, shared);
                self.builder.add(&name("shared_experts.sum"), y, always)
            }
            None => y,
        }
    }
}
