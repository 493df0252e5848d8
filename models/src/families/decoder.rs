//! Decoder-only transformers of Llama's kind (Touvron et al. 2023), with Hugging Face's names. The
//! feed-forward network of a layer is dense, or a mixture of experts as in Mixtral (Jiang et al.
//! 2024).
//!
//! Shared experts, dense layers before the first mixture, and low-rank queries and keys are as in
//! DeepSeek's models (DeepSeek-AI 2024). There is no auxiliary loss that balances the experts.

use crate::builder::{AttentionKind, GraphBuilder, GraphOptions, MixtureShape, dimension};
use crate::dropout::DropoutRate;
use crate::graph::{BATCH, Graph, Initialisation, InputKind, TensorId};
use crate::kernel::{Epsilon, WeightLayout};

/// Sizes of a decoder.
pub(super) struct Decoder {
    pub(super) layers: usize,
    pub(super) hidden: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dimension: usize,
    /// Features of the low-rank projection that queries are made from. `None`: they are made from
    /// `hidden` features.
    pub(super) query_rank: Option<usize>,
    /// As `query_rank`, for keys and values.
    pub(super) key_value_rank: Option<usize>,
    /// Inner width of a dense layer.
    pub(super) ffn: usize,
    pub(super) vocabulary: usize,
    pub(super) sequence: usize,
    pub(super) tied_embeddings: bool,
    pub(super) rope_theta: usize,
    /// The mixtures of experts. `None`: all layers are dense.
    pub(super) mixtures: Option<Mixtures>,
}

/// The layers that are mixtures of experts, and their sizes.
#[derive(Clone, Copy)]
pub(super) struct Mixtures {
    pub(super) shape: MixtureShape,
    /// Inner width of an expert.
    pub(super) ffn: usize,
    /// Inner width of all shared experts together, to which every token goes. `None`: there are
    /// none.
    pub(super) shared_ffn: Option<usize>,
    /// Period of mixtures among layers. The last layer of a period is one.
    pub(super) every: usize,
    /// Dense layers before the first period.
    pub(super) first: usize,
}

impl Mixtures {
    /// Whether the layer of this index is a mixture.
    fn includes(&self, layer: usize) -> bool {
        layer >= self.first && (layer - self.first + 1).is_multiple_of(self.every)
    }
}

/// Epsilon of the norms.
const EPSILON: Epsilon = Epsilon::new(5);

/// Initial values of weights.
const WEIGHTS: Initialisation = Initialisation::Normal(0.02);

impl Decoder {
    /// Builds the forward graph.
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
    /// Adds a table `[vocabulary, hidden]`: the embedding, or the head.
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
        let y = match self.sizes.mixtures.filter(|mixtures| mixtures.includes(layer)) {
            Some(mixtures) => self.mixture(&name("block_sparse_moe"), y, mixtures),
            None => self.dense(&name("mlp"), y, self.sizes.ffn),
        };
        self.builder.add(&name("mlp.residual"), x, y)
    }

    /// Adds self-attention.
    fn attention(&mut self, module: &str, x: TensorId) -> TensorId {
        let Decoder { hidden, heads, kv_heads, head_dimension, query_rank, key_value_rank, rope_theta, .. } = *self.sizes;
        let builder = &mut self.builder;
        let name = |part: &str| format!("{module}.{part}");
        let key_heads = [dimension("heads", kv_heads), dimension("head_dimension", head_dimension)];
        // Query head h attends to key head h / group, so the dimension of key heads comes first.
        let query_heads = match heads / kv_heads {
            1 => key_heads.to_vec(),
            group => vec![key_heads[0], dimension("group", group), key_heads[1]],
        };
        // DeepSeek's low-rank projections, without their separate rotary part.
        let mut low_rank = |rank: Option<usize>, part: &str| match rank {
            Some(rank) => {
                let y = builder.linear(&name(&format!("{part}_a_proj")), x, 1, &[dimension("rank", rank)], WEIGHTS, None);
                builder.rms_norm(&name(&format!("{part}_a_layernorm")), y, EPSILON)
            }
            None => x,
        };
        let (query_input, key_input) = (low_rank(query_rank, "q"), low_rank(key_value_rank, "kv"));
        let q = builder.linear(&name("q_proj"), query_input, 1, &query_heads, WEIGHTS, None);
        let k = builder.linear(&name("k_proj"), key_input, 1, &key_heads, WEIGHTS, None);
        let v = builder.linear(&name("v_proj"), key_input, 1, &key_heads, WEIGHTS, None);
        let q = builder.rope(&name("rotary_q"), q, rope_theta);
        let k = builder.rope(&name("rotary_k"), k, rope_theta);
        let kind = AttentionKind { causal: true, scaled: true, relative: None, dropout: DropoutRate::NONE };
        let y = builder.attention(module, [q, k, v], kind);
        builder.linear(&name("o_proj"), y, query_heads.len(), &[dimension("hidden", hidden)], WEIGHTS, None)
    }

    /// Adds a dense feed-forward network.
    fn dense(&mut self, module: &str, x: TensorId, ffn: usize) -> TensorId {
        let name = |part: &str| format!("{module}.{part}");
        let [inner, hidden] = [dimension("ffn", ffn), dimension("hidden", self.sizes.hidden)];
        let gate = self.builder.linear(&name("gate_proj"), x, 1, &[inner], WEIGHTS, None);
        let up = self.builder.linear(&name("up_proj"), x, 1, &[inner], WEIGHTS, None);
        let y = self.builder.silu_multiply(&name("act"), gate, up);
        self.builder.linear(&name("down_proj"), y, 1, &[hidden], WEIGHTS, None)
    }

    /// Adds the mixture of experts of a layer.
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
            Some(shared_ffn) => {
                let shared = self.dense(&name("shared_experts"), x, shared_ffn);
                self.builder.add(&name("shared_experts.sum"), y, shared)
            }
            None => y,
        }
    }
}
