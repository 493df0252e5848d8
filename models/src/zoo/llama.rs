//! Llama's architecture (Touvron et al. 2023) with Hugging Face's names.

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
    pub(crate) ffn: usize,
    pub(crate) vocabulary: usize,
    pub(crate) sequence: usize,
    pub(crate) tied_embeddings: bool,
    pub(crate) rope_theta: usize,
}

const EPSILON: Epsilon = Epsilon::new(5);

const WEIGHTS: Initialisation = Initialisation::Normal(0.02);

pub(crate) fn llama(name: &str, shape: &LlamaShape, options: &GraphOptions) -> Graph {
    let mut llama = Llama { builder: GraphBuilder::new(name, options), shape };
    let positions = vec![dimension(BATCH, options.batch), dimension("sequence", shape.sequence)];
    llama.builder.block("embedding", false);
    let tokens = llama.builder.input(InputKind::Tokens, positions.clone());
    let table = llama.table("model.embed_tokens.weight");
    let mut x = llama.builder.embedding("model.embed_tokens", tokens, table);
    for layer in 0..shape.layers {
        llama.builder.block(format!("layer {layer}"), true);
        x = llama.layer(&format!("model.layers.{layer}"), x);
    }
    llama.builder.block("head", false);
    let normed = llama.builder.rms_norm("model.norm", x, EPSILON);
    let head = if shape.tied_embeddings { table } else { llama.table("lm_head.weight") };
    let logits = llama.builder.matmul("lm_head", normed, head, 1, WeightLayout::OutIn);
    let labels = llama.builder.input(InputKind::Labels, positions);
    llama.builder.cross_entropy("loss", logits, labels);
    llama.builder.finish(shape.sequence, Some(shape.sequence))
}

struct Llama<'a> {
    builder: GraphBuilder,
    shape: &'a LlamaShape,
}

impl Llama<'_> {
    fn table(&mut self, name: &str) -> TensorId {
        let (vocabulary, hidden) = (self.shape.vocabulary, self.shape.hidden);
        let dimensions = vec![dimension("vocabulary", vocabulary), dimension("hidden", hidden)];
        self.builder.parameter(name.into(), dimensions, vec![vocabulary, hidden], WEIGHTS)
    }

    fn layer(&mut self, module: &str, x: TensorId) -> TensorId {
        let LlamaShape { hidden, heads, kv_heads, ffn, rope_theta, .. } = *self.shape;
        let builder = &mut self.builder;
        let name = |part: &str| format!("{module}.{part}");
        let key_dimensions = [dimension("heads", kv_heads), dimension("head_dimension", hidden / heads)];
        // Query head h belongs to key head h / group: the key head's dimension comes first.
        let query_dimensions = match heads / kv_heads {
            1 => key_dimensions.to_vec(),
            group => vec![key_dimensions[0], dimension("group", group), key_dimensions[1]],
        };
        let hidden_dimension = dimension("hidden", hidden);

        let y = builder.rms_norm(&name("input_layernorm"), x, EPSILON);
        let q = builder.linear(&name("self_attn.q_proj"), y, 1, &query_dimensions, WEIGHTS, None);
        let k = builder.linear(&name("self_attn.k_proj"), y, 1, &key_dimensions, WEIGHTS, None);
        let v = builder.linear(&name("self_attn.v_proj"), y, 1, &key_dimensions, WEIGHTS, None);
        let q = builder.rope(&name("self_attn.rotary_q"), q, rope_theta);
        let k = builder.rope(&name("self_attn.rotary_k"), k, rope_theta);
        let kind = AttentionKind { causal: true, scaled: true, relative: None };
        let y = builder.attention(&name("self_attn"), [q, k, v], kind);
        let y = builder.linear(&name("self_attn.o_proj"), y, query_dimensions.len(), &[hidden_dimension], WEIGHTS, None);
        let x = builder.add(&name("self_attn.residual"), x, y);

        let y = builder.rms_norm(&name("post_attention_layernorm"), x, EPSILON);
        let inner = [dimension("ffn", ffn)];
        let gate = builder.linear(&name("mlp.gate_proj"), y, 1, &inner, WEIGHTS, None);
        let up = builder.linear(&name("mlp.up_proj"), y, 1, &inner, WEIGHTS, None);
        let y = builder.silu_multiply(&name("mlp.act"), gate, up);
        let y = builder.linear(&name("mlp.down_proj"), y, 1, &[hidden_dimension], WEIGHTS, None);
        builder.add(&name("mlp.residual"), x, y)
    }
}
