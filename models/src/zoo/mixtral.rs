//! Mixtral's architecture (Jiang et al. 2024) with Hugging Face's names: a Llama whose feed-forward networks are mixtures of experts, all of
//! them or every n-th. There is no auxiliary loss that balances the experts.

use crate::builder::{AttentionKind, GraphBuilder, MixtureShape, dimension};
use crate::graph::{BATCH, Graph, Initialisation, InputKind, TensorId};
use crate::kernel::{Epsilon, WeightLayout};
use crate::specification::GraphOptions;

/// A Mixtral's sizes.
pub(crate) struct MixtralShape {
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) ffn: usize,
    pub(crate) vocabulary: usize,
    pub(crate) sequence: usize,
    pub(crate) experts: usize,
    pub(crate) top: usize,
    /// Every so many layers one is a mixture, the last of them.
    pub(crate) moe_every: usize,
    /// Slots of an expert for each sample.
    pub(crate) slots_per_sample: usize,
    pub(crate) rope_theta: usize,
    pub(crate) tied_embeddings: bool,
}

/// Mixtral's epsilon of its norms.
const EPSILON: Epsilon = Epsilon::new(5);

/// The standard deviation of new weights.
const WEIGHTS: Initialisation = Initialisation::Normal(0.02);

pub(crate) fn mixtral(name: &str, shape: &MixtralShape, options: &GraphOptions) -> Graph {
    let mut mixtral = Mixtral { builder: GraphBuilder::new(name, options), shape };
    let positions = vec![dimension(BATCH, options.batch), dimension("sequence", shape.sequence)];
    mixtral.builder.block("embedding", false);
    let tokens = mixtral.builder.input(InputKind::Tokens, positions.clone());
    let table = mixtral.table("model.embed_tokens.weight");
    let mut x = mixtral.builder.embedding("model.embed_tokens", tokens, table);
    for layer in 0..shape.layers {
        mixtral.builder.block(format!("layer {layer}"), true);
        let is_mixture = (layer + 1).is_multiple_of(shape.moe_every);
        x = mixtral.layer(&format!("model.layers.{layer}"), x, is_mixture);
    }
    mixtral.builder.block("head", false);
    let normed = mixtral.builder.rms_norm("model.norm", x, EPSILON);
    let head = if shape.tied_embeddings { table } else { mixtral.table("lm_head.weight") };
    let logits = mixtral.builder.matmul("lm_head", normed, head, 1, WeightLayout::OutIn);
    let labels = mixtral.builder.input(InputKind::Labels, positions);
    mixtral.builder.cross_entropy("loss", logits, labels);
    mixtral.builder.finish(shape.sequence, Some(shape.sequence))
}

struct Mixtral<'a> {
    builder: GraphBuilder,
    shape: &'a MixtralShape,
}

impl Mixtral<'_> {
    fn table(&mut self, name: &str) -> TensorId {
        let (vocabulary, hidden) = (self.shape.vocabulary, self.shape.hidden);
        let dimensions = vec![dimension("vocabulary", vocabulary), dimension("hidden", hidden)];
        self.builder.parameter(name.into(), dimensions, vec![vocabulary, hidden], WEIGHTS)
    }

    fn layer(&mut self, module: &str, x: TensorId, is_mixture: bool) -> TensorId {
        let name = |part: &str| format!("{module}.{part}");
        let y = self.builder.rms_norm(&name("input_layernorm"), x, EPSILON);
        let y = self.attention(&name("self_attn"), y);
        let x = self.builder.add(&name("self_attn.residual"), x, y);
        let y = self.builder.rms_norm(&name("post_attention_layernorm"), x, EPSILON);
        let y = if is_mixture { self.mixture(&name("block_sparse_moe"), y) } else { self.dense(&name("mlp"), y) };
        self.builder.add(&name("mlp.residual"), x, y)
    }

    fn attention(&mut self, module: &str, x: TensorId) -> TensorId {
        let MixtralShape { hidden, heads, kv_heads, rope_theta, .. } = *self.shape;
        let name = |part: &str| format!("{module}.{part}");
        let key_heads = [dimension("heads", kv_heads), dimension("head_dimension", hidden / heads)];
        let query_heads = match heads / kv_heads {
            1 => key_heads.to_vec(),
            group => vec![key_heads[0], dimension("group", group), key_heads[1]],
        };
        let q = self.builder.linear(&name("q_proj"), x, 1, &query_heads, WEIGHTS, None);
        let k = self.builder.linear(&name("k_proj"), x, 1, &key_heads, WEIGHTS, None);
        let v = self.builder.linear(&name("v_proj"), x, 1, &key_heads, WEIGHTS, None);
        let q = self.builder.rope(&name("q_rope"), q, rope_theta);
        let k = self.builder.rope(&name("k_rope"), k, rope_theta);
        let kind = AttentionKind { causal: true, scaled: true, relative: None };
        let y = self.builder.attention(module, [q, k, v], kind);
        self.builder.linear(&name("o_proj"), y, query_heads.len(), &[dimension("hidden", hidden)], WEIGHTS, None)
    }

    fn dense(&mut self, module: &str, x: TensorId) -> TensorId {
        let name = |part: &str| format!("{module}.{part}");
        let [inner, hidden] = [dimension("ffn", self.shape.ffn), dimension("hidden", self.shape.hidden)];
        let gate = self.builder.linear(&name("gate_proj"), x, 1, &[inner], WEIGHTS, None);
        let up = self.builder.linear(&name("up_proj"), x, 1, &[inner], WEIGHTS, None);
        let y = self.builder.silu_multiply(&name("act"), gate, up);
        self.builder.linear(&name("down_proj"), y, 1, &[hidden], WEIGHTS, None)
    }

    fn mixture(&mut self, module: &str, x: TensorId) -> TensorId {
        let MixtralShape { hidden, ffn, sequence, experts, top, slots_per_sample, .. } = *self.shape;
        let shape = MixtureShape { experts, top, slots_per_sample };
        let name = |part: &str| format!("{module}.{part}");
        let [experts, inner, hidden] = [dimension("experts", experts), dimension("ffn", ffn), dimension("hidden", hidden)];
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
        self.builder.combine(module, y, &routing, sequence, &shape)
    }
}
