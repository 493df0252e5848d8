//! Llama's architecture (Touvron et al. 2023) with Hugging Face's names; and Mixtral's (Jiang et al. 2024), which is a Llama whose feed-forward
//! networks are mixtures of experts, all of them or every n-th (`mixtral.rs`).

use super::mixtral::Mixtures;
use crate::DropoutRate;
use crate::builder::{AttentionKind, GraphBuilder, dimension};
use crate::graph::{BATCH, Graph, Initialisation, InputKind, TensorId};
use crate::kernel::{Epsilon, WeightLayout};
use crate::specification::GraphOptions;

/// A Llama's sizes.
pub(crate) struct LlamaShape {
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dimension: usize,
    /// Features that queries are made through, where they are.
    pub(crate) query_rank: Option<usize>,
    /// Features that keys and values are made through, where they are.
    pub(crate) key_value_rank: Option<usize>,
    /// Of a layer that is no mixture.
    pub(crate) ffn: usize,
    pub(crate) vocabulary: usize,
    pub(crate) sequence: usize,
    pub(crate) tied_embeddings: bool,
    pub(crate) rope_theta: usize,
    /// Of a Mixtral.
    pub(crate) mixtures: Option<Mixtures>,
}

/// The epsilon of the norms.
const EPSILON: Epsilon = Epsilon::new(5);

/// How new weights are drawn.
pub(super) const WEIGHTS: Initialisation = Initialisation::Normal(0.02);

pub(crate) fn llama(name: &str, shape: &LlamaShape, options: &GraphOptions) -> Graph {
    let mut llama = Llama { builder: GraphBuilder::new(name, options), shape };
    let positions = vec![dimension(BATCH, options.batch), dimension("sequence", shape.sequence)];
    llama.builder.block("embedding", false);
    let tokens = llama.builder.input(InputKind::Tokens, positions.clone());
    let table = llama.table("model.embed_tokens.weight");
    let mut x = llama.builder.embedding("model.embed_tokens", tokens, table);
    for layer in 0..shape.layers {
        llama.builder.block(format!("layer {layer}"), true);
        x = llama.layer(layer, x);
    }
    llama.builder.block("head", false);
    let normed = llama.builder.rms_norm("model.norm", x, EPSILON);
    let head = if shape.tied_embeddings { table } else { llama.table("lm_head.weight") };
    let logits = llama.builder.matmul("lm_head", normed, head, 1, WeightLayout::OutIn);
    let labels = llama.builder.input(InputKind::Labels, positions);
    llama.builder.cross_entropy("loss", logits, labels);
    llama.builder.finish(shape.sequence, Some(shape.sequence))
}

/// A Llama under construction.
pub(super) struct Llama<'a> {
    pub(super) builder: GraphBuilder,
    pub(super) shape: &'a LlamaShape,
}

impl Llama<'_> {
    fn table(&mut self, name: &str) -> TensorId {
        let (vocabulary, hidden) = (self.shape.vocabulary, self.shape.hidden);
        let dimensions = vec![dimension("vocabulary", vocabulary), dimension("hidden", hidden)];
        self.builder.parameter(name.into(), dimensions, vec![vocabulary, hidden], WEIGHTS)
    }

    fn layer(&mut self, layer: usize, x: TensorId) -> TensorId {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let y = self.builder.rms_norm(&name("input_layernorm"), x, EPSILON);
        let y = self.attention(&name("self_attn"), y);
        let x = self.builder.add(&name("self_attn.residual"), x, y);
        let y = self.builder.rms_norm(&name("post_attention_layernorm"), x, EPSILON);
        let y = match self.shape.mixtures.filter(|mixtures| mixtures.has(layer)) {
            Some(mixtures) => self.mixture(&name("block_sparse_moe"), y, mixtures),
            None => self.dense(&name("mlp"), y, self.shape.ffn),
        };
        self.builder.add(&name("mlp.residual"), x, y)
    }

    fn attention(&mut self, module: &str, x: TensorId) -> TensorId {
        let LlamaShape { hidden, heads, kv_heads, head_dimension, query_rank, key_value_rank, rope_theta, .. } = *self.shape;
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

    pub(super) fn dense(&mut self, module: &str, x: TensorId, ffn: usize) -> TensorId {
        let name = |part: &str| format!("{module}.{part}");
        let [inner, hidden] = [dimension("ffn", ffn), dimension("hidden", self.shape.hidden)];
        let gate = self.builder.linear(&name("gate_proj"), x, 1, &[inner], WEIGHTS, None);
        let up = self.builder.linear(&name("up_proj"), x, 1, &[inner], WEIGHTS, None);
        let y = self.builder.silu_multiply(&name("act"), gate, up);
        self.builder.linear(&name("down_proj"), y, 1, &[hidden], WEIGHTS, None)
    }
}
